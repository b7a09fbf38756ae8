"""The rules between settings, each checked once at start. A broken one is a UsageError that names the values.

Looks at the file system and at installed plugins where a setting names something there; changes nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import stat
import sys
import warnings
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path

from elastic import values
from elastic.errors import StorageGoneError, UsageError
from elastic.flags import Given
from elastic.own_checkpoints import own_checkpoints
from elastic.passing import is_away

logger = logging.getLogger(__name__)

SINGLE_NODE_BACKENDS = ("standalone", "static", "c10d", "etcd", "etcd-v2")
_NO_EFFECT = {
    "monitor_interval": "workers are watched by events, not polled",
    "node_rank": "ranks of nodes come from the rendezvous",
    "start_method": "workers are fresh processes in every case",
    "event_log_handler": "events are in the log, /status and the metrics",
    "signals_to_handle": "TERM, INT, QUIT, HUP and USR1 have a fixed meaning, see --usr1",
}
_CONF_FLAGS = "--lease-ttl, --last-call, --settle, --join-timeout, --node-id, --etcd-ca, -cert, -key and -user"
_ETCD_ONLY = ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user")
_NO_SOURCE = (".pyc", ".pyz", ".zip")
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f]{1,128}")


def check(given: Given, environ: Mapping[str, str]) -> None:
    """Raises: UsageError at the first rule that does not hold. StorageGoneError: the script's file server is away."""
    _check_target(given, environ)
    _check_preload(given, environ)
    _check_rendezvous(given)
    _check_times(given)
    _check_store_access(given, environ)
    _check_http(given)
    _check_checkpoints(given)
    _check_logs(given)
    _check_names(given)
    _say_what_has_no_effect(given)


def backend(given: Given) -> str:
    """ "etcd3" or "standalone": whatever torchrun's backends do, one node needs no server."""
    return "etcd3" if given["rdzv_backend"] == "etcd3" else "standalone"


def _check_target(given: Given, environ: Mapping[str, str]) -> None:
    name = given["training_script"]
    if not name:
        where = f"the command line and {given.path} name" if given.path else "the command line names"
        raise UsageError(f"nothing to run: {where} neither a script nor -m MODULE")
    if given["module"] and (given["no_python"] or given["run_path"]):
        other = "no_python" if given["no_python"] else "run_path"
        raise UsageError(f"{given.named(other)} contradicts --module: a module is run by python -m")
    if given["module"]:
        _check_module(name, environ)
    elif given["no_python"] and not given["run_path"]:
        if shutil.which(name, path=environ.get("PATH")) is None:
            raise UsageError(f"program {name!r} (--no-python) is not an executable file, here or in PATH")
    else:
        _check_script(name, environ)


def _check_script(name: str, environ: Mapping[str, str]) -> None:
    found = _look(f"script {name!r}", name, is_needed=True)
    if found is None:
        raise UsageError(f"script {name!r} does not exist (in {Path.cwd()})")
    if not os.access(name, os.R_OK):
        raise UsageError(f"script {name!r} cannot be read by this user")
    if stat.S_ISDIR(found.st_mode):
        main = _look(f"script {name!r}", Path(name) / "__main__.py", is_needed=True)
        if main is None or not stat.S_ISREG(main.st_mode):
            raise UsageError(f"script {name!r} is a directory without a __main__.py")
        _check_syntax(str(Path(name) / "__main__.py"), environ)
    elif stat.S_ISREG(found.st_mode):  # what comes through a pipe can be read only once
        _check_syntax(name, environ)


def _check_syntax(name: str, environ: Mapping[str, str]) -> None:
    """Every worker would fail by it, each time. What another interpreter makes of the script is not known here."""
    if environ.get("PYTHON_EXEC") or name.endswith(_NO_SOURCE):
        return
    try:
        source = Path(name).read_bytes()
    except OSError:
        return  # the workers say so, and are tried again
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as exc:
        line = f", line {exc.lineno}" if exc.lineno else ""
        raise UsageError(f"script {name!r}{line}: {type(exc).__name__}: {exc.msg}") from exc
    except ValueError as exc:  # a NUL, for some versions of Python
        raise UsageError(f"script {name!r}: {exc}") from exc
    except (RecursionError, MemoryError):
        return  # a worker's stack may be deeper


def _check_module(name: str, environ: Mapping[str, str]) -> None:
    """Only the top-level package is looked for: deeper ones cannot be found without importing it."""
    top = name.split(".")[0]
    if name.endswith(".py") and _look(f"module {name!r}", name) is not None:
        raise UsageError(f"module {name!r} is a file: leave out -m, or name it {name[:-3]!r}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"module {name!r} is not a module's name; a file is run without -m")
    if not _is_importable(top, Path.cwd(), environ):
        raise UsageError(f"module {name!r}: no {top!r} in {Path.cwd()} or on Python's path")


def _check_preload(given: Given, environ: Mapping[str, str]) -> None:
    """As above; what lies beside the program can be preloaded too."""
    target = Path(given["training_script"])
    folder = Path.cwd() if given["module"] else target if target.is_dir() else target.resolve().parent
    for name in given["preload"]:
        if not _is_importable(name.split(".")[0], folder, environ):
            where = f"in {folder} or on Python's path"
            raise UsageError(f"{given.named('preload')}: no module {name!r} {where}; install it or leave it out")


def _is_importable(top: str, folder: Path, environ: Mapping[str, str]) -> bool:
    """Whether a worker would find this top-level module. Another interpreter's path is not known here."""
    if environ.get("PYTHON_EXEC"):
        return True
    path = [str(folder), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    return bool(importlib.machinery.PathFinder.find_spec(top, path) or importlib.util.find_spec(top))


def _check_rendezvous(given: Given) -> None:
    chosen, (_, most) = given["rdzv_backend"], given["nnodes"]
    if chosen != "etcd3" and chosen not in SINGLE_NODE_BACKENDS:
        raise UsageError(f"{given.named('rdzv_backend')} is not known: etcd3 for many nodes, nothing for one")
    if given["standalone"]:
        _check_standalone(given)
    if chosen != "etcd3" and most > 1:
        raise UsageError(
            f"{given.named('nnodes')} needs a store that the nodes share, which {given.named('rdzv_backend')} is not: "
            "give --rdzv-backend etcd3 --rdzv-endpoint HOST:2379[,...] --rdzv-id JOB"
        )
    if chosen == "etcd3":
        for key, example in (("rdzv_endpoint", "h1:2379,h2:2379,h3:2379"), ("rdzv_id", "my-job")):
            if not given[key]:
                raise UsageError(f"--rdzv-backend=etcd3 needs --{key.replace('_', '-')}, such as {example}")
        _endpoints(given)
    port = given["master_port"]
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"{given.named('master_port')} must be from 0 to 65535")


def _check_standalone(given: Given) -> None:
    """torchrun overrules what contradicts --standalone; we say so, but for the harmless form found in its manual."""
    if given["rdzv_backend"] == "etcd3":
        raise UsageError(
            f"{given.named('standalone')} contradicts {given.named('rdzv_backend')}: leave one of them out"
        )
    if given["nnodes"][1] > 1:
        raise UsageError(f"{given.named('standalone')} contradicts {given.named('nnodes')}: it means one node")
    host = given["rdzv_endpoint"].rpartition(":")[0] or given["rdzv_endpoint"]
    if host not in ("", "localhost", "127.0.0.1", "[::1]"):
        raise UsageError(
            f"{given.named('standalone')} contradicts {given.named('rdzv_endpoint')}: leave one of them out"
        )


def _endpoints(given: Given) -> str:
    try:
        return values.endpoints(given["rdzv_endpoint"])
    except ArgumentTypeError as exc:
        raise UsageError(f"{given.named('rdzv_endpoint')}: {exc}") from exc


def _check_times(given: Given) -> None:
    if given["max_restarts"] < 0:
        raise UsageError(f"{given.named('max_restarts')} must be 0 or more")
    if given["lease_ttl"] < 2:
        raise UsageError(f"{given.named('lease_ttl')} must be 2 seconds or more: etcd grants no shorter lease")
    for key in ("restart_window", "join_timeout", "drain_grace"):
        if given[key] <= 0:
            raise UsageError(f"{given.named(key)} must be more than 0 seconds")
    if backend(given) != "etcd3":
        return
    for key in ("last_call", "settle"):
        if given[key] >= given["join_timeout"]:
            raise UsageError(
                f"{given.named(key)} must be shorter than {given.named('join_timeout')}, or no node gets in"
            )
    if given["lease_ttl"] >= given["join_timeout"]:
        raise UsageError(
            f"{given.named('lease_ttl')} must be shorter than {given.named('join_timeout')}, or the loss of a node "
            "is noticed after the wait for another one is over"
        )


def _check_store_access(given: Given, environ: Mapping[str, str]) -> None:
    if backend(given) != "etcd3":
        return
    _check_partners(given, "etcd_cert", "etcd_key")
    if given["etcd_cert"] and not given["etcd_ca"]:
        raise UsageError(
            f"{given.named('etcd_cert')} needs --etcd-ca, the authority that the server is checked against"
        )
    _check_readable(given, "etcd_ca", "etcd_cert", "etcd_key")
    if given["etcd_user"] and "ELASTICD_ETCD_PASSWORD" not in environ:
        raise UsageError(f"{given.named('etcd_user')} needs its password in the variable ELASTICD_ETCD_PASSWORD")


def _check_http(given: Given) -> None:
    _check_partners(given, "http_cert", "http_key")
    _check_readable(given, "http_token_file", "http_cert", "http_key")
    for key in ("http_token_file", "http_key"):
        if given[key] and (mode := Path(given[key]).stat().st_mode & 0o777) & 0o027:
            raise UsageError(f"{given.named(key)} has mode {mode:04o}, so others may read it: chmod 0600 or 0640")


def _check_partners(given: Given, first: str, second: str) -> None:
    """A certificate is of no use without its key, and the other way round."""
    for key, partner in ((first, second), (second, first)):
        if given[key] and not given[partner]:
            raise UsageError(f"{given.named(key)} needs --{partner.replace('_', '-')} as well")


def _check_readable(given: Given, *keys: str) -> None:
    for key in keys:
        if given[key] and not os.access(given[key], os.R_OK):
            raise UsageError(f"{given.named(key)} does not exist or cannot be read by this user")


def _check_checkpoints(given: Given) -> None:
    if given["memory_every"] is not None and not given["memory_checkpoints"]:
        raise UsageError(f"{given.named('memory_every')} contradicts {given.named('memory_checkpoints')}")
    directory = given["checkpoint_dir"]
    if given["checkpoint_every"] and not directory:
        raise UsageError(f"{given.named('checkpoint_every')} needs --checkpoint-dir")
    if directory is None:
        return
    if not directory:
        raise UsageError(f"{given.named('checkpoint_dir')} is empty; give a directory or leave it out")
    local = own_checkpoints("storage").local_path(directory)
    if local is not None:
        _check_directory(given, "checkpoint_dir", local)


def _check_directory(given: Given, key: str, path: str) -> None:
    """Of one that is made where it is not there."""
    found = _look(given.named(key), path)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{given.named(key)} is a file, not a directory")


def _look(name: str, path: str | Path, *, is_needed: bool = False) -> os.stat_result | None:
    """What is at a path that `name` names, None: nothing; or its file server is away, which is waited out later.

    `is_needed`: it is now, so that this is an error as well. Raises: UsageError, StorageGoneError.
    """
    try:
        return os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return None
    except ValueError as exc:  # a NUL
        raise UsageError(f"{name}: {exc}") from exc
    except OSError as exc:
        if not is_away(exc):
            raise UsageError(
                f"{name}: {exc.strerror or exc}: give a path whose directories this user may enter, and whose names "
                "the file system takes"
            ) from exc
        if is_needed:
            raise StorageGoneError(f"{name}: {exc.strerror or exc}; check its file server") from exc
        return None


def _check_logs(given: Given) -> None:
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    for key in ("redirects", "tee"):
        try:
            Std.from_str(given[key])
        except ValueError as exc:
            raise UsageError(f"{given.named(key)} is neither 0, 1, 2 or 3 nor a list such as 0:3,1:1") from exc
    try:
        _parse_rendezvous_config(given["rdzv_conf"])
    except ValueError as exc:
        raise UsageError(f"{given.named('rdzv_conf')} is not KEY=VALUE[,KEY=VALUE...]: {exc}") from exc
    if given["local_ranks_filter"] and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", given["local_ranks_filter"]):
        raise UsageError(f"{given.named('local_ranks_filter')} is not a list of local ranks such as 0,1,2")
    if given["log_dir"]:
        _check_directory(given, "log_dir", given["log_dir"])
    plugin = given["logs_specs"]
    if plugin and not importlib.metadata.entry_points(group="torchrun.logs_specs", name=plugin):
        raise UsageError(
            f"{given.named('logs_specs')}: no installed package has this entry point in torchrun.logs_specs"
        )


def _check_names(given: Given) -> None:
    """They become parts of keys, file names and labels."""
    for key in ("rdzv_id", "node_id"):
        if given[key] is not None and (not _NAME.fullmatch(given[key]) or given[key] in (".", "..")):
            raise UsageError(f"{given.named(key)}: a name has 1 to 128 characters and neither blanks nor slashes")


def _say_what_has_no_effect(given: Given) -> None:
    for key, reason in _NO_EFFECT.items():
        if given.explicit(key):
            logger.warning("%s has no effect: %s", given.named(key), reason)
    for key in sorted(given.strange):
        if given.explicit(key):
            logger.warning("%s has no effect: it is a flag of a torchrun newer than elasticd", given.named(key))
    if given["no_python"]:
        for key in ("standby", "preload"):
            if given.explicit(key) and given[key]:
                logger.warning("%s has no effect: a program that is not Python is started cold", given.named(key))
    elif given["preload"] and not given["standby"]:
        logger.warning("%s has no effect without standbys", given.named("preload"))
    if backend(given) == "etcd3":
        for key in ("master_addr", "master_port"):
            if given.explicit(key):
                logger.warning("%s has no effect: each round chooses its store's host and port", given.named(key))
        if given["rdzv_conf"]:
            logger.warning("%s has no effect here: its keys are flags, %s", given.named("rdzv_conf"), _CONF_FLAGS)
        return
    for key in ("rdzv_backend", "rdzv_endpoint", "rdzv_conf"):
        if given.explicit(key) and given[key] not in ("", "standalone"):
            logger.info("%s has no effect: one node needs no rendezvous server", given.named(key))
    for key in _ETCD_ONLY:
        if given.explicit(key):
            logger.warning("%s has no effect without --rdzv-backend etcd3", given.named(key))
