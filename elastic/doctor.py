"""`elasticd doctor`: is this node fit to train? Reads the job's settings, runs the checks, says what to do.

Owns which checks there are and what each is handed; what they look at is in `elastic/checks`. Nothing is left behind,
and no CUDA context is made.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastic import __version__, values
from elastic.checks import clock, gpus, limits, network, service, software, storage
from elastic.checks.finding import Check, Finding, Host, examine, ok, warning
from elastic.checks.report import as_json, exit_code, print_text
from elastic.config import JobConfig, load, program_of, shared_settings
from elastic.errors import UsageError
from elastic.flags import collect
from elastic.systemctl import stop_timeout, unit_of

_CHECK_SECONDS = 20.0
_USAGE = """elasticd doctor [JOB.toml | flags of elasticd run] [--json] [--preflight]

Is this node fit to train the job? Exit 0: no error, 1: an error, 2: wrong usage. Takes every flag of
`elasticd run`, or its job file; without a script it looks at the node alone.

  --json                  a list of {check, state, message, remedy}
  --preflight             measure the network too: run it on every node of the job at the same time
  --preflight-timeout S   how long to wait for the others, and again for the measurement (default: 120)"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is looked at."""

    config: JobConfig
    job_file: Path | None
    environ: Mapping[str, str]
    host: Host = dataclasses.field(default_factory=Host)

    @property
    def many(self) -> bool:
        return self.config.rdzv_backend == "etcd3"

    @property
    def processes(self) -> int:
        """Of torch on this node: agent, workers and their standbys."""
        return 1 + self.config.nproc_per_node * (2 if self.config.standby else 1)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises: UsageError for settings that `elasticd run` would refuse as well."""
    options, rest = _parser().parse_known_args(argv)
    config, job_file = _job(rest, environ)
    subject = Subject(config=config, job_file=job_file, environ=environ)
    findings = examine(checks(subject), timeout_seconds=_CHECK_SECONDS)
    if options.preflight:
        findings += _preflight(config, options.preflight_timeout)
    if options.json:
        sys.stdout.write(as_json(findings) + "\n")
    else:
        print_text(findings, sys.stdout)
    return int(exit_code(findings))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see elasticd doctor --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="elasticd doctor", usage=_USAGE, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--preflight", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--preflight-timeout", type=values.seconds, default=120.0, help=argparse.SUPPRESS)
    return parser


def _preflight(config: JobConfig, timeout_seconds: float) -> list[Finding]:
    """After the checks, and with whatever they found: a node that stays away would look like a broken network."""
    from elastic.preflight import preflight

    return list(preflight(config, os.environ, timeout_seconds))


def _job(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[JobConfig, Path | None]:
    """The job's settings and the file they come from. Nothing need be named to run: then this module stands for it."""
    arguments = list(argv)
    named = next((i for i, text in enumerate(arguments) if text.endswith(".toml") and _is_alone(arguments, i)), None)
    if named is not None:
        arguments[named : named + 1] = ["--config", arguments[named]]
    given = collect(arguments, environ)
    if not given["training_script"]:
        arguments += ["--module", __name__]
    return load(arguments, environ), given.path


def _is_alone(arguments: Sequence[str], position: int) -> bool:
    return position == 0 or arguments[position - 1] != "--config"


def checks(subject: Subject) -> dict[str, Check]:
    """Every check by its name, ready to be called."""
    config, host = subject.config, subject.host
    descriptors, memlock = limits.own_limits()
    found = functools.lru_cache(maxsize=1)(lambda: network.interfaces(host))
    nvml = functools.lru_cache(maxsize=1)(gpus.load_nvml)
    state_bytes = functools.lru_cache(maxsize=1)(lambda: storage.newest_state_bytes(config.checkpoint_dir))
    shm = Path(subject.environ.get("ELASTICD_SHM_DIR") or host.shm)
    unit = unit_of(subject.job_file.stem) if subject.job_file else None
    most_workers = config.max_nodes * config.nproc_per_node
    made: dict[str, Check] = {
        "software": lambda: software.check_versions(software.installed(host, gpus.driver_cuda(nvml()))),
        "etcd client": lambda: software.check_etcd_client(subject.many),
        "gpus": lambda: _gpus(nvml(), config.nproc_per_node),
        "xid": lambda: _xids(nvml()),
        "interfaces": lambda: network.check_interfaces(found()),
        "address": lambda: _address(subject, found()),
        "own name": lambda: network.check_own_name(socket.gethostname(), subject.environ, found(), many=subject.many),
        "nccl": lambda: network.check_nccl(dict(config.nccl), found()),
        "http port": lambda: network.check_http(config.http_host, config.http_port),
        "http access": lambda: network.check_exposure(
            config.http_host, token=config.http_token_file is not None, tls=config.http_cert is not None
        ),
        "port range": lambda: network.check_port_range(host),
        "shared memory": lambda: storage.check_shm(shm, used=config.memory_checkpoints, state_bytes=state_bytes()),
        "checkpoints": lambda: storage.check_directory(config.checkpoint_dir, state_bytes()),
        "descriptors": lambda: limits.check_descriptors(descriptors, most_workers),
        "memlock": lambda: limits.check_memlock(memlock, host),
        "memory": lambda: limits.check_memory(host, subject.processes),
        "pids": lambda: limits.check_pids(host, subject.processes),
        "oom": lambda: limits.check_oom(host),
        "time sync": lambda: clock.check_sync(clock.kernel_clock()),
    }
    if unit is not None:
        made["unit"] = lambda: service.check_stop_timeout(unit, stop_timeout(unit), config.stop_grace_seconds)
    if subject.many:
        made["etcd"] = lambda: _etcd(subject)
    return made


def _gpus(nvml: Any, workers: int) -> Iterator[Finding]:
    if nvml is None:
        yield ok("gpus", "none looked at: nvidia-ml-py is not installed (elasticd[gpu]) or finds no driver")
    else:
        yield from gpus.check_gpus(gpus.read_gpus(nvml), workers)


def _xids(nvml: Any) -> Iterator[Finding]:
    if nvml is None:
        return
    try:
        yield from gpus.check_xids(gpus.kernel_log())
    except OSError as exc:
        yield warning("xid", f"the kernel's log cannot be read: {exc.strerror}", "run elasticd doctor as root once")


def _address(subject: Subject, found: Sequence[network.Interface]) -> Iterator[Finding]:
    """The address by the same rule as the agent's own."""
    config = subject.config
    address, local = config.local_addr or "127.0.0.1", False
    if subject.many:
        from elastic.rendezvous.etcd_config import parse_endpoints
        from elastic.rendezvous.identity import address_towards

        endpoints = parse_endpoints(config.rdzv_endpoint)
        local = all(host in ("localhost", "127.0.0.1", "::1") for host, _ in endpoints)
        address = config.local_addr or address_towards(endpoints)
    yield from network.check_address(address, found, many=subject.many, store_is_local=local)
    yield from network.check_reverse(address, network.reverse)


def _etcd(subject: Subject) -> Iterator[Finding]:
    from elastic.checks import etcd
    from elastic.rendezvous.etcd_config import EtcdConfig, parse_endpoints
    from elastic.rendezvous.records import PROTOCOL

    config = subject.config
    access = EtcdConfig(
        endpoints=parse_endpoints(config.rdzv_endpoint),
        ca=config.etcd_ca,
        cert=config.etcd_cert,
        key=config.etcd_key,
        user=config.etcd_user,
        password=subject.environ.get("ELASTICD_ETCD_PASSWORD"),
    )
    endpoints = etcd.ask_endpoints(access, config.run_id)
    yield from etcd.check_endpoints(endpoints, config.lease_ttl_seconds)
    for address, endpoint in zip(access.endpoints, endpoints, strict=True):
        if not endpoint.failure:
            yield from etcd.check_write(access, address, config.run_id)
            yield from etcd.check_peers(
                endpoint.records,
                node_id=config.node_id,
                version=__version__,
                protocol=PROTOCOL,
                settings=shared_settings(config),
                program=program_of(config),
            )
            return
