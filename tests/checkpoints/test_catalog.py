"""What the command line shows of a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import catalog
from checkpoints.errors import CheckpointError
from checkpoints.manager import CheckpointManager
from tests.checkpoints.support import assert_same, cut_state, flip_byte, newest, small_state

ROOT = Path(__file__).parents[2]


def save_steps(directory: Path, *steps: int) -> None:
    manager = CheckpointManager(directory, run_id="job", incarnation="one", keep_last=99)
    manager.restore()
    for step in steps:
        manager.save(step, small_state(step), samples=step * 2)
    manager.close()


def test_list_has_one_entry_per_checkpoint_with_the_documented_keys(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    entries = catalog.list_checkpoints(tmp_path)
    json.dumps(entries)
    for entry, step in zip(entries, (1, 2), strict=True):
        assert list(entry) == ["step", "state", "path", "reason", "bytes", "world_size", "round", "base_step", "time"]
        assert entry["path"] == str(tmp_path / f"step-{step:012d}")
        assert entry["bytes"] == sum(path.stat().st_size for path in Path(entry["path"]).glob("shard-*"))
        assert (entry["step"], entry["state"], entry["reason"]) == (step, "committed", None)
        assert (entry["world_size"], entry["round"], entry["base_step"]) == (1, 1, 0)
    assert catalog.list_checkpoints(tmp_path / "missing") == []


def test_every_state_is_told_apart(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    flip_byte(next(newest(tmp_path).glob("shard-*")), -1)
    (tmp_path / "step-000000000003" / "manifest.json").unlink()
    (tmp_path / ".writing-step-000000000009-r7-ab12n0").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    save_steps(tmp_path)  # round 8 starts from step 2
    (tmp_path / ".writing-step-000000000009-r7-ab12n0").mkdir()
    listed = {entry["step"]: entry["state"] for entry in catalog.list_checkpoints(tmp_path)}
    assert listed == {1: "committed", 2: "committed", 3: "partial", 4: "void", 9: "partial"}
    verified = {entry["step"]: (entry["state"], entry["reason"]) for entry in catalog.verify(tmp_path)}
    assert verified[4][0] == "corrupt"
    assert "checksum" in str(verified[4][1])
    assert (tmp_path / "notes.txt").exists()
    assert catalog.highest_round(tmp_path) == 8


def test_show_tells_what_the_manifest_says(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    shown = catalog.show(tmp_path, 5)
    json.dumps(shown)
    assert (shown["run_id"], shown["incarnation"], shown["samples"], shown["step"]) == ("job", "one", 10, 5)
    assert {"name": "model/bias", "dtype": "bfloat16", "shape": [16]} in shown["tensors"]
    for ask in (catalog.show, catalog.verify):
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 in .*; committed are the steps 5$"):
            ask(tmp_path, 6)


def test_prune_says_what_it_would_remove_and_removes_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    planned = catalog.prune(tmp_path, 1, 2, True)
    assert [entry["step"] for entry in planned] == [1, 3]
    assert len(catalog.list_checkpoints(tmp_path)) == 4
    assert catalog.prune(tmp_path, 1, 2) == planned
    assert [entry["step"] for entry in catalog.list_checkpoints(tmp_path)] == [2, 4]
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        catalog.prune(tmp_path, 0)


def test_export_joins_the_pieces_into_one_plain_file(tmp_path: Path) -> None:
    save_steps(tmp_path / "d", 1)
    manager = CheckpointManager(tmp_path / "d")
    manager.restore()
    manager.save(2, cut_state(2))
    manager.close()
    told = catalog.export(tmp_path / "d", tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert (told["step"], told["tensors"]) == (2, 5)
    assert told["bytes"] == (tmp_path / "out.safetensors").stat().st_size
    expected = cut_state(2)
    assert_same({name: loaded[name] for name in expected}, expected)
    catalog.export(tmp_path / "d", tmp_path / "one.safetensors", step=1)
    old = load_file(tmp_path / "one.safetensors")
    assert torch.equal(old["model/tied"], old["model/weight"])
    assert old["model/empty"].shape == (0, 3)
    assert old["optimizer/state/0/step"].item() == 1
    told = catalog.export(tmp_path / "d", tmp_path / "model.safetensors", step=1, only="model")
    own = load_file(tmp_path / "model.safetensors")
    assert set(own) == {name.removeprefix("model/") for name in old if name.startswith("model/")}
    assert told["tensors"] == len(own) < len(old)
    assert all(torch.equal(tensor, old[f"model/{name}"]) for name, tensor in own.items())
    with pytest.raises(CheckpointError, match="no tensors below the key 'mode'; its keys are model, optimizer"):
        catalog.export(tmp_path / "d", tmp_path / "none.safetensors", step=1, only="mode")
    names = ["d", "model.safetensors", "one.safetensors", "out.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_export_of_a_damaged_checkpoint_writes_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    flip_byte(next(newest(tmp_path).glob("shard-*")), -1)
    with pytest.raises(CheckpointError, match="checksum"):
        catalog.export(tmp_path, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        catalog.export(tmp_path / "empty", tmp_path / "out.safetensors")


def test_catalog_imports_no_torch() -> None:
    code = "import sys, checkpoints.catalog; print([m for m in ('torch', 'numpy', 'elastic') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


ALONE = """
import importlib, importlib.util, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "elastic" or name.startswith("elastic."):
            raise ImportError("elastic is blocked")
sys.meta_path.insert(0, Blocked())
import torch

def serve(package, directory):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    manager = package.CheckpointManager(directory)
    assert manager.restore() is None
    manager.save(1, {"model": model.state_dict(), "optimizer": optimizer})
    assert manager.wait().state == "committed"
    restored = manager.restore({"model": model.state_dict()})
    model.load_state_dict(restored.state["model"])
    assert restored.state["optimizer"]["param_groups"] == optimizer["param_groups"]
    manager.close()

where = {"submodule_search_locations": ["checkpoints"]}
spec = importlib.util.spec_from_file_location("another_name", "checkpoints/__init__.py", **where)
another = sys.modules["another_name"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(another)
serve(another, sys.argv[1] + "/one")
assert not [m for m in sys.modules if m == "checkpoints" or m.startswith("checkpoints.")]
serve(importlib.import_module("checkpoints"), sys.argv[1] + "/two")
"""


def test_package_serves_alone_and_under_another_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
