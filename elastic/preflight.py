"""`elasticd doctor --preflight`: all nodes of a job meet, and measure each pair and one all-reduce over all.

Meets below the job's own prefix in etcd, where a role for the job alone may write, and on a TCPStore as a round has it.
Each pair has a process group of its own: one that is broken fails alone and is named, where a group over all would fail
as a whole and name nobody. Everything is bounded, a frozen store included: it obeys no timeout, so the clock is kept
outside the thread that measures.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # what torch.distributed exports, with their types
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters

from elastic.checks.finding import Finding, error, ok
from elastic.checks.pairs import Pair, judge, merged, tournament
from elastic.config import JobConfig
from elastic.errors import ElasticError
from elastic.passing import begin
from elastic.rendezvous.records import PREFLIGHT
from elastic.rendezvous.torchrun import BACKEND, TorchrunHandler, create_handler

logger = logging.getLogger(__name__)

T = TypeVar("T")
Group = Any  # a ProcessGroupGloo or ProcessGroupNCCL, of whose collectives torch's stubs know nothing

_LAST_CALL_SECONDS = 30.0  # people start it on their nodes by hand
_PAIR_SECONDS = 10.0
_PINGS = 20
_REPEATS = 3
_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}


@dataclasses.dataclass(slots=True, kw_only=True)
class _Progress:
    """What the measuring thread has found so far, and what it waits for; read by the other one when time is over."""

    pairs: list[Pair] = dataclasses.field(default_factory=list)
    waits_for: str = "the others"
    all_reduce: Finding | None = None
    failure: str = ""


def preflight(config: JobConfig, environ: MutableMapping[str, str], timeout_seconds: float) -> Iterator[Finding]:
    """Findings on all pairs, the same on each node. Every node of the job runs it at the same time."""
    if config.rdzv_backend != "etcd3":
        yield ok("preflight", "one node: there is no pair to measure")
        return
    environ.update(config.nccl)
    environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a broken pair is an error then, not the end of this process
    handler: TorchrunHandler | None = None
    try:
        handler = _handler(config, timeout_seconds)
        info = handler.next_rendezvous()
    except (RendezvousError, ElasticError) as exc:
        why = (handler.trouble if handler is not None else "") or str(exc)
        yield error("preflight", f"the nodes did not meet: {why}", "run the same command on every node at the same "
                    "time; a store that does not answer is behind a broken pair")  # fmt: skip
    else:
        names = dict(enumerate(handler.node_ids))
        yield from _bounded(
            _Mesh(store=info.store, rank=info.rank, names=names, seconds=timeout_seconds), timeout_seconds
        )
    finally:
        if handler is not None:
            handler.shutdown()


def _handler(config: JobConfig, timeout_seconds: float) -> TorchrunHandler:
    access = {"ca": config.etcd_ca, "cert": config.etcd_cert, "key": config.etcd_key, "user": config.etcd_user}
    return create_handler(
        RendezvousParameters(
            backend=BACKEND,
            endpoint=config.rdzv_endpoint,
            run_id=f"{config.run_id}/{PREFLIGHT}",
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            node_id=config.node_id,
            lease_ttl=config.lease_ttl_seconds,
            last_call=min(_LAST_CALL_SECONDS, timeout_seconds / 3),
            join_timeout=timeout_seconds,
            store_timeout=timeout_seconds / 4,
            **access,
        )
    )


def _bounded(mesh: _Mesh, timeout_seconds: float) -> Iterator[Finding]:
    """What the mesh finds within this time."""
    thread = threading.Thread(target=mesh.measure, name="doctor-preflight", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    progress, me = mesh.progress, mesh.names[mesh.rank]
    if thread.is_alive():
        message = f"{me} still waits for {progress.waits_for}, though --preflight-timeout is over"
        remedy = "give it more time: each pair takes a second or more"
        if mesh.rank != 0:  # calls to the store and to groups end in time as long as the store's host lives
            message += f": node {mesh.names[0]}, which holds the store, does not answer"
            remedy = f"look at {mesh.names[0]}: is it frozen, or its network cut?"
        yield error("preflight", message, remedy)
    elif progress.failure:
        message = f"{me} stopped while it waited for {progress.waits_for}: {progress.failure}"
        yield error("preflight", message, "look at that node, and run it again on all")
    yield from judge(merged(progress.pairs), mesh.names)
    if progress.all_reduce is not None:
        yield progress.all_reduce


class _Mesh:
    """This node's part: its pairs one after another, in step with the other nodes."""

    def __init__(self, *, store: Store, rank: int, names: Mapping[int, str], seconds: float) -> None:
        self.rank = rank
        self.names = names
        self.progress = _Progress()
        self._store: Any = store  # a TCPStore, whose `clone` is not in torch's stubs either
        self._pair_seconds = min(_PAIR_SECONDS, seconds / 6)
        self._silent: set[int] = set()  # nodes that were not there at the end of a round
        on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        self._backend = "nccl" if on_gpu else "gloo"
        self._device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")

    def measure(self) -> None:
        """The body of the measuring thread."""
        try:
            self._store.set_timeout(timedelta(seconds=self._pair_seconds))
            for number, partners in enumerate(tournament(len(self.names))):
                self._meet(number, partners.get(self.rank))
            self._collect()
            if not any(pair.failure for pair in self.progress.pairs):
                self.progress.all_reduce = self._all_reduce()
            self._arrive("end")
        except (RuntimeError, ValueError) as exc:  # of torch's stores and groups; a Pair that is none
            self.progress.failure = _first_line(exc)

    def _meet(self, number: int, partner: int | None) -> None:
        """One round of the tournament; ends when everybody has ended it, or is known to be silent."""
        if partner is not None:
            left, right = sorted((self.rank, partner))
            self.progress.waits_for = f"{self.names[partner]}, its partner in a pair"
            logger.info("preflight: measuring %s - %s", self.names[left], self.names[right])
            pair = self._pair(left, right, is_silent=partner in self._silent)
            self.progress.pairs.append(pair)
            self._tell(f"pair/{left}-{right}/{self.rank}", pair.to_json())
        self._arrive(f"round/{number}")

    def _pair(self, left: int, right: int, *, is_silent: bool) -> Pair:
        if is_silent:
            return Pair(left=left, right=right, failure="not measured: one of them had stopped to answer")
        try:
            pings, seconds = self._bounded(lambda: self._transfers(f"{left}-{right}", [left, right]))
        except RuntimeError as exc:
            return Pair(left=left, right=right, failure=_first_line(exc))
        return Pair(
            left=left,
            right=right,
            bytes_per_second=_BYTES[self._backend] / seconds,  # each way: an all-reduce of two sends the buffer once
            round_trip_seconds=pings,
        )

    def _all_reduce(self) -> Finding:
        count = len(self.names)
        self.progress.waits_for = "all nodes, in the all-reduce"
        try:
            _, seconds = self._bounded(lambda: self._transfers("all", list(self.names)))
        except RuntimeError as exc:
            remedy = "every pair works alone: look for a limit on connections, or a node that is overloaded"
            return error("all-reduce", f"over {count} nodes ({self._backend}): {_first_line(exc)}", remedy)
        size = _BYTES[self._backend]
        bus = 2 * (count - 1) / count * size / seconds
        shown = f"{size >> 20} MiB over {count} nodes ({self._backend}) in {seconds * 1000:.1f} ms"
        return ok("all-reduce", f"{shown}, bus bandwidth {bus / 1e9:.2f} GB/s")

    def _bounded(self, act: Callable[[], T]) -> T:
        """gloo's listening end waits on for a peer that cannot connect: it is left behind when its time is over."""
        try:
            return begin(act, "doctor-pair").result(self._pair_seconds)
        except FutureTimeoutError as exc:
            raise RuntimeError(f"no connection, or no transfer, within {self._pair_seconds:g} s") from exc
        except OSError as exc:  # no room for a thread
            raise RuntimeError(str(exc)) from exc

    def _transfers(self, name: str, ranks: list[int]) -> tuple[float, float]:
        """Median seconds of a tiny all-reduce of these nodes, and those of the large one: the fastest of a few."""
        group = self._group(name, ranks)
        pings = [self._seconds(group, torch.ones(1, device=self._device)) for _ in range(_PINGS)]
        buffer = torch.ones(_BYTES[self._backend] // 4, device=self._device)
        self._seconds(group, buffer)  # makes what connections and buffers it needs
        return statistics.median(pings), min(self._seconds(group, buffer) for _ in range(_REPEATS))

    def _seconds(self, group: Group, buffer: torch.Tensor) -> float:
        began = time.monotonic()
        group.allreduce([buffer]).wait()
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        return time.monotonic() - began

    def _group(self, name: str, ranks: list[int]) -> Group:
        """A process group that torch's own bookkeeping does not know: it counts groups, and after one that has failed
        two nodes would count differently and look for each other under different keys."""
        store = PrefixStore(f"group/{name}", self._store.clone())  # one client is one lock, and its waits may be long
        timeout = timedelta(seconds=self._pair_seconds)
        rank, size = ranks.index(self.rank), len(ranks)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def _collect(self) -> None:
        """What the others have found. A pair of which neither end has told is broken."""
        self.progress.waits_for = f"{self.names[0]}, which holds the store"
        for left, right in itertools.combinations(self.names, 2):
            told = [key for rank in (left, right) if self._store.check([key := f"pair/{left}-{right}/{rank}"])]
            self.progress.pairs += [Pair.from_json(self._store.get(key)) for key in told]
            if not told:
                failure = "neither of the two has told what came out"
                self.progress.pairs.append(Pair(left=left, right=right, failure=failure))

    def _tell(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def _arrive(self, where: str) -> None:
        """Wait for all that are not silent; who does not come in time is silent from now on."""
        self._tell(f"{where}/{self.rank}", "1")
        keys = {rank: f"{where}/{rank}" for rank in self.names if rank not in self._silent}
        self.progress.waits_for = f"{self.names[0]}, which holds the store"
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._pair_seconds + 2))
        except RuntimeError:  # the time is over
            self._silent |= {rank for rank, key in keys.items() if not self._store.check([key])}
            logger.warning("preflight: no answer from %s", ", ".join(self.names[rank] for rank in sorted(self._silent)))


def _first_line(exc: Exception) -> str:
    """torch's messages go on with a stack."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0][:300]
