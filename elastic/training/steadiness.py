"""Which tensors may be copied beside training: those that a step was seen to leave alone until its update.

The first copy of a round is made while training waits, and what the next forward does to the tensors is looked at
(`nn.Embedding(max_norm=)` scales its weights there). From then on the checkpoints package looks at every copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal

import torch

logger = logging.getLogger(__name__)


class Steadiness:
    """`tensors`: those that only an update should change. Without overlap none is ever copied beside training."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], *, overlap: bool) -> None:
        self._tensors = tensors
        self._state: Literal["off", "unknown", "steady"] = "unknown" if overlap else "off"
        self._watched: list[tuple[torch.Tensor, int]] = []

    def at_copy(self) -> Iterable[torch.Tensor]:
        """A copy begins: what of it need not be done at once."""
        if self._state == "steady":
            return self._tensors()
        if self._state == "unknown":
            self._watched = [(tensor, tensor._version) for tensor in self._tensors() if not tensor.is_inference()]
        return ()

    def at_settle(self, *, after_forward: bool = True) -> None:
        """The state is about to be changed: by an update, or without a forward before it by an evaluation."""
        if self._state == "unknown" and self._watched and after_forward:
            if all(tensor._version == version for tensor, version in self._watched):
                self._state = "steady"
            else:
                self.broken()
        self._watched = []

    def broken(self) -> None:
        """Something changes them before an update."""
        self._state = "off"
        logger.warning(
            "this task changes its parameters in a forward or an evaluation, so checkpoints are copied while training "
            "waits, and not beside it (overlap_copies=False says so from the start)"
        )
