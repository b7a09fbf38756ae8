"""A wheel, built and put into a virtual environment of its own: all that a host needs to install a job and run it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SOURCES / "pyproject.toml").exists(), reason="needs the sources, not an installed package"),
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed"),
]


def run(*command: str | Path, folder: Path) -> str:
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"RUNTIME_DIRECTORY": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def elasticd(tmp_path: Path) -> Path:
    """The command of a fresh environment; torch and what else the wheel needs is taken from this one."""
    copy = tmp_path / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("elastic", "checkpoints", "systemd"):
        shutil.copytree(SOURCES / name, copy / name, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCES / name, copy)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy, folder=tmp_path)
    (wheel,) = tmp_path.glob("elasticd-*.whl")
    shutil.rmtree(copy)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    run(*pip, "--python", tmp_path / "venv/bin/python", "install", "--no-deps", wheel, folder=tmp_path)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "venv/bin/elasticd"


def test_a_wheel_is_enough_to_install_a_job_and_to_run_one(tmp_path: Path, elasticd: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os, checkpoints, elastic\n"
        "print(elastic.session().world_size, elastic.__file__, checkpoints.__file__, sep='\\n')\n"
    )
    script = tmp_path / "image" / tmp_path.relative_to("/") / "own.py"
    script.parent.mkdir(parents=True)
    script.touch()
    (tmp_path / "job.toml").write_text('script = "own.py"\nhttp = "127.0.0.1:0"\n')
    run(elasticd, "install", "job.toml", "--root", tmp_path / "image", folder=tmp_path)
    unit = (tmp_path / "image/etc/systemd/system/elasticd@job.service.d/10-job.conf").read_text()
    assert f"ExecStart={elasticd} run" in unit
    run(elasticd, "dashboards", "boards", folder=tmp_path)
    assert sorted(path.suffix for path in (tmp_path / "boards").iterdir()) == [".json", ".yml"]
    said = run(elasticd, "run", "--config", "job.toml", folder=tmp_path)
    for package in ("elastic", "checkpoints"):
        assert f"{tmp_path}/venv/lib" in next(line for line in said.splitlines() if f"/{package}/__init__.py" in line)
