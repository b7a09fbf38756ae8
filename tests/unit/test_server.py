"""The agent's HTTP server, over TCP and its unix socket, with friendly and hostile clients."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic import runtime
from elastic.errors import UsageError
from elastic.metrics import server as server_module
from elastic.metrics.access import Access, exposure, load_access
from elastic.metrics.server import StatusServer, bind_tcp
from elastic.metrics.site import Site
from elastic.status import JobStatus
from tests.support.etcd import Certificates
from tests.support.job import wait_for


def no_server_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("elasticd-http")]


class Job:
    """The agent's side, as the server sees it."""

    def __init__(self) -> None:
        self.state: Any = "running"
        self.alive = True

    def status(self) -> JobStatus:
        if self.state == "broken":
            raise RuntimeError("no status today")
        return JobStatus(run_id="train", incarnation="a", node_id="n", state=self.state)

    def healthy(self) -> bool:
        return self.alive

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return f"asked for {accept}".encode(), "text/x-test"


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return runtime.socket_path(tmp_path, 1)


@pytest.fixture
def server(job: Job, path: Path) -> Iterator[StatusServer]:
    made = StatusServer(
        bind_tcp("127.0.0.1", 0), path, Site(status=job.status, healthy=job.healthy, metrics=job.metrics)
    )
    yield made
    made.close()
    wait_for(no_server_threads, seconds=10.0, what="the server's threads are gone")


def ask(server: StatusServer, target: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, server.port, timeout=10)
    try:
        connection.request(method, target)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def ask_raw(connection: socket.socket, request: bytes) -> bytes:
    """Everything the server sends until it closes; empty when it closes without a word."""
    with connection:
        try:
            connection.sendall(request)
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionError:
            return b""
        return received


def tcp(server: StatusServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_status_is_the_same_on_tcp_and_on_the_socket(server: StatusServer, job: Job, path: Path) -> None:
    code, body = ask(server, "/status")
    answer = ask_raw(runtime.connect(path, 10), b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (code, json.loads(body)) == (200, job.status().to_json())
    assert answer.partition(b"\r\n\r\n")[2].decode() == body


def test_healthz_follows_the_loop_and_not_the_state(server: StatusServer, job: Job) -> None:
    job.state = "waiting"
    assert ask(server, "/healthz")[0] == 200
    job.alive = False
    assert ask(server, "/healthz")[0] == 503


@pytest.mark.parametrize(
    "state", ["joining", "waiting", "spare", "starting", "running", "draining", "stopped", "closed"]
)
def test_readyz_is_200_only_while_running(server: StatusServer, job: Job, state: str) -> None:
    job.state = state
    assert ask(server, "/readyz") == (200 if state == "running" else 503, f"{state}\n")


def test_an_unknown_path_lists_the_known_ones(server: StatusServer) -> None:
    code, body = ask(server, "/nothing")
    assert code == 404
    assert "/healthz /readyz /status" in body


def test_a_query_is_ignored_and_head_has_no_body(server: StatusServer) -> None:
    assert ask(server, "/healthz?x=1")[0] == 200
    assert ask(server, "/healthz", method="HEAD") == (200, "")
    assert ask(server, "/healthz", method="POST")[0] == 501


def test_trouble_of_the_agent_is_a_500_and_the_server_lives(
    server: StatusServer, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.state = "broken"
    assert ask(server, "/status")[0] == 500
    assert "no status today" in caplog.text
    job.state = "running"
    assert ask(server, "/status")[0] == 200


def test_a_busy_port_is_a_warning_and_the_next_free_one(
    server: StatusServer, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        second = StatusServer(bind_tcp("127.0.0.1", server.port), None, Site(status=job.status, healthy=job.healthy))
    try:
        assert second.port > server.port
        assert f"port {server.port} is taken; serving on port {second.port}" in caplog.text
        assert ask(second, "/healthz")[0] == 200
    finally:
        second.close()


def test_a_port_is_free_again_once_the_server_is_closed(job: Job) -> None:
    first = StatusServer(bind_tcp("127.0.0.1", 0), None, Site(status=job.status, healthy=job.healthy))
    ask(first, "/healthz")
    first.close()
    second = StatusServer(bind_tcp("127.0.0.1", first.port), None, Site(status=job.status, healthy=job.healthy))
    second.close()
    assert second.port == first.port


def test_an_ipv6_literal_is_a_host(job: Job) -> None:
    made = StatusServer(bind_tcp("::1", 0), None, Site(status=job.status, healthy=job.healthy))
    try:
        assert ask(made, "/healthz", host="::1")[0] == 200
    finally:
        made.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
def test_a_host_that_is_not_ours_is_refused_by_name(job: Job, host: str) -> None:
    with pytest.raises(UsageError, match=rf"--http: .*{host}"):
        StatusServer(bind_tcp(host, 0), None, Site(status=job.status, healthy=job.healthy))


def test_the_socket_replaces_a_dead_agents_and_goes_with_the_server(job: Job, path: Path) -> None:
    path.touch()
    made = StatusServer(bind_tcp("127.0.0.1", 0), path, Site(status=job.status, healthy=job.healthy))
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    made.close()
    assert not path.exists()


def test_a_socket_that_cannot_be_made_leaves_no_server_behind(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"status socket .*gone/1\.sock: No such file"):
        StatusServer(
            bind_tcp("127.0.0.1", 0), tmp_path / "gone" / "1.sock", Site(status=job.status, healthy=job.healthy)
        )
    wait_for(no_server_threads, seconds=10.0, what="the server's threads are gone")


def test_silent_clients_do_not_keep_others_waiting(server: StatusServer) -> None:
    silent = [tcp(server) for _ in range(10)]
    for number, connection in enumerate(silent):
        connection.sendall(b"GET /sta" if number % 2 else b"")
    began = time.monotonic()
    assert ask(server, "/healthz")[0] == 200
    assert time.monotonic() - began < server_module._EXCHANGE_SECONDS
    for connection in silent:
        connection.close()


def test_clients_beyond_the_limit_are_turned_away_and_come_in_again_later(server: StatusServer, path: Path) -> None:
    silent = [tcp(server) for _ in range(server_module._CONNECTIONS)]
    for connection in silent:
        connection.sendall(b"G")
    assert ask_raw(tcp(server), b"GET /healthz HTTP/1.1\r\n\r\n") == b""
    assert b" 200 " in ask_raw(runtime.connect(path, 10), b"GET /healthz HTTP/1.1\r\n\r\n")
    for connection in silent:
        connection.close()
    deadline = time.monotonic() + 10
    while b" 200 " not in ask_raw(tcp(server), b"GET /healthz HTTP/1.1\r\n\r\n"):
        assert time.monotonic() < deadline


def test_a_client_that_drips_its_request_is_cut_off(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_EXCHANGE_SECONDS", 0.3)
    made = StatusServer(bind_tcp("127.0.0.1", 0), None, Site(status=job.status, healthy=job.healthy))
    try:
        with tcp(made) as dripping:
            deadline = time.monotonic() + 5
            with pytest.raises(ConnectionError):
                while time.monotonic() < deadline:
                    dripping.sendall(b"x")
                    time.sleep(0.05)
    finally:
        made.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0" * 20000,
        b"GET /" + b"a" * 20000,
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
    ],
    ids=["zeros", "long", "empty", "nonsense", "version", "binary"],
)
def test_rubbish_does_no_harm(server: StatusServer, request_bytes: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert b" 200 " not in ask_raw(tcp(server), request_bytes)
    assert ask(server, "/healthz")[0] == 200
    assert "Traceback" not in caplog.text


def test_closing_does_not_wait_for_silent_clients(job: Job) -> None:
    made = StatusServer(bind_tcp("127.0.0.1", 0), None, Site(status=job.status, healthy=job.healthy))
    with tcp(made) as silent:
        silent.sendall(b"G")
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < server_module._EXCHANGE_SECONDS
    wait_for(no_server_threads, seconds=10.0, what="the server's threads are gone")


def test_metrics_are_asked_with_what_the_client_accepts(server: StatusServer, path: Path) -> None:
    assert ask(server, "/metrics") == (200, "asked for ")
    with runtime.connect(path, 5.0) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nAccept: a/b\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.endswith(b"asked for a/b")
    assert b"Content-Type: text/x-test" in answer


TOKEN = b"long-random-word"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    (tmp_path / "tls").mkdir()
    return Certificates(tmp_path / "tls")


def guarded(job: Job, path: Path | None, access: Access) -> StatusServer:
    site = Site(status=job.status, healthy=job.healthy, metrics=job.metrics)
    return StatusServer(bind_tcp("127.0.0.1", 0), path, site, access)


def authorized(server: StatusServer, target: str, header: str | None) -> tuple[int, list[str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", target, headers={} if header is None else {"Authorization": header})
        response = connection.getresponse()
        assert TOKEN not in response.read()
        return response.status, response.headers.get_all("WWW-Authenticate", [])
    finally:
        connection.close()


def basic(text: bytes) -> str:
    return "Basic " + base64.b64encode(text).decode()


def test_without_the_token_probes_alone_are_answered_and_the_socket_needs_none(job: Job, path: Path) -> None:
    made = guarded(job, path, Access(token=TOKEN))
    try:
        right = f"Bearer {TOKEN.decode()}"
        for target in ("/status", "/metrics", "/nothing"):
            for wrong in (
                None,
                "",
                "Bearer",
                "Bearer long-random-wor",
                f"{right}x",
                basic(b"u:x"),
                "Basic =",
                "Bearer \xff",
            ):
                code, challenges = authorized(made, target, wrong)
                assert (code, len(challenges)) == (401, 2), (target, wrong)
        for target in ("/healthz", "/readyz"):
            assert authorized(made, target, None)[0] == 200
        for header in (right, right.replace("Bearer", "bearer"), basic(b"anybody:" + TOKEN)):
            assert authorized(made, "/status", header) == (200, [])
        assert b" 200 " in ask_raw(runtime.connect(path, 10), b"GET /status HTTP/1.1\r\n\r\n")
        assert TOKEN.decode() not in repr(Access(token=TOKEN))
    finally:
        made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the ssl module itself
def test_clients_that_reset_before_they_are_heard_do_not_end_a_server_with_tls(
    job: Job, certificates: Certificates
) -> None:
    made = guarded(job, None, load_access(None, *map(str, certificates.server)))
    try:
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", made.port), 10) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        trusted = ssl.create_default_context(cafile=str(certificates.ca))
        client = http.client.HTTPSConnection("127.0.0.1", made.port, timeout=10, context=trusted)
        client.request("GET", "/healthz")
        assert client.getresponse().read() == b"ok\n"
        client.close()
    finally:
        made.close()


def test_tls_with_an_authority_of_ones_own_and_nothing_in_the_clear(job: Job, certificates: Certificates) -> None:
    made = guarded(job, None, load_access(None, *map(str, certificates.server)))
    try:
        trusting = ssl.create_default_context(cafile=str(certificates.ca))
        connection = http.client.HTTPSConnection("127.0.0.1", made.port, timeout=10, context=trusting)
        connection.request("GET", "/status")
        assert json.loads(connection.getresponse().read())["run_id"] == "train"
        connection.close()
        strict = http.client.HTTPSConnection("127.0.0.1", made.port, timeout=10, context=ssl.create_default_context())
        with pytest.raises(ssl.SSLCertVerificationError):
            strict.request("GET", "/status")
        strict.close()
        assert b"train" not in ask_raw(tcp(made), b"GET /status HTTP/1.1\r\n\r\n")
        with tcp(made) as silent:  # a handshake that does not come keeps nobody waiting
            again = http.client.HTTPSConnection("127.0.0.1", made.port, timeout=10, context=trusting)
            again.request("GET", "/healthz")
            assert again.getresponse().read() == b"ok\n"
            again.close()
            began = time.monotonic()
            made.close()
            assert time.monotonic() - began < server_module._EXCHANGE_SECONDS
            assert silent.recv(1) == b""
    finally:
        made.close()


def test_files_that_cannot_serve_are_named(tmp_path: Path, certificates: Certificates) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="empty is empty"):
        load_access(str(tmp_path / "empty"), None, None)
    with pytest.raises(UsageError, match=r"--http-cert .*server\.pem and --http-key .*client\.key"):
        load_access(None, str(certificates.server[0]), str(certificates.client[1]))
    with pytest.raises(UsageError, match="none: No such file"):
        load_access(str(tmp_path / "none"), None, None)


@pytest.mark.parametrize(
    ("address", "token", "tls", "remedy"),
    [
        ("127.0.0.1", False, False, ""),
        ("::1", False, False, ""),
        ("0.0.0.0", False, False, "--http-token-file"),
        ("::", False, True, "--http-token-file"),
        ("10.0.0.5", True, False, "--http-cert"),
        ("10.0.0.5", True, True, ""),
    ],
)
def test_a_server_that_others_reach_says_what_they_can_do(address: str, token: bool, tls: bool, remedy: str) -> None:
    risk = exposure(address, token=token, tls=tls)
    assert bool(risk) == bool(remedy)
    assert remedy in risk
    assert address in risk or not risk
