"""An unmodified script runs under `elasticd run` as under `torchrun --standalone`: environment, output, logs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.quick import QUICK
from tests.support.job import run_to_end, write

REPORT = """
import json, os, sys
environ, ranks = dict(os.environ), []
if sys.argv[1] == "ours":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    dist.destroy_process_group()
with open(f"{sys.argv[1]}-{os.environ['RANK']}.json", "w") as file:
    json.dump({"environ": environ, "argv": sys.argv, "ranks": ranks, "cwd": os.getcwd()}, file)
"""

# Workers run with -u, as torchrun's do: a print would be several writes, between which another rank's may come.
SPEAK = """
import os, sys
sys.stdout.write(f"out {os.environ['RANK']}\\n")
sys.stderr.write(f"err {os.environ['RANK']}\\n")
"""

QUIET = {"OMP_NUM_THREADS": "1"}
HARNESS = {"RUNTIME_DIRECTORY", "JOB_TEST_MARK", "PET_STANDBY"}  # what the tests themselves give to an agent
# What names this run or the program that runs it, and so must differ.
PRIVATE = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"}


def torchrun(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *args]
    environ = {**os.environ, **QUIET}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=90, check=True)


def elasticd(folder: Path, *args: str) -> str:
    code, output = run_to_end(folder, "--http", "127.0.0.1:0", "--nproc-per-node", "2", *args, environ=QUIET)
    assert code == 0, output
    return output


def reports(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def test_a_worker_finds_the_same_environment_arguments_and_world(tmp_path: Path) -> None:
    write(tmp_path, "script.py", REPORT)
    torchrun(tmp_path, "script.py", "theirs", "--lr", "3")
    elasticd(tmp_path, "script.py", "ours", "--lr", "3")
    for theirs, ours in zip(reports(tmp_path, "theirs"), reports(tmp_path, "ours"), strict=True):
        assert ours["ranks"] == [0, 1]
        assert ours["argv"][1:] == ["ours", "--lr", "3"]
        assert (ours["argv"][0], ours["cwd"]) == (theirs["argv"][0], theirs["cwd"])
        missing = {
            name: (value, ours["environ"].get(name))
            for name, value in theirs["environ"].items()
            if name not in PRIVATE and ours["environ"].get(name) != value
        }
        assert missing == {}
        assert set(ours["environ"]) >= PRIVATE
        added = {name for name in ours["environ"] if name not in theirs["environ"]}
        assert {name for name in added if not name.startswith("ELASTICD_")} <= HARNESS


@pytest.mark.parametrize(
    "options",
    [
        ["--nproc-per-node", "4", "-r", "0:3,1:1", "-t", "1:2,2:3"],
        ["-r", "1", "-t", "2", "--local-ranks-filter", "1"],
    ],
    ids=["by rank", "for all, filtered"],
)
def test_redirect_tee_and_filter_write_the_same_files_and_console(tmp_path: Path, options: list[str]) -> None:
    write(tmp_path, "script.py", SPEAK)
    theirs = torchrun(tmp_path, "--log-dir", "theirs", *options, "script.py")
    ours = elasticd(tmp_path, "--log-dir", "ours", *options, "script.py")
    assert _files(tmp_path / "ours") == _files(tmp_path / "theirs")
    assert _spoken(ours) == _spoken(theirs.stdout + theirs.stderr)


def test_a_module_runs_with_the_local_rank_in_its_arguments_and_a_log_dir_alone_keeps_a_file_per_rank(
    tmp_path: Path,
) -> None:
    write(tmp_path, "speak.py", SPEAK + 'print("argument", sys.argv[1])')
    output = elasticd(tmp_path, "--log-dir", "logs", "-m", "speak", "${local_rank}")
    assert _files(tmp_path / "logs") == {
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/0/stdout.log": "out 0\nargument 0\n",
        "attempt_0/1/stderr.log": "err 1\n",
        "attempt_0/1/stdout.log": "out 1\nargument 1\n",
    }
    assert len(_spoken(output)) == 4, "the output is still shown"


def test_a_program_runs_and_virtual_local_rank_gives_each_worker_its_own_device_zero(tmp_path: Path) -> None:
    command = 'echo "dev $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES"'
    output = elasticd(tmp_path, "--virtual-local-rank", "--no-python", "/bin/sh", "-c", command)
    assert sorted(re.findall(r"dev \d+ \d+ \d+", output)) == ["dev 0 0 0", "dev 1 0 1"]


def _files(folder: Path) -> dict[str, str]:
    """Log files below the run's own folder, without the empty ones and torch's error files."""
    found = {}
    for path in sorted(folder.glob("*/attempt_0/**/*.log")):
        if path.stat().st_size:
            found[str(path.relative_to(path.parents[2]))] = path.read_text()
    return found


def _spoken(output: str) -> list[str]:
    return sorted(re.findall(r"(?:\[\w+\]:)?(?:out|err) \d", output))


def test_the_prefix_of_lines_on_the_console_may_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('hello')")
    flags = ("--tee", "3", "--log-dir", "logs", "--log-line-prefix-template", "${hostname}/${rank}/${local_rank}: ")
    code, output = run_to_end(tmp_path, *QUICK, *flags, "script.py")
    assert code == 0, output
    assert re.search(rf"^{re.escape(socket.gethostname())}/0/0: ?hello$", output, re.MULTILINE), output
