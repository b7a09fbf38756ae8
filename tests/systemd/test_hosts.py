"""Three hosts with a real systemd, an etcd member on each, a job installed by `elasticd install`; and what may happen.

The tests share the hosts and the run, in their order: each finds the job training on all three and leaves it so. What
all of it has done to the samples is looked at in the end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.demo.ledger import read_ledger
from tests.support.job import wait_for
from tests.support.prometheus import Prometheus, prometheus, static
from tests.systemd.hosts import Host, what_is_missing
from tests.systemd.lab import ELASTICD, SHARED, TTL, UNIT, Lab, lab

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing()),
]
SOLO = f"""
module = "elastic.demo.bytelm"
args = ["--device=cpu", "--layers=1", "--width=16", "--heads=2", "--context=16", "--samples=1000", "--global-batch=4",
    "--micro-batch=2", "--steps=1000000", "--step-seconds=0.05", "--log-every=1000", "--ledger={SHARED}/solo.jsonl"]
checkpoint_dir = "/var/lib/elasticd/solo/checkpoints"
checkpoint_every = 1000000
memory_every = 1
http = "127.0.0.1:0"
"""
SLACK_SECONDS = 1.5  # after the lease, for the others to go on


@pytest.fixture(scope="module")
def job() -> Iterator[Lab]:
    with lab() as found:
        yield found


@pytest.fixture(scope="module")
def monitor(job: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus outside of the hosts, as from its first test on; the job trains then."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus (Debian) is not on PATH")
    targets = static([f"{host.address}:9431" for host in job.hosts])
    with prometheus(tmp_path_factory.mktemp("monitor"), targets, agents=len(job.hosts), every="2s") as server:
        yield server


@pytest.fixture(autouse=True)
def story(job: Lab) -> Iterator[None]:
    """What a failure is to be understood by."""
    yield
    sys.stdout.write(job.story())


@pytest.fixture
def bystander(job: Lab) -> Host:
    """A host that may vanish without etcd having to choose another leader, which makes all leases longer."""
    leader = job.etcd_leader()
    return next(host for host in job.hosts if host is not leader)


def others(job: Lab, host: Host) -> list[Host]:
    return [other for other in job.hosts if other is not host]


def wait_warm(job: Lab, *machines: Host) -> None:
    """Until a standby is warm on each: what follows is then told in tenths of a second."""

    def is_warm(host: Host) -> bool:
        status = job.status(host)
        return status is not None and all(worker["standby"] for worker in status["workers"])

    wait_for(lambda: all(is_warm(host) for host in machines or job.hosts), seconds=90, what="warm standbys")


def test_a_job_is_installed_started_and_trains(job: Lab) -> None:
    for host in job.hosts:
        host.run("systemctl", "enable", UNIT)
    job.systemctl("start")
    job.wait_training()
    for host in job.hosts:
        wait_for(
            lambda host=host: host.show(UNIT, "StatusText").startswith("running: 3 ranks on 3 nodes, round 1, step")
        )
        assert float(host.show(UNIT, "TimeoutStopUSec").removeprefix("1min ").removesuffix("s")) == 30  # 60 s + 30 s
        verified = host.run("systemd-analyze", "verify", UNIT)
        assert verified.stdout + verified.stderr == ""
        environ = host.run("sh", "-c", f"cat /proc/{job.workers(host)[0]}/environ").stdout.split("\0")
        assert not [line for line in environ if line.startswith(("NOTIFY_SOCKET", "WATCHDOG_"))]


@pytest.mark.usefixtures("monitor")
def test_a_host_that_loses_its_power_is_done_without_and_let_in_again(job: Lab, bystander: Host) -> None:
    wait_warm(job)
    off_at = time.time()
    bystander.power_off()
    went_on = job.first_step_after(off_at, seconds=60)
    bystander.boot()
    assert went_on["time"] - off_at <= TTL + SLACK_SECONDS, job.story()
    job.wait_training(*job.hosts)


def test_a_host_without_network_is_fenced_and_let_in_again(job: Lab, bystander: Host) -> None:
    workers = job.workers(bystander)
    cut_at = time.monotonic()
    bystander.cut()
    try:
        wait_for(lambda: not any(is_alive(bystander, pid) for pid in workers), seconds=TTL, what="its workers end")
        job.wait_training(*others(job, bystander))
        time.sleep(max(0.0, cut_at + 3 * TTL - time.monotonic()))
        assert bystander.show(UNIT, "ActiveState") == "active"
    finally:
        bystander.heal()
    job.wait_training()


def is_alive(host: Host, pid: int) -> bool:
    return host.run("test", "-d", f"/proc/{pid}", check=False).returncode == 0


def test_a_frozen_agent_is_restarted_by_the_watchdog(job: Lab) -> None:
    host = job.hosts[0]
    agent = job.agent(host)
    host.run("kill", "-STOP", str(agent))
    wait_for(lambda: job.agent(host) not in (0, agent), seconds=60, what="another agent")
    job.wait_training()
    assert "Watchdog timeout" in host.journal(UNIT)
    assert host.show(UNIT, "NRestarts") == "1"


def test_an_agent_that_is_killed_gives_its_lease_back_at_once(job: Lab) -> None:
    """The others go on, and it comes back by itself."""
    host = job.hosts[1]
    wait_warm(job)
    killed_at = time.time()
    host.run("kill", "-KILL", str(job.agent(host)))
    went_on = job.first_step_after(killed_at, seconds=60)
    assert "gave back the lease" in host.journal(UNIT)
    assert went_on["time"] - killed_at < TTL + SLACK_SECONDS, job.story()
    job.wait_training()


def test_a_worker_killed_for_memory_does_not_take_the_unit(job: Lab) -> None:
    host = job.hosts[2]
    agent, restarts = job.agent(host), host.show(UNIT, "NRestarts")
    (worker,) = job.workers(host)
    number = job.wait_training()
    use_up_memory(beside=host.outside(worker))
    wait_for(lambda: not is_alive(host, worker), what="the worker is gone")
    assert job.wait_training() > number
    assert (job.agent(host), host.show(UNIT, "NRestarts")) == (agent, restarts)
    assert (host.show(UNIT, "OOMPolicy"), host.show(UNIT, "ActiveState")) == ("continue", "active")
    assert "SIGKILL" in host.journal(UNIT)


def use_up_memory(beside: int) -> None:
    """The kernel has to kill one of two that share what memory there is, and is told to take `beside` first."""
    group = Path("/sys/fs/cgroup/memory/elasticd-test")
    if not group.parent.is_dir():
        pytest.skip("needs the memory controller of cgroups v1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("32M")
        (group / "cgroup.procs").write_text(str(beside))
        Path(f"/proc/{beside}/oom_score_adj").write_text("1000")
        hog = f"open('{group}/cgroup.procs', 'w').write('0'); bytearray(2**28)"
        subprocess.run([sys.executable, "-c", hog], check=False, timeout=30)
        assert int((group / "memory.oom_control").read_text().split()[-1]) >= 1, "the OOM killer has struck"
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_the_loss_of_etcds_leader_stops_nobody(job: Lab) -> None:
    number = job.wait_training()
    leader = job.etcd_leader()
    leader.run("kill", "-KILL", leader.show("elasticd-etcd", "MainPID"))
    wait_for(lambda: job.etcd_leader() is not leader, seconds=30)
    step = job.newest()["step"]
    wait_for(lambda: job.newest()["step"] >= step + 100, seconds=60, what="100 more steps")
    assert job.newest()["round"] == number, job.story()


def test_a_reload_reopens_logs_and_training_goes_on(job: Lab) -> None:
    number = job.wait_training()
    job.systemctl("reload")
    step = job.newest()["step"]
    wait_for(lambda: job.newest()["step"] >= step + 20, seconds=30)
    assert job.newest()["round"] == number
    assert "received SIGHUP" in job.hosts[0].journal(UNIT)


def test_a_stop_during_a_save_commits_the_last_step_and_leaves_nothing(job: Lab) -> None:
    job.wait_saving()
    job.systemctl("stop")
    assert job.committed_step == job.newest()["step"], job.story()
    for host in job.hosts:
        assert host.show(UNIT, "ActiveState") == "inactive"
        assert host.show(UNIT, "ExecMainStatus") == "143"
        assert host.show(UNIT, "TasksCurrent") in ("[not set]", "0"), "the control group is empty"
        last = host.journal(UNIT).splitlines()[-4:]
        assert any("the job has drained" in line for line in last), last
        assert any("Deactivated successfully" in line for line in last), last
        assert job.leftovers(host) == ""
    job.systemctl("start")
    job.wait_training()


def test_when_all_hosts_lose_their_power_the_job_goes_on_after_the_boot(job: Lab) -> None:
    committed = job.committed_step
    for host in job.hosts:
        host.power_off()
    begun = job.newest()
    for host in job.hosts:
        host.boot(wait=False)
    for host in job.hosts:
        host.wait_booted()
    job.wait_training()
    assert job.newest()["round"] > begun["round"]
    assert job.newest()["step"] >= committed


def test_a_service_that_fails_fast_is_given_up_and_says_so(job: Lab) -> None:
    host = job.hosts[0]
    drop_in = host.disk / "root/etc/systemd/system/elasticd@fast.service.d/crash.conf"
    drop_in.parent.mkdir()
    # The agent of this one dies at once; the rest is the unit's.
    drop_in.write_text(
        "[Service]\nExecStart=\nExecStart=/bin/sh -c 'kill -SEGV $$$$'\nExecStopPost=\nRestartSec=50ms\n"
        "WorkingDirectory=/\n"
    )
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "elasticd@fast", check=False)
    wait_for(lambda: host.show("elasticd@fast", "ActiveState") == "failed", seconds=60)
    assert "Start request repeated too quickly" in host.journal("elasticd@fast")
    assert host.journal("elasticd@fast").count("status=11/SEGV") == 10


def test_a_job_that_fails_is_not_tried_again_and_its_last_words_are_kept(job: Lab) -> None:
    host = job.hosts[0]
    (job.shared / "broken.py").write_text('import sys\nsys.exit("these are the last words")\n')
    (job.shared / "broken.toml").write_text(f'script = "{SHARED}/broken.py"\nmax_restarts = 0\nhttp = "127.0.0.1:0"\n')
    host.run(str(ELASTICD), "install", f"{SHARED}/broken.toml")
    host.run("systemctl", "start", "elasticd@broken", check=False)
    wait_for(lambda: host.show("elasticd@broken", "ActiveState") == "failed", seconds=60)
    assert host.show("elasticd@broken", "NRestarts") == "0"
    assert host.show("elasticd@broken", "ExecMainStatus") == "1"
    journal = host.journal("elasticd@broken")
    assert "these are the last words" in journal
    assert "the job has failed" in journal
    assert host.run(str(ELASTICD), "uninstall", "broken").returncode == 0


def test_a_killed_agent_of_a_job_on_one_host_loses_no_step(job: Lab) -> None:
    """Steps that memory alone held are on disk before systemd starts the next agent, which goes on from there."""
    host, unit, ledger = job.hosts[0], "elasticd@solo", job.shared / "solo.jsonl"
    (job.shared / "solo.toml").write_text(SOLO)
    host.run(str(ELASTICD), "install", f"{SHARED}/solo.toml")
    host.run("systemctl", "start", unit)

    def trained(round_: int) -> list[int]:
        entries = read_ledger(ledger.read_text()).entries if ledger.exists() else []
        return [entry.step for entry in entries if entry.round == round_]

    wait_for(lambda: len(trained(1)) > 20, seconds=60, what="20 steps")
    host.run("kill", "-KILL", host.show(unit, "MainPID"))
    wait_for(lambda: len(trained(2)) > 20, seconds=90, what="20 steps of the next agent")
    assert host.show(unit, "NRestarts") == "1"
    host.run("systemctl", "stop", unit)
    journal = host.journal(unit)
    found = re.search(r"step (\d+), which memory alone held, is saved", journal)
    assert found, journal
    saved = int(found[1])
    assert min(trained(2)) == saved + 1
    assert saved >= max(trained(1)) - 1, "the step that the kill interrupted may not have been kept"
    assert host.run(str(ELASTICD), "uninstall", "solo").returncode == 0


def test_a_prometheus_has_seen_all_of_it(job: Lab, monitor: Prometheus) -> None:
    job.wait_training()
    wait_for(lambda: len(monitor.query('elasticd_step{job="elasticd"}')) == 3, seconds=30, what="three ranks, no ghost")
    restarts = {
        sample["metric"]["reason"]: float(sample["value"][1])
        for sample in monitor.query('sum by (reason) (increase(elasticd_restarts_total{job="elasticd"}[1h]))')
    }
    for reason in ("node_lost", "node_joined", "worker_failed"):
        assert restarts[reason] > 0, restarts
    (goodput,) = {sample["value"][1] for sample in monitor.query("max(elasticd_goodput_ratio)")}
    assert 0 < float(goodput) < 1


def test_after_all_of_it_every_sample_was_used_once_in_its_step(job: Lab) -> None:
    job.systemctl("stop")
    found = job.audit()
    assert found.is_right, found
    assert found.steps == job.committed_step
    for host in job.hosts:
        assert job.leftovers(host) == ""
        host.run(str(ELASTICD), "uninstall", "lab")
        assert str(ELASTICD) not in host.run("systemctl", "cat", UNIT, check=False).stdout
