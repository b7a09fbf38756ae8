"""One checkpoint's files over plain TCP, from a rank that has it to ranks that have not. Nothing is unpickled.

The sender listens on a free port while a restore needs it; address and token travel through the round's store.

    receiver -> sender    token (32 bytes), length of a name (u16), the name of one file of the checkpoint
    sender -> receiver    frames: length (i32) and as many bytes; 0 ends the file; negative: an error text instead

One connection brings one file. What arrives is verified by those who read it, as if it came from a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import io
import ipaddress
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import IO, Any, cast

from .manifest import MANIFEST, Manifest
from .storage import Readable

logger = logging.getLogger(__name__)

FRAME_BYTES = 1 << 20
PATIENCE_SECONDS = 20.0  # for one socket operation: a peer that stands still this long has failed
_GREETING_SECONDS = 10.0
_JOIN_SECONDS = 5.0  # only a disk that does not answer holds a thread whose socket is shut
_LONGEST_TEXT_BYTES = 4096
_TOKEN_BYTES = 32
_NAME_LENGTH = struct.Struct("<H")
_FRAME_LENGTH = struct.Struct("<i")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a sender listens, and the secret that it asks for."""

    host: str
    port: int
    token: str = dataclasses.field(repr=False)


class Sender:
    """Sends the files of one checkpoint, each to whoever asks with the token, until `close` or the deadline."""

    def __init__(self, storage: Readable, directory: str, manifest: Manifest, *, host: str, deadline: float) -> None:
        self._storage, self._directory, self._deadline = storage, directory, deadline
        self._names = {MANIFEST, *(file.name for file in manifest.files)}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._listener = _listen(host)
        self.address = Address(host=host, port=self._listener.getsockname()[1], token=secrets.token_hex(16))
        self._thread = threading.Thread(target=self._accept, name="checkpoint-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all transfers, done or not, and the threads."""
        with self._lock:
            self._closed = True
            threads = [self._thread, *self._connections.values()]
            for each in (self._listener, *self._connections):
                with contextlib.suppress(OSError):  # it is closed or was never connected
                    each.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread that waits on it
        for thread in threads:
            thread.join(_JOIN_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                self._listener.settimeout(_left(self._deadline))
                connection, (host, *_) = self._listener.accept()
            except OSError as exc:
                if not self._closed:
                    logger.warning("no more receivers are let in: %s", exc)
                return
            thread = threading.Thread(target=self._serve, args=(connection, host), name="checkpoint-send", daemon=True)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                name = self._greet(connection)
                if name not in self._names:
                    logger.warning("a connection from %s is refused: it did not show the token or asks for more", host)
                    return
                for frame in self._frames(name):
                    connection.settimeout(min(PATIENCE_SECONDS, _left(self._deadline)))
                    connection.sendall(frame)
        except OSError as exc:
            logger.warning("sending to %s broke off: %s", host, exc)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _greet(self, connection: socket.socket) -> str | None:
        """The name that is asked for, by one who knows the token."""
        deadline = time.monotonic() + _GREETING_SECONDS
        token = _receive(connection, _TOKEN_BYTES, deadline)
        if not hmac.compare_digest(token, self.address.token.encode("ascii")):
            return None
        (length,) = _NAME_LENGTH.unpack(_receive(connection, _NAME_LENGTH.size, deadline))
        return _receive(connection, length, deadline).decode("utf-8", "replace")

    def _frames(self, name: str) -> Iterator[memoryview | bytes]:
        buffer = memoryview(bytearray(_FRAME_LENGTH.size + FRAME_BYTES))
        try:
            with self._storage.open(self._storage.join(self._directory, name)) as file:
                stream: Any = file  # IO[bytes] lacks readinto, files have it
                while count := stream.readinto(buffer[_FRAME_LENGTH.size :]):
                    _FRAME_LENGTH.pack_into(buffer, 0, count)
                    yield buffer[: _FRAME_LENGTH.size + count]
            yield _FRAME_LENGTH.pack(0)
        except OSError as exc:
            text = str(exc).encode("utf-8", "replace")[:_LONGEST_TEXT_BYTES]
            yield _FRAME_LENGTH.pack(-len(text)) + text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The checkpoint that a sender has, to be read as from a directory; any thread may open any file."""

    address: Address
    deadline: float

    def join(self, directory: str, *names: str) -> str:
        return names[-1]

    def open(self, path: str) -> IO[bytes]:
        """Raises OSError when the sender cannot be reached; reading raises it when it fails later."""
        address = self.address
        patience = min(PATIENCE_SECONDS, _left(self.deadline))
        connection = socket.create_connection((address.host, address.port), timeout=patience)
        try:
            name = path.encode("utf-8")
            connection.sendall(address.token.encode("ascii") + _NAME_LENGTH.pack(len(name)) + name)
        except BaseException:
            connection.close()
            raise
        return cast("IO[bytes]", _Stream(connection, self.deadline))


class _Stream(io.RawIOBase):
    """The bytes of one file as its frames come in."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline
        self._left = 0  # of the frame
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        if not len(view) or not self._in_frame():
            return 0
        self._connection.settimeout(min(PATIENCE_SECONDS, _left(self._deadline)))
        count = self._connection.recv_into(view[: self._left])
        if not count:
            raise _broken_off()
        self._left -= count
        return count

    def _in_frame(self) -> bool:
        """Whether there are bytes to come; begins the next frame when one is over."""
        if self._left or self._ended:
            return not self._ended
        (self._left,) = _FRAME_LENGTH.unpack(_receive(self._connection, _FRAME_LENGTH.size, self._deadline))
        if self._left < 0:
            text = _receive(self._connection, min(-self._left, _LONGEST_TEXT_BYTES), self._deadline)
            raise OSError(errno.EREMOTEIO, f"the sender cannot read it: {text.decode('utf-8', 'replace')}")
        self._ended = self._left == 0
        return not self._ended

    def close(self) -> None:
        self._connection.close()
        super().close()


def own_address(store: object) -> str:
    """The address at which the other ranks reach this machine: that of the route to the store's server.

    No packet is sent. On the server's own machine the route may be the loopback; there it is the name that all ranks
    reach the server by. Without a server (a file store) it is the host name.
    """
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        return socket.gethostname()
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return host if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


def _listen(host: str) -> socket.socket:
    """A listener on that address only; a name may mean another one here than at the peers, so then on all."""
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
        return socket.create_server((host, 0), family=socket.AF_INET6 if version == 6 else socket.AF_INET)
    except (ValueError, OSError):
        pass
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes."""
    data = b""
    while len(data) < count:
        connection.settimeout(min(PATIENCE_SECONDS, _left(deadline)))
        part = connection.recv(count - len(data))
        if not part:
            raise _broken_off()
        data += part
    return data


def _broken_off() -> OSError:
    return ConnectionError("the other side closed the connection early")


def _left(deadline: float) -> float:
    """Seconds until the deadline, as a socket's timeout."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for the transfer is over")
    return left
