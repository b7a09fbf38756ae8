"""Sharded, checksummed, atomically committed checkpoints for PyTorch, in safetensors and JSON; never pickled.

Serves alone in any torch program: `CheckpointManager("dir")`, or with `rank`, `world_size` and a `torch.distributed`
store for several ranks. Names load on first use, so that `checkpoints.catalog` works without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .background import CommitResult as CommitResult
    from .errors import CheckpointError as CheckpointError
    from .errors import CheckpointMismatchError as CheckpointMismatchError
    from .errors import DisturbedError as DisturbedError
    from .errors import FingerprintError as FingerprintError
    from .errors import NoDriverError as NoDriverError
    from .errors import NoUsableCheckpointError as NoUsableCheckpointError
    from .errors import StaleRoundError as StaleRoundError
    from .errors import UnsupportedStateError as UnsupportedStateError
    from .manager import CheckpointManager as CheckpointManager
    from .manager import Staged as Staged
    from .memory import MemoryTier as MemoryTier
    from .restore import Restored as Restored
    from .storage import Storage as Storage
    from .storage import open_storage as open_storage
    from .tree import Nested as Nested

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointManager": "manager",
    "CheckpointMismatchError": "errors",
    "CommitResult": "background",
    "DisturbedError": "errors",
    "FingerprintError": "errors",
    "MemoryTier": "memory",
    "Nested": "tree",
    "NoDriverError": "errors",
    "NoUsableCheckpointError": "errors",
    "Restored": "restore",
    "StaleRoundError": "errors",
    "Staged": "manager",
    "Storage": "storage",
    "UnsupportedStateError": "errors",
    "open_storage": "storage",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
