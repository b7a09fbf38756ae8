"""Imports our package `checkpoints`, also where the user's script has a `checkpoints.py` of its own beside it.

`python script.py` puts the script's directory first on the path, so the name may be theirs. Theirs stays importable as
`checkpoints` for their code (and for what they pickle); ours is then loaded from where it lies, under an alias.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import elastic

_ALIAS = "elastic._own_checkpoints"
_HOME = Path(elastic.__file__).resolve().parent.parent / "checkpoints"


def own_checkpoints(submodule: str) -> ModuleType:
    """Our `checkpoints.<submodule>`, whatever the name `checkpoints` means in this process."""
    return importlib.import_module(f"{_package_name()}.{submodule}")


def _package_name() -> str:
    if _ALIAS in sys.modules:
        return _ALIAS
    if _resolves_to_ours():
        return "checkpoints"
    init = _HOME / "__init__.py"
    spec = importlib.util.spec_from_file_location(_ALIAS, init, submodule_search_locations=[str(_HOME)])
    if spec is None or spec.loader is None or not init.exists():
        raise ImportError(f"elasticd's package 'checkpoints' is not at {_HOME}; install elasticd again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_ALIAS] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_ALIAS]
        raise
    return _ALIAS


def _resolves_to_ours() -> bool:
    loaded = sys.modules.get("checkpoints")
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec("checkpoints")
        origin = spec.origin if spec is not None else None
    return origin is not None and Path(origin).resolve() == _HOME / "__init__.py"
