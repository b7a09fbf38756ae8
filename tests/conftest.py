"""What every test gets: one thread per process, and no process of ours left behind."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For whatever the tests start. Short: killed data loaders leave sockets there, whose paths have 107 bytes."""
    tmp_path_factory.getbasetemp()  # stays where it was
    with (
        tempfile.TemporaryDirectory(prefix="elt-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(autouse=True)
def _own_loggers() -> Iterator[None]:
    """What a command has done to our loggers ends with its test: the stream that they write to is closed by then."""
    loggers = [logging.getLogger(name) for name in ("elastic", "checkpoints")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


# Long tests first: what starts last decides when the second of two processes has nothing left to do.
_LONGEST_FIRST = ("e2e", "demo", "agent", "training", "checkpoints", "rendezvous")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By the longest time that a file's tests may take, then by folder; within a file all stays as it was."""
    longest: dict[Path, float] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, 0.0), _timeout_seconds(item))

    def place(item: pytest.Item) -> tuple[float, int]:
        folder = item.path.parent.name
        return -longest[item.path], _LONGEST_FIRST.index(folder) if folder in _LONGEST_FIRST else len(_LONGEST_FIRST)

    items.sort(key=place)


def _timeout_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None and marker.args else 0.0


if os.environ.get("CI"):
    # A test that is skipped because the machine lacks something would make a green run say less than it seems to.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        return _not_skipped(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        return _not_skipped(report)


def _not_skipped(report: R) -> R:
    """The same report, failed where it says skipped; expected failures stay what they are."""
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report
