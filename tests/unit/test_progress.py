"""The progress block: every field arrives, a torn slot costs one report, and a report costs microseconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import progress
from elastic.progress import Phase, Progress, ProgressReader, ProgressWriter
from elastic.timings import WORKER_TIMINGS


@pytest.fixture
def block(tmp_path: Path) -> Path:
    path = tmp_path / "block"
    progress.create(path)
    return path


@pytest.fixture
def ends(block: Path) -> Iterator[tuple[ProgressWriter, ProgressReader]]:
    writer, reader = ProgressWriter(block), ProgressReader(block)
    yield writer, reader
    writer.close()
    reader.close()


def test_every_field_arrives_as_it_was_set_and_the_others_stay(ends: tuple[ProgressWriter, ProgressReader]) -> None:
    writer, reader = ends
    assert reader.read() is None
    writer.update()
    first = reader.read()
    assert first is not None
    for field in dataclasses.fields(Progress):
        default, told = field.default, getattr(first, field.name)
        both_nan = isinstance(default, float) and math.isnan(default) and math.isnan(told)
        assert both_nan or told == default or field.name == "heartbeat", field.name
    values = {f.name: n + (0.5 if f.type == "float" else 0) for n, f in enumerate(dataclasses.fields(Progress), 1)}
    values["phase"] = Phase.OPTIMIZER
    for name, value in values.items():
        writer.update(**{name: value})
    told = reader.read()
    assert told is not None
    assert {name: getattr(told, name) for name in values if name != "heartbeat"} == {
        name: value for name, value in values.items() if name != "heartbeat"
    }


def test_amounts_are_added_and_durations_counted(ends: tuple[ProgressWriter, ProgressReader]) -> None:
    writer, reader = ends
    for _ in range(3):
        writer.add(samples_total=4, checkpoint_stall_seconds_total=0.25)
        writer.observe({"data": 0.002, "checkpoint_write": 0.2})
    told, timings = reader.read(), reader.read_timings()
    assert told is not None
    assert timings is not None
    assert (told.samples_total, told.checkpoint_stall_seconds_total) == (12, 0.75)
    assert {name: timings[name].count for name in WORKER_TIMINGS if timings[name].count} == {
        "data": 3,
        "checkpoint_write": 3,
    }
    assert timings["checkpoint_write"].sum == pytest.approx(0.6)


def test_a_torn_slot_costs_one_report(block: Path, ends: tuple[ProgressWriter, ProgressReader]) -> None:
    writer, reader = ends
    writer.update(step=1)
    writer.update(step=2)
    newest = progress._SLOT_OFFSET + (2 % 2) * progress._SLOT_BYTES
    with block.open("r+b") as file:
        file.seek(newest + 40)
        file.write(b"\xff" * 8)
    told = reader.read()
    assert told is not None
    assert told.step == 1
    writer.update(step=3)
    told = reader.read()
    assert told is not None
    assert told.step == 3


@pytest.mark.parametrize("fields", [{"stepp": 1}, {"step": 1.5}, {"step": "x"}])
def test_what_is_no_field_or_no_number_of_its_kind_is_refused(
    ends: tuple[ProgressWriter, ProgressReader], fields: dict[str, float]
) -> None:
    with pytest.raises((KeyError, TypeError)):
        ends[0].update(**fields)


def test_requests_go_the_other_way(ends: tuple[ProgressWriter, ProgressReader]) -> None:
    writer, reader = ends
    assert (writer.drain_requested, writer.saves_requested, writer.profiles_requested) == (False, 0, 0)
    reader.request_save()
    reader.request_save()
    reader.request_profile()
    reader.request_drain()
    assert (writer.drain_requested, writer.saves_requested, writer.profiles_requested) == (True, 2, 1)
