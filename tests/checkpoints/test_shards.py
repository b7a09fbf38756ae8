"""The pure partition, shard files, and the manifest."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from checkpoints import manifest as manifests
from checkpoints.errors import CorruptCheckpointError
from checkpoints.manager import CheckpointManager
from checkpoints.manifest import DTYPES, Piece, TensorEntry
from checkpoints.shards import SMALLEST_CUT_BYTES, layout, partition
from checkpoints.storage import PAGE_BYTES, LocalStorage
from tests.checkpoints.support import cut_state


def draw_tensors(seed: int) -> list[TensorEntry]:
    draw = random.Random(seed)
    tensors = []
    for number in range(draw.randrange(40)):
        shape = tuple(draw.choice([0, 1, 2, 7, 100, 513]) for _ in range(draw.randrange(3)))
        same_as = "t0" if number > 0 and draw.random() < 0.1 else None
        tensors.append(TensorEntry(name=f"t{number}", dtype=draw.choice(list(DTYPES)), shape=shape, same_as=same_as))
    return tensors


@pytest.mark.parametrize("writers", [1, 2, 3, 8, 61])
@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_exactly_one_share_and_shares_are_equal(seed: int, writers: int) -> None:
    tensors = draw_tensors(seed)
    pieces = partition(tensors, writers)
    covered: dict[int, int] = {}
    for piece in pieces:
        assert piece.begin == covered.get(piece.tensor, 0) < piece.end
        covered[piece.tensor] = piece.end
    assert covered == {i: t.elements for i, t in enumerate(tensors) if t.stored_bytes}
    shares = [0] * writers
    for piece in pieces:
        shares[piece.file] += (piece.end - piece.begin) * tensors[piece.tensor].itemsize
    assert max(shares) - min(shares) <= SMALLEST_CUT_BYTES


@pytest.mark.parametrize("seed", range(10))
def test_pieces_lie_aligned_and_without_gaps_behind_a_header_of_whole_pages(seed: int) -> None:
    tensors = draw_tensors(seed)
    pieces = partition(tensors, 3)
    for file in range(3):
        shard = layout(tensors, pieces, file)
        assert len(shard.header) % PAGE_BYTES == 0
        position = len(shard.header)
        for piece, offset in zip(shard.pieces, shard.offsets, strict=True):
            itemsize = tensors[piece.tensor].itemsize
            assert offset == position
            assert offset % itemsize == 0
            position += (piece.end - piece.begin) * itemsize
        assert position == shard.size_bytes


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    state = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in (getattr(torch, name) for name in DTYPES)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)
    manager.close()
    with safe_open(tmp_path / "step-000000000001" / "shard-00000-of-00001.safetensors", framework="pt") as shard:
        assert set(shard.keys()) == set(state)
        for name, tensor in state.items():
            stored = shard.get_tensor(name)
            raw = [t.contiguous().view(-1).view(torch.uint8) for t in (stored, tensor)]
            assert torch.equal(*raw)


def saved(tmp_path: Path) -> Path:
    manager = CheckpointManager(tmp_path)
    manager.save(1, cut_state(1))
    manager.close()
    return tmp_path / "step-000000000001"


def test_manifest_survives_its_own_json(tmp_path: Path) -> None:
    manifest = manifests.read(LocalStorage(), str(saved(tmp_path)))
    assert manifests.parse(manifests.dump(manifest)) == manifest


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    data = (saved(tmp_path) / "manifest.json").read_bytes()
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(CorruptCheckpointError):
            manifests.parse(bytes(damaged))


def test_pieces_that_do_not_cover_their_tensor_are_noticed(tmp_path: Path) -> None:
    manifest = manifests.read(LocalStorage(), str(saved(tmp_path)))
    short = [dataclasses.replace(piece, end=piece.end - 1) for piece in manifest.pieces]
    far = [*manifest.pieces[:-1], Piece(tensor=manifest.pieces[-1].tensor, file=9, begin=0, end=1)]
    for pieces in (short, far, manifest.pieces[1:]):
        with pytest.raises(CorruptCheckpointError):
            manifests.parse(manifests.dump(dataclasses.replace(manifest, pieces=tuple(pieces))))


def test_manifest_of_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    body = json.loads((saved(tmp_path) / "manifest.json").read_bytes())
    with pytest.raises(CorruptCheckpointError, match="format 2"):
        manifests.parse(json.dumps({**body, "format": 2}).encode())
