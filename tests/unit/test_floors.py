"""The import floors of the house, read from the sources: a file imports only from floors below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    5: {"cli"},
    4: {"demo", "doctor", "agent", "service"},
    3: {"training", "metrics", "rendezvous"},
    2: {"config"},
    1: {"checkpoints", "own_checkpoints", "status", "progress", "runtime", "journal", "systemctl", "pidfd"},
    0: {"errors", "passing"},
}
# Files that belong to a room without lying in a directory of its name.
ROOMS = {
    **dict.fromkeys(("cli_checkpoints", "cli_install", "cli_status", "cli_table", "__main__"), "cli"),
    **dict.fromkeys(("flags", "jobfile", "rules", "values"), "config"),
    **dict.fromkeys(("timings", "profile_order"), "progress"),
    **dict.fromkeys(("cli_profile",), "cli"),
    "journal_json": "journal",
    **dict.fromkeys(("checks", "preflight"), "doctor"),
}
LEVELS = {room: level for level, rooms in FLOORS.items() for room in rooms}
SOURCES = sorted([*ROOT.glob("elastic/**/*.py"), *ROOT.glob("checkpoints/**/*.py")])


def room_of(module: str) -> str | None:
    """The room of a module of ours; None for the package `elastic` itself and for everybody else's modules."""
    package, *rest = module.split(".")
    if package == "checkpoints":
        return "checkpoints"
    if package != "elastic" or not rest or rest == ["__version__"]:
        return None
    return ROOMS.get(rest[0], rest[0])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports anywhere in it, with the line. Relative imports are made absolute."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module == "elastic":
                yield from ((f"elastic.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_sources_are_found() -> None:
    assert {"elastic/cli.py", "elastic/errors.py", "checkpoints/__init__.py"} <= {name(path) for path in SOURCES}


@pytest.mark.parametrize("path", [p for p in SOURCES if name(p) != "elastic/__init__.py"], ids=name)
def test_a_file_imports_only_from_its_own_room_and_from_floors_below(path: Path) -> None:
    room = room_of(module_of(path))
    assert room in LEVELS, f"{name(path)} belongs to no room: add it to FLOORS or ROOMS"
    for module, line in imports_of(path):
        other = room_of(module)
        if other is None or other == room:
            continue
        assert other in LEVELS, f"{name(path)}:{line} imports {module}, which belongs to no room"
        assert LEVELS[other] < LEVELS[room], f"{name(path)}:{line}: {room} must not import {other} ({module})"


def test_checkpoints_imports_itself_relatively_and_nothing_of_elastic() -> None:
    for path in ROOT.glob("checkpoints/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            absolute = []
            if isinstance(node, ast.Import):
                absolute = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                absolute = [node.module or ""]
            ours = [module for module in absolute if module.split(".")[0] in ("checkpoints", "elastic")]
            assert not ours, f"{name(path)}:{node.lineno} imports {ours[0]} by its absolute name"


def test_etcd3_has_one_importer() -> None:
    importers = {name(path) for path in SOURCES for module, _ in imports_of(path) if module.split(".")[0] == "etcd3"}
    assert importers == {"elastic/rendezvous/etcd_messages.py"}


def test_the_package_itself_names_only_the_session_and_only_when_asked() -> None:
    path = ROOT / "elastic/__init__.py"
    assert {module for module, _ in imports_of(path)} <= {"__future__", "typing", "elastic.training.session"}


@pytest.mark.parametrize(
    "module",
    ["elastic", "elastic.config", "elastic.cli", "elastic.cli_status", "elastic.cli_checkpoints", "checkpoints"],
)
def test_importing_does_not_load_torch_or_the_agent(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'elastic.agent', 'etcd3') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_reader_of_imports_sees_lazy_and_relative_ones() -> None:
    assert "elastic.agent.launch" in {module for module, _ in imports_of(ROOT / "elastic/cli.py")}
    assert "checkpoints.errors" in {module for module, _ in imports_of(ROOT / "checkpoints/manifest.py")}
