"""The text, its windows, and a model that learns from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.demo.data import Windows
from elastic.demo.model import GPT, GPTConfig, next_byte_loss
from elastic.demo.records import parameter_digest
from elastic.demo.text import default_text, read_text
from elastic.errors import UsageError

TINY = GPTConfig(layers=1, heads=2, width=32, context=32)


def test_the_default_text_is_the_same_each_time_and_bounded() -> None:
    text = read_text(default_text(), limit_bytes=300_000)
    assert text == read_text(default_text(), limit_bytes=300_000)
    assert len(text) == 300_000
    assert b"import" in text


def test_a_folder_is_read_in_order_without_what_is_hidden(tmp_path: Path) -> None:
    for name, content in (("b.txt", "B"), ("a/z.txt", "A"), (".git/x", "no"), (".hidden", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_text(tmp_path) == b"AB"
    (tmp_path / "code.py").write_text("P")
    assert read_text(tmp_path) == b"P"


@pytest.mark.parametrize(("name", "words"), [("missing", "No such file"), ("empty", "has no text")])
def test_without_text_the_error_names_the_path(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match=f"{name}.*{words}"):
        read_text(tmp_path / name)


def test_windows_follow_each_other_and_share_one_byte() -> None:
    windows = Windows(bytes(range(21)), context=5)
    assert len(windows) == 4
    assert windows[1].tolist() == [5, 6, 7, 8, 9, 10]
    assert windows[3].tolist() == [15, 16, 17, 18, 19, 20]
    assert len(Windows(bytes(20), context=5)) == 3  # the last byte of the fourth is missing
    assert len(Windows(bytes(21), context=5, samples=2)) == 2


def test_too_short_a_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"has 5 bytes.*needs 6"):
        Windows(bytes(5), context=5)
    with pytest.raises(UsageError, match="--samples 5 is more than the 4 windows"):
        Windows(bytes(21), context=5, samples=5)


def test_no_position_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(256, (2, 32))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_the_loss_falls_on_real_text() -> None:
    torch.manual_seed(0)
    model, windows = GPT(TINY), Windows(read_text(default_text()), context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        batch = torch.stack([windows[8 * step + i] for i in range(8)])
        loss, count = next_byte_loss(model, batch)
        assert count == 8 * 32
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(loss.item() / count)
    assert losses[0] == pytest.approx(5.55, abs=0.3)  # the logarithm of 256: it knows nothing yet
    assert sum(losses[-10:]) / 10 < 3.6


def test_tied_weights_are_one_tensor_and_can_be_two() -> None:
    tied, untied = GPT(TINY), GPT(GPTConfig(layers=1, heads=2, width=32, context=32, tie_weights=False))
    count = sum(p.numel() for p in tied.parameters())
    assert sum(p.numel() for p in untied.parameters()) == count + 256 * 32


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("layers", 0, "layers is 0"), ("heads", 5, "not divisible by heads 5"), ("dropout", 1.0, "dropout is 1")],
)
def test_a_shape_that_cannot_be_is_refused_by_name(field: str, value: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GPTConfig(**{field: value})


def test_the_digest_is_that_of_every_bit_of_every_parameter() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    digest = parameter_digest(model)
    assert digest == parameter_digest(model)
    with torch.no_grad():
        last = list(model.parameters())[-1].view(-1)
        last[-1] = torch.nextafter(last[-1], torch.tensor(10.0))
    assert parameter_digest(model) != digest
