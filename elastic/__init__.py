"""elasticd: fault-tolerant elastic training for PyTorch.

Kept thin on purpose: importing `elastic` imports neither torch nor the agent. A worker calls `elastic.session()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.training.session import session as session

__version__ = "0.1.0"
__all__ = ["__version__", "session"]


def __getattr__(name: str) -> Any:
    if name == "session":
        from elastic.training.session import session

        return session
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
