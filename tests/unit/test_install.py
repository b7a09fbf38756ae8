"""`elasticd install` and `uninstall` on the tree of an image: what is written, and that edits are never lost."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import cli_install
from elastic.cli import main
from elastic.config import load
from elastic.service import install, plan
from elastic.service.install import first_closed, may
from elastic.service.stamp import State, is_intact, stamped, state

JOB = """
script = "train.py"
checkpoint_dir = "ckpt"
drain_grace = 300
"""
UNITS = Path("etc/systemd/system")
DROP_IN = UNITS / "elasticd@llm-1.service.d/10-job.conf"


class Host:
    """An image's tree, and what the commands say about it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.job = folder / "llm-1.toml"
        self.job.write_text(JOB)
        self.place(folder / "train.py").touch()
        (folder / "train.py").touch()
        self._capsys = capsys

    def place(self, path: Path) -> Path:
        """Where a path of the job's lies in the image; its folder is there."""
        place = self.root / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def run(self, *arguments: str, code: int = 0) -> str:
        assert main([*arguments, "--root", str(self.root)]) == code
        out, err = self._capsys.readouterr()
        return out + err

    def install(self, *more: str, code: int = 0) -> str:
        return self.run("install", str(self.job), *more, code=code)

    def read(self, path: Path | str) -> str:
        return (self.root / path).read_text()

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.glob("etc/**/*") if path.is_file()}


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PET_NNODES", "nonsense")  # of the shell, not of the service
    return Host(tmp_path, capsys)


def test_a_job_is_installed_with_the_program_of_this_environment_and_told_how_to_start(host: Host) -> None:
    said = host.install()
    settings = host.read(DROP_IN)
    elasticd = Path(sys.executable).with_name("elasticd")
    assert f"\nExecStart={elasticd} run --config /etc/elasticd/%i.toml\n" in settings
    assert f"WorkingDirectory={Path.cwd()}\n" in settings
    assert "TimeoutStopSec=330s\n" in settings
    assert f"ReadWritePaths=-{Path.cwd()}/ckpt\n" in settings
    assert host.read("etc/elasticd/llm-1.toml").endswith(JOB)
    assert "systemctl enable --now elasticd@llm-1.service" in said
    assert "journalctl -fu elasticd@llm-1.service" in said
    environment = (host.root / "etc/elasticd/llm-1.env").stat()
    assert stat.S_IMODE(environment.st_mode) == 0o600
    assert {"etc/systemd/system/elasticd@.service", "etc/sysusers.d/elasticd.conf"} <= host.files()


def test_what_the_loader_refuses_is_not_installed(host: Host) -> None:
    host.job.write_text(JOB + "lease_ttl = 1\n")
    assert "lease_ttl = 1" in host.install(code=2)
    assert not host.files()


def test_paths_of_the_job_are_looked_for_in_the_image(host: Host, tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    for text, path, says in (
        ('script = "/opt/llm/train.py"\n', Path("/opt/llm/train.py"), "script '{place}' does not exist"),
        (f'script = "train.py"\nhttp_token_file = "{tmp_path}/token"\n', tmp_path / "token", "{place}"),
        ('script = "train-llm"\nno_python = true\n', Path("/usr/bin/train-llm"), "program 'train-llm'"),
    ):
        host.job.write_text(text)
        place = host.place(path)
        assert says.format(place=place) in host.install(code=2), text
        assert not host.files()
        place.touch(mode=0o700)
        host.install("--dry-run")


def test_whatever_lies_in_the_image_is_named_as_seen_from_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.job.write_text(JOB.replace('"ckpt"', '"/data/ckpt"'))
    script = host.place(Path("/opt/llm/train.py"))
    script.touch()
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(cli_install, "program", lambda: (f"{host.root}/opt/venv/bin/elasticd",))
    host.install()
    assert "\nWorkingDirectory=/opt/llm\n" in host.read(DROP_IN)
    assert "\nExecStart=/opt/venv/bin/elasticd run --config" in host.read(DROP_IN)
    assert "ReadWritePaths=-/data/ckpt\n" in host.read(DROP_IN)


def test_a_relative_checkpoint_directory_lies_in_the_image_as_well(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    script = host.place(Path("/home/u/job/train.py"))
    script.touch()
    monkeypatch.chdir(script.parent)
    host.install()
    assert "ReadWritePaths=-/home/u/job/ckpt\n" in host.read(DROP_IN)
    assert (host.root / "home/u/job/ckpt").is_dir()
    (host.root / "home/u/job/ckpt").rmdir()
    (host.root / "home/u/job/ckpt").touch()
    assert "checkpoint_dir" in host.install(code=2)
    monkeypatch.chdir(host.job.parent)
    (host.job.parent / "ckpt").touch()  # of the host that builds the image
    host.install("--dry-run")


@pytest.mark.parametrize("name", ["a b.toml", "x@y.toml", "job.conf", "etcd.toml"])
def test_a_name_that_makes_no_unit_is_refused(host: Host, name: str) -> None:
    host.job = host.job.rename(host.job.with_name(name))
    assert f"job file {host.job}" in host.install(code=2)
    assert not host.files()


def test_a_second_install_changes_nothing(host: Host) -> None:
    host.install()
    before = {name: host.read(name) for name in host.files()}
    said = host.install()
    assert {name: host.read(name) for name in host.files()} == before
    assert "wrote " not in said


def test_a_dry_run_says_the_same_and_writes_nothing(host: Host) -> None:
    said = host.install("--dry-run")
    assert not host.files()
    assert said.splitlines()[0].startswith("a dry run: nothing is written")
    assert "      | ExecStart=" in said, "what each file would hold"
    told = [line for line in said.splitlines()[1:] if not line.startswith("      |")]
    assert told == host.install().splitlines()


@pytest.mark.parametrize("path", [UNITS / "elasticd@.service", DROP_IN, Path("etc/elasticd/llm-1.toml")])
def test_an_edited_file_is_kept_and_ours_put_beside_it(host: Host, path: Path) -> None:
    host.install()
    edited = host.read(path) + "# mine\n"
    (host.root / path).write_text(edited)
    said = host.install()
    assert host.read(path) == edited
    assert f"mv {host.root / path}.elasticd-new {host.root / path}" in said
    (host.root / f"{path}.elasticd-new").rename(host.root / path)
    assert "kept  " not in host.install()


def test_a_file_of_ours_that_nobody_has_edited_is_brought_up_to_date(host: Host) -> None:
    host.install()
    host.job.write_text(JOB.replace("300", "60"))
    said = host.install()
    assert "TimeoutStopSec=90s\n" in host.read(DROP_IN)
    assert "drain_grace = 60\n" in host.read("etc/elasticd/llm-1.toml")
    assert "kept  " not in said


def test_the_installed_file_itself_may_be_edited_and_installed(host: Host) -> None:
    host.install()
    host.job = host.root / "etc/elasticd/llm-1.toml"
    host.job.write_text(host.job.read_text().replace("300", "45"))
    assert "kept  " not in host.install()
    assert "TimeoutStopSec=75s\n" in host.read(DROP_IN)


def test_uninstall_takes_out_what_install_wrote_and_keeps_edits(host: Host) -> None:
    host.install()
    (host.root / "etc/elasticd/llm-1.env").write_text("ELASTICD_ETCD_PASSWORD=x\n")
    said = host.run("uninstall", "llm-1")
    assert host.files() == {"etc/elasticd/llm-1.env"}
    assert "kept  " in said
    assert "systemctl disable --now elasticd@llm-1.service" in said


def test_uninstall_leaves_what_another_job_needs(host: Host) -> None:
    host.install()
    first = host.files()
    host.job = host.job.rename(host.job.with_name("other.toml"))
    host.install()
    host.run("uninstall", "other.toml")
    assert host.files() == first


def test_uninstall_of_a_job_that_is_not_there_names_those_that_are(host: Host) -> None:
    host.install()
    assert "llm-1" in host.run("uninstall", "llm-2", code=2)


def test_without_root_it_says_how_to_go_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["install", str(host.job)]) == 2
    assert "sudo" in host._capsys.readouterr().err


@pytest.mark.parametrize(
    ("job_in", "arguments", "code", "said"),
    [
        ("work", ("--user", "no-such-user"), 2, "no such user"),
        ("work", ("--user", "nobody"), 0, ""),
        ("tmp", ("--user", "nobody"), 0, "PrivateTmp=yes"),
    ],
)
def test_what_the_service_would_fail_with_is_said_in_a_dry_run_too(
    host: Host, monkeypatch: pytest.MonkeyPatch, job_in: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.setattr(install, "is_private", lambda path: job_in == "tmp" and path.name == "ckpt")
    assert main(["install", str(host.job), *arguments, "--dry-run"]) == code
    out, err = host._capsys.readouterr()
    assert said in out + err
    assert ("PrivateTmp=yes). Move" in out) is (job_in == "tmp")


def test_a_tmp_of_the_services_own_is_known() -> None:
    assert [install.is_private(Path(p)) for p in ("/tmp/a", "/var/tmp/a/b", "/var/tmpfiles", "/srv/tmp")] == [
        True,
        True,
        False,
        False,
    ]


def test_the_password_may_come_later_and_is_asked_for(host: Host) -> None:
    host.job.write_text(JOB + 'rdzv_backend="etcd3"\nrdzv_endpoint="h1"\nrdzv_id="x"\netcd_user="u"\n')
    assert "ELASTICD_ETCD_PASSWORD" in host.install()


def test_paths_with_blanks_and_percents_reach_the_unit_whole() -> None:
    assert plan.command_line(["/a b/50%/elasticd", 'x"y', "$HOME"]) == '"/a b/50%%/elasticd" "x\\"y" $$HOME'


def test_the_stop_timeout_is_longer_than_whatever_the_agent_waits_for(host: Host) -> None:
    config = load(["--drain-grace", "10", "--shutdown-timeout", "77.5", "train.py"], {})
    assert plan.stop_timeout(config) == 108


def test_stamps_tell_edits_from_older_versions() -> None:
    assert state(None, "a\n") is State.MISSING
    assert state(stamped("a\n"), "a\n") is State.SAME
    assert state("a\n", "a\n") is State.SAME
    assert state(stamped("a\n"), "b\n") is State.OLD
    assert state(stamped("a\n") + "c\n", "b\n") is State.EDITED
    assert state("a\n", "b\n") is State.EDITED
    assert not is_intact("a\n")


def test_a_directory_that_keeps_the_user_out_is_found(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, whom no mode keeps out")
    closed = tmp_path / "closed"
    (closed / "venv").mkdir(parents=True)
    closed.chmod(0o700)
    parents = [parent for parent in closed.parents if not parent.stat().st_mode & 1]
    assert first_closed(closed / "venv" / "elasticd", "nobody") == (parents[-1] if parents else closed)
    assert first_closed(closed / "venv" / "elasticd", "root") is None
    assert first_closed(closed, "no-such-user") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as an install does")
def test_what_the_services_user_cannot_read_or_write_is_told(tmp_path: Path) -> None:
    token, open_one, folder = tmp_path / "token", tmp_path / "open", tmp_path / "ckpt"
    folder.mkdir(mode=0o750)
    for file, mode in ((token, 0o600), (open_one, 0o644)):
        file.touch()
        file.chmod(mode)
    assert not may(token, "nobody", os.R_OK)
    assert may(open_one, "nobody", os.R_OK)
    assert not may(open_one, "nobody", os.W_OK)
    assert not may(folder, "nobody", os.W_OK | os.X_OK)
    assert may(token, "root", os.R_OK)
    assert may(token, "no-such-user", os.R_OK)
    assert may(tmp_path / "not-there", "nobody", os.R_OK)
    os.chown(token, 65534, -1)
    assert may(token, "nobody", os.R_OK)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize(("unit", "program"), [("elasticd@.service", "elasticd"), ("elasticd-etcd.service", "etcd")])
def test_units_are_valid_and_closed_enough(tmp_path: Path, unit: str, program: str) -> None:
    """The scale of `systemd-analyze security` goes from 0 to 10; what is left open is explained in the unit."""
    text = (Path(plan.__file__).parent / "units" / unit).read_text()
    (tmp_path / unit).write_text(text.replace(f"/usr/bin/{program}", "/bin/true"))
    shutil.copy(Path(plan.__file__).parent / "units/elasticd.slice", tmp_path)
    instance = unit.replace("@.", "@job.")
    verified = subprocess.run(
        ["systemd-analyze", "verify", f"./{instance}", "./elasticd.slice"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=40", f"./{unit}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout[-2000:]


def test_the_package_holds_every_file_of_the_folder_of_units() -> None:
    """A wheel takes them from the package, where a link leads to the folder."""
    root = Path(plan.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("needs the sources, not an installed package")
    ours = {path.name for path in (root / "systemd").iterdir()}
    assert ours == {path.name for path in (Path(plan.__file__).parent / "units").iterdir()}
    assert {"elasticd@.service", "elasticd-etcd.service", "elasticd.env.example"} <= ours
    assert '"service/units/*"' in (root / "pyproject.toml").read_text()
