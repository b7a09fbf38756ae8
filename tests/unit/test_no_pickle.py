"""Nothing that arrives over the network or lies on a disk is unpickled or executed: read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.test_floors import SOURCES, imports_of, name

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    *("eval", "__import__", "torch.load", "torch.save", ".load_state_dict_from_url"),
    *(".all_gather_object", ".gather_object", ".broadcast_object_list", ".scatter_object_list"),  # torch pickles these
    *(".send_object_list", ".recv_object_list", ".rpc_sync", ".rpc_async", ".init_rpc"),
}
RUNS_THE_USERS_PROGRAM = {"elastic/agent/standby.py"}  # from a path that the operator named


def called(path: Path) -> set[str]:
    """What a file calls: `name`, `.method`, and `owner.method` where the owner is a name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.add(node.func.id)
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                found |= {f".{node.func.attr}", f"{owner}.{node.func.attr}"}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_neither_pickles_nor_runs_what_it_is_sent(path: Path) -> None:
    assert not {module.split(".")[0] for module, _ in imports_of(path)} & MODULES
    calls = called(path)
    assert not calls & CALLS
    assert "exec" not in calls or name(path) in RUNS_THE_USERS_PROGRAM


def test_the_reader_of_calls_sees_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import torch, dist\ntorch.load('x')\ndist.all_gather_object([], 1)\nexec('1')\nmodel.eval()\n")
    assert {"torch.load", ".all_gather_object", "exec"} <= called(path)
    assert "eval" not in called(path)
