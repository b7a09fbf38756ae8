"""The settings as people write them: torchrun's own flags and ours, PET_* variables, a job file; the strongest wins.

Owns spelling, types of single values and the order flag > PET_* variable > file > default. What values mean together is
decided in `rules.py`. torch is imported when a command line is read, not before.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from elastic import jobfile, values
from elastic.errors import UsageError

Source = Literal["flag", "variable", "file", "default"]

_UNSET: Any = object()
_TARGET = ("training_script", "training_script_args", "module")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Every setting with where it came from, by argparse's names."""

    values: Mapping[str, Any]
    sources: Mapping[str, Source]
    path: Path | None  # the job file
    strange: frozenset[str] = frozenset()  # flags of a torchrun that is newer than we are

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def explicit(self, key: str) -> bool:
        return self.sources[key] != "default"

    def named(self, key: str) -> str:
        """The setting and its value in the words of who gave it, for messages."""
        value = self.values[key]
        text = values.shown(value)
        flag = "--" + key.replace("_", "-")
        source = self.sources[key]
        if source == "file":
            return f"{key} = {text} in {self.path}"
        if source == "variable":
            return f"PET_{key.upper()}={text}"
        if isinstance(value, bool):
            return flag
        return f"{flag}={text}" if source == "flag" else f"{flag}={text} (the default)"


def collect(argv: Sequence[str], environ: Mapping[str, str]) -> Given:
    """Read everything that is said about a job. `--help` prints and exits here.

    Raises: UsageError for anything unknown, malformed, or missing.
    """
    parser = build_parser()
    options = {action.dest: action for action in parser._actions if action.dest != "help"}
    said = _from_flags(parser, options, argv)
    variables = _from_variables(options, environ)
    config = said.get("config", variables.get("config"))
    path = Path(config) if config is not None else None
    settable = {key: option for key, option in options.items() if key not in (*_TARGET, "config")}
    filed = jobfile.read(path, settable) if path is not None else {}
    if said.get("training_script") is not None:  # one place says what to run, whole
        filed = {key: value for key, value in filed.items() if key not in _TARGET}
    elif "training_script" in filed and ("module" in said or variables.get("module")):
        raise UsageError(f"-m/--module needs its module on the command line; {path} names {filed['training_script']!r}")
    layers: dict[Source, Mapping[str, Any]] = {
        "default": {**_TORCHS_ALONE, **{key: option.default for key, option in options.items()}, "nccl": {}},
        "file": filed,
        "variable": {key: value for key, value in variables.items() if key != "module" or "module" not in filed},
        "flag": said,
    }
    merged: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers.items():
        merged.update(layer)
        sources.update(dict.fromkeys(layer, source))
    ours = {a.dest for g in parser._action_groups if (g.title or "").startswith(_OURS) for a in g._group_actions}
    return Given(values=merged, sources=sources, path=path, strange=frozenset(options.keys() - ours - _TORCHRUNS))


_OURS = "elasticd: "  # how the titles of our groups begin
_TORCHRUNS = frozenset(
    {
        *("nnodes", "nproc_per_node", "node_rank", "standalone"),
        *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
        *("max_restarts", "monitor_interval", "start_method", "event_log_handler", "role", "module", "no_python"),
        *("run_path", "log_dir", "redirects", "tee", "local_ranks_filter", "log_line_prefix_template", "logs_specs"),
        *("duplicate_stdout_filters", "duplicate_stderr_filters", "master_addr", "master_port", "local_addr"),
        *("numa_binding", "signals_to_handle", "shutdown_timeout", "virtual_local_rank", "print_completion"),
        *("training_script", "training_script_args"),
    }
)
# Flags that come with torch's own code for them, as they are where an older torch has neither.
_TORCHS_ALONE: dict[str, Any] = {"numa_binding": None, "duplicate_stdout_filters": [], "duplicate_stderr_filters": []}


def build_parser() -> argparse.ArgumentParser:
    """torchrun's parser with our defaults where they differ, and our flags in a group of their own."""
    with _without_pet_variables():  # torch's actions read them at this moment; we read them in `collect`
        from torch.distributed.run import get_args_parser

        torchs = get_args_parser()
        parser = _Parser(
            prog="elasticd run",
            usage="elasticd run [options] (SCRIPT | -m MODULE) [args]",
            description="Run a training script on every worker of this node and keep it going. Takes every flag of "
            "torchrun, and those below. PET_<FLAG> variables and --config set the same.",
            parents=[torchs],
            add_help=False,
            formatter_class=_Help,
        )
        parser._optionals.title = "torchrun's options"
        _add_newer_flags(parser)
        _change_defaults(parser)
        _add_membership_flags(parser)
        _add_worker_flags(parser)
        _add_etcd_flags(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Errors become ours, with a hint for a mistyped flag."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--?[^\s=]+)", message)
        close = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1, cutoff=0.7) if unknown else []
        raise UsageError(message + (f"; did you mean {close[0]}?" if close else "; see elasticd run --help"))


class _Help(argparse.HelpFormatter):
    """Tells each default that is a value, as it would be written."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, "", [], False, argparse.SUPPRESS) or "default" in text.lower():
            return text
        return f"{text} (default: {'on' if action.default is True else values.shown(action.default)})"


class _Switch(argparse.Action):
    """`--name` and `--no-name`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        negated = ["--no-" + option[2:] for option in option_strings]
        negated += [option.replace("-", "_").replace("__", "--", 1) for option in negated]
        super().__init__(list(dict.fromkeys([*option_strings, *negated])), dest, nargs=0, **kwargs)

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no"))


@contextlib.contextmanager
def _without_pet_variables() -> Iterator[None]:
    aside = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PET_")}
    try:
        yield
    finally:
        os.environ.update(aside)


def _add_newer_flags(parser: argparse.ArgumentParser) -> None:
    """What torchrun knows since a later torch than the one here, and needs nothing of it."""
    from torch.distributed.argparse_util import check_env, env

    def add(flag: str, **kwargs: Any) -> None:
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, "--" + flag[2:].replace("-", "_"), **{"action": env, **kwargs})

    add("--shutdown-timeout", help="Seconds from SIGTERM to SIGKILL for workers that are to stop; default: 30.")
    add("--virtual-local-rank", action=check_env, help="LOCAL_RANK is 0 everywhere, CUDA_VISIBLE_DEVICES one device.")
    add("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", help="Without effect here.")
    add("--log-line-prefix-template", default="", help="Of each line on the console; may have ${role_name}, "
        "${local_rank}, ${rank}, ${hostname}.")  # fmt: skip


def _change_defaults(parser: argparse.ArgumentParser) -> None:
    options = {action.dest: action for action in parser._actions}
    options["nnodes"].type, options["nnodes"].default = values.node_range, (1, 1)
    options["max_restarts"].default = 3
    options["rdzv_backend"].default = "standalone"
    options["rdzv_id"].default = None
    options["master_addr"].default = options["master_port"].default = None
    options["shutdown_timeout"].type = values.seconds
    script = options["training_script"]
    script.nargs, script.required, script.default = "?", False, None
    script.metavar, options["training_script_args"].metavar = "SCRIPT", "args"
    script.help = "Script, module (-m) or program (--no-python) to run; may be named in the job file instead."
    options["training_script_args"].help = "Handed to it as they are."
    options["max_restarts"].help = "Failures the job may have within --restart-window before it ends."
    options["rdzv_backend"].help = "'standalone' for one node (no server), 'etcd3' for many."
    options["rdzv_endpoint"].help = "With etcd3: HOST:PORT[,HOST:PORT...] of the etcd cluster."
    options["rdzv_id"].help = "Name of the job; required with etcd3, otherwise taken from the script's name."
    options["standalone"].help = "One node without a server; the same as giving no --rdzv-endpoint."


def _adder(parser: argparse.ArgumentParser, title: str) -> Any:
    """A function that adds one flag in both spellings, set by PET_<FLAG> as torchrun's are."""
    from torch.distributed.argparse_util import env

    group = parser.add_argument_group(title)

    def add(flag: str, **kwargs: Any) -> None:
        spellings = dict.fromkeys([flag, "--" + flag[2:].replace("-", "_")])
        group.add_argument(*spellings, **{"action": env, **kwargs})

    return add


def _add_membership_flags(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser, "elasticd: nodes, times and budgets")
    add("--config", metavar="JOB.toml", help="A file with the same settings; keys are flag names with _.")
    add("--node-id", metavar="NAME", help="Identity of this node that survives a restart; default: the host name.")
    add("--lease-ttl", type=values.whole_seconds, default=5, metavar="S", help="A node silent for this long is lost.")
    add(
        "--last-call",
        type=values.seconds,
        default=5.0,
        metavar="S",
        help="At first start: wait for more than MIN nodes.",
    )
    add(
        "--settle",
        type=values.seconds,
        default=1.0,
        metavar="S",
        help="Newcomers within this time are let in together.",
    )
    add(
        "--join-timeout",
        type=values.seconds,
        default=600.0,
        metavar="S",
        help="Fewer than MIN nodes for this long: exit 3.",
    )
    add("--restart-window", type=values.seconds, default=600.0, metavar="S", help="The window of --max-restarts.")
    add(
        "--drain-grace", type=values.seconds, default=120.0, metavar="S", help="Time to reach a step boundary and save."
    )


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser, "elasticd: workers, checkpoints and status")
    add(
        "--hang-timeout",
        type=values.seconds,
        default=0.0,
        metavar="S",
        help="No progress for this long: hung; 0 = off.",
    )
    add("--standby", action=_Switch, default=True, help="Keep one warm standby per worker.")
    add(
        "--preload", type=values.names, default=[], metavar="MODULE[,...]", help="What a standby imports besides torch."
    )
    add("--memory-checkpoints", action=_Switch, default=True, help="Keep the newest state in shared memory.")
    add("--memory-every", type=values.steps, metavar="N",
        help="Keep it each N steps; without it as often as costs 1 %% of the time at most.")  # fmt: skip
    add("--checkpoint-dir", metavar="DIR", help="Handed to the workers through the session.")
    add("--checkpoint-every", type=values.interval, metavar="N|TIME", help="100 = steps; 30s, 5m = time.")
    add("--allow-fresh-start", action=_Switch, default=False,
        help="Begin at step 0 although there are checkpoints and none is good.")  # fmt: skip
    add("--http", type=values.address, default=("127.0.0.1", 9431), metavar="HOST:PORT",
        help="Where /healthz, /readyz and /status are; port 0 = any free.")  # fmt: skip
    add("--log-format", choices=["plain", "json"], default="plain",
        help="The agent's own lines: for people, or one JSON object each.")  # fmt: skip
    add("--http-token-file", metavar="FILE", help="Who asks over TCP must have the token in this file.")
    add("--http-cert", metavar="FILE", help="Serve TLS with this certificate.")
    add("--http-key", metavar="FILE", help="Key of --http-cert.")
    add("--usr1", choices=["save", "drain"], default="save", help="What SIGUSR1 to the agent means.")


def _add_etcd_flags(parser: argparse.ArgumentParser) -> None:
    add = _adder(parser, "elasticd: TLS and authentication of etcd")
    add("--etcd-ca", metavar="FILE", help="CA certificate.")
    add("--etcd-cert", metavar="FILE", help="Client certificate.")
    add("--etcd-key", metavar="FILE", help="Key of --etcd-cert.")
    add("--etcd-user", metavar="NAME", help="User; the password is taken from ELASTICD_ETCD_PASSWORD.")


def _from_flags(
    parser: argparse.ArgumentParser, options: Mapping[str, argparse.Action], argv: Sequence[str]
) -> dict[str, Any]:
    """Only what the command line says: argparse sets no default where the namespace has the attribute already."""
    namespace = parser.parse_args(list(argv), argparse.Namespace(**dict.fromkeys(options, _UNSET)))
    said = {key: value for key, value in vars(namespace).items() if key in options and value is not _UNSET}
    if said.get("training_script") is None:
        for key in ("training_script", "training_script_args"):
            said.pop(key, None)
    return said


def _from_variables(options: Mapping[str, argparse.Action], environ: Mapping[str, str]) -> dict[str, Any]:
    """PET_* variables, for the flags for which torchrun has them and for all of ours."""
    from torch.distributed.argparse_util import check_env, env

    found: dict[str, Any] = {}
    for key, option in options.items():
        name = f"PET_{key.upper()}"
        text = environ.get(name)
        if text is None:
            continue
        if isinstance(option, (check_env, _Switch)):
            if text not in ("0", "1"):
                raise UsageError(f"{name}={text}: must be 0 or 1")
            found[key] = text == "1"
        elif isinstance(option, env):
            found[key] = jobfile.convert_text(f"{name}={text}", text, option)
    return found
