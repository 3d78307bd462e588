"""refattn: the golden reference for attention as a dynamical system.

Every mechanism is array-API code with hand-written forward and backward passes, without autograd::

    import refattn as ra

    out, saved = ra.softmax.forward(q, k, v, causal=True)
    gradients = ra.softmax.backward(saved, d_out)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Context", "Decline", "__version__", "list_mechanisms", "mechanism", "softmax", "trace"]

if TYPE_CHECKING:
    from refattn.equations import trace
    from refattn.mechanisms import softmax
    from refattn.mechanisms.context import Context
    from refattn.mechanisms.registry import list_mechanisms, mechanism
    from refattn.verify.adapter import Decline

# Where a public name lives; it is imported when it is first used, so that `import refattn` stays quick.
_HOMES = {
    "Context": "refattn.mechanisms.context",
    "Decline": "refattn.verify.adapter",
    "list_mechanisms": "refattn.mechanisms.registry",
    "mechanism": "refattn.mechanisms.registry",
    "trace": "refattn.equations",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    from refattn.mechanisms import registry

    if name in registry.list_mechanisms():
        return registry.room(name)
    raise AttributeError(f"module 'refattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    from refattn.mechanisms import registry

    return sorted({*__all__, *registry.list_mechanisms()})
