"""`elasticd`: parses, hands over; no logic. Commands that only look at things start without importing torch."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic import __version__
from elastic.errors import ElasticError, ExitCode, UsageError
from elastic.journal import log_to_stderr

_INTERRUPTED = 130
_USAGE = """elasticd COMMAND [options]

commands:
  run          run a training script on this node's workers and keep it going (elasticd run --help)
  status       what the agents of this host are doing
  drain        ask an agent to save and stop, as SIGTERM does
  profile      a torch.profiler trace of the next steps, without a restart
  checkpoints  list, show, verify, prune or export checkpoints
  doctor       is this node fit to train? (elasticd doctor --help)
  dashboards   write the Grafana dashboard and the Prometheus rules into a directory
  install      set a job up as a service of systemd (root)
  uninstall    take it out again
  demo         train a small model, lose a worker, and prove that no sample was lost"""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code. Every foreseen error is one line on stderr."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold any bytes, a terminal not show each letter
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        return code if _is_read() else int(ExitCode.FAILED)
    except ElasticError as exc:
        print(f"elasticd: error: {exc}", file=sys.stderr)
        return int(exc.exit_code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _is_read()
        return int(ExitCode.FAILED)
    except SystemExit:  # the help was shown, or a flag is wrong
        _is_read()
        raise


def _check_current_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as exc:
        raise UsageError("the current directory has been removed; cd to one that exists") from exc


def _is_read() -> bool:
    """Write what is left of our output; where its reader is gone (`elasticd status | head`) it goes nowhere."""
    try:
        if sys.stdout is not None:  # None: it was closed before we began
            sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _open_closed_streams() -> None:
    """Somebody may have started us with `>&-`: whatever is opened next would become our standard output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


def _dispatch(arguments: list[str]) -> int:
    """`run`, `demo`, `doctor` and `give-back` have command lines of their own, the rest share one parser."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("run", "demo", "doctor"):
        _check_current_directory()
    if command == "run":
        return _run(rest)
    if command == "demo":
        log_to_stderr()
        from elastic.demo.demo import main as demo

        return int(demo(rest))
    if command == "doctor":
        return _doctor(rest)
    if command == "give-back":
        return _give_back(rest)
    options = _parser().parse_args(arguments)
    log_to_stderr()
    return int(options.handler(options))


def _run(argv: Sequence[str]) -> int:
    from elastic.config import load

    log_to_stderr()
    gc.disable()  # a fifth of torch's import would be the search for garbage among what it makes
    try:
        config = load(argv, os.environ)
    finally:
        gc.enable()
    if config.log_format == "json":
        from elastic.journal_json import log_as_json

        log_as_json(run_id=config.run_id, node_id=config.node_id)
    from elastic.agent.launch import run_job
    from elastic.agent.log_thread import LOG_THREAD

    gc.freeze()  # what was imported stays for good
    code = run_job(config)
    if any(thread.name.startswith(("TailLog", LOG_THREAD)) for thread in threading.enumerate()):
        os._exit(code)  # nobody reads our output any more: the interpreter would wait for its writers for ever
    return code


def _doctor(argv: Sequence[str]) -> int:
    log_to_stderr()
    from elastic.doctor import main as doctor

    code = doctor(argv, os.environ)
    if any(thread.name.startswith("doctor-") for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)  # what a check asked does not answer: the interpreter's end would wait for it
    return code


def _status(options: argparse.Namespace) -> int:
    from elastic.cli_status import show_job, show_status

    if options.rdzv_endpoint:
        return show_job(options, os.environ)
    return show_status(os.environ, options)


def _drain(options: argparse.Namespace) -> int:
    from elastic.cli_status import drain_agent

    return drain_agent(os.environ, run_id=options.run_id, pid=options.pid, wait=options.wait)


def _profile(options: argparse.Namespace) -> int:
    from elastic.cli_profile import profile

    which = (options.run_id, options.pid)
    return profile(os.environ, which=which, steps=options.steps, out=options.out, as_json=options.json)


def _checkpoints(options: argparse.Namespace) -> int:
    from elastic.cli_checkpoints import run_action

    return run_action(options)


def _dashboards(options: argparse.Namespace) -> int:
    from elastic.metrics.dashboards import write

    for path in write(options.directory):
        print(path)
    return int(ExitCode.SUCCEEDED)


def _install(options: argparse.Namespace) -> int:
    from elastic.cli_install import install

    return install(options, os.environ)


def _uninstall(options: argparse.Namespace) -> int:
    from elastic.cli_install import uninstall

    return uninstall(options)


def _give_back(argv: Sequence[str]) -> int:
    """Run by the unit. The parser of the other commands, which is for people, knows nothing of it."""
    parser = _Parser(
        prog="elasticd give-back",
        description="Free what agents of yours that were killed still hold on this host: kill what they have started, "
        "end their leases in etcd, save the step that memory alone holds, free /dev/shm. systemd runs it after the "
        "unit has stopped. Agents that live are left alone; where there is nothing to do it says nothing.",
    )
    parser.parse_args(argv)
    log_to_stderr()
    from elastic.agent.give_back import give_back
    from elastic.runtime import runtime_dir

    give_back(runtime_dir(os.environ))
    return int(ExitCode.SUCCEEDED)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # raises, as the original exits
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="elasticd", usage=_USAGE, add_help=True)
    parser.add_argument("--version", action="version", version=f"elasticd {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="elasticd"
    )

    status = commands.add_parser("status", description="Show what the agents of this host are doing.")
    status.add_argument("--json", action="store_true", help="the JSON of /status; a list when there are several agents")
    status.add_argument("--watch", action="store_true", help="show it again every second until interrupted")
    status.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", help="ask etcd instead: the whole job --rdzv-id")
    for name, text in (("ca", "CA certificate"), ("cert", "client certificate"), ("key", "its key"), ("user", "user")):
        status.add_argument(f"--etcd-{name}", metavar="NAME" if name == "user" else "FILE", help=f"etcd: {text}")
    status.set_defaults(handler=_status)

    drain = commands.add_parser("drain", description="Ask an agent to save at the next step and stop, as SIGTERM does.")
    drain.add_argument("--wait", action="store_true", help="until the agent has ended; an interrupt leaves it draining")
    drain.set_defaults(handler=_drain)
    profile = commands.add_parser(
        "profile",
        description="Have this node's workers trace their next steps with torch.profiler, without a restart: a Chrome "
        "trace per rank, and where the time of a step goes.",
    )
    profile.add_argument("--steps", type=int, default=5, metavar="N", help="default: %(default)s")
    profile.add_argument("--out", type=Path, metavar="DIR", help="default: the job's --log-dir")
    profile.add_argument("--json", action="store_true", help="print JSON")
    profile.set_defaults(handler=_profile)
    for command in (status, drain, profile):
        command.add_argument(
            "--rdzv-id",
            "--run-id",
            dest="run_id",
            metavar="JOB",
            help="the agent of this job, when there are several on this host",
        )
    for command in (status, drain, profile):
        command.add_argument("--pid", type=int, metavar="PID", help="the agent with this process id")

    _add_checkpoint_actions(commands.add_parser("checkpoints", description="Look after a directory of checkpoints."))
    dashboards = commands.add_parser(
        "dashboards", description="Write the Grafana dashboard and the Prometheus rules, and say where they are."
    )
    dashboards.add_argument("directory", type=Path, metavar="DIR", help="made if need be; files of ours are replaced")
    dashboards.set_defaults(handler=_dashboards)
    _add_service_commands(commands)
    for name in ("run", "demo", "doctor"):  # known to the parser for its messages alone
        commands.add_parser(name, add_help=False)
    return parser


def _add_service_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    install = commands.add_parser(
        "install", description="Check a job file and set it up as elasticd@NAME.service, NAME being the file's name."
    )
    install.add_argument("job", type=Path, nargs="?", metavar="JOB.toml", help="as for `elasticd run --config`")
    install.add_argument("--etcd", action="store_true", help="the unit and the settings of a small etcd, to fill in")
    install.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    install.add_argument("--user", default="elasticd", metavar="NAME", help="who runs it; default: %(default)s")
    install.set_defaults(handler=_install)
    uninstall = commands.add_parser("uninstall", description="Stop a job's service and remove what install wrote.")
    uninstall.add_argument("job", metavar="JOB", help="its name, or its file")
    uninstall.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    uninstall.set_defaults(handler=_uninstall)
    for parser in (install, uninstall):
        parser.add_argument("--root", type=Path, metavar="DIR", help="work on an image's tree, start and stop nothing")


def _add_checkpoint_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|verify|prune|export")
    made = {}
    for name, text in (
        ("list", "every checkpoint with its state"),
        ("show", "one checkpoint's manifest: step, position, tensors, files"),
        ("verify", "read everything and compare the checksums; exit 1 if a checkpoint is corrupt"),
        ("prune", "remove what retention would remove"),
        ("export", "write one checkpoint into a single safetensors file"),
    ):
        made[name] = action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.add_argument("directory", metavar="DIR", help="the --checkpoint-dir of the job")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(handler=_checkpoints)
    made["export"].add_argument("output", type=Path, metavar="OUT.safetensors")
    made["export"].add_argument(
        "--only", metavar="KEY", help="the tensors below this key, such as model, named without it"
    )
    for name, which in (
        ("show", "the newest committed step"),
        ("export", "the newest committed step"),
        ("verify", "all"),
    ):
        made[name].add_argument("--step", type=int, metavar="N", help=f"default: {which}")
    made["prune"].add_argument("--keep-last", type=int, default=3, metavar="K", help="default: %(default)s")
    made["prune"].add_argument("--keep-every", type=int, metavar="N", help="also keep every step divisible by N")
    made["prune"].add_argument("--dry-run", action="store_true", help="say what would be removed, remove nothing")
