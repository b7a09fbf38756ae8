"""The agent's HTTP server, on TCP and on a unix socket with the same answers; the socket alone takes commands as well.

Owns sockets and threads; what it says is `site.py`'s. A client that is slow, silent or hostile
costs one thread for at most `_EXCHANGE_SECONDS` and never the server: the number of connections at once is bounded, and
so is the size of a request.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from elastic.errors import UsageError
from elastic.metrics.access import CHALLENGES, OPEN, Access
from elastic.metrics.site import Answer, Ask, Route, Site
from elastic.passing import is_full, lacks_room, start_thread
from elastic.runtime import socket_address

logger = logging.getLogger(__name__)

_EXCHANGE_SECONDS = 5.0  # for a whole request, and again for its answer
_REQUEST_BYTES = 8192
_CONNECTIONS = 32  # at once, per listener
_PORTS_TRIED = 100
_CLOSE_SECONDS = 2.0


class Routes(NamedTuple):
    """Path -> what answers, by method."""

    get: Mapping[str, Route]
    post: Mapping[str, Route]


class StatusServer:
    """Serves from construction until `close`. Commands are taken from the socket alone: it is this user's own.

    `tcp` is what `bind_tcp` made; it is closed with the server. `socket_path` None = TCP alone.
    Raises: UsageError when the socket cannot be made. OSError when this host has no room for it now.
    """

    def __init__(self, tcp: socket.socket, socket_path: Path | None, site: Site, access: Access = OPEN) -> None:
        routes = Routes(site.routes(), {})
        self.address: str = tcp.getsockname()[0]
        self.port: int = tcp.getsockname()[1]
        self._socket_path = socket_path
        self._listeners = [_Listener(tcp, routes, "elasticd-http", access)]
        if socket_path is not None:
            try:
                unix = _bind_unix(socket_path)
                self._listeners.append(_Listener(unix, Routes(site.routes(), site.controls), "elasticd-http-unix"))
            except OSError as exc:
                self.close()
                if lacks_room(exc) or is_full(exc):
                    raise
                raise UsageError(f"cannot make the status socket {socket_path}: {exc.strerror or exc}") from exc

    def close(self) -> None:
        """Stop listening, end what is being answered, join the threads and remove the socket's file."""
        for listener in self._listeners:
            listener.close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)


class _Handler(BaseHTTPRequestHandler):
    """One request, one answer; the connection ends with it."""

    server_version = "elasticd"
    sys_version = ""

    def __init__(self, connection: socket.socket, routes: Routes, access: Access) -> None:
        self._routes = routes
        self._access = access
        super().__init__(connection, "", None)  # type: ignore[arg-type]  # address and server serve logging alone

    def handle(self) -> None:
        self.close_connection = True
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.settimeout(_EXCHANGE_SECONDS)
            self.connection.do_handshake()
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(_read_head(self.connection)))
        self.connection.settimeout(_EXCHANGE_SECONDS)  # sendall counts it as a whole
        self.handle_one_request()

    def do_GET(self) -> None:
        self._send(self._answer(self._routes.get))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        if not self._routes.post:
            self.send_error(501, "commands are taken from the agent's socket alone")
            return
        self._send(self._answer(self._routes.post))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in answer.headers:
            self.send_header(name, value)
        if answer.code == 401:
            for challenge in CHALLENGES:
                self.send_header("WWW-Authenticate", challenge)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _answer(self, routes: Mapping[str, Route]) -> Answer:
        path, _, query = self.path.partition("?")
        if not self._access.allows(path, self.headers.get("Authorization", "")):
            return Answer(401, b"a token is needed: Authorization: Bearer TOKEN (--http-token-file)\n")
        route = routes.get(path)
        if route is None:
            return Answer(404, f"nothing at {path[:200]!r}; there are {' '.join(routes)}\n".encode())
        try:
            return route(Ask(accept=self.headers.get("Accept", ""), query=query))
        except Exception:  # top of a request: the agent's trouble must not end the server
            logger.exception("cannot answer %s", path)
            return Answer(500, b"error; see the agent's log\n")

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _read_head(connection: socket.socket) -> bytes:
    """A request up to its blank line; empty when it does not come whole in time and size."""
    deadline = time.monotonic() + _EXCHANGE_SECONDS
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) > _REQUEST_BYTES:
            return b""
        connection.settimeout(left)
        chunk = connection.recv(4096)
        if not chunk:
            return b""
        head += chunk
    return head


class _Listener:
    """Accepts on one socket, and closes it; a thread per connection, at most `_CONNECTIONS` of them."""

    def __init__(self, listening: socket.socket, routes: Routes, name: str, access: Access = OPEN) -> None:
        self._socket = listening
        self._routes = routes
        self._access = access
        self._name = name
        self._closing = False
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        try:
            start_thread(self._thread)
        except OSError:
            listening.close()
            raise

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._thread.join(_CLOSE_SECONDS)
        self._socket.close()
        with self._lock:
            still_open = dict(self._open)
        for connection in still_open.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in still_open:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError as exc:
                if self._closing:
                    return
                logger.warning("%s: cannot accept a connection: %s", self._name, exc)
                time.sleep(0.1)  # out of descriptors, most likely: others must close some first
                continue
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._open) >= _CONNECTIONS:
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name=f"{self._name}-client", daemon=True)
            self._open[thread] = connection
        try:
            start_thread(thread)
        except OSError as exc:
            logger.warning("%s: cannot serve a connection: %s", self._name, exc)
            self._forget(thread, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._access.tls is not None:
                connection = self._encrypted(connection, self._access.tls)
            _Handler(connection, self._routes, self._access)
        except OSError as exc:
            logger.debug("%s: client gone: %s", self._name, exc)
        except Exception:  # top of a thread
            logger.exception("%s: request failed", self._name)
        finally:
            self._forget(threading.current_thread(), connection)

    def _encrypted(self, connection: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        """On the connection's own thread: a peer that has gone raises, and one that dawdles keeps nobody waiting."""
        connection.getpeername()  # raises as well, and earlier: `wrap_socket` would leave a socket behind
        wrapped = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open[threading.current_thread()] = wrapped
        return wrapped

    def _forget(self, thread: threading.Thread, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(thread, None)
        connection.close()


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket at host:port; a busy port is a warning and the next free one. Who connects is not served yet.

    Raises: UsageError when the host is none of this machine's. OSError when it has no room, or no port, now.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise UsageError(f"--http: host {host!r} is not known here: {exc}") from exc
    refusal: OSError | None = None
    for family, _, _, _, place in found:
        try:
            listening = _first_free(family, place)
        except OSError as exc:
            if lacks_room(exc, port=0):  # any port would have done in the end
                raise
            refusal = exc  # such as a name that resolves to ::1 first on a machine without it
            continue
        used = listening.getsockname()[1]
        if port and used != port:
            logger.warning("--http: port %d is taken; serving on port %d", port, used)
        return listening
    raise UsageError(f"--http: cannot listen on {host}:{port}: {refusal and refusal.strerror}") from refusal


def _first_free(family: int, place: Any) -> socket.socket:
    """A socket at `place`, at one of the ports after it, or at any."""
    host, port, *rest = place
    for candidate in range(port, min(port + _PORTS_TRIED, 65535) + 1) if port else ():
        try:
            return _listen(socket.socket(family, socket.SOCK_STREAM), (host, candidate, *rest))
        except OSError as exc:
            if exc.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return _listen(socket.socket(family, socket.SOCK_STREAM), (host, 0, *rest))


def _bind_unix(path: Path) -> socket.socket:
    """A listening socket at `path` for this user alone; one left by a dead agent of the same pid is replaced."""
    path.unlink(missing_ok=True)
    with socket_address(path) as address:
        listening = _listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address)
    path.chmod(0o600)
    return listening


def _listen(made: socket.socket, address: Any) -> socket.socket:
    try:
        if made.family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(64)
    except BaseException:
        made.close()
        raise
    return made
