"""The job file: what it may say, what wins over it, and what is refused by key or line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from elastic.agent.environment import lasting_environ
from elastic.errors import UsageError
from tests.unit.settings import job_file, loaded

pytestmark = pytest.mark.usefixtures("work_directory")


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default() -> None:
    path = job_file('max_restarts = 5\nsettle = 5\nrole = "file"\nnnodes = 1\n')
    variables = {"PET_MAX_RESTARTS": "6", "PET_SETTLE": "6", "PET_CONFIG": path}
    config = loaded("--max-restarts", "7", "train.py", **variables)
    assert (config.max_restarts, config.settle_seconds, config.role, config.last_call_seconds) == (7, 6.0, "file", 5.0)


def test_a_flag_that_repeats_the_default_still_beats_the_file() -> None:
    path = job_file("max_restarts = 5\nstandby = false\n")
    config = loaded("--config", path, "--max-restarts", "3", "--standby", "train.py")
    assert (config.max_restarts, config.standby) == (3, True)


NCCL = """
max_restarts = 1

[nccl]
NCCL_ALGO = "Ring"
NCCL_NSOCKS_PERTHREAD = 4
NCCL_IB_DISABLE = true
"""


def test_the_table_nccl_is_for_the_workers_environment() -> None:
    config = loaded("--config", job_file(NCCL), "train.py")
    expected = (("NCCL_ALGO", "Ring"), ("NCCL_IB_DISABLE", "1"), ("NCCL_NSOCKS_PERTHREAD", "4"))
    assert config.nccl == expected
    for_workers = lasting_environ(config, local_rank=0, nonce="n", agent_environ={})
    assert {name: value for name, value in for_workers.items() if name.startswith("NCCL_")} == dict(expected)


def test_the_environment_beats_the_table_nccl_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = loaded("--config", job_file(NCCL), "train.py", NCCL_ALGO="Tree", NCCL_DEBUG="INFO")
    assert dict(config.nccl) == {
        "NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "NCCL_NSOCKS_PERTHREAD": "4"
    }  # fmt: skip
    assert "NCCL_ALGO = Ring in job.toml has no effect: the environment has Tree" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[nccl]\nalgo = "Ring"', "'algo' in .nccl. is no variable of NCCL's; .* NCCL_ALGO"),
        ('[nccl]\nLD_PRELOAD = "x"', "'LD_PRELOAD' in .nccl."),
        ('[nccl]\n"NCCL_A B" = "x"', "'NCCL_A B' in .nccl."),
        ("[nccl]\nNCCL_ALGO = [1]", "NCCL_ALGO = .1. in .nccl. must be a string"),
        ("[nccl]\nNCCL_X = 0.5", "NCCL_X = 0.5"),
        ('[nccl]\nNCCL_X = "a\\nb"', "NCCL_X = .* holds a control character"),
        ('[nccl]\nNCCL_X = "a\\u0000b"', "NCCL_X = .* holds a NUL character"),
        ("nccl = 1", "nccl = 1 must be a table"),
        ("[gloo]\nx = 1", "table .gloo. is not supported, .nccl. alone is"),
    ],
)
def test_what_does_not_belong_into_the_table_nccl_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"job.toml: {message}"):
        loaded("--config", job_file(text), "train.py")


def test_a_job_file_can_say_everything(work_directory: Path) -> None:
    path = job_file(
        'script = "train.py"\nargs = ["--lr", "0.1"]\nnproc_per_node = 2\nlease_ttl = "3s"\ndrain_grace = 1.5\n'
        'http = "[::1]:0"\npreload = ["json", "csv"]\ncheckpoint_dir = "ckpt"\ncheckpoint_every = 100\ntee = 3\n'
        'local_ranks_filter = [0, 1]\nduplicate_stdout_filters = ["a,b"]\nmemory_checkpoints = false\nusr1 = "drain"\n'
    )
    config = loaded("--config", path)
    assert (config.script, config.args, config.nproc_per_node) == ("train.py", ("--lr", "0.1"), 2)
    assert (config.lease_ttl_seconds, config.drain_grace_seconds, config.tee) == (3, 1.5, "3")
    assert (config.http_host, config.http_port, config.preload) == ("::1", 0, ("json", "csv"))
    assert (config.checkpoint_dir, config.checkpoint_every) == (str(work_directory / "ckpt"), "100")
    assert (config.local_ranks_filter, config.duplicate_stdout_filters) == ("0,1", ("a,b",))
    assert (config.memory_checkpoints, config.usr1) == (False, "drain")


def test_a_job_file_can_name_a_module() -> None:
    config = loaded("--config", job_file('module = "json.tool"\nargs = ["x"]\n'))
    assert (config.script, config.module, config.args, config.run_id) == ("json.tool", True, ("x",), "json.tool")


def test_a_script_on_the_command_line_replaces_what_the_file_runs() -> None:
    config = loaded("--config", job_file('module = "json.tool"\nargs = ["x"]\n'), "train.py")
    assert (config.script, config.module, config.args) == ("train.py", False, ())


WRONG_FILES: list[tuple[bytes, str]] = [
    (b"lease-ttl = 3", r"job\.toml: unknown key 'lease-ttl'; did you mean 'lease_ttl'"),
    (b"max_restart = 3", "unknown key 'max_restart'; did you mean 'max_restarts'"),
    (b"qwertyuiop = 3", "unknown key 'qwertyuiop'; keys are the flags' names"),
    (b"config = 'x'", "unknown key 'config'"),
    (b"training_script = 'x'", "unknown key 'training_script'; write script"),
    (b"[gloo]\nx = 1", r"table \[gloo\] is not supported"),
    (b"[env]\nA = 'x'", r"table \[env\] is not supported"),
    (b"max_restarts = '3'", "max_restarts = '3' must be a whole number"),
    (b"max_restarts = 1.5", "max_restarts = 1.5 must be a whole number"),
    (b"max_restarts = true", "max_restarts = True must be a whole number"),
    (b"max_restarts = -1", r"max_restarts = -1 in job\.toml must be 0 or more"),
    (b"lease_ttl = 2.5", "lease_ttl = 2.5: '2.5' must be whole seconds"),
    (b"settle = 'x'", "settle = 'x': 'x' is not a number of seconds, nor a time such as 90s"),
    (b"settle = true", "settle = True must be a number of seconds, or a time"),
    (b"settle = nan", "settle = nan: 'nan' must be a finite"),
    (b"standby = 1", "standby = 1 must be true or false"),
    (b"role = 3", "role = 3 must be a string"),
    (b"role = ['a']", r"role = \['a'\] must be a string"),
    (b"preload = [1]", r"preload = \[1\] must be an array of strings"),
    (b"usr1 = 'stop'", "usr1 = 'stop': choose one of save, drain"),
    (b"nnodes = 2", r"nnodes = 2 in job\.toml needs a store"),
    (b"nnodes = '2:1'", "nnodes = '2:1': '2:1' must have"),
    (b"standby = \n", r"job\.toml is not valid TOML: .*line 1"),
    (b"role = 'a'\nrole = 'b'\n", r"job\.toml is not valid TOML: .*line 2.*: role = 'b'$"),
    (
        b"# a\nscript = env.py\n",
        r"at line 2, column 10\): script = env\.py; strings and times are written in quotes",
    ),
    (b"hang_timeout = 10m\n", r"at line 1, column 18\): hang_timeout = 10m; strings and times are written in quotes"),
    (b"role = a\x01b", r": 'role = a\\x01b'; strings"),
    (b'role = """a', r"job\.toml is not valid TOML: [^;:]*$"),
    (b"# a\nrole = '\xff'", r"job\.toml is not UTF-8 \(line 2\)"),
    (b"script = 'train.py'\nmodule = 'json'", "script = 'train.py' and module = 'json': give one"),
    (b"module = true", "module = True must be a string"),
    (b"args = ['x']", "args needs script or module"),
    (b"script = 'train.py'\nargs = [1]", r"args = \[1\] must be an array of strings"),
    (b"script = 'train.py'\nargs = 'x'", "args = 'x' must be an array of strings"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_FILES, ids=lambda case: repr(case)[:50])
def test_a_wrong_job_file_is_refused_by_key_or_line(content: bytes, message: str) -> None:
    Path("job.toml").write_bytes(content)
    argv = ["--config", "job.toml"] + ([] if b"script" in content or b"module" in content else ["train.py"])
    with pytest.raises(UsageError, match=message) as caught:
        loaded(*argv)
    assert "\n" not in str(caught.value)


def test_a_job_file_that_names_a_missing_script_is_refused() -> None:
    with pytest.raises(UsageError, match=r"script 'gone\.py' does not exist"):
        loaded("--config", job_file('script = "gone.py"\n'))


def test_a_module_flag_without_a_module_does_not_turn_the_files_script_into_one() -> None:
    path = job_file('script = "train.py"\n')
    with pytest.raises(UsageError, match="needs its module on the command line"):
        loaded("--config", path, "-m")
    with pytest.raises(UsageError, match="needs its module on the command line"):
        loaded("--config", path, PET_MODULE="1")


def test_a_job_file_gives_steps_as_numbers(work_directory: Path) -> None:
    path = job_file('script = "train.py"\ncheckpoint_dir = "c"\ncheckpoint_every = 100\nmemory_every = 5\n')
    config = loaded("--config", path)
    assert (config.checkpoint_every, config.memory_every) == ("100", 5)
