"""`elasticd profile` against a real agent whose workers cannot, or will not, profile: what it says then."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli import main
from tests.support.job import running, write

SCRIPT = str(Path(__file__).parents[1] / "support" / "trainer_script.py")
QUICK = ("--http", "127.0.0.1:0", "--lease-ttl", "2", "--nproc-per-node", "2")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code = main(["profile", *argv])
    return code, capsys.readouterr().err


def test_without_an_agent_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys) == (1, "elasticd: no running agent on this host\n")


def test_each_refusal_names_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with running(tmp_path, *QUICK, SCRIPT, "1000000", "0.003", str(tmp_path / "state")) as job:
        job.wait_step(3)
        for argv, message in (
            (["--steps", "5"], "no --log-dir to write a profile to: name a directory with --out"),
            (["--steps", "0"], "--steps=0: 1 to 1000 steps"),
            (["--out", str(tmp_path / "file" / "x")], f"cannot write a profile to {tmp_path}/file/x: Not a directory"),
            (["--out", str(tmp_path / "out")], "their loop must call session.agree()"),
        ):
            code, line = said(capsys, *argv)
            assert code == 1
            assert message in line
        code, line = said(capsys, "--out", str(tmp_path / "out"))
        assert "their loop must call session.agree()" in line, "one that nobody began with does not stand in the way"
    code, line = said(capsys, "--out", str(tmp_path / "out"))
    assert (code, line) == (1, "elasticd: no running agent on this host\n")


def test_a_plain_script_is_told_to_profile_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "plain.py", "from pathlib import Path; import time; Path('here').touch(); time.sleep(600)")
    with running(tmp_path, *QUICK, "plain.py") as job:
        job.wait_status(lambda _: (tmp_path / "here").exists())
        code, line = said(capsys, "--out", str(tmp_path))
    assert code == 1
    assert "can only profile itself, with torch.profiler" in line
