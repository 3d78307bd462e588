"""A mechanism from its definition, its loops and a few words: what every map of q, k and v has is here by default.

A definition has ``forward(q, k, v, allowed, ...)``, which returns out and what its backward reads, and
``backward(saved, d_out)``, which returns the gradients of q, k and v by name. `allowed` says which query may attend
which key, broadcastable to (b, h, i, j), and is None if every query may attend every key. Whatever else `forward` takes
is an option of the core, a number or a word with its default; None stands for a number that is not given. The
definition is the general code, too: keys and values may have fewer heads than queries. What a number must be beyond
finite, such as a temperature above 0, the record says: ``mechanism(..., options={"beta": Real(0.0, above=True)})``.

From this `mechanism` makes the core, which checks its arguments, takes masks and causality, and casts; the block of
`multihead` around it; and the record. A block decodes by computing everything again, unless a stream is given.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from refattn import equations
from refattn.args import Maybe, One, Real, Whole, check
from refattn.mechanisms import multihead
from refattn.mechanisms.block import Block
from refattn.mechanisms.core_arguments import check_saved, enter, implementation_of, returned, upstream
from refattn.mechanisms.record import Case, Mechanism
from refattn.ops.masks import Causal, allowed_pairs
from refattn.xp import Array

READS = ("mask", "key_mask", "causal", "memory", "memory_mask")
"""What the block reads of its context."""


@dataclass(frozen=True)
class Saved:
    """What the backward of a core reads."""

    like: Array
    inner: Any  # of the definition
    shape: tuple[int, ...]
    implementation: str = "dense"


NEEDS = {bool: bool, int: Whole(), float: Real(), str: str, type(None): Maybe(Real())}
"""What an option has to be, by the type of its default."""


def core_of(definition: ModuleType, needs: Mapping[str, Any] | None = None) -> ModuleType:
    """Return the core of a definition: the module NAME.core, which is made and has no file.

    `needs` are the `options` of `mechanism`.
    """
    options = list(inspect.signature(definition.forward).parameters.values())[4:]
    home = f"{definition.__name__.rpartition('.')[0]}.core"
    own_saved: Any = type("Saved", (Saved,), {"__module__": home})  # another mechanism's is no instance of it
    known = {option.name: NEEDS.get(type(option.default)) for option in options}
    for name, need in (needs or {}).items():
        check("options", name, One(tuple(known)))
        known[name] = Maybe(need) if isinstance(known[name], Maybe) else need

    def forward(
        q: Array,
        k: Array,
        v: Array,
        *,
        mask: Array | None = None,
        causal: Causal = False,
        implementation: str = "auto",
        **given: Any,
    ) -> tuple[Array, Saved]:
        """Return out (b, h, i, e) of q (b, h, i, d), k (b, g, j, d), v (b, g, j, e), and what `backward` reads."""
        if unknown := given.keys() - known.keys():
            raise TypeError(f"{min(unknown)}: got an option that {definition.__name__} does not have")
        for name, value in given.items():
            check(name, value, known[name])
        call = enter(q, k, v, mask=mask, causal=causal)
        implementation_of(implementation, ("dense",), usual="dense")
        allowed = allowed_pairs(call.mask, call.offset, *call.plane[2:], call.q)
        out, inner = equations.active(definition).forward(call.q, call.k, call.v, allowed, **given)
        return call.back(out), own_saved(q, inner, tuple(out.shape))

    def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
        """Return the gradients of q, k and v."""
        check_saved(saved, own_saved)
        (d_out,) = upstream(saved.like, d_out=(d_out, saved.shape))
        return returned(equations.active(definition).backward(saved.inner, d_out), "qkv", saved.like)

    shared = [p for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    forward.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    forward.said = lambda given, *arrays: given  # type: ignore[attr-defined]  # every call is the definition's
    core = ModuleType(home, definition.__doc__)
    vars(core).update(forward=forward, backward=backward, Saved=own_saved)
    sys.modules[core.__name__] = core  # its classes can be pickled
    return core


def mechanism(
    title: str,
    source: str,
    definition: ModuleType,
    loops: ModuleType,
    *,
    cases: tuple[Case, ...],
    properties: tuple[str, ...] = ("causal", "padding", "independent", "repeatable"),
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Mechanism:
    """Return the record of a mechanism, which is called after the folder of its definition.

    Parameters
    ----------
    title, source, loops, cases, properties
        As in the record.
    definition
        The equations with their ids, forward and backward: see above.
    options
        By the name of an option what it has to be, in the words of `refattn.args`, where its default does not say it.
    others
        Further fields of the record, and those that shall be others: its `core`, `block` or `context_fields`, for
        instance.
    """
    home = definition.__name__.rpartition(".")[0]
    core: Any = others.get("core") or core_of(definition, options)
    context_fields = others.get("context_fields", READS)
    config = type("Config", (multihead.Config,), {"core": core, "__module__": core.__name__})
    core.Config = config
    usual: Mapping[str, Any] = {
        "name": home.rpartition(".")[2],
        "definition": definition,
        "equation_modules": (definition, multihead),
        "implementations": ("dense",),
        "context_fields": context_fields,
        "core": core,
        "block": Block(multihead, title, context_fields, config),
        "tiled": False,
    }
    given = {"title": title, "source": source, "loops": loops, "cases": cases, "properties": properties}
    return Mechanism(**{**usual, **given, **others})
