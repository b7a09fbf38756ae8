"""The command line from outside: exit codes, one clear line for an error, quick starts."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.manager import CheckpointManager
from elastic import cli
from elastic.cli import main

AGENT = """
import os, signal, sys, threading
from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from elastic.runtime import runtime_dir, socket_path
from elastic.status import JobStatus

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
status = JobStatus(run_id=sys.argv[1], incarnation="i", node_id="n", state="running")
site = Site(status=lambda: status, healthy=lambda: True)
server = StatusServer(bind_tcp("127.0.0.1", 0), socket_path(runtime_dir(os.environ), os.getpid()), site)
print(server.port, flush=True)
stop.wait(60)
server.close()
sys.exit(143)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which no agent but those of the test is found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return {**kept, "RUNTIME_DIRECTORY": str(tmp_path / "run")}


@pytest.fixture
def elasticd(tmp_path: Path, environ: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("elasticd")), *argv]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def start_agent(environ: dict[str, str]) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts what looks like an agent from outside, once its server answers."""
    started: list[subprocess.Popen[str]] = []

    def start(run_id: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", AGENT, run_id]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, for commands run in this process; what they do to logging is undone."""
    monkeypatch.chdir(tmp_path)
    loggers = [logging.getLogger(name) for name in ("elastic", "checkpoints")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield tmp_path
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    assert done.returncode == code, done
    assert re.fullmatch(rf"elasticd: error: .*{message}.*\n", done.stderr), done.stderr
    assert done.stdout == ""


def test_version_and_help(elasticd: Any) -> None:
    assert re.fullmatch(r"elasticd \d+\.\d+\.\d+\n", elasticd("--version").stdout)
    shown = elasticd("--help")
    assert shown.returncode == 0
    for command in ("run", "status", "drain", "checkpoints", "demo"):
        assert command in shown.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["status", "--bogus"], "unrecognized arguments: --bogus"),
        (["checkpoints"], "list"),
        (["checkpoints", "list"], "DIR"),
        (["checkpoints", "list", "gone"], "checkpoint directory 'gone' does not exist"),
        (["checkpoints", "verify", "file"], "checkpoint directory 'file' is not a directory"),
        (["checkpoints", "list", "file://{}/file"], "is not a directory"),
        (["checkpoints", "prune", ".", "--keep-last", "0"], "--keep-last=0 must be 1 or more"),
        (["checkpoints", "export", ".", "gone/x.safetensors"], "no directory '.*gone'"),
        (["checkpoints", "export", ".", "."], "is a directory"),
        (
            ["checkpoints", "export", ".", "out.PT"],
            r"torch\.load could not read 'out\.PT'.* name it 'out\.safetensors'",
        ),
        (["give-back", "now"], "unrecognized arguments: now; see elasticd give-back --help"),
        (["run", "gone.py"], r"script 'gone\.py' does not exist"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_2(
    in_process: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (in_process / "file").write_text("")
    code = main([argument.format(in_process) for argument in argv])
    shown = capsys.readouterr()
    assert_one_line(subprocess.CompletedProcess(argv, code, shown.out, shown.err), 2, message)


def test_a_mistyped_command_is_answered_with_those_for_people(
    in_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["statu"]) == 2
    said = capsys.readouterr().err
    assert "'statu'" in said
    assert "status" in said.replace("'statu'", "")
    assert "give-back" not in said


def test_what_is_not_for_people_tells_what_it_does(
    in_process: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(in_process))
    with pytest.raises(SystemExit, match="0"):
        main(["give-back", "--help"])
    assert "killed" in capsys.readouterr().out
    assert main(["give-back"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_process_ends_with_the_exit_code_of_the_error(elasticd: Any) -> None:
    assert_one_line(elasticd("run", "gone.py"), 2, r"script 'gone\.py' does not exist")


def test_an_interrupt_is_no_traceback(in_process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert main(["run", "x.py"]) == 130


def test_the_module_is_the_command(environ: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic", "--version"]
    assert subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("argv", [["status"], ["checkpoints", "list", "."]], ids=" ".join)
def test_commands_that_only_look_start_without_torch(environ: dict[str, str], tmp_path: Path, argv: list[str]) -> None:
    code = f"import sys; from elastic.cli import main; main({argv!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_status_without_an_agent_says_so(elasticd: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "1.sock").touch()
    done = elasticd("status")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "elasticd: no running agent on this host\n")
    assert elasticd("status", "--watch", "--json", "--run-id", "x").returncode == 1
    assert elasticd("drain", "--pid", "1").returncode == 1


def test_status_of_one_agent_is_its_json_and_of_several_a_list(elasticd: Any, start_agent: Any) -> None:
    first = start_agent("a")
    one = json.loads(elasticd("status", "--json").stdout)
    assert (one["run_id"], one["state"]) == ("a", "running")
    start_agent("b")
    assert sorted(status["run_id"] for status in json.loads(elasticd("status", "--json").stdout)) == ["a", "b"]
    assert json.loads(elasticd("status", "--json", "--run-id", "b").stdout)["run_id"] == "b"
    shown = elasticd("status").stdout
    assert "job a: running" in shown
    assert f"pid {first.pid}" in shown


def test_a_killed_agents_socket_is_skipped(elasticd: Any, start_agent: Any) -> None:
    start_agent("dead").kill()
    start_agent("alive")
    deadline = time.monotonic() + 10
    while isinstance(found := json.loads(elasticd("status", "--json").stdout), list):
        assert time.monotonic() < deadline
    assert found["run_id"] == "alive"


def test_watch_ends_with_the_agent(environ: dict[str, str], start_agent: Any) -> None:
    agent = start_agent("a")
    command = [sys.executable, "-m", "elastic", "status", "--watch", "--json"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["run_id"] == "a"
        agent.terminate()
        watching.communicate(timeout=20)
        assert watching.returncode == 0


def test_drain_asks_the_one_agent_that_is_meant(elasticd: Any, start_agent: Any) -> None:
    first, second = start_agent("a"), start_agent("b")
    assert_one_line(elasticd("drain"), 2, f"by --rdzv-id or --pid: .*pid {first.pid}: node n of job a.*")
    third = start_agent("a")
    choice = (
        f"several agents on this host, choose one by --pid: pid {first.pid}: node n of job a; pid {third.pid}: node n"
    )
    assert_one_line(elasticd("drain", "--rdzv-id", "a"), 2, choice)
    third.kill()
    third.wait()
    assert first.poll() is None
    done = elasticd("drain", "--run-id", "a")
    assert (done.returncode, done.stdout) == (0, f"asked agent {first.pid} of job a to drain\n")
    assert first.wait(10) == 143
    done = elasticd("drain", "--pid", str(second.pid), "--wait")
    assert done.returncode == 1, "whether it has saved is not known"
    assert "it has ended without a word, its log says how; newest committed step it told of: -\n" in done.stdout
    assert second.wait(10) == 143


def test_drain_does_not_signal_who_is_no_agent(elasticd: Any, environ: dict[str, str], tmp_path: Path) -> None:
    """A socket that somebody else listens on, named like an agent's."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True)\n"
        "while True: c, _ = s.accept(); c.recv(999); c.sendall(b'hello'); c.close()"
    )
    (tmp_path / "run").mkdir(mode=0o700)
    command = [sys.executable, "-c", code, str(tmp_path / "run" / "1.sock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as bystander:
        assert bystander.stdout is not None
        bystander.stdout.readline()
        assert elasticd("drain").returncode == 1
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> Path:
    """Four committed steps and one that was never finished."""
    import torch

    directory = tmp_path / "ckpt"
    manager = CheckpointManager(directory, run_id="job", keep_last=10)
    manager.restore(allow_fresh_start=True)
    for step in (10, 20, 30, 40):
        manager.save(step, {"model": {"w": torch.arange(100.0) + step}, "epoch": 1})
        result = manager.wait(30)
        assert result is not None
        assert result.state == "committed"
    manager.close()
    (directory / ".writing-step-000000000050-r1-abc").mkdir()
    return directory


def test_checkpoints_are_listed_shown_exported_and_pruned(elasticd: Any, checkpoint_dir: Path, tmp_path: Path) -> None:
    listed = json.loads(elasticd("checkpoints", "list", "ckpt", "--json").stdout)
    assert [(entry["step"], entry["state"]) for entry in listed] == [
        *((step, "committed") for step in (10, 20, 30, 40)),
        (50, "partial"),
    ]
    fields = {"step", "state", "path", "reason", "bytes", "world_size", "round", "base_step", "time"}
    assert all(set(entry) == fields for entry in listed)
    assert "committed" in elasticd("checkpoints", "list", "ckpt").stdout

    shown = json.loads(elasticd("checkpoints", "show", "ckpt", "--json").stdout)
    assert (shown["step"], shown["run_id"]) == (40, "job")
    assert "model/w" in elasticd("checkpoints", "show", "ckpt", "--step", "20").stdout

    done = elasticd("checkpoints", "export", "ckpt", "out.safetensors", "--step", "20", "--json")
    assert json.loads(done.stdout)["step"] == 20
    from safetensors.torch import load_file

    assert load_file(tmp_path / "out.safetensors")["model/w"][0] == 20

    prune = ("checkpoints", "prune", "ckpt", "--keep-last", "1", "--keep-every", "20", "--json")
    would = json.loads(elasticd(*prune, "--dry-run").stdout)
    assert [entry["step"] for entry in would] == [10, 30]
    assert len(list(checkpoint_dir.glob("step-*"))) == 4
    assert json.loads(elasticd(*prune).stdout) == would
    assert sorted(path.name[-2:] for path in checkpoint_dir.glob("step-*")) == ["20", "40"]
    assert elasticd("checkpoints", "prune", "ckpt").stdout == "nothing to remove\n"


def test_verify_exits_1_only_when_something_committed_is_corrupt(elasticd: Any, checkpoint_dir: Path) -> None:
    sound = elasticd("checkpoints", "verify", "ckpt")
    assert sound.returncode == 0
    assert "4 read, none corrupt; 1 never committed" in sound.stdout
    shard = next((checkpoint_dir / "step-000000000030").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = elasticd("checkpoints", "verify", "ckpt", "--json")
    assert done.returncode == 1
    states = {entry["step"]: entry["state"] for entry in json.loads(done.stdout)}
    assert states == {10: "committed", 20: "committed", 30: "corrupt", 40: "committed", 50: "partial"}
    assert "1 of 4 corrupt; 1 never committed" in elasticd("checkpoints", "verify", "ckpt").stdout
    assert elasticd("checkpoints", "verify", "ckpt", "--step", "20").stdout.endswith("1 read, none corrupt\n")
    assert elasticd("checkpoints", "verify", "ckpt/step-000000000030").returncode == 1


def test_a_step_that_is_not_there_is_one_line(elasticd: Any, checkpoint_dir: Path) -> None:
    assert_one_line(elasticd("checkpoints", "show", "ckpt", "--step", "7"), 1, "no checkpoint of step 7")
    assert_one_line(elasticd("checkpoints", "export", "ckpt", "x", "--step", "7"), 1, "no checkpoint of step 7")
    assert_one_line(elasticd("checkpoints", "show", "."), 1, "no committed checkpoint")
    assert_one_line(elasticd("checkpoints", "show", "ckpt", "--step", "7"), 1, "committed are the steps 10, 20, 30, 40")


def test_the_path_of_one_checkpoint_means_that_one(elasticd: Any, checkpoint_dir: Path) -> None:
    one = "ckpt/step-000000000020"
    assert json.loads(elasticd("checkpoints", "show", one, "--json").stdout)["step"] == 20
    assert json.loads(elasticd("checkpoints", "export", f"{one}/", "x", "--json").stdout)["step"] == 20
    assert_one_line(elasticd("checkpoints", "list", one), 2, "the checkpoint of step 20 alone: name its folder, 'ckpt'")
    assert_one_line(elasticd("checkpoints", "show", one, "--step", "30"), 2, "step 20 alone")


def test_an_empty_directory_has_no_checkpoints(elasticd: Any) -> None:
    assert elasticd("checkpoints", "list", ".", "--json").stdout == "[]\n"
    assert elasticd("checkpoints", "verify", ".").returncode == 0


def test_a_directory_whose_name_is_no_text_is_listed(
    elasticd: Any, environ: dict[str, str], checkpoint_dir: Path, tmp_path: Path
) -> None:
    environ["PYTHONIOENCODING"] = "utf-8"  # as on a terminal of today: what is no UTF-8 cannot be written
    strange = tmp_path / os.fsdecode(b"caf\xe9")
    checkpoint_dir.rename(strange)
    done = elasticd("checkpoints", "list", str(strange))
    assert (done.returncode, done.stderr) == (0, "")
    assert "committed" in done.stdout
    (strange / "step-000000000009").mkdir(exist_ok=True)
    assert elasticd("checkpoints", "list", "--json", str(strange)).returncode == 0
    assert elasticd("checkpoints", "list", str(strange / "no")).returncode == 2


def test_a_url_that_nothing_can_reach_is_one_line(elasticd: Any) -> None:
    done = elasticd("checkpoints", "list", "nosuch://bucket/x")
    assert_one_line(done, 1, "nosuch://bucket/x: Protocol not known: nosuch")


def test_a_current_directory_that_was_removed_is_one_line(environ: dict[str, str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.rmdir({str(gone)!r}); from elastic.cli import main; raise SystemExit(main(['run', 'x.py']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=gone, capture_output=True, text=True, timeout=60
    )
    assert_one_line(done, 2, "the current directory has been removed; cd to one that exists")


def test_a_checkpoints_module_in_the_working_directory_does_not_shadow_ours(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints.py").write_text("raise SystemExit('not ours')")
    command = [sys.executable, "-m", "elastic", "checkpoints", "list", ".", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_traceback(environ: dict[str, str], tmp_path: Path, unbuffered: str) -> None:
    environ = {**environ, "PYTHONUNBUFFERED": unbuffered}
    elasticd = f"{sys.executable} -m elastic"
    commands = ("--help", "checkpoints --help", "checkpoints list .")  # to one who is certainly gone by then
    command = "; ".join(f"(sleep 0.2; exec {elasticd} {arguments}) | true" for arguments in commands)
    done = subprocess.run(command, shell=True, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
