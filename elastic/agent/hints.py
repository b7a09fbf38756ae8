"""What to look at when a worker failed: the text of an error -> one line for people. Pure."""

from __future__ import annotations

import re

# The first that fits counts: what is special stands before what is general.
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"DefaultCPUAllocator: can't allocate memory|^MemoryError|std::bad_alloc|Cannot allocate memory",
        "the host's memory, or its cgroup's limit: fewer loader workers, a smaller loader_prefetch or micro_batch_size",
    ),
    (
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory: a smaller micro_batch_size (the global batch stays), other processes in nvidia-smi, "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
    ),
    (
        r"DataLoader worker \(pid\(?s?\)?.*killed by signal: Bus error|insufficient shared memory",
        "/dev/shm is too small for the loader workers: give the container more (--shm-size), or use fewer of them",
    ),
    (
        r"DataLoader worker.*(killed by signal: Killed|exited unexpectedly)|data loader process is gone",
        "a loader worker was killed: `dmesg` says whether for memory; loader_workers=0 shows its errors",
    ),
    (r"DataLoader timed out", "the storage that the dataset reads from, and loader_timeout_seconds"),
    (r"Too many open files|errno 24\b", "the limit of open files: `ulimit -n`, LimitNOFILE= in the unit"),
    (r"No space left on device|errno 28\b", "`df -h` and `df -i` of the path in the traceback, and of /dev/shm"),
    (
        r"device-side assert",
        "an index outside of its tensor, most often a label or a token id; CUDA_LAUNCH_BLOCKING=1 shows the right line",
    ),
    (
        r"uncorrectable (ECC|NVLink)|ECC error|CUDA error: hardware|GPU has fallen off the bus",
        "the GPU: `nvidia-smi -q`, Xid lines in `dmesg`; drain this node (`elasticd drain`)",
    ),
    (r"illegal memory access", "a wrong kernel or a bad GPU: CUDA_LAUNCH_BLOCKING=1, Xid lines in `dmesg`"),
    (r"no kernel image is available", "this build of torch does not know this GPU: install one that was made for it"),
    (r"invalid device ordinal|has no GPU:", "--nproc-per-node is more than the visible GPUs (CUDA_VISIBLE_DEVICES)"),
    (r"CUDA driver version is insufficient", "the driver is older than this build of torch wants: `nvidia-smi`"),
    (r"Duplicate GPU detected", "two ranks use the same GPU: torch.cuda.set_device(LOCAL_RANK), CUDA_VISIBLE_DEVICES"),
    (
        r"Watchdog caught collective operation timeout|NCCL.*timed? ?out",
        "a rank that did not come to this collective: its log, --hang-timeout, and TORCH_NCCL_DUMP_ON_TIMEOUT=1",
    ),
    (
        r"ncclSystemError|unhandled system error",
        "the network between the ranks or /dev/shm: NCCL_DEBUG=INFO says which; NCCL_SOCKET_IFNAME, --shm-size",
    ),
    (r"ncclRemoteError", "the rank at the other end: it failed or was cut off; the failure of its node says more"),
    (r"\bNCCL\b|\bnccl[A-Z]\w+", "NCCL_DEBUG=INFO tells more; the same NCCL, driver and interface on all nodes"),
    (r"Address already in use|EADDRINUSE", "another process has this port: leave --master-port out, or choose another"),
    (
        r"connectFullMesh|Gloo connect|Network is unreachable|No route to host",
        "the address that ranks reach each other by: GLOO_SOCKET_IFNAME, --local-addr, a firewall between the nodes",
    ),
    (
        r"Timed out waiting \d+ms for (send|recv) operation|Socket Timeout|wait timeout",
        "a rank that is slow or hung: its log, --hang-timeout; collective_timeout_seconds where such a pause is right",
    ),
    (
        r"Connection (closed|reset) by (remote )?peer|Broken pipe|recvBytes|gloo[/\\]|DistNetworkError",
        "another rank ended first: its failure is the cause, here or on its node",
    ),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern, re.MULTILINE), hint) for pattern, hint in _HINTS)


def hint_for(message: str) -> str:
    """One line on where to look, or "" for an error that speaks for itself. `message` is the exception's text."""
    return next((hint for pattern, hint in _COMPILED if pattern.search(message)), "")
