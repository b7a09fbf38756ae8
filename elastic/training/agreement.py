"""One decision for all ranks: a handful of doubles, summed over the world once per step.

All ranks read the same sums, so they save, stop and skip after the same step, without a store and without waiting for a
device. The reduction runs on a gloo group of its own: its order against DDP's reductions does not matter, and it is
over when `wait` returns, also where the main backend runs ahead of the host (CUDA).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_FLAGS = 5  # stop, save, busy, error, profile: the first numbers of the vector


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know after one exchange. A flag is set when any rank set it; sums are over all ranks."""

    stop: bool = False
    save: bool = False
    busy: bool = False
    error: bool = False
    profiles: int = 0  # ranks that have seen the order of a profile and not begun with it
    sums: tuple[float, ...] = ()


class PendingAgreement:
    """An exchange under way. Every rank calls `wait` exactly once, at the same place of its program."""

    def __init__(
        self,
        vector: torch.Tensor,
        work: dist.Work | None,
        on_result: Callable[[Agreement], None],
        on_wait: Callable[[bool], None],
    ) -> None:
        self._vector, self._work, self._on_result, self._on_wait = vector, work, on_result, on_wait

    def wait(self) -> Agreement:
        """Block until every rank has contributed.

        Raises:
            RuntimeError: a peer is gone, or did not answer within the group's timeout.
        """
        if self._work is not None:
            already = self._work.is_completed()
            if not already:
                self._on_wait(True)
            self._work.wait()
            if not already:
                self._on_wait(False)
        stop, save, busy, error, profiles, *sums = self._vector.tolist()  # (flags + sums,) float64
        agreement = Agreement(
            stop=stop > 0, save=save > 0, busy=busy > 0, error=error > 0, profiles=int(profiles), sums=tuple(sums)
        )
        self._on_result(agreement)
        return agreement


class AgreementChannel:
    """Makes the group at the first exchange, which is therefore collective as every other."""

    def __init__(self, *, world_size: int, timeout_seconds: float) -> None:
        self._world_size, self._timeout = world_size, timedelta(seconds=timeout_seconds)
        self._group: dist.ProcessGroup | None = None

    def begin(
        self,
        flags: Sequence[bool],
        sums: Sequence[float],
        on_result: Callable[[Agreement], None],
        on_wait: Callable[[bool], None],
    ) -> PendingAgreement:
        """Contribute this rank's flags (stop, save, busy, error, profile) and sums.

        `on_wait` is told where the wait for the others begins (True) and ends, unless all have been there before.
        """
        assert len(flags) == _FLAGS
        vector = torch.tensor([*flags, *sums], dtype=torch.float64)
        if self._world_size == 1:
            return PendingAgreement(vector, None, on_result, on_wait)
        if self._group is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    f"ranks of a world of {self._world_size} can agree only in a process group; "
                    "call torch.distributed.init_process_group() first"
                )
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        work = dist.all_reduce(vector, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        return PendingAgreement(vector, work, on_result, on_wait)

    def leave(self) -> None:
        """Called before the process groups are destroyed; the next exchange makes a new group."""
        self._group = None
