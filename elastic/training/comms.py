"""The communication hook of DDP: sums gradients over the ranks, optionally compressed, and counts what that costs.

Sums, not averages: the caller divides once by the global weight. The hook also sees to ranks whose loss must not count:
it puts something else into the bucket before the reduction, because no factor on the loss would get rid of an inf.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from elastic.training.comm_clock import CommClock, make_clock
from elastic.training.trainer_config import Compression, TrainerConfig

logger = logging.getLogger(__name__)

TensorFuture = torch.futures.Future[torch.Tensor]
Reduction = Callable[[GradBucket], TensorFuture]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommTotals:
    """Of this rank since the round began. `seconds`: some reduction was under way; `exposed`: backward waited.

    Bytes are those handed over, not what an algorithm makes of them on the wire.
    """

    bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    syncs: int = 0
    broadcast_bytes: int = 0  # of buffers
    broadcast_seconds: float = 0.0


class _Ending:
    """Told when one reduction is over; an object, so that one can see when it is gone."""

    def __init__(self, clock: CommClock) -> None:
        self._clock, self._began = clock, clock.reduction_began()

    def __call__(self, _: object) -> None:
        self._clock.reduction_ended(self._began)


class _Unpacking:
    """From what the backend gives to what DDP wants, widened into `target` if there is one."""

    def __init__(self, target: torch.Tensor | None) -> None:
        self._target = target

    def __call__(self, done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        value = done.value()[0]
        return value if self._target is None else self._target.copy_(value)


class GradientComms:
    """State of the hook. The trainer sets `substitute` around a backward pass that must contribute something else."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        world_size: int,
        device: torch.device,
        on_compute_end: Callable[[], None],
    ) -> None:
        self.substitute: Mapping[torch.Tensor, torch.Tensor] | None = None
        self.dry = False
        self._clock: CommClock = make_clock(device)
        self._device = device
        self._on_compute_end = on_compute_end
        self._power: Any = None
        self._bytes = self._syncs = 0
        self._callbacks: weakref.WeakSet[_Ending | _Unpacking] = weakref.WeakSet()
        self._reduce = self._make_reduction(config, world_size)

    def attach(self, model: DistributedDataParallel) -> None:
        """Make `model` reduce its gradients through this object."""
        model.register_comm_hook(self, sum_gradients)

    def step_began(self, micro_steps: int) -> None:
        """Called before the first of a step's micro-steps, when its data have not been fetched yet."""
        self._clock.step_began(micro_steps)

    def compute(self) -> tuple[float, int]:
        """(seconds, micro-steps) of data, forward and backward so far, without waiting; on CUDA as far as passed."""
        return self._clock.compute()

    def backward_returned(self) -> None:
        """Called right after a synchronised backward: what lies between the end of its compute and now was waiting."""
        self._syncs += not self.dry
        if not self.dry:
            self._clock.backward_returned()

    def totals(self) -> CommTotals:
        """Counters up to now; on CUDA those of the steps before the last one."""
        return CommTotals(
            bytes=self._bytes,
            seconds=self._clock.busy_seconds(),
            exposed_seconds=self._clock.exposed_seconds(),
            syncs=self._syncs,
        )

    def reduce(self, bucket: GradBucket) -> TensorFuture:
        """One bucket; called by the backward pass, in the same order on all ranks."""
        if self.dry:
            future: TensorFuture = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
            future.set_result(bucket.buffer())
            return future
        if bucket.index() == 0:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._compute_ended)
        if self.substitute is not None:
            self._put_substitute(bucket, self.substitute)
        ending = _Ending(self._clock)
        self._callbacks.add(ending)
        future = self._reduce(bucket)
        future.add_done_callback(ending)
        return future

    def close(self, *, timeout_seconds: float = 5.0) -> None:
        """Called before the process group goes: wait until the backend's threads have let go of our callbacks.

        A thread drops a callback some time after its reduction, and needs the GIL for it. The group's destructor joins
        that thread while it holds the GIL: a run that ends within milliseconds of its last step would never return.
        """
        deadline = time.monotonic() + timeout_seconds
        while len(self._callbacks) and time.monotonic() < deadline:
            time.sleep(0.0005)  # lets other threads have the GIL
        time.sleep(0.005)  # for the callbacks that torch adds of its own

    def _compute_ended(self) -> None:
        self._clock.compute_ended()
        self._on_compute_end()

    @staticmethod
    def _put_substitute(bucket: GradBucket, substitute: Mapping[torch.Tensor, torch.Tensor]) -> None:
        bucket.buffer().zero_()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in substitute:
                gradient.copy_(substitute[parameter])

    def _make_reduction(self, config: TrainerConfig, world_size: int) -> Reduction:
        if config.compression == "powersgd":
            return self._power_reduction(config, world_size)
        narrow: Mapping[Compression, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return lambda bucket: self._sum(bucket.buffer(), narrow.get(config.compression))

    def _sum(self, buffer: torch.Tensor, wire_dtype: torch.dtype | None) -> TensorFuture:
        wire = buffer if wire_dtype is None else buffer.to(wire_dtype)
        self._bytes += wire.numel() * wire.element_size()
        work = dist.all_reduce(wire, op=dist.ReduceOp.SUM, async_op=True)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        unpacking = _Unpacking(None if wire is buffer else buffer)
        self._callbacks.add(unpacking)
        return future.then(unpacking)

    def _power_reduction(self, config: TrainerConfig, world_size: int) -> Reduction:
        """PowerSGD (Vogels et al., 2019). Its error feedback is this rank's own and begins anew in each round."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        state = power.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start_step,
            random_seed=config.seed,
        )

        def reduction(bucket: GradBucket) -> TensorFuture:
            plain, before = state.iter < config.powersgd_start_step, state.total_numel_after_compression
            future = power.powerSGD_hook(state, bucket)
            numel = bucket.buffer().numel() if plain else state.total_numel_after_compression - before
            self._bytes += numel * bucket.buffer().element_size()
            return future.then(lambda done: done.value().mul_(world_size))  # it averages

        return reduction


def sum_gradients(state: GradientComms, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook as DDP wants it."""
    return state.reduce(bucket)
