"""The model as this rank runs it: wrapped for DDP or DataParallel or not at all, its gradients and its buffers."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastic.errors import UsageError
from elastic.training.comms import CommTotals, GradientComms
from elastic.training.stopwatch import Stopwatch
from elastic.training.trainer_config import TrainerConfig

logger = logging.getLogger(__name__)
_BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024  # as DDP's own broadcast of buffers


class Replica:
    """`model` is the bare module (state and evaluation), `module` what a training forward calls."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        *,
        world_size: int,
        device: torch.device,
        on_compute_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.module: nn.Module = model
        self.syncs_skipped = 0
        self._distributed = world_size > 1
        self._comms: GradientComms | None = None
        self._ddp: DistributedDataParallel | None = None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffer_homes = [m for m in model.modules() if m._buffers]
        self._buffers_before: list[tuple[int, int]] = []
        self._broadcast_bytes, self._broadcasting = 0, Stopwatch(device)
        if config.compile:
            model.compile(backend=config.compile_backend)
        if self._distributed:
            self._comms = GradientComms(config, world_size=world_size, device=device, on_compute_end=on_compute_end)
            self._ddp = _wrap(model, config, device)
            self._comms.attach(self._ddp)
            self.module = self._ddp
        elif config.parallel == "dp":
            self.module = DataParallel(model)

    @property
    def distributed(self) -> bool:
        return self._distributed

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """What the last synchronised backward left; the same on every rank."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def forward_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-step: gradients are synchronised in a rank's last one only."""
        if last or self._ddp is None:
            return nullcontext()
        self.syncs_skipped += 1
        return self._ddp.no_sync()

    def backward(self, loss: torch.Tensor, *, counts: bool, last: bool) -> None:
        """Add the gradients of `loss`; after the last micro-step of all ranks they are the sums over the world.

        A micro-batch that does not count (weight 0, or run by a rank without a share) may hold inf or NaN. In the last
        micro-step it must take part in the reduction all the same: the gradients gathered so far take its place.
        """
        if not counts:
            if not (last and self._comms is not None):
                return
            self._comms.substitute = {p: p.grad.clone() for p in self._parameters if p.grad is not None}
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if last and self._comms is not None:
            self._comms.backward_returned()
            self._comms.substitute = None

    @contextmanager
    def dry(self) -> Iterator[None]:
        """A backward inside reaches DDP's bookkeeping and nothing else: no reduction, no gradient, no buffer stays.

        DDP orders its buckets by the first synchronised backward, and the order of summation follows (visible from
        three ranks on). Done once before a round's first step, it makes that step sum like any later one.
        """
        saved = [b.clone() for b in self._buffers()]
        if self._comms is not None:
            self._comms.dry = True
        try:
            yield
        finally:
            if self._comms is not None:
                self._comms.dry = False
            for parameter in self._parameters:
                parameter.grad = None
            with torch.no_grad():
                for buffer, before in zip(self._buffers(), saved, strict=True):
                    buffer.copy_(before)

    def _buffers(self) -> list[torch.Tensor]:
        return [b for home in self._buffer_homes for b in home._buffers.values() if b is not None]

    def begin_step(self, micro_steps: int) -> None:
        """Called before a step's first forward: no gradient of the last one is left."""
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers_before = [(id(b), b._version) for b in self._buffers()]
        if self._comms is not None:
            self._comms.step_began(micro_steps)

    def rebuild_buckets(self) -> None:
        """Let DDP order its buckets by its first synchronised backward now, not in its next forward. Collective.

        Called between two steps: the gradients, views of the old buckets, are dropped.
        """
        if self._ddp is not None:
            for parameter in self._parameters:
                parameter.grad = None
            self._ddp.reducer._rebuild_buckets()

    def buffers_changed(self) -> bool:
        """Whether this step's forwards wrote any buffer: ranks agree on it, masks and tables are never sent."""
        return [(id(b), b._version) for b in self._buffers()] != self._buffers_before

    def broadcast_buffers(self) -> None:
        """Every rank takes rank 0's buffers (running statistics differ after a step). Collective."""
        buffers = self._buffers()
        if self._distributed and buffers:
            with self._broadcasting.measured():
                _broadcast_coalesced(dist.distributed_c10d._get_default_group(), buffers, _BROADCAST_CHUNK_BYTES, 0)
            self._broadcast_bytes += sum(b.nbytes for b in buffers)

    def close(self) -> None:
        """Called before the process group is destroyed."""
        if self._comms is not None:
            self._comms.close()

    def compute(self) -> tuple[float, int]:
        """(seconds, micro-steps) of this rank's data, forwards and backwards since the round began, without waiting."""
        return self._comms.compute() if self._comms is not None else (0.0, 0)

    def comm_totals(self) -> CommTotals:
        """What this rank has sent since the round began."""
        if self._comms is None:
            return CommTotals()
        return dataclasses.replace(
            self._comms.totals(),
            broadcast_bytes=self._broadcast_bytes,
            broadcast_seconds=self._broadcasting.seconds(),
        )


def _wrap(model: nn.Module, config: TrainerConfig, device: torch.device) -> DistributedDataParallel:
    options: dict[str, Any] = {}
    if config.bucket_megabytes is not None:
        options["bucket_cap_mb"] = config.bucket_megabytes
    if config.compression == "powersgd" and device.type == "cpu":
        # Its several reductions per bucket run on gloo's threads, in an order that differs between ranks.
        kinds = {p.dtype for p in model.parameters() if p.requires_grad}
        if len(kinds) > 1:
            raise UsageError(
                f"compression 'powersgd' on gloo needs all gradients in one bucket, and the model has parameters of "
                f"{', '.join(sorted(map(str, kinds)))}; choose compression 'fp16' or 'bf16'"
            )
        options["bucket_cap_mb"] = 1 << 20
    with warnings.catch_warnings():
        # torch 2.10+ announces that buffers may be named otherwise; both spellings mean the same here.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            **options,
        )
