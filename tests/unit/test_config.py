"""Settings: where they come from, which wins, and every rule that a wrong one breaks."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.config import JobConfig, shared_settings
from elastic.errors import ExitCode, StorageGoneError, UsageError
from elastic.rendezvous.mismatch import differences
from tests.unit.settings import ETCD, loaded

pytestmark = pytest.mark.usefixtures("work_directory")


def test_defaults_are_those_of_the_design() -> None:
    config = loaded("train.py")
    assert config == JobConfig(script="train.py", run_id="train", node_id=socket.gethostname())
    assert (config.max_restarts, config.restart_window_seconds, config.drain_grace_seconds) == (3, 600.0, 120.0)
    assert (config.lease_ttl_seconds, config.last_call_seconds, config.settle_seconds) == (5, 5.0, 1.0)
    assert (config.http_host, config.http_port, config.usr1) == ("127.0.0.1", 9431, "save")


def test_script_arguments_are_left_alone() -> None:
    config = loaded("--nproc-per-node", "2", "train.py", "--nnodes", "7", "--config", "x", "--", "-m")
    assert config.args == ("--nnodes", "7", "--config", "x", "--", "-m")
    assert (config.nproc_per_node, config.max_nodes) == (2, 1)


FLAGS: list[tuple[list[str], str, Any]] = [
    (["--nproc_per_node", "3"], "nproc_per_node", 3),
    (["--nproc-per-node=3"], "nproc_per_node", 3),
    (["--max_restarts", "0"], "max_restarts", 0),
    (["--rdzv-id", "a-job"], "run_id", "a-job"),
    (["--role", "trainer"], "role", "trainer"),
    (["-r", "3"], "redirects", "3"),
    (["-t", "0:1,1:2"], "tee", "0:1,1:2"),
    (["--master-port", "29511"], "master_port", 29511),
    (["--master-addr", "::1"], "master_addr", "::1"),
    (["--local-addr", "10.0.0.1"], "local_addr", "10.0.0.1"),
    (["--duplicate-stdout-filters", "a,,b,c"], "duplicate_stdout_filters", ("a,b", "c")),
    (["--virtual-local-rank"], "virtual_local_rank", True),
    (["--shutdown-timeout", "0.5"], "shutdown_timeout_seconds", 0.5),
    (["--node-id", "n1"], "node_id", "n1"),
    (["--lease-ttl", "2"], "lease_ttl_seconds", 2),
    (["--lease_ttl", "2"], "lease_ttl_seconds", 2),
    (["--lease-ttl", "1m"], "lease_ttl_seconds", 60),
    (["--drain-grace", "10m"], "drain_grace_seconds", 600.0),
    (["--settle", "500 ms"], "settle_seconds", 0.5),
    (["--hang-timeout", "2h"], "hang_timeout_seconds", 7200.0),
    (["--checkpoint-dir", "c", "--checkpoint-every", "1.5m"], "checkpoint_every", "90s"),
    (["--checkpoint-dir", "c", "--checkpoint-every", "0.5s"], "checkpoint_every", "0.5s"),
    (["--checkpoint-dir", "c", "--checkpoint-every", "0.05ms"], "checkpoint_every", "0.00005s"),
    (["--checkpoint-dir", "c", "--checkpoint-every", "100"], "checkpoint_every", "100"),
    (["--drain-grace", "0.5"], "drain_grace_seconds", 0.5),
    (["--settle", "0"], "settle_seconds", 0.0),
    (["--no-standby"], "standby", False),
    (["--no_memory_checkpoints"], "memory_checkpoints", False),
    (["--memory-checkpoints"], "memory_checkpoints", True),
    (["--preload", "json, xml.dom"], "preload", ("json", "xml.dom")),
    (["--http", "0.0.0.0:0"], "http_port", 0),
    (["--http", "[::1]:80"], "http_host", "::1"),
    (["--http", ":9000"], "http_host", "0.0.0.0"),
    (["--http", "9000"], "http_port", 9000),
    (["--usr1", "drain"], "usr1", "drain"),
    (["--log-line-prefix-template", "${hostname}:${rank}: "], "log_line_prefix_template", "${hostname}:${rank}: "),
    (["--checkpoint-dir", "s3://bucket/x", "--checkpoint-every", "30s"], "checkpoint_every", "30s"),
    (["--checkpoint-dir", "s3://bucket/x"], "checkpoint_dir", "s3://bucket/x"),
]


@pytest.mark.parametrize(
    ("flags", "field", "value"), FLAGS, ids=lambda case: " ".join(case) if isinstance(case, list) else ""
)
def test_a_flag_sets_its_field(flags: list[str], field: str, value: Any) -> None:
    assert getattr(loaded(*flags, "train.py"), field) == value


def test_paths_become_absolute_and_may_not_exist_yet(work_directory: Path) -> None:
    config = loaded("--log-dir", "logs", "--checkpoint-dir", "c/d", "train.py")
    assert (config.log_dir, config.checkpoint_dir) == (str(work_directory / "logs"), str(work_directory / "c/d"))


PLACES = [
    pytest.param(["--checkpoint-dir", "{}", "train.py"], "--checkpoint-dir={}", id="checkpoint_dir"),
    pytest.param(["--checkpoint-dir", "file://{}", "train.py"], "--checkpoint-dir=file://{}", id="its URL"),
    pytest.param(["--log-dir", "{}", "train.py"], "--log-dir={}", id="log_dir"),
    pytest.param(["{}"], "script '{}'", id="script"),
    pytest.param(["-m", "{}.py"], "module '{}.py'", id="module"),
]


def stat_fails(monkeypatch: pytest.MonkeyPatch, below: Path, number: int) -> None:
    real = os.stat

    def refused(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and below in Path(os.fsdecode(path)).parents:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)


@pytest.mark.parametrize(("flags", "named"), PLACES)
def test_a_path_that_this_user_may_not_look_at_is_an_error_by_name(
    work_directory: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], named: str
) -> None:
    closed = work_directory / "closed"
    stat_fails(monkeypatch, closed, errno.EACCES)
    with pytest.raises(UsageError, match=f"{re.escape(named.format(closed / 'x'))}: Permission denied: give a path"):
        loaded(*(flag.format(closed / "x") for flag in flags))


@pytest.mark.parametrize(("flags", "named"), PLACES)
def test_a_path_that_no_file_system_takes_is_an_error_by_name(
    work_directory: Path, flags: list[str], named: str
) -> None:
    long = work_directory / ("x" * 300)
    with pytest.raises(UsageError, match=f"{re.escape(named.format(long))}: File name too long: give a path"):
        loaded(*(flag.format(long) for flag in flags))


def test_a_file_server_that_is_away_is_no_matter_of_usage(
    work_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = work_directory / "away"
    stat_fails(monkeypatch, away, errno.ESTALE)
    config = loaded("--checkpoint-dir", str(away / "ck"), "--log-dir", str(away / "logs"), "train.py")
    assert (config.checkpoint_dir, config.log_dir) == (str(away / "ck"), str(away / "logs"))  # waited for by the agent
    with pytest.raises(StorageGoneError, match=r"train\.py': Stale file handle; check its file server") as caught:
        loaded(str(away / "train.py"))
    assert caught.value.exit_code is ExitCode.STORE_GONE


def test_only_the_given_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    monkeypatch.setenv("PET_STANDALONE", "rubbish")
    assert loaded("train.py").max_restarts == 3
    assert os.environ["PET_MAX_RESTARTS"] == "9"


def test_a_token_or_key_that_others_may_read_is_refused_by_name(work_directory: Path) -> None:
    secret = work_directory / "secret"
    secret.write_text("word")
    for mode in (0o600, 0o640, 0o400):
        secret.chmod(mode)
        assert loaded("--http-token-file", "secret", "train.py").http_token_file == str(secret)
    for mode in (0o644, 0o660, 0o604):
        secret.chmod(mode)
        with pytest.raises(UsageError, match=f"--http-token-file=secret has mode {mode:04o}.*chmod 0600"):
            loaded("--http-token-file", "secret", "train.py")
        with pytest.raises(UsageError, match=f"--http-key=secret has mode {mode:04o}"):
            loaded("--http-cert", "file", "--http-key", "secret", "train.py")


def test_switches_are_set_by_variables() -> None:
    config = loaded("train.py", PET_STANDBY="0", PET_VIRTUAL_LOCAL_RANK="1")
    assert (config.standby, config.virtual_local_rank) == (False, True)


@pytest.mark.parametrize(
    ("argv", "run_id"),
    [
        (["train.py"], "train"),
        (["-m", "json.tool"], "json.tool"),
        (["sub dir/my train!.py"], "my-train"),
        (["--rdzv-id", "x", "train.py"], "x"),
    ],
)
def test_a_job_without_a_name_is_called_after_what_it_runs(argv: list[str], run_id: str) -> None:
    Path("sub dir").mkdir()
    Path("sub dir/my train!.py").write_text("")
    assert loaded(*argv).run_id == run_id


@pytest.mark.parametrize(
    ("endpoint", "meant"),
    [
        ("h1,h2:2380,h3:2379", "h1:2379,h2:2380,h3:2379"),
        ("h1:2379, h1:2379", "h1:2379"),
        ("[::1]:2379,::1,[fe80::1]", "[::1]:2379,[fe80::1]:2379"),
        ("10.0.0.1", "10.0.0.1:2379"),
    ],
)
def test_etcd_endpoints_get_their_port(endpoint: str, meant: str) -> None:
    config = loaded("--rdzv-backend=etcd3", "--rdzv-id=j", "--nnodes=2:3", "--rdzv-endpoint", endpoint, "train.py")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("etcd3", meant)
    assert (config.min_nodes, config.max_nodes) == (2, 3)


def test_workers_can_be_counted_by_torch() -> None:
    assert loaded("--nproc-per-node=cpu", "train.py").nproc_per_node == os.cpu_count()


WRONG: list[tuple[list[str], str]] = [
    ([], "nothing to run"),
    ([""], "nothing to run"),
    (["gone.py"], r"script 'gone\.py' does not exist \(in /"),
    (["empty"], r"script 'empty' is a directory without a __main__\.py"),
    (["--no-python", "no-such-program"], r"program 'no-such-program' \(--no-python\)"),
    (["-m", "no_such_package.sub"], r"module 'no_such_package\.sub': no 'no_such_package'"),
    (["-m", "train.py"], r"module 'train\.py' is a file: leave out -m"),
    (["-m", "dir/train"], "'dir/train' is not a module's name"),
    (["-m", "--no-python", "json"], "--no-python contradicts --module"),
    (["-m", "--run-path", "json"], "--run-path contradicts --module"),
    (["--bogus", "train.py"], "unrecognized arguments: --bogus"),
    (["--lease-tll", "3", "train.py"], "--lease-tll; did you mean --lease-ttl"),
    (["--max-restarts", "x", "train.py"], "--max-restarts/--max_restarts: invalid int value: 'x'"),
    (["--max-restarts", "-1", "train.py"], "--max-restarts=-1 must be 0 or more"),
    (["--nproc-per-node", "0", "train.py"], "--nproc-per-node=0 gives 0 workers"),
    (["--nproc-per-node", "-2", "train.py"], "--nproc-per-node=-2"),
    (["--nproc-per-node", "many", "train.py"], "--nproc-per-node=many: .*auto, cpu, gpu or a number"),
    (["--nnodes", "0", "train.py"], "'0' must have 1 <= MIN <= MAX"),
    (["--nnodes", "3:2", "train.py"], "'3:2' must have 1 <= MIN <= MAX"),
    (["--nnodes", "1:2:3", "train.py"], "'1:2:3' is not a number of nodes or MIN:MAX"),
    (["--nnodes", "2", "train.py"], "--nnodes=2 needs a store .*--rdzv-backend etcd3"),
    (["--nnodes", "1:2", "--rdzv-backend=c10d", "train.py"], "--nnodes=1:2 .*--rdzv-backend=c10d .*etcd3"),
    (["--rdzv-backend", "etcd4", "train.py"], "--rdzv-backend=etcd4 is not known"),
    (["--rdzv-backend", "etcd3", "--rdzv-id", "j", "train.py"], "needs --rdzv-endpoint"),
    (["--rdzv-backend", "etcd3", "--rdzv-endpoint", "h", "train.py"], "needs --rdzv-id"),
    (["--rdzv-backend", "etcd3", "--rdzv-endpoint", "http://h:1", "--rdzv-id=j", "train.py"], "without a scheme"),
    (["--rdzv-backend", "etcd3", "--rdzv-endpoint", "h:x", "--rdzv-id=j", "train.py"], "'h:x' is not HOST:PORT"),
    (["--rdzv-backend", "etcd3", "--rdzv-endpoint", "h:1,,", "--rdzv-id=j", "train.py"], "empty part"),
    (["--rdzv-conf", "abc", "train.py"], "--rdzv-conf=abc is not KEY=VALUE"),
    (["--standalone", "--rdzv-endpoint", "h1:29400", "train.py"], "--standalone contradicts --rdzv-endpoint=h1:29400"),
    (["--standalone", "--nnodes=2", "train.py"], "--standalone contradicts --nnodes=2"),
    (["--standalone", *ETCD, "train.py"], "--standalone contradicts --rdzv-backend=etcd3"),
    (["--master-port", "70000", "train.py"], "--master-port=70000"),
    (["--rdzv-id", "a/b", "train.py"], "--rdzv-id=a/b: a name has"),
    (["--rdzv-id", "", "--rdzv-backend=etcd3", "--rdzv-endpoint=h", "train.py"], "needs --rdzv-id"),
    (["--node-id", "a b", "train.py"], "--node-id=a b: a name has"),
    (["--lease-ttl", "1", "train.py"], "--lease-ttl=1 must be 2 seconds or more"),
    (["--lease-ttl", "99999999999", "train.py"], "'99999999999' must be at most 31536000 seconds"),
    (["--drain-grace", "1e300", "train.py"], "'1e300' must be at most 31536000 seconds"),
    (["--nproc-per-node", "99999999999", "train.py"], "gives 99999999999 workers; at most 1024 are allowed"),
    (["--lease-ttl", "2.5", "train.py"], "'2.5' must be whole seconds"),
    (["--drain-grace", "0", "train.py"], "--drain-grace=0 must be more than 0"),
    (["--drain-grace", "nan", "train.py"], "'nan' must be a finite"),
    (["--restart-window", "0", "train.py"], "--restart-window=0 must be more than 0"),
    (["--restart-window", "inf", "train.py"], "'inf' must be a finite"),
    (["--hang-timeout", "-1", "train.py"], "'-1' must be a finite number of seconds, 0 or more"),
    (["--shutdown-timeout", "-1", "train.py"], "--shutdown-timeout"),
    ([*ETCD, "--join-timeout", "4", "train.py"], "--last-call=5 .the default. must be shorter than --join-timeout=4"),
    ([*ETCD, "--join-timeout", "3", "--last-call=1", "train.py"], "--lease-ttl=5 .the default. must be shorter"),
    ([*ETCD, "--etcd-cert", "file", "train.py"], "--etcd-cert=file needs --etcd-key"),
    ([*ETCD, "--etcd-key", "file", "train.py"], "--etcd-key=file needs --etcd-cert"),
    ([*ETCD, "--etcd-cert=file", "--etcd-key=file", "train.py"], "--etcd-cert=file needs --etcd-ca"),
    ([*ETCD, "--etcd-ca", "gone.pem", "train.py"], r"--etcd-ca=gone\.pem does not exist"),
    ([*ETCD, "--etcd-user", "u", "train.py"], "--etcd-user=u .*ELASTICD_ETCD_PASSWORD"),
    (["--checkpoint-every", "100", "train.py"], "--checkpoint-every=100 needs --checkpoint-dir"),
    (["--checkpoint-dir=c", "--checkpoint-every", "5x", "train.py"], "'5x' is neither a number of steps"),
    (["--checkpoint-dir=c", "--checkpoint-every", "0", "train.py"], "'0' must be more than 0"),
    (["--checkpoint-dir=c", "--checkpoint-every", "0.0s", "train.py"], "must be more than 0"),
    (["--checkpoint-dir", "file", "train.py"], "--checkpoint-dir=file is a file"),
    (["--log-dir", "file", "train.py"], "--log-dir=file is a file"),
    (["--redirects", "4", "train.py"], "--redirects=4 is neither"),
    (["--tee", "x:1", "train.py"], "--tee=x:1 is neither"),
    (["--local-ranks-filter", "a", "train.py"], "--local-ranks-filter=a is not a list"),
    (["--local-ranks-filter", "0,2", "--nproc-per-node=2", "train.py"], "no local rank 2 among 2 workers"),
    (["--logs-specs", "nobodys", "train.py"], "--logs-specs=nobodys: no installed package"),
    (["--http", "host", "train.py"], "'host' is not HOST:PORT"),
    (["--http-cert", "file", "train.py"], "--http-cert=file needs --http-key"),
    (["--http-key", "file", "train.py"], "--http-key=file needs --http-cert"),
    (["--http-token-file", "none", "train.py"], "--http-token-file=none does not exist"),
    (["--http", "::1", "train.py"], "'::1' has no valid host; an IPv6 address is written .::1.:PORT"),
    (["--http", "::1:80", "train.py"], "'::1:80' has no valid host"),
    (["--http", "h:70000", "train.py"], "'h:70000' is not HOST:PORT"),
    (["--http", "a b:1", "train.py"], "no valid host"),
    (["--usr1", "kill", "train.py"], "--usr1: invalid choice: 'kill'"),
    (["--start-method", "thread", "train.py"], "--start-method.*invalid choice"),
    (["--preload", "a-b", "train.py"], "'a-b' is not a module's name"),
    (["--preload", "json,no_such_one.x", "train.py"], r"--preload=\S+: no module 'no_such_one\.x' in .* install it"),
    (["--config", "gone.toml", "train.py"], r"cannot read job file gone\.toml: No such file"),
    (["--config", ".", "train.py"], r"cannot read job file \.: Is a directory"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=lambda case: " ".join(case) if isinstance(case, list) else "")
def test_a_wrong_command_line_is_refused_by_name(argv: list[str], message: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=message) as caught:
        loaded(*argv)
    assert "\n" not in str(caught.value)


BROKEN: list[tuple[bytes, str]] = [
    (b"import sys\n\ndef main(:\n", r"script 'wrong\.py', line 3: SyntaxError: invalid syntax"),
    (b"x = 1\n  y = 2\n", r"script 'wrong\.py', line 2: IndentationError: unexpected indent"),
    (b"x = 1\0\n", r"script 'wrong\.py'.*null bytes"),
    (b"x = '\xff'\n", r"script 'wrong\.py'.*SyntaxError: .*'utf-8'"),
]


@pytest.mark.parametrize(("source", "message"), BROKEN)
def test_a_script_that_python_cannot_compile_is_refused_with_its_line(source: bytes, message: str) -> None:
    Path("wrong.py").write_bytes(source)
    with pytest.raises(UsageError, match=message) as caught:
        loaded("wrong.py")
    assert "\n" not in str(caught.value)
    Path("app").mkdir()
    Path("wrong.py").rename("app/__main__.py")
    with pytest.raises(UsageError, match=message.replace("wrong", "app/__main__")):
        loaded("app")


def test_a_script_is_compiled_and_not_run_and_only_where_this_python_runs_it() -> None:
    Path("train.py").write_text("open('was-run', 'w')\npattern = '\\d'  # Python warns of it\n")
    Path("wrong.py").write_text("def main(:\n")
    Path("wrong.py").chmod(0o755)
    Path("app.pyz").write_bytes(b"PK\0")
    before = list(sys.path), set(sys.modules)
    loaded("train.py")
    assert (list(sys.path), set(sys.modules)) == before
    assert not Path("was-run").exists()
    loaded("wrong.py", PYTHON_EXEC="python2")
    loaded("--no-python", "./wrong.py")
    loaded("app.pyz")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_MAX_RESTARTS": "x"}, "PET_MAX_RESTARTS=x: invalid int"),
        ({"PET_MAX_RESTARTS": "-1"}, "PET_MAX_RESTARTS=-1 must be 0 or more"),
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE=yes: must be 0 or 1"),
        ({"PET_STANDBY": ""}, "PET_STANDBY=: must be 0 or 1"),
        ({"PET_USR1": "no"}, "PET_USR1=no: choose one of save, drain"),
        ({"PET_LEASE_TTL": "1"}, "PET_LEASE_TTL=1 must be 2 seconds"),
        ({"PET_NNODES": "2:1"}, "PET_NNODES=2:1: '2:1' must have"),
        ({"PET_CONFIG": "gone.toml"}, r"cannot read job file gone\.toml"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loaded("train.py", **variables)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node-id=other", "--nproc-per-node=2"], ""),
        (["--nnodes=1:2"], "--nnodes=1:2 instead of 1:1"),
        (["--max-restarts=9", "--lease-ttl=9"], "--max-restarts=9 instead of 3, --lease-ttl=9 instead of 5"),
        (["--settle=0.5"], "--settle=0.5 instead of 1"),
        (["--checkpoint-dir=/c", "--checkpoint-every=100"], "--checkpoint-every=100 instead of none"),
        (["--no-python"], "--no-python"),
    ],
)
def test_what_nodes_must_agree_on_is_named_where_it_differs(flags: list[str], said: str) -> None:
    job = shared_settings(loaded(*ETCD, "train.py", "--data", "/a"))
    Path("train.py").chmod(0o755)
    mine = shared_settings(loaded(*ETCD, *flags, "./train.py", "--data", "/b"))
    assert (mine == job) is (said == "")
    assert differences(mine, job) == said
    if said:
        assert differences(job, mine)
