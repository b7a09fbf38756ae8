"""Each check of `elasticd doctor` by what it is handed: files of a made-up kernel, values, and a fake NVML."""

from __future__ import annotations

import json
import math
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from checkpoints.manager import CheckpointManager
from elastic.checks import clock, etcd, gpus, limits, network, service, software, storage
from elastic.checks.finding import Finding, Host, examine, ok
from elastic.checks.report import as_json, exit_code, print_text, summary
from elastic.rendezvous.identity import own_identity
from elastic.rendezvous.records import NodeRecord
from elastic.rendezvous.round import Node
from tests.doctor.findings import only, states

UNLIMITED = -1


@pytest.fixture
def host(tmp_path: Path) -> Host:
    for name in ("proc", "sys", "shm"):
        (tmp_path / name).mkdir()
    return Host(proc=tmp_path / "proc", sys=tmp_path / "sys", shm=tmp_path / "shm")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_check_that_breaks_or_hangs_does_not_stop_the_others() -> None:
    hold = threading.Event()

    def broken() -> list[Finding]:
        raise ZeroDivisionError("no kernel today")

    def hanging() -> list[Finding]:
        hold.wait(30)
        return []

    checks: Any = {"a": broken, "b": hanging, "c": lambda: [ok("c", "fine")]}
    first, second, third = examine(checks, timeout_seconds=0.2)
    hold.set()
    assert (first.state, "no kernel today" in first.message) == ("warning", True)
    assert (second.check, second.state, "0.2 s" in second.message) == ("b", "error", True)
    assert third == ok("c", "fine")


VERSIONS: list[tuple[dict[str, Any], list[str], str]] = [
    ({"python": "3.9.2"}, ["error", "ok", "ok"], "Python 3.9.2; at least 3.10"),
    ({"torch": "2.6.0+cu124"}, ["ok", "error", "ok"], "torch 2.6.0"),
    ({"driver": "550.1"}, ["ok", "ok", "warning"], "has no CUDA"),
    ({"cuda": "12.8"}, ["ok", "ok", "warning"], "no NVIDIA driver"),
    ({"cuda": "13.0", "driver": "550.1", "driver_cuda": (12, 4)}, ["ok", "ok", "error"], "knows CUDA 12.4"),
    ({"cuda": "12.8", "driver": "550.1", "driver_cuda": (12, 4), "nccl": "2.27"}, ["ok"] * 3, "NCCL 2.27"),
]


@pytest.mark.parametrize(("changes", "expected", "text"), VERSIONS)
def test_versions_that_do_not_fit_are_named(changes: dict[str, Any], expected: list[str], text: str) -> None:
    found = list(software.check_versions(software.Versions(**{"python": "3.12.1", "torch": "2.13.0", **changes})))
    assert states(found) == expected
    assert text in " ".join(finding.message for finding in found)


def test_the_driver_is_read_from_the_kernel(host: Host) -> None:
    put(host.proc / "driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n")
    assert software.installed(host, None).driver == "550.54.15"
    put(
        host.proc / "driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Rel\n"
    )
    assert software.installed(host, None).driver == "570.86.10"


class NvmlError(Exception):
    pass


def fake_nvml(**answers: Any) -> Any:
    """NVML with one GPU; what is not answered raises, as on a device without the sensor."""

    def refuse(*_: Any) -> Any:
        raise NvmlError

    names = ("Name", "MemoryInfo", "RemappedRows", "CurrentClocksEventReasons", "TotalEccErrors", "Temperature")
    calls = {f"nvmlDeviceGet{name}": refuse for name in names}
    calls |= {f"nvmlDeviceGet{name}": (lambda *_, value=value: value) for name, value in answers.items()}
    constants = {"NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0, "NVML_TEMPERATURE_GPU": 0}
    return types.SimpleNamespace(
        NVMLError=NvmlError, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda i: i, **calls, **constants
    )


ROOM = types.SimpleNamespace(total=80 << 30, used=1 << 30)
FULL = types.SimpleNamespace(total=80 << 30, used=70 << 30)


@pytest.mark.parametrize(
    ("answers", "state", "text"),
    [
        ({"MemoryInfo": ROOM}, "ok", "H200"),
        ({}, "ok", "H200"),
        ({"TotalEccErrors": 2, "MemoryInfo": ROOM}, "error", "2 uncorrected"),
        ({"RemappedRows": (0, 1, 0, 1)}, "error", "could not be replaced"),
        ({"RemappedRows": (0, 1, 1, 0)}, "warning", "waits to be replaced"),
        ({"CurrentClocksEventReasons": 0x44, "Temperature": 92}, "warning", "92 C (hardware thermal slowdown)"),
        ({"MemoryInfo": FULL}, "warning", "88% of its memory"),
    ],
)
def test_a_gpus_health(answers: dict[str, Any], state: str, text: str) -> None:
    (gpu,) = gpus.read_gpus(fake_nvml(Name="NVIDIA H200", **answers))
    finding = only(gpus.check_gpus([gpu], workers=1))
    assert finding.state == state
    assert text in finding.message


def test_more_workers_than_gpus_is_an_error() -> None:
    found = list(gpus.check_gpus(gpus.read_gpus(fake_nvml(Name=b"old")), workers=8))
    assert found[1].remedy == "--nproc-per-node 1"


def test_xids_are_counted_by_device_and_told_apart_by_whose_fault_they_are() -> None:
    fallen = "3,1,1,-;NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', GPU has fallen off the bus."
    crashed = "3,2,2,-;NVRM: Xid (PCI:0000:17:00): 31, pid=7, MMU Fault"
    found = list(gpus.check_xids(["6,0,0,-;Linux version 6.1", crashed, fallen, fallen]))
    assert states(found) == ["warning", "error"]
    assert "Xid 79 of PCI:0000:65:00 in the kernel's log, 2 times" in found[1].message


@pytest.mark.parametrize(("text", "state"), [("32768\t60999", "ok"), ("50000\t51000", "warning")])
def test_the_range_of_ports(host: Host, text: str, state: str) -> None:
    put(host.proc / "sys/net/ipv4/ip_local_port_range", text)
    assert only(network.check_port_range(host)).state == state


@pytest.mark.parametrize(
    ("limit", "state"), [((1024, 524288), "ok"), ((300, 524288), "warning"), ((300, 300), "error"), ((-1, -1), "ok")]
)
def test_open_files_against_the_size_of_the_job(limit: tuple[int, int], state: str) -> None:
    assert only(limits.check_descriptors(limit, world_size=64)).state == state


def test_locked_memory_matters_where_there_is_rdma(host: Host) -> None:
    assert only(limits.check_memlock((65536, 65536), host)).state == "ok"
    (host.sys / "class/infiniband/mlx5_0").mkdir(parents=True)
    refused = only(limits.check_memlock((65536, 65536), host))
    assert (refused.state, "mlx5_0" in refused.message) == ("error", True)
    assert only(limits.check_memlock((UNLIMITED, UNLIMITED), host)).state == "ok"


def test_the_tightest_control_group_above_counts(host: Host) -> None:
    put(host.proc / "meminfo", "MemTotal:       65536000 kB\n")
    put(host.proc / "self/cgroup", "0::/jobs.slice/train.service\n")
    assert only(limits.check_memory(host, 4)).state == "ok"
    assert "does not bound" in only(limits.check_pids(host, 4)).message
    put(host.sys / "fs/cgroup/jobs.slice/train.service/memory.max", "max\n")
    put(host.sys / "fs/cgroup/jobs.slice/memory.max", "1000000000\n")
    put(host.sys / "fs/cgroup/jobs.slice/train.service/pids.max", "100\n")
    memory, pids = only(limits.check_memory(host, 4)), only(limits.check_pids(host, 4))
    assert (memory.state, "/jobs.slice;" in memory.message) == ("error", True)
    assert (pids.state, "/jobs.slice/train.service" in pids.message) == ("warning", True)


@pytest.mark.parametrize(
    ("setting", "value"), [("panic_on_oom", "1"), ("overcommit_memory", "2"), ("oom_kill_allocating_task", "1")]
)
def test_oom_settings_that_hurt(host: Host, setting: str, value: str) -> None:
    for name in ("panic_on_oom", "overcommit_memory", "oom_kill_allocating_task"):
        put(host.proc / "sys/vm" / name, "0\n")
    assert states(limits.check_oom(host)) == ["ok"]
    put(host.proc / "sys/vm" / setting, value)
    found = list(limits.check_oom(host))
    assert (found[0].state, setting in found[0].message) == ("warning", True)


def test_shared_memory_against_what_the_newest_checkpoint_needs(host: Host, tmp_path: Path) -> None:
    assert only(storage.check_shm(host.shm, used=True, state_bytes=1000)).state == "ok"
    short = only(storage.check_shm(host.shm, used=True, state_bytes=1 << 60))
    assert (short.state, "docker --shm-size" in short.remedy) == ("warning", True)
    assert only(storage.check_shm(tmp_path / "none", used=True, state_bytes=None)).state == "error"


def test_a_checkpoint_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    room, speed = storage.check_directory(str(tmp_path / "not" / "yet"), None)
    assert (room.state, "will be made" in room.message) == ("ok", True)
    assert "64 MiB" in speed.message
    assert list(tmp_path.iterdir()) == []
    assert only(storage.check_directory("s3://bucket/x", None)).state == "ok"
    assert only(storage.check_directory(None, None)).state == "warning"
    (tmp_path / "file").write_text("")
    assert only(storage.check_directory(str(tmp_path / "file"), None)).state == "error"


def test_room_is_compared_with_the_newest_checkpoint(tmp_path: Path) -> None:
    directory = str(tmp_path / "ckpt")
    assert storage.newest_state_bytes(directory) is None
    manager = CheckpointManager(directory)
    manager.save(1, {"note": "x" * 1000})
    manager.close()
    size = storage.newest_state_bytes(directory)
    assert size is not None and size > 0
    full, _ = storage.check_directory(directory, 1 << 60)
    assert (full.state, "elasticd checkpoints prune" in full.remedy) == ("error", True)


def test_a_speed_is_what_was_written_over_what_it_took(tmp_path: Path) -> None:
    speed = storage.measure(tmp_path, 8 << 20)
    assert speed.bytes == 8 << 20
    assert speed.seconds > 0
    assert storage.Speed(bytes=100, seconds=2.0).per_second == 50


@pytest.mark.parametrize(
    ("result", "status", "state"), [(0, 0, "ok"), (5, 0, "warning"), (0, 0x40, "warning"), (0, 0x2001, "ok")]
)
def test_time_that_nobody_keeps_is_a_warning(result: int, status: int, state: str) -> None:
    kernel = clock.KernelClock(result=result, status=status, most_error_microseconds=500)
    assert only(clock.check_sync(kernel)).state == state


def test_the_kernels_clock_is_read_without_changing_it() -> None:
    assert clock.kernel_clock().most_error_microseconds >= 0


@pytest.mark.parametrize(("seconds", "state"), [(0.9, "ok"), (-2.9, "ok"), (3.5, "warning"), (-60, "warning")])
def test_a_difference_of_clocks_beyond_the_grain_is_a_warning(seconds: float, state: str) -> None:
    assert only(clock.check_difference("etcd", seconds, 1.0)).state == state


@pytest.mark.parametrize(("timeout", "state"), [(None, "ok"), (90.0, "error"), (150.0, "ok"), (math.inf, "ok")])
def test_systemd_must_wait_for_longer_than_a_drain_may_take(timeout: float | None, state: str) -> None:
    found = only(service.check_stop_timeout("elasticd@job.service", timeout, 120.0))
    assert found.state == state
    if state == "error":
        assert "TimeoutStopSec=150" in found.remedy


def endpoint(name: str, **changes: Any) -> etcd.Endpoint:
    return etcd.Endpoint(**{"name": name, "version": "3.5.1", "cluster_id": 1, "read_seconds": 0.001, **changes})


def test_one_endpoint_of_many_may_be_away_but_not_all() -> None:
    away = {"failure": "Connection refused", "remedy": "start it"}
    assert "error" not in states(etcd.check_endpoints([endpoint("a", **away), endpoint("b")], 5))
    assert states(etcd.check_endpoints([endpoint("a", **away), endpoint("b", **away)], 5)) == ["error", "error"]


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({"read_seconds": 1.0}, "error", "a renewal has 0.83 s"),
        ({"read_seconds": 0.2}, "warning", "200.0 ms"),
        ({"version": "3.3.27"}, "error", "3.3.27"),
        ({"version": ""}, "warning", "does not tell"),
        ({"clock_ahead_seconds": 30.0}, "warning", "30.0 s ahead"),
        ({"cluster_id": 2}, "error", "different clusters"),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_named(changes: dict[str, Any], state: str, text: str) -> None:
    found = [f for f in etcd.check_endpoints([endpoint("a", **changes), endpoint("b")], 5) if f.state != "ok"]
    assert only(found).state == state
    assert text in found[0].message


def record(node_id: str, **changes: Any) -> str:
    own = {name: changes.pop(name) for name in ("settings", "program") if name in changes}
    node = Node(
        node_id=node_id, addr="10.0.0.9", slots=1, **{"settings": "--nnodes=1:2", "program": "train.py 5a", **own}
    )
    return NodeRecord(node=node, identity=own_identity(), version="0.1.0", **changes).to_json()


@pytest.mark.parametrize(
    ("text", "here", "state"),
    [
        (record("n2"), "0.1.0", "ok"),
        (record("n2"), "0.2.0", "warning"),
        (record("n2", protocol=9), "0.1.0", "error"),
        (record("n2", settings="--nnodes=1:3"), "0.1.0", "error"),
        (record("n2", program="train.py 77"), "0.1.0", "warning"),
        ("{}", "0.1.0", "warning"),
    ],
)
def test_peers_of_another_version_protocol_or_settings(text: str, here: str, state: str) -> None:
    mine = record("n1", protocol=99)
    own = {"version": here, "protocol": 1, "settings": "--nnodes=1:2", "program": "train.py 5a"}
    found = list(etcd.check_peers([mine, text], node_id="n1", **own))
    assert found[0].state == state
    if state != "ok":
        assert "n2" in found[0].message or text == "{}"


def test_the_report_has_a_line_each_a_sum_and_no_colours_in_a_file(tmp_path: Path) -> None:
    findings = [ok("a", "fine"), Finding("longer", "warning", "so so", "do it"), Finding("c", "error", "bad", "fix")]
    path = tmp_path / "report"
    with path.open("w") as file:
        print_text(findings, file)
    text = path.read_text()
    assert "\x1b" not in text
    assert "warning  longer  so so\n" in text
    assert "-> do it" in text
    assert text.endswith("this node is not fit to train: 1 ok, 1 warning, 1 error\n")
    assert json.loads(as_json(findings))[1] == {
        "check": "longer", "state": "warning", "message": "so so", "remedy": "do it"
    }  # fmt: skip
    assert (exit_code(findings), exit_code(findings[:2])) == (1, 0)
    assert summary([]) == "this node is fit to train: 0 ok, 0 warnings, 0 errors"
