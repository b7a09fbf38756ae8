"""The child's entry point: a process that waits for a start message and then becomes the worker.

Run as a file, `python -u standby.py FD[,FD…] SCRIPT ARGS…`: messages come through the first descriptor, a line of JSON
each. The others are locks, which hold for as long as the worker lives, whatever becomes of the agent; what it executes
does not get them. The rest is there for whoever looks for the job with `ps` or `pkill -f`. A cold start sends the start
message at once. A standby is first told to warm up: it imports what nearly every worker does, says that it is ready,
and waits.

It leaves the process as `python script.py` would: `__main__`, `sys.argv`, `sys.path`, `__file__`, `__spec__`; and a
module beside the script (a user's own `elastic.py`, `checkpoints.py`, `yaml.py`) is what an import of that name finds,
whatever was loaded before. It adds: log files that SIGHUP reopens, stacks on SIGQUIT, the traceback in torch's error
file, and an end that tears the process group down before the interpreter goes (a script that ends with an open gloo
group may abort otherwise). What a warm start does beyond that is in `warm_up.py`.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys

_LOADED_BY_PYTHON = frozenset(sys.modules)

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import threading
import time
import traceback
import types
from typing import Any, NoReturn

_DESTROY_SECONDS = 5.0
_OURS = ("elastic", "checkpoints")


def make_way(folder: str) -> None:
    """Forget the loaded modules whose names the program's folder holds: there, `python script.py` would find its own.

    What Python itself loads before any script (os, codecs ...) stays, as it would. Ours go together or not at all.
    """
    loaded = {name.partition(".")[0] for name in sys.modules} - _LOADED_BY_PYTHON - {"__main__"}
    with contextlib.suppress(OSError):  # an archive
        loaded &= {entry.partition(".")[0] for entry in os.listdir(folder)}  # noqa: PTH208
    shadowed = {name for name in loaded if _is_another(name, folder)}
    if shadowed & {*_OURS}:
        shadowed |= {*_OURS}
    for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
        del sys.modules[name]


def _is_another(name: str, folder: str) -> bool:
    """Whether an import of `name` with `folder` first on the path would find something else than what is loaded."""
    found = importlib.machinery.PathFinder.find_spec(name, [folder])
    if found is None or found.origin is None:  # a plain folder comes after every real module
        return False
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is None or spec.origin is None or os.path.realpath(spec.origin) != os.path.realpath(found.origin)


def folder_of(kind: str, target: str) -> str:
    """What Python puts first on the path for this program."""
    if kind == "module":
        return os.getcwd()  # noqa: PTH109 - pathlib costs import time here
    return target if is_container(target) else os.path.dirname(os.path.realpath(target))  # noqa: PTH120


def is_container(path: str) -> bool:
    """A folder or an archive with a `__main__` inside."""
    return os.path.isdir(path) or path.endswith((".zip", ".pyz"))  # noqa: PTH112


def redirect(stdout: str, stderr: str) -> None:
    """Point the standard streams at log files; an empty name leaves one where it is."""
    for name, number in ((stdout, 1), (stderr, 2)):
        if name:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            os.dup2(descriptor, number)
            os.close(descriptor)


def listen(stdout: str, stderr: str) -> None:
    """SIGHUP reopens the log files after a rotation, SIGQUIT writes the stacks of all threads to stderr."""

    def reopen(_number: int, _frame: object) -> None:
        try:
            redirect(stdout, stderr)
        except OSError as exc:  # the folder is gone: the old files go on; this runs in the middle of the user's code
            os.write(2, f"cannot reopen {stdout or stderr}: {exc}\n".encode())

    signal.signal(signal.SIGHUP, reopen)
    signal.siginterrupt(signal.SIGHUP, False)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)


def keep_sockets_in(folder: str) -> None:
    """Where multiprocessing, and with it a data loader, puts its sockets: a killed worker would leave them in /tmp."""
    from multiprocessing import process

    process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # read by util.get_temp_dir


def become_main(target: str, kind: str, args: list[str]) -> None:
    """Run the user's program as `__main__`; returns when its top-level code has."""
    sys.argv = [target, *args]
    if kind == "module":
        _run_module(target)
    else:
        _run_script(target)


def _run_script(path: str) -> None:
    make_way(folder_of("script", path))
    if is_container(path):
        import runpy

        runpy.run_path(path, run_name="__main__")
        return
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    sys.path.insert(0, folder_of("script", path))
    path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - absolute but not normalised, as Python itself does
    loader: Any = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    if path.endswith(".pyc"):
        code = loader.get_code("__main__")
    else:
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    main = _main_module(__file__=path, __loader__=loader, __spec__=None, __cached__=None)
    exec(code, main.__dict__)


def _run_module(name: str) -> None:
    import runpy

    sys.path.insert(0, folder_of("module", name))
    make_way(sys.path[0])
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    main = _main_module(
        __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __cached__=spec.cached, __package__=spec.parent
    )
    exec(code, main.__dict__)


def _main_module(**attributes: Any) -> types.ModuleType:
    """A fresh `__main__`, as multiprocessing's spawn and pickle expect to find it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, **attributes)
    sys.modules["__main__"] = main
    return main


def exit_code_of(failure: SystemExit) -> int:
    """What the interpreter would exit with."""
    if failure.code is None:
        return 0
    if isinstance(failure.code, int):
        return failure.code & 0xFF
    print(failure.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def record(failure: BaseException) -> None:
    """The traceback into torch's error file, unless torch's `record` has written it already."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or os.path.exists(path):  # noqa: PTH110
        return
    message = {
        "message": f"{type(failure).__name__}: {failure}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(type(failure), failure, failure.__traceback__)),
            "timestamp": str(int(time.time())),
        },
    }
    partial = f"{path}.{os.getpid()}"
    try:
        with open(partial, "w") as file:  # noqa: PTH123
            json.dump({"message": message}, file)
        os.replace(partial, path)  # noqa: PTH105
    except OSError as exc:
        print(f"cannot write {path}: {exc}", file=sys.stderr)  # noqa: T201


def tell_if_final(failure: BaseException) -> None:
    """Have the agent told that a retry would fail the same way, where the failure says so and there is a session."""
    ours = sys.modules.get("elastic.training.session")
    if ours is not None and getattr(failure, "retry_is_useless", False) is True:
        with contextlib.suppress(Exception):  # it may be what could not be had
            ours.session().fatal(failure)


def end(code: int) -> NoReturn:
    """Finish as the interpreter would (threads, atexit, flush), but leave the process group cleanly and always exit."""
    try:
        if code == 0:
            _destroy_process_group()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the last stop of the process
        traceback.print_exc()
        code = code or 1
    _let_go_of_main()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


def _let_go_of_main() -> None:
    """Finalise what the program still holds, as the interpreter would: open files are flushed, `__del__` runs."""
    main = sys.modules.get("__main__")
    if main is not None and main.__dict__ is not globals():  # the program may not have come to life
        main.__dict__.clear()
    gc.collect()
    for thing in gc.get_objects():  # what other modules, reference cycles or threads still hold open
        if issubclass(type(thing), io.IOBase):  # isinstance would ask lazy objects, which warn
            with contextlib.suppress(Exception):  # the program's own code; the interpreter's end ignores it as well
                if not thing.closed:
                    thing.flush()


def _destroy_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    # A peer that never leaves must not hold this rank: its training is done.
    thread = threading.Thread(target=distributed.destroy_process_group, name="destroy-process-group", daemon=True)
    thread.start()
    thread.join(_DESTROY_SECONDS)


def run(message: dict[str, Any]) -> NoReturn:
    """Become the worker that the message describes, and end with its exit code."""
    os.environ.update(message["environ"], ELASTICD_WORKER_PID=str(os.getpid()))
    if message["scratch"]:
        keep_sockets_in(message["scratch"])
    if message["cwd"]:
        os.chdir(message["cwd"])
    os.umask(message["umask"])
    redirect(message["stdout"], message["stderr"])
    listen(message["stdout"], message["stderr"])
    code = 0
    try:
        become_main(message["target"], message["kind"], message["args"])
    except SystemExit as exc:
        code = exit_code_of(exc)
    except KeyboardInterrupt as exc:
        _drop_our_frames(exc)
        sys.excepthook(type(exc), exc, exc.__traceback__)
        code = 130
    except BaseException as exc:  # noqa: BLE001 - the top of the process
        _drop_our_frames(exc)
        record(exc)
        tell_if_final(exc)
        sys.excepthook(type(exc), exc, exc.__traceback__)
        code = 1
    end(code)


def _drop_our_frames(failure: BaseException) -> None:
    """Let the traceback begin in the user's program, as it would without this file."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    failure.__traceback__ = trace


class Channel:
    """The agent's messages, a line of JSON each; a second one may lie behind the first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the agent has closed its end: no worker is needed any more."""
        while b"\n" not in self._unread:
            try:
                chunk = os.read(self._descriptor, 65536)
            except ConnectionResetError:  # it went before it had read what we said
                return None
            if not chunk:
                return None
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(text)
        return message

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it may have started us meanwhile, and listens no more
            os.write(self._descriptor, text.encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def wait_warm(channel: Channel, message: dict[str, Any]) -> dict[str, Any] | None:
    """Warm up, say so, and return the start message when it comes, or has come meanwhile."""
    spec: Any = importlib.util.spec_from_file_location("warm_up", os.path.join(os.path.dirname(__file__), "warm_up.py"))  # noqa: PTH118, PTH120
    warmth = importlib.util.module_from_spec(spec)  # not in sys.modules, where a user's module may have that name
    spec.loader.exec_module(warmth)
    with warmth.silence():
        failed = warmth.warm_up(folder_of(message["kind"], message["target"]), message["preload"])
    channel.say(json.dumps(failed))
    start = channel.receive()
    if start is not None:
        warmth.show_as(start["shown"])
    return start


def main() -> NoReturn:
    """Wait for the start message, warm if told to."""
    del sys.path[0]  # this file's folder, which is nothing the user's program should see
    descriptors = [int(number) for number in sys.argv[1].split(",")]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    channel = Channel(descriptors[0])
    message = channel.receive()
    if message is not None and "preload" in message:
        message = wait_warm(channel, message)
    if message is None:
        os._exit(0)
    channel.close()
    run(message)


if __name__ == "__main__":
    main()
