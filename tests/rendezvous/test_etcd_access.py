"""Who may use an etcd and how it is named, encrypted and loaded; what is said when that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import StoreRefusedError, StoreUnavailableError, UsageError
from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
from elastic.rendezvous.etcd_store import open_store
from elastic.rendezvous.store import Put
from tests.rendezvous.gateway import KEY, NONCE, Listener, put, value
from tests.support.etcd import Certificates, EtcdCluster, etcd_cluster, eventually

ROOT = Path(__file__).resolve().parents[2]


def refused(config: EtcdConfig, key: str = KEY) -> str:
    store = open_store(config)
    begin = time.monotonic()
    with pytest.raises(StoreRefusedError) as caught:
        store.read(key)
    with pytest.raises(StoreRefusedError):
        store.write([], [Put(key, "")], nonce_key=NONCE)
    assert time.monotonic() - begin < 2
    store.close()
    assert "secret" not in str(caught.value) + repr(config)
    return str(caught.value)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster


def test_password_and_permission(own_cluster: EtcdCluster) -> None:
    cluster = own_cluster
    put(store := open_store(cluster.config()), "1")
    store.close()
    assert "no authentication" in refused(cluster.config(user="trainer", password="secret"))
    cluster.enable_auth(("trainer", "secret", "/elasticd/job/"))
    store = open_store(cluster.config(user="trainer", password="secret"))
    listener = Listener(store, put(store, "2"))
    assert "ELASTICD_ETCD_PASSWORD" in refused(cluster.config(user="trainer", password="wrong secret"))
    assert "--etcd-user" in refused(cluster.config())
    denied = refused(cluster.config(user="trainer", password="secret"), "/elasticd/of-others/round")
    assert "denies permission" in denied
    assert "'trainer'" in denied
    cluster.revoke_tokens()
    put(store, "3")
    eventually(lambda: listener.told == ["3"])
    store.close()


def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    cert, key = map(str, ours.client)
    with etcd_cluster(tmp_path / "etcd", certificates=ours, client_certificates=True) as cluster:
        store = open_store(cluster.config(cert=cert, key=key))
        put(store, "1")
        assert value(store) == "1"
        store.close()
        assert "--etcd-ca" in refused(cluster.config(ca=str(theirs.ca), cert=cert, key=key))
        cert, key = map(str, theirs.client)
        assert "--etcd-cert" in refused(cluster.config(cert=cert, key=key))
        assert "cannot be read" in refused(cluster.config(ca=str(tmp_path / "none.pem")))
        plain = open_store(cluster.config(ca=None, timeout_seconds=1))
        with pytest.raises(StoreUnavailableError):
            plain.read(KEY)
        plain.close()


def test_a_host_without_an_address_is_named() -> None:
    message = refused(EtcdConfig(endpoints=(("no-such-host.invalid", 2379),), timeout_seconds=3))
    assert "no-such-host.invalid" in message
    assert "--rdzv-endpoint" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoints": ()}, "--rdzv-endpoint"),
        ({"cert": "a"}, "need each other"),
        ({"cert": "a", "key": "b"}, "--etcd-ca"),
        ({"user": "a"}, "ELASTICD_ETCD_PASSWORD"),
        ({"timeout_seconds": 0}, "more than 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EtcdConfig(**{"endpoints": (("h", 1),), **settings})  # type: ignore[arg-type]  # that is the point


def test_endpoints_are_read_from_a_comma_list() -> None:
    assert parse_endpoints("h1:2379,h2, [::1]:99") == (("h1", 2379), ("h2", 2379), ("::1", 99))
    with pytest.raises(UsageError, match="https://h"):
        parse_endpoints("https://h:1")


def run_clean(code: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    environ.pop("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("before", ["", "os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'upb'"])
def test_loading_etcd3_leaves_the_environment_as_it_was(before: str) -> None:
    code = f"import os\n{before}\nb = dict(os.environ)\nimport elastic.rendezvous.etcd\nassert b == dict(os.environ)\n"
    # What a worker would inherit is the process's environment, not Python's copy of it.
    done = run_clean(
        code + "import sys; sys.stdout.flush(); os.system('printenv PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("upb" if before else "")


_FOREIGN = """
from google.protobuf import descriptor_pb2, descriptor_pool
descriptor_pool.Default().Add(descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="another"))
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="nothing"),
        pytest.param("import google.protobuf.descriptor", id="protobuf_is_loaded"),
        pytest.param("import os; os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'python'", id="pure_python"),
        pytest.param(_FOREIGN, id="another_package_has_an_rpc.proto"),
    ],
)
def test_etcd3_loads_whatever_of_protobuf_is_there_before(before: str) -> None:
    code = """
from elastic.rendezvous.etcd import etcd3, rpc
import etcd3.etcdrpc.kv_pb2
request = rpc.TxnRequest()
request.compare.add().result = rpc.Compare.NOT_EQUAL
request.success.add().request_put.key = b"k"
print(request.SerializeToString().hex(), etcd3.etcdrpc.kv_pb2.Event.DELETE, rpc.AlarmType.Name(rpc.NOSPACE))
"""
    done = run_clean(f"{before}\n{code}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0a020803120512030a016b", "1", "NOSPACE"]


def test_the_messages_of_a_newer_etcd3_are_its_own(tmp_path: Path) -> None:
    package = tmp_path / "etcd3" / "etcdrpc"
    package.mkdir(parents=True)
    (tmp_path / "etcd3" / "__init__.py").touch()
    (package / "__init__.py").write_text("from . import kv_pb2, auth_pb2, rpc_pb2\n")
    for name in ("kv_pb2", "auth_pb2", "rpc_pb2"):
        (package / f"{name}.py").write_text("NEW = 'DESCRIPTOR = pool.AddSerializedFile(...)'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom elastic.rendezvous import etcd_messages\n"
    done = run_clean(code + "print(etcd_messages.load()[1].rpc_pb2.NEW)")
    assert done.stdout.strip() == "DESCRIPTOR = pool.AddSerializedFile(...)", done.stderr


def test_the_store_alone_does_not_load_etcd3() -> None:
    code = "import sys, elastic.rendezvous.etcd_store, elastic.rendezvous.lease\n"
    done = run_clean(code + "print([m for m in ('etcd3', 'grpc', 'google.protobuf', 'torch') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr
