"""A TCP proxy in front of a server, to lose what is on its way: answers, requests, whole connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType


class _Pair:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.held = bytearray()
        self.held_at = 0.0  # when the last of it came
        self.holding = proxy.holding
        self.threads = [
            threading.Thread(target=self._requests, args=(proxy,), daemon=True),
            threading.Thread(target=self._answers, args=(proxy,), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _requests(self, proxy: Proxy) -> None:
        with contextlib.suppress(OSError):
            while data := self.client.recv(65536):
                if proxy.hold_from and proxy.hold_from in data:
                    proxy.holding = True
                if proxy.holding or self.holding:
                    self.holding = True
                    self.held += data
                    self.held_at = time.monotonic()
                else:
                    self.server.sendall(data)
        if not self.holding:  # else what is held may still be sent, by a client that has gone
            self.close()

    def _answers(self, proxy: Proxy) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(65536):
                proxy.answered_bytes += len(data)
                if not proxy.muted and not self.holding:  # whose requests are held has gone when they are answered
                    self.client.sendall(data)
        self.close()


class Proxy:
    """`muted`: requests arrive, answers do not. `holding`: requests are kept until `release()`.

    `hold_from`: text of the request that the holding is to begin with.
    """

    def __init__(self, port: int, listener: socket.socket | None = None) -> None:
        """`listener`: where clients come to, if not to a free port of this host's."""
        self._target = ("127.0.0.1", port)
        self.muted = False
        self.holding = False
        self.hold_from = b""
        self.answered_bytes = 0
        self._cut = False
        self._pairs: list[_Pair] = []
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def held_with(self, text: bytes) -> list[int]:
        """Of each connection that is held, in the order of their making: bytes so far.

        None while no one has `text`, and until nothing followed it for a moment: a request may come in several pieces.
        """
        held = [pair for pair in self._pairs if pair.held]
        whole = any(text in pair.held and time.monotonic() > pair.held_at + 0.1 for pair in held)
        return [len(pair.held) for pair in held] if whole else []

    def release(self, sizes: list[int]) -> None:
        """Send that much of what was held on each connection, and nothing of what came after it."""
        for pair, size in zip([pair for pair in self._pairs if pair.held], sizes, strict=False):
            pair.server.sendall(pair.held[:size])

    def cut(self) -> None:
        """Connections end, new ones are ended at once."""
        self._cut = True
        for pair in self._pairs:
            pair.close()

    def heal(self) -> None:
        self._cut = False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        for pair in self._pairs:
            for thread in pair.threads:
                thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._cut:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(self._target, 5)
                    server.settimeout(None)
                except OSError:
                    client.close()
                    continue
                self._pairs.append(_Pair(self, client, server))
