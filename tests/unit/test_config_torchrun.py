"""Flags of torchrun's: what they mean here, which have no effect, and other versions of torchrun."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from elastic.errors import UsageError
from tests.unit.settings import ETCD, loaded

pytestmark = pytest.mark.usefixtures("work_directory")


@pytest.mark.parametrize(
    "flags",
    [
        ["--standalone"],
        ["--standalone", "--nnodes=1"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--rdzv-backend=static", "--master-port=29500", "--nnodes=1:1"],
        ["--rdzv-endpoint=host:29400"],
    ],
    ids=" ".join,
)
def test_what_torchrun_scripts_say_for_one_node_means_standalone(flags: list[str]) -> None:
    config = loaded(*flags, "train.py")
    assert (config.rdzv_backend, config.rdzv_endpoint, config.max_nodes) == ("standalone", "", 1)


def test_shutdown_timeout_follows_torchruns_variable() -> None:
    assert loaded("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout_seconds == 7
    assert loaded("--shutdown-timeout=2", "train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout_seconds == 2
    with pytest.raises(UsageError, match=r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'x'"):
        loaded("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--monitor-interval", "0.5"], "--monitor-interval=0.5"),
        (["--node-rank", "1"], "--node-rank=1"),
        (["--event-log-handler", "console"], "--event-log-handler=console"),
        (["--signals-to-handle", "SIGUSR2"], "--signals-to-handle=SIGUSR2"),
        (["--start-method", "fork"], "--start-method=fork"),
        (["--rdzv-backend", "c10d"], "--rdzv-backend=c10d"),
        (["--etcd-user", "u"], "--etcd-user=u"),
        (["--no-standby", "--preload", "json"], "--preload="),
        (
            [*ETCD, "--rdzv-conf", "lease_ttl=2"],
            "--rdzv-conf=lease_ttl=2 has no effect here: its keys are flags",
        ),
    ],
)
def test_a_flag_without_effect_says_so_once(flags: list[str], name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "elastic"):
        loaded(*flags, "train.py")
    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(name)


def test_flags_at_their_defaults_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "elastic"):
        loaded("train.py")
    assert not [record for record in caplog.records if record.name.startswith("elastic")]


def test_help_lists_torchruns_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded("--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for part in (
        "torchrun's options",
        "--nproc-per-node",
        "elasticd: nodes",
        "--lease-ttl",
        "--checkpoint-dir",
        "--etcd-ca",
    ):
        assert part in shown


def other_torchrun(monkeypatch: pytest.MonkeyPatch, *, without: Sequence[str] = (), new: str | None = None) -> None:
    """The flags of another torch's torchrun."""
    from torch.distributed import run

    made = run.get_args_parser()
    for action in [action for action in made._actions if action.dest in without]:
        made._remove_action(action)
        for option in action.option_strings:
            del made._option_string_actions[option]
    if new is not None:
        made.add_argument(new, default=7)
    monkeypatch.setattr(run, "get_args_parser", lambda: made)


def test_flags_that_an_older_torchrun_lacks_are_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.8."""
    newer = ("shutdown_timeout", "virtual_local_rank", "signals_to_handle", "log_line_prefix_template")
    torchs = ("numa_binding", "duplicate_stdout_filters", "duplicate_stderr_filters")
    other_torchrun(monkeypatch, without=(*newer, *torchs))
    config = loaded(
        *("--shutdown-timeout", "2.5", "--virtual-local-rank", "--log-line-prefix-template", "${rank}: ", "train.py")
    )
    assert (config.shutdown_timeout_seconds, config.virtual_local_rank) == (2.5, True)
    assert (config.log_line_prefix_template, config.numa_binding) == ("${rank}: ", None)
    with pytest.raises(UsageError, match="unrecognized arguments: --numa-binding"):
        loaded("--numa-binding", "node", "train.py")


def test_a_flag_that_only_a_newer_torchrun_knows_is_said_to_have_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other_torchrun(monkeypatch, new="--brand-new")
    loaded("train.py")
    assert "brand-new" not in caplog.text
    loaded("--brand-new", "1", "train.py")
    assert "--brand-new=1 has no effect: it is a flag of a torchrun newer than elasticd" in caplog.text
