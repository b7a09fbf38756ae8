"""What is made of a failure's text: a hint, a place to recognise it by; and how a kill for memory is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.agent import failure
from elastic.agent.hints import hint_for
from elastic.agent.oom import oom_kills
from elastic.agent.repeats import Place, note, place_of


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total", "micro_batch_size"),
        ("torch.OutOfMemoryError: HIP out of memory", "the GPU's memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", "the host's"),
        ("MemoryError: ", "the host's memory"),
        ("RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that", "/dev/shm"),
        ("RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed. ", "dmesg"),
        ("LoaderDiedError: a data loader process is gone or stuck (DataLoader worker (pid(s) 7) exited)", "dmesg"),
        ("OSError: [Errno 24] Too many open files: 'x'", "ulimit -n"),
        ("OSError: [Errno 28] No space left on device", "df -h"),
        ("RuntimeError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "Xid"),
        ("RuntimeError: CUDA error: invalid device ordinal", "--nproc-per-node"),
        ("DistBackendError: NCCL error in: x.cpp:328, unhandled system error (run with NCCL_DEBUG=INFO)", "--shm-size"),
        ("DistBackendError: ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0", "the same GPU"),
        (
            "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7",
            "--hang-timeout",
        ),
        ("DistBackendError: NCCL communicator was aborted on rank 1. ncclRemoteError: A call failed", "the other end"),
        ("DistBackendError: NCCL error: ncclInternalError", "NCCL_DEBUG=INFO"),
        ("RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144]", "GLOO_SOCKET_IFNAME"),
        ("RuntimeError: [gloo/x/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", "slow or hung"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9", "ended first"),
        ("DistNetworkError: The server socket has failed to listen: EADDRINUSE", "--master-port"),
        ("ValueError: expected 3 channels", ""),
        ("KeyError: 'nccl'", ""),
        ("exited with 3", ""),
    ],
)
def test_an_error_says_what_to_look_at(message: str, words: str) -> None:
    hint = hint_for(message)
    assert words in hint
    assert bool(hint) == bool(words)
    assert "\n" not in hint


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("ValueError: bad item\nitem 7", "ValueError: bad item"),
        (
            'RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s): "weight". \n\tUnexpected',
            'RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s): "weight".',
        ),
        ("ValueError: \n\n  two things:\n  one", "ValueError: two things: one"),
        (f"ValueError: sizes:\n{'x' * 999}\nmore", f"ValueError: sizes: {'x' * 181}..."),
        (f"ValueError: {'x' * 300}:\nmore", f"ValueError: {'x' * 300}:"),
        ("Raised: -- Process 1:\nTraceback (most recent call last):\n  File", "Raised: -- Process 1:"),
        ("ValueError:", "ValueError:"),
        ("", ""),
    ],
)
def test_the_line_that_sums_an_error_up_does_not_end_where_the_matter_begins(message: str, line: str) -> None:
    assert failure.in_one_line(message) == line


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        ("BrokenPipeError: [Errno 32] Broken pipe", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41", True),
        ("RuntimeError: writev [127.0.0.1]:4711: Broken pipe", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("ValueError: bad item", False),
    ],
)
def test_what_a_peers_end_made_of_a_rank_is_told_from_what_its_own_pipes_did(message: str, is_one: bool) -> None:
    assert failure.tells_of_a_peer(message) == is_one


TRACE = """ValueError: bad item
Traceback (most recent call last):
  File "/job/train.py", line 80, in <module>
    main()
  File "/job/data.py", line 8, in __getitem__
    raise ValueError("bad item")
ValueError: bad item"""


def test_a_place_is_rank_step_error_and_last_frame() -> None:
    frame = "/job/data.py:8 in __getitem__"
    assert place_of(TRACE, rank=1, applied_step=6) == Place(rank=1, step=7, error="ValueError", frame=frame)
    assert place_of("exited with 3", rank=1, applied_step=6) is None
    assert place_of("killed by SIGKILL", rank=1, applied_step=6) is None
    assert place_of(TRACE, rank=1, applied_step=-1) is None


def test_a_place_is_counted_until_its_step_is_applied() -> None:
    here = place_of(TRACE, rank=1, applied_step=6)
    assert here is not None
    known = note({}, here, applied_step=6)
    known = note(known, None, applied_step=3)  # killed from outside, before it came there
    known = note(known, here, applied_step=6)
    assert known == {here: 2}
    assert note(known, None, applied_step=7) == {}
    elsewhere = place_of(TRACE, rank=0, applied_step=6)
    assert elsewhere is not None
    assert note(known, elsewhere, applied_step=6) == {here: 2, elsewhere: 1}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"cgroup/a/b/memory.events": "low 0\noom 4\noom_kill 3\n", "proc/vmstat": "oom_kill 9\n"}, 3),
        ("0::/a/b\n", {"cgroup/memory.events": "oom_kill 2\n"}, 2),  # a container whose mount begins at its cgroup
        ("0::/../x\n", {"proc/vmstat": "pgfault 1\noom_kill 5\n"}, 5),
        ("0::/\n4:memory:/p\n", {"cgroup/memory/p/memory.oom_control": "under_oom 0\noom_kill 7\n"}, 7),
        ("0::/\n", {"proc/vmstat": "oom_kill 5\n"}, 5),  # the host's root cgroup has no such file
        ("0::/\n", {}, 0),
        ("0::/\n", {"proc/vmstat": "nr_free 5\n"}, 0),
    ],
)
def test_kills_for_memory_are_those_of_the_own_cgroup(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_an_error_that_holds_a_tensor_in_full_is_told_by_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    written = {"message": f"ValueError: {'0.123456, ' * 1_000_000}the end", "extraInfo": {"py_callstack": "short"}}
    path.write_text(json.dumps({"message": written}))
    read_before = failure._parse_error_file.cache_info().misses
    for _ in range(200):  # each pass of the agent's loop asks
        message, callstack = failure.read_error_file(str(path))
    assert failure._parse_error_file.cache_info().misses == read_before + 1
    assert callstack == "short"
    assert len(message) < 10_000
    assert message.startswith("ValueError: 0.123456")
    assert "characters left out" in message
    assert message.endswith("the end")
    path.write_text(json.dumps({"message": "another"}))
    assert failure.read_error_file(str(path)) == ("another", "")
