"""The child's entry point leaves a process as `python script.py` and `python -m module` would, started cold or warm.

The warm ones here have no torch to import, which makes them quick; `test_standby.py` has a few real ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import standby
from tests.support.job import wait_for, write

PROBE = """
import json, os, sys, __main__
import helper
class Item: pass
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path0": sys.path[0], "path": sys.path[1:],
    "spec": __spec__ and __spec__.name, "package": __package__, "main_is_me": __main__.Item is Item,
    "qualified": Item.__module__, "cached": __cached__, "helper": helper.__file__, "doc": __doc__,
    "ours": sorted(m for m in sys.modules if m.split(".")[0] in ("elastic", "checkpoints")),
}))
"""


@pytest.fixture(params=["cold", "warm"])
def start_as(request: pytest.FixtureRequest) -> str:
    """How the process gets its start message."""
    return str(request.param)


def start(
    folder: Path, kind: str, target: str, *args: str, start_as: str = "cold", **fields: Any
) -> subprocess.Popen[str]:
    ours, theirs = socket.socketpair()
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    if start_as == "warm":
        (folder / "no-torch").mkdir()
        write(folder / "no-torch", "torch.py", "raise ImportError('not here')")
        environ["PYTHONPATH"] = str(folder / "no-torch")
    process = subprocess.Popen(
        [sys.executable, "-u", standby.__file__, str(theirs.fileno()), target, *args],
        pass_fds=(theirs.fileno(),),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    theirs.close()
    ours.settimeout(30)
    message = {"kind": kind, "target": target, "args": list(args), "environ": {}, "cwd": "", "umask": 0o022}
    with ours:
        if start_as == "warm":
            ours.sendall(json.dumps({"kind": kind, "target": target, "preload": []}).encode() + b"\n")
            assert json.loads(ours.recv(4096)) == {}
        start = {**message, "stdout": "", "stderr": "", "scratch": "", "shown": [target, *args], **fields}
        ours.sendall(json.dumps(start).encode() + b"\n")
    return process


def run(folder: Path, kind: str, target: str, *args: str, start_as: str = "cold") -> tuple[int, str, str]:
    process = start(folder, kind, target, *args, start_as=start_as)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def plain(folder: Path, *args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-u", *args], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout, done.stderr


def as_plain(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Without what only the warm start of this file brings along."""
    path = [entry for entry in found["path"] if entry != str(folder / "no-torch")]
    return {**found, "path": path, "ours": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    write(tmp_path, "helper.py", "")
    write(tmp_path / "pkg", "helper.py", "")
    write(tmp_path / "pkg", "__init__.py", "")
    for name in ("script.py", "pkg/inner.py", "pkg/__main__.py"):
        write(tmp_path, name, PROBE)
    return tmp_path


@pytest.mark.parametrize("target", ["script.py", "pkg/inner.py", "./pkg/../script.py", "pkg"])
def test_a_script_finds_what_python_would_give_it(folder: Path, target: str, start_as: str) -> None:
    expected = json.loads(plain(folder, target, "-x", "1")[1])
    code, out, err = run(folder, "script", target, "-x", "1", start_as=start_as)
    assert code == 0, err
    found = json.loads(out)
    if target == "pkg":  # a folder is run by runpy, which puts it first on the path but keeps a package name of its own
        for key in ("name", "argv", "helper"):
            assert found[key] == expected[key]
    else:
        assert as_plain(found, folder) == as_plain(expected, folder)
    if start_as == "cold":
        assert found["ours"] == []


def test_a_script_by_absolute_path_too(folder: Path) -> None:
    target = str(folder / "pkg" / "inner.py")
    assert json.loads(run(folder, "script", target)[1]) == json.loads(plain(folder, target)[1])


@pytest.mark.parametrize("name", ["pkg.inner", "pkg", "script"])
def test_a_module_finds_what_python_would_give_it(folder: Path, name: str, start_as: str) -> None:
    expected = json.loads(plain(folder, "-m", name, "-x", "1")[1])
    code, out, err = run(folder, "module", name, "-x", "1", start_as=start_as)
    assert code == 0, err
    assert as_plain(json.loads(out), folder) == as_plain(expected, folder)


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a message')",
        "import sys; sys.exit(True)",
        "raise ValueError('boom')",
        "def f(:",
        "import atexit; atexit.register(print, 'at exit'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
        "import os; os._exit(7)",
        "import sys; print('no newline', end='')",
        "raise KeyboardInterrupt",
    ],
)
def test_a_script_ends_as_under_python(tmp_path: Path, body: str, start_as: str) -> None:
    write(tmp_path, "script.py", body)
    expected_code, expected_out, expected_err = plain(tmp_path, "script.py")
    code, out, err = run(tmp_path, "script", "script.py", start_as=start_as)
    assert (code, out) == (130 if expected_code == -signal.SIGINT else expected_code, expected_out)
    assert err == expected_err


def test_a_failure_that_says_it_is_final_is_shown_also_where_no_session_can_be_had(tmp_path: Path) -> None:
    body = "import os\nos.environ['RANK'] = 'first'\nimport elastic\nelastic.session()"
    write(tmp_path, "script.py", body)
    code, _, err = run(tmp_path, "script", "script.py")
    assert code == 1
    assert err.count("Traceback") == 1
    assert "the variable RANK is 'first'" in err


@pytest.mark.parametrize("name", ["flush", "closed"])
def test_a_stream_of_the_scripts_own_that_fails_at_the_end_fails_nothing(tmp_path: Path, name: str) -> None:
    kind = "@property\n    " if name == "closed" else ""
    body = f"def {name}(self): raise RuntimeError('upstream is gone')"
    write(tmp_path, "tee.py", f"import io\nclass Tee(io.StringIO):\n    {kind}{body}\nkept = Tee.__new__(Tee)\n")
    write(tmp_path, "script.py", "import tee\nprint('done')")
    code, out, err = run(tmp_path, "script", "script.py")
    assert (code, out) == (0, "done\n"), err


def test_what_a_script_leaves_open_is_written(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "kept = open('result', 'w')\nkept.write('precious')\nraise SystemExit(0)")
    code, _, err = run(tmp_path, "script", "script.py")
    assert code == 0, err
    assert (tmp_path / "result").read_text() == "precious"


def test_a_missing_script_or_module_is_an_error_that_names_it(tmp_path: Path) -> None:
    for kind, name in (("script", "nowhere.py"), ("module", "nowhere")):
        code, _, err = run(tmp_path, kind, name)
        assert code == 1
        assert "nowhere" in err


def test_an_exception_lands_in_torchs_error_file(tmp_path: Path, start_as: str) -> None:
    write(tmp_path, "script.py", "def f():\n    raise ValueError('boom')\nf()")
    run(tmp_path, "script", "script.py", start_as=start_as)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert 'script.py", line 3, in <module>' in message["extraInfo"]["py_callstack"]


def test_what_torchs_record_has_written_is_kept(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import json, os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('kept')\nraise ValueError('boom')",
    )
    run(tmp_path, "script", "script.py")
    assert (tmp_path / "error.json").read_text() == "kept"


@pytest.mark.parametrize("text", [b"", b'{"kind": "scr'])
def test_no_whole_message_means_not_needed_any_more(text: bytes) -> None:
    receiving, sending = os.pipe()
    process = subprocess.Popen([sys.executable, standby.__file__, str(receiving)], pass_fds=(receiving,))
    os.close(receiving)
    os.write(sending, text)
    os.close(sending)
    assert process.wait(10) == 0


def test_spawned_children_can_unpickle_what_the_script_defines(tmp_path: Path, start_as: str) -> None:
    """As a DataLoader with spawn does with the user's dataset."""
    write(
        tmp_path,
        "script.py",
        """
import multiprocessing
class Square:
    def __call__(self, x):
        return x * x
def child(f, queue):
    queue.put(f(7))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(Square(), queue))
    process.start()
    print(queue.get())
    process.join()
""",
    )
    code, out, err = run(tmp_path, "script", "script.py", start_as=start_as)
    assert (code, out.strip()) == (0, "49"), err


@pytest.mark.parametrize("name", ["json", "queue", "elastic", "checkpoints", "traceback"])
def test_a_module_beside_the_script_is_what_its_name_means_there(tmp_path: Path, name: str, start_as: str) -> None:
    """Whatever the entry point, or a standby, has imported under that name for itself."""
    write(tmp_path, f"{name}.py", "MINE = True")
    write(tmp_path, "script.py", f"import {name}; print({name}.MINE)")
    assert plain(tmp_path, "script.py")[1] == "True\n"
    assert run(tmp_path, "script", "script.py", start_as=start_as)[:2] == (0, "True\n")


def test_a_folder_beside_the_script_shadows_no_module(tmp_path: Path, start_as: str) -> None:
    (tmp_path / "json").mkdir()
    write(tmp_path, "script.py", "import json; print(json.loads('1'))")
    assert run(tmp_path, "script", "script.py", start_as=start_as)[:2] == (0, "1\n")


def test_stacks_come_on_sigquit_and_logs_reopen_on_sighup(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.05)\n    print('tick', flush=True)",
    )
    log, errors = tmp_path / "out.log", tmp_path / "err.log"
    process = start(tmp_path, "script", "script.py", stdout=str(log), stderr=str(errors))
    try:
        wait_for(lambda: log.exists() and "up" in log.read_text())
        log.rename(tmp_path / "out.1")
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: log.exists() and "tick" in log.read_text())
        process.send_signal(signal.SIGQUIT)
        wait_for(lambda: 'script.py"' in errors.read_text())
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_an_open_process_group_does_not_spoil_the_exit(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print('done')\nsys.exit(0)",
    )
    for _ in range(2):
        code, out, err = run(tmp_path, "script", "script.py")
        assert (code, out) == (0, "done\n"), err


def test_the_entry_point_starts_quickly_and_without_torch(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import sys; print('torch' in sys.modules, len(sys.modules))")
    began = time.monotonic()
    _, out, err = run(tmp_path, "script", "script.py")
    assert out.startswith("False"), err
    assert time.monotonic() - began < 10
