"""One frozen object with every setting of a job, made once at start; whoever holds it need not check anything again.

Owns what the settings mean. How they are written on a command line, in PET_* variables and
in a job file is the business of `flags.py` and `jobfile.py`; the rules between them are in `rules.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import socket
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from elastic import rules, values
from elastic.errors import UsageError
from elastic.flags import Given, collect
from elastic.own_checkpoints import own_checkpoints
from elastic.status import plural

logger = logging.getLogger(__name__)

_DEFAULT_SHUTDOWN_SECONDS = 30.0  # torchrun's
_MOST_WORKERS = 1024  # on a node: more is a slip of the pen, and would use up its memory
# What every node of a job must agree on: these decide together who takes part, how long others wait and when all save.
_SHARED = (
    *("module", "no_python", "checkpoint_every", "memory_every", "max_restarts"),
    *("lease_ttl_seconds", "last_call_seconds", "settle_seconds", "join_timeout_seconds"),
    *("restart_window_seconds", "drain_grace_seconds"),
)
_PATHS = (
    *("log_dir", "etcd_ca", "etcd_cert", "etcd_key"),
    *("http_token_file", "http_cert", "http_key"),
)
_AS_THEY_ARE = (
    *("module", "no_python", "run_path", "rdzv_conf", "role", "master_addr", "master_port", "local_addr", "etcd_user"),
    *(
        "max_restarts",
        "standby",
        "memory_checkpoints",
        "memory_every",
        "checkpoint_every",
        "allow_fresh_start",
        "usr1",
        "log_format",
        "virtual_local_rank",
        "numa_binding",
    ),
    *("redirects", "tee", "local_ranks_filter", "logs_specs", "start_method", "monitor_interval", "signals_to_handle"),
    *("event_log_handler", "log_line_prefix_template"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Settings of `elasticd run`. Names without a unit are torchrun's own; paths are absolute."""

    # what to run
    script: str  # a path, or with `module` a module's name
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    args: tuple[str, ...] = ()

    # who takes part
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = "none"
    node_id: str = "localhost"
    rdzv_backend: Literal["standalone", "etcd3"] = "standalone"
    rdzv_endpoint: str = ""  # h1:2379,h2:2379, always with ports; empty for standalone
    rdzv_conf: str = ""
    role: str = "default"
    master_addr: str | None = None  # None = not asked for
    master_port: int | None = None
    local_addr: str | None = None
    etcd_ca: str | None = None
    etcd_cert: str | None = None
    etcd_key: str | None = None
    etcd_user: str | None = None

    # times and budgets
    lease_ttl_seconds: int = 5
    last_call_seconds: float = 5.0
    settle_seconds: float = 1.0
    join_timeout_seconds: float = 600.0
    max_restarts: int = 3
    restart_window_seconds: float = 600.0
    drain_grace_seconds: float = 120.0
    shutdown_timeout_seconds: float = 30.0
    hang_timeout_seconds: float = 0.0  # 0 = off

    # workers
    standby: bool = True
    preload: tuple[str, ...] = ()
    memory_checkpoints: bool = True
    memory_every: int | None = None  # steps; None = as the measured cost allows
    checkpoint_dir: str | None = None  # an absolute path, or a URL that takes fsspec
    checkpoint_every: str | None = None  # "100" = steps, "30s" = time
    allow_fresh_start: bool = False  # begin at step 0 although there are checkpoints and none is good
    usr1: Literal["save", "drain"] = "save"
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    nccl: tuple[tuple[str, str], ...] = ()  # every NCCL_ variable of the workers: the environment's, and [nccl]'s

    # logs
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str = ""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    logs_specs: str | None = None

    log_format: Literal["plain", "json"] = "plain"  # of the agent's own lines

    # what the agent serves
    http_host: str = "127.0.0.1"
    http_port: int = 9431  # 0 = any free one
    http_token_file: str | None = None
    http_cert: str | None = None
    http_key: str | None = None

    # accepted for torchrun's sake, without effect here
    start_method: str = "spawn"
    monitor_interval: float = 0.1
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    log_line_prefix_template: str = ""
    event_log_handler: str = "null"

    @property
    def stop_grace_seconds(self) -> float:
        """How long the workers may take to stop: with a session they drain, without one they get SIGTERM."""
        return max(self.drain_grace_seconds, self.shutdown_timeout_seconds)


def load(argv: Sequence[str], environ: Mapping[str, str], *, root: Path | None = None) -> JobConfig:
    """The settings of `elasticd run` from its arguments, PET_* variables and the job file, checked.

    `root`: the tree of an image in which the job is to run; what its paths name is looked for there.

    Raises: UsageError, of one line, for the first thing that is wrong; StorageGoneError. Logs each flag that has no
    effect here.
    """
    given = collect(argv, environ)
    rules.check(given if root is None else _within(given, root), environ)
    low, high = given["nnodes"]
    host, port = given["http"]
    many = rules.backend(given) == "etcd3"
    paths: dict[str, Any] = {key: _absolute(given[key]) for key in _PATHS}
    paths["checkpoint_dir"] = _checkpoint_dir(given["checkpoint_dir"])
    return JobConfig(
        script=given["training_script"],
        args=tuple(given["training_script_args"] or ()),
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=_workers_per_node(given),
        run_id=given["rdzv_id"] or _run_id_from_name(given["training_script"], module=given["module"]),
        node_id=given["node_id"] or socket.gethostname() or "localhost",
        rdzv_backend="etcd3" if many else "standalone",
        rdzv_endpoint=values.endpoints(given["rdzv_endpoint"]) if many else "",
        **paths,
        **{f"{key}_seconds": given[key] for key in ("lease_ttl", "last_call", "settle", "join_timeout")},
        **{f"{key}_seconds": given[key] for key in ("restart_window", "drain_grace", "hang_timeout")},
        shutdown_timeout_seconds=_shutdown_timeout(given, environ),
        preload=tuple(given["preload"]),
        duplicate_stdout_filters=tuple(given["duplicate_stdout_filters"]),
        duplicate_stderr_filters=tuple(given["duplicate_stderr_filters"]),
        http_host=host,
        http_port=port,
        nccl=_nccl(given, environ),
        **{key: given[key] for key in _AS_THEY_ARE},
    )


def _within(given: Given, root: Path) -> Given:
    """With its paths below `root`, for the rules to look at."""
    script = given["training_script"] or ""
    is_path = not given["module"] and ("/" in script or not given["no_python"])  # else it is looked for
    keys = (*_PATHS, "training_script") if is_path else _PATHS
    paths = {key: below(root, given[key]) for key in keys if given[key] and "://" not in given[key]}
    checkpoints = _checkpoint_dir(given["checkpoint_dir"])
    if checkpoints and "://" not in checkpoints:
        paths["checkpoint_dir"] = below(root, checkpoints)
    return dataclasses.replace(given, values={**given.values, **paths})


def below(root: Path, path: str) -> str:
    """Where a path of an image lies on this host; a relative one begins in the current directory."""
    place = Path(path).absolute()
    return str(place if place.is_relative_to(root) else root / place.relative_to("/"))


def shared_settings(config: JobConfig) -> str:
    """Equal on two nodes exactly if they may train together; paths and script arguments may differ between hosts.

    A line of flags, `--nnodes=1:3 --max-restarts=3 ...`, for whoever looks into the store.
    """
    flags = [f"--nnodes={config.min_nodes}:{config.max_nodes}"]
    for key in _SHARED:
        value = getattr(config, key)
        flag = f"--{key.removesuffix('_seconds').replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value not in (None, False):
            flags.append(f"{flag}={value:g}" if isinstance(value, float) else f"{flag}={value}")
    return " ".join(flags)


def program_of(config: JobConfig) -> str:
    """The script's name and a checksum of its arguments, which may hold secrets: for peers to see what differs."""
    name = config.script if config.module else Path(config.script).name
    return f"{name} {hashlib.sha256(json.dumps(config.args).encode()).hexdigest()[:12]}"


def _workers_per_node(given: Given) -> int:
    """torch's own meaning of auto, cpu, gpu and numbers; checked against what names single workers."""
    from torch.distributed.run import determine_local_world_size

    try:
        workers: int = determine_local_world_size(given["nproc_per_node"])
    except ValueError as exc:
        raise UsageError(f"{given.named('nproc_per_node')}: {exc}; give auto, cpu, gpu or a number") from exc
    if workers < 1:
        raise UsageError(f"{given.named('nproc_per_node')} gives {workers} workers; at least 1 is needed")
    if workers > _MOST_WORKERS:
        raise UsageError(
            f"{given.named('nproc_per_node')} gives {workers} workers; at most {_MOST_WORKERS} are allowed"
        )
    shown = given["local_ranks_filter"]
    if shown and (beyond := [rank for rank in map(int, shown.split(",")) if rank >= workers]):
        raise UsageError(
            f"{given.named('local_ranks_filter')}: no local rank {beyond[0]} among {plural(workers, 'worker')}"
        )
    return workers


def _nccl(given: Given, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The environment wins over the file, as PET_* variables do; what the file says in vain is said in the log."""
    set_already = {name: value for name, value in environ.items() if name.startswith("NCCL_")}
    for name, value in given["nccl"].items():
        if set_already.get(name, value) != value:
            logger.warning(
                "%s = %s in %s has no effect: the environment has %s", name, value, given.path, set_already[name]
            )
    return tuple(sorted({**given["nccl"], **set_already}.items()))


def _run_id_from_name(target: str, *, module: bool) -> str:
    """`train` for train.py, `pkg.train` for -m pkg.train: the same at each start, so that a restart is recognised.

    torchrun's own default is a name made anew each time, or "none".
    """
    stem = target if module else (Path(target).stem or Path(target).absolute().name)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip(".-")[:128] or "job"


def _shutdown_timeout(given: Given, environ: Mapping[str, str]) -> float:
    """--shutdown-timeout, else torchrun's variable for it, else torchrun's 30 s."""
    if given["shutdown_timeout"] is not None:
        return float(given["shutdown_timeout"])
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    try:
        return values.seconds(environ[name]) if name in environ else _DEFAULT_SHUTDOWN_SECONDS
    except ArgumentTypeError as exc:
        raise UsageError(f"{name}: {exc}") from exc


def _absolute(path: str | None) -> str | None:
    """Workers may change their directory; URLs stay as they are."""
    return path if not path or "://" in path else str(Path(path).absolute())


def _checkpoint_dir(directory: str | None) -> str | None:
    """By one name, however it was written: file:///x is /x, whose lock, account and room are looked for there."""
    if not directory:
        return directory
    local: str | None = own_checkpoints("storage").local_path(directory)
    return directory if local is None else local
