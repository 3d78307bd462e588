"""Training by hand-written gradients: data, optimiser, schedule, checkpoints and metrics.

The public names are here: `ra.train.run(ra.train.Settings("softmax", steps=200))`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refattn.train.loop import Report as Report
    from refattn.train.loop import Result as Result
    from refattn.train.loop import run as run
    from refattn.train.settings import Settings as Settings

_HOMES = {"Report": "loop", "Result": "loop", "Settings": "settings", "run": "loop"}

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # for a type checker names that are not listed above do not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'refattn.train' has no attribute {name!r}")
        return getattr(importlib.import_module(f"refattn.train.{_HOMES[name]}"), name)
