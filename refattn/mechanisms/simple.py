"""A mechanism from its definition, its loops and a few words: what every map of q, k and v has is here by default.

A definition has ``forward(q, k, v, allowed, ...)``, which returns out and what its backward reads, and
``backward(saved, d_out)``, which returns the gradients of q, k and v by name. `allowed` says which query may attend
which key, broadcastable to (b, h, i, j), and is None if every query may attend every key. Whatever else `forward` takes
is an option of the core, a number or a word with its default; None stands for a number that is not given. The
definition is the general code, too: keys and values may have fewer heads than queries. What a number must be beyond
finite, such as a temperature above 0, the record says: ``mechanism(..., options={"beta": Real(0.0, above=True)})``.
A number whose gradient `backward` returns beside those of q, k and v is named, ``differentiable=("beta",)``: it may be
a 0-d array, and the core returns its gradient if the number was given.

Other implementations of the same mathematics are modules beside the definition, ``more={"chunked": chunked}``. Theirs
is ``forward(q, k, v, mask, offset, ...)`` with the options of the definition: `mask` is broadcastable to (b, h, i, j)
or None, and `offset` says that query i may attend key j where j <= i + offset, None that the call is not causal. Its
docstring declares the equations that it alone has, and for the others "as in the definition". For a call that it does
not compute, such as values of another width than keys, an implementation or the definition raises
`refattn.mechanisms.record.Unsupported`.

From this `mechanism` makes the core, which checks its arguments, takes masks and causality, and casts; the block of
`multihead` around it, whose configuration has the core's options; and the record. A block decodes by computing
everything again, unless a stream is given.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from refattn import equations
from refattn.args import Maybe, One, Real, Whole, check
from refattn.mechanisms import multihead
from refattn.mechanisms.block import Block
from refattn.mechanisms.case_builders import with_usual
from refattn.mechanisms.core_arguments import check_saved, defaults_of, enter, implementation_of, returned, upstream
from refattn.mechanisms.record import Case, Mechanism
from refattn.mechanisms.wrong import WrongKernel, conventions, of_group_gradients, of_masks, of_scales
from refattn.ops.masks import Causal, allowed_pairs
from refattn.xp import Array, is_array

OF_A_CALL = ("mask", "causal", "implementation")
"""The options of a core that are no choices of its block."""

READS = ("mask", "key_mask", "causal", "memory", "memory_mask")
"""What the block reads of its context."""


@dataclass(frozen=True)
class Saved:
    """What the backward of a core reads."""

    like: Array
    inner: Any  # of the implementation
    shape: tuple[int, ...]
    implementation: str = "dense"
    numbers: Mapping[str, Any] = field(default_factory=dict)  # with a gradient


NEEDS = {bool: bool, int: Whole(), float: Real(), str: str, type(None): Maybe(Real())}
"""What an option has to be, by the type of its default."""


def core_of(
    definition: ModuleType,
    needs: Mapping[str, Any] | None = None,
    *,
    more: Mapping[str, ModuleType] | None = None,
    differentiable: tuple[str, ...] = (),
) -> ModuleType:
    """Return the core of a definition: the module NAME.core, which is made and has no file.

    `needs` are the `options` of `mechanism`; `more` and `differentiable` are its arguments.
    """
    implementations = {"dense": definition, **(more or {})}
    options = list(inspect.signature(definition.forward).parameters.values())[4:]
    home = f"{definition.__name__.rpartition('.')[0]}.core"
    own_saved: Any = type("Saved", (Saved,), {"__module__": home})  # another mechanism's is no instance of it
    known = {option.name: NEEDS.get(type(option.default)) for option in options}
    for name, need in (needs or {}).items():
        check("options", name, One(tuple(known)))
        known[name] = Maybe(need) if isinstance(known[name], Maybe) else need
    for name in differentiable:
        check("differentiable", name, One(tuple(known)))

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
        call = enter(q, k, v, mask=mask, causal=causal)
        numbers = {name: x for name, x in given.items() if name in differentiable and x is not None}
        for name, value in given.items():
            if name in numbers and is_array(value):  # a 0-d array, in the dtype that is computed in
                positive = getattr(known[name], "schema", known[name]) == Real(0.0, above=True)
                numbers[name] = given[name] = call.number(name, value, positive=positive)
            else:
                check(name, value, known[name])
        chosen = implementation_of(implementation, implementations, usual="dense")
        run = equations.active(implementations[chosen]).forward
        hidden: tuple[Any, ...] = (call.mask, call.offset)
        if chosen == "dense":
            hidden = (allowed_pairs(call.mask, call.offset, *call.plane[2:], call.q),)
        out, inner = run(call.q, call.k, call.v, *hidden, **given)
        return call.back(out), own_saved(q, inner, tuple(out.shape), chosen, numbers)

    def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
        """Return the gradients of q, k and v, and of the numbers that have one and were given."""
        check_saved(saved, own_saved)
        (d_out,) = upstream(saved.like, d_out=(d_out, saved.shape))
        gradients = equations.active(implementations[saved.implementation]).backward(saved.inner, d_out)
        if lost := gradients.keys() - {"q", "k", "v", *differentiable}:
            raise ValueError(f"backward: returned the gradient of {min(lost)}, needs differentiable=({min(lost)!r},)")
        return returned(gradients, ("q", "k", "v", *saved.numbers), saved.like)

    shared = [p for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    forward.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    forward.said = lambda given, *arrays: given  # type: ignore[attr-defined]  # every call is the definition's
    core = ModuleType(home, definition.__doc__)
    vars(core).update(forward=forward, backward=backward, Saved=own_saved)
    vars(core).update(IMPLEMENTATIONS=implementations, NEEDS=known, DIFFERENTIABLE=differentiable)
    sys.modules[core.__name__] = core  # its classes can be pickled
    return core


def _config(core: Any) -> type[multihead.Config]:
    """Return the configurations of the block around a core: those of its projections, and the core's options."""
    own = {name: usual for name, usual in defaults_of(core.forward).items() if name not in OF_A_CALL}
    if taken := own.keys() & {each.name for each in fields(multihead.Config)}:
        raise ValueError(f"options: got {min(taken)!r}, which a block calls one of its own, needs another name")
    needs = {name: getattr(core, "NEEDS", {}).get(name) for name in own}
    namespace = {"core": core, "needs": needs, "__module__": core.__name__, "__doc__": multihead.Config.__doc__}
    chosen = [(name, Any, field(default=usual)) for name, usual in own.items()]
    return make_dataclass("Config", chosen, bases=(multihead.Config,), frozen=True, namespace=namespace)


def mechanism(
    title: str,
    source: str,
    definition: ModuleType,
    loops: ModuleType,
    *,
    cases: tuple[Case, ...] = (),
    properties: tuple[str, ...] = ("causal", "padding", "independent", "repeatable"),
    options: Mapping[str, Any] | None = None,
    more: Mapping[str, ModuleType] | None = None,
    differentiable: tuple[str, ...] = (),
    wrong: Callable[[Any], Mapping[str, WrongKernel]] | Mapping[str, WrongKernel] = MappingProxyType({}),
    **others: Any,
) -> Mechanism:
    """Return the record of a mechanism, which is called after the folder of its definition.

    Parameters
    ----------
    title, source, loops, properties
        As in the record.
    cases
        Designed calls; those of `refattn.mechanisms.case_builders.USUAL` are added whose features none of them has.
    definition
        The equations with their ids, forward and backward: see above.
    options
        By the name of an option what it has to be, in the words of `refattn.args`, where its default does not say it.
    more
        Further implementations by name, beside the definition, which is "dense".
    differentiable
        The options that are numbers with a gradient.
    wrong
        Wrong kernels by name, or a function that makes them of the core, beside wrong readings of masks, causality,
        shared heads and of an option `scale`, which are there by default.
    others
        Further fields of the record, and those that shall be others: its `core`, `block` or `context_fields`, for
        instance.
    """
    home = definition.__name__.rpartition(".")[0]
    core: Any = others.get("core") or core_of(definition, options, more=more, differentiable=differentiable)
    context_fields = others.get("context_fields", READS)
    config = core.Config = _config(core)
    beside = tuple(module for module in getattr(core, "IMPLEMENTATIONS", {}).values() if module is not definition)
    usual: Mapping[str, Any] = {
        "name": home.rpartition(".")[2],
        "definition": definition,
        "equation_modules": (definition, *beside, multihead),
        "block_modules": beside,
        "differentiable": getattr(core, "DIFFERENTIABLE", ()),
        "context_fields": context_fields,
        "core": core,
        "block": Block(multihead, title, context_fields, config),
        "tiled": False,
        "cases": with_usual(cases),
        "wrong": {**_wrong(core), **(wrong(core) if callable(wrong) else wrong)},
    }
    return Mechanism(title=title, source=source, loops=loops, properties=properties, **{**usual, **others})


def _wrong(core: Any) -> dict[str, WrongKernel]:
    """Return the wrong kernels that every such core has."""

    def run(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, ...]:
        return core.forward(q, k, v, **options)[:1]

    scales = of_scales(run) if defaults_of(core.forward).get("scale", 1.0) is None else {}
    return {**conventions({**of_masks(run), **scales}), **of_group_gradients(core)}
