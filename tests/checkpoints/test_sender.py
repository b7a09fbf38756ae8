"""One rank's sending end alone: bytes, tokens, deadlines, the address that others reach it by."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoints import manifest as manifests
from checkpoints import transfer
from checkpoints.manager import CheckpointManager
from checkpoints.storage import LocalStorage
from checkpoints.transfer import Peer, Sender, own_address
from tests.checkpoints.support import cut_state, newest


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    manager = CheckpointManager(tmp_path)
    manager.save(1, cut_state(1))
    manager.close()
    path = str(newest(tmp_path))
    manifest = manifests.read(LocalStorage(), path)
    sender = Sender(LocalStorage(), path, manifest, host="127.0.0.1", deadline=time.monotonic() + 30)
    yield sender
    sender.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-send")]


def read(sender: Sender, name: str, token: str | None = None) -> bytes:
    address = sender.address
    if token is not None:
        address = transfer.Address(host=address.host, port=address.port, token=token)
    with Peer(address=address, deadline=time.monotonic() + 10).open(name) as stream:
        return stream.read()


def test_files_come_byte_for_byte_to_several_receivers_at_once(sender: Sender, tmp_path: Path) -> None:
    (shard,) = newest(tmp_path).glob("shard-*")
    received: list[bytes] = []
    threads = [threading.Thread(target=lambda: received.append(read(sender, shard.name))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert received == [shard.read_bytes()] * 4
    assert read(sender, "manifest.json") == (newest(tmp_path) / "manifest.json").read_bytes()


def test_wrong_token_and_files_outside_are_refused(sender: Sender, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    with pytest.raises(ConnectionError):
        read(sender, "manifest.json", token="0" * 32)
    for name in ("../secret", str(tmp_path / "secret"), "", "x" * 60_000):
        with pytest.raises(ConnectionError):
            read(sender, name)
    assert "token" not in repr(sender.address)


def test_sender_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = transfer.Address(host="127.0.0.1", port=silent.getsockname()[1], token="0" * 32)
        with (
            Peer(address=address, deadline=time.monotonic() + 60).open("manifest.json") as stream,
            pytest.raises(TimeoutError),
        ):
            stream.read()


def test_transfer_ends_at_its_deadline_however_steadily_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = transfer._Stream(ours, time.monotonic() + 0.3)
        theirs.sendall(transfer._FRAME_LENGTH.pack(1 << 20))

        def drip() -> None:
            for _ in range(20):
                theirs.sendall(b"x")
                time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        target = bytearray(8)
        with pytest.raises(TimeoutError):
            while stream.readinto(target):
                pass
        thread.join(5)
        stream.close()


def test_address_is_that_of_the_route_to_the_store_or_the_name_all_reach_it_by() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "127.0.0.1"
    assert own_address(dist.HashStore()) == socket.gethostname()
    assert own_address(None) == socket.gethostname()
