"""refattn: the golden reference for attention as a dynamical system.

Every mechanism is array-API code with hand-written forward and backward passes, without autograd::

    import refattn as ra

    out, saved = ra.softmax.forward(q, k, v, causal=True)
    gradients = ra.softmax.backward(saved, d_out)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from refattn.mechanisms import registry as _registry

__version__ = "0.1.0"

if TYPE_CHECKING:
    # `as` says that these are meant to be imported from here.
    from refattn import bridges as bridges
    from refattn import train as train
    from refattn.explorer.call import explore as explore
    from refattn.instruments.dual import tangent as tangent
    from refattn.mechanisms import delta as delta
    from refattn.mechanisms import graph_energy as graph_energy
    from refattn.mechanisms import growing as growing
    from refattn.mechanisms import higher_order as higher_order
    from refattn.mechanisms import koopman as koopman
    from refattn.mechanisms import softmax as softmax
    from refattn.mechanisms import sympformer as sympformer
    from refattn.mechanisms.context import Context as Context
    from refattn.mechanisms.registry import list_mechanisms as list_mechanisms
    from refattn.mechanisms.registry import mechanism as mechanism
    from refattn.mechanisms.use_definition import reading as reading
    from refattn.mechanisms.use_definition import trace as trace
    from refattn.verify.in_python import assert_close as assert_close
    from refattn.verify.in_python import verify as verify
    from refattn.verify.outcome import Decline as Decline

# Where a public name lives; it is imported when it is first used, so that `import refattn` stays quick.
_HOMES = {
    "Context": "refattn.mechanisms.context",
    "Decline": "refattn.verify.outcome",
    "assert_close": "refattn.verify.in_python",
    "explore": "refattn.explorer.call",
    "list_mechanisms": "refattn.mechanisms.registry",
    "mechanism": "refattn.mechanisms.registry",
    "reading": "refattn.mechanisms.use_definition",
    "tangent": "refattn.instruments.dual",
    "trace": "refattn.mechanisms.use_definition",
}

_MODULES = ("bridges", "train", "verify")

__all__ = sorted(["__version__", *_MODULES, *_HOMES, *_registry.list_mechanisms()])


if not TYPE_CHECKING:  # for a type checker names that are not listed above do not exist

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            found = getattr(importlib.import_module(_HOMES[name]), name)
        elif name in _MODULES:
            found = importlib.import_module(f"refattn.{name}")
        elif name in _registry.list_mechanisms():
            found = _registry.room(name)
        else:
            from refattn.messages import meant

            raise AttributeError(f"module 'refattn' has no attribute {name!r}{meant(name, __all__)}")
        globals()[name] = found  # from now on without a call of this function
        return found


def __dir__() -> list[str]:
    return list(__all__)
