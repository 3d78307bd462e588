"""Wrong kernels: the one record that all of them have, and those that any attention with masks and groups allows.

Verification is worth what it catches of these, and it names the one that explains what an implementation returned. A
folder writes its own as *readings*, which have the signature of its core and return the outputs, and as wrong backward
passes of a right forward, which take `d_out` as well and return gradients by name. Those below are made of a core, as a
call ``core(q, k, v, **options)`` that returns the outputs, or of its module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

from refattn import equations
from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Outputs = tuple[Array, ...]
Values = dict[str, Any]
Core = Callable[..., Outputs]
Change = Callable[[dict[str, Any]], Mapping[str, Any]]
Gradients = dict[str, Array]
Backward = Callable[..., Gradients]
GradientChange = Callable[[Gradients, dict[str, Any], Any], Gradients]
"""Of the right gradients, of all arguments with `d_out`, and of what was saved: those that are others."""

MASKS = ("mask", "key_mask")
"""Options in which True means that something may be attended."""


@dataclass(frozen=True)
class Call:
    """What a wrong kernel is given.

    Attributes
    ----------
    inputs, options, d_out
        The arrays and the other arguments of a call, and the upstream gradient; None where no gradient is asked.
    dtype
        The type that results are stored in.
    exact
        Whether it computes in float64, and rounds nothing that an honest kernel rounds.
    outputs
        The right outputs, for what is wrong in the backward alone; {} where they are not known.
    size
        One of the sizes of the kernel, such as that of its tiles.
    further
        Gradients of outputs beside `out`, by the names of the backward's arguments ("d_lse"), if they are asked.
    times
        By what the numbers of q, k and v were multiplied, if the kernel is given numbers and factors; {} otherwise.
    """

    inputs: Mapping[str, Any]
    options: Mapping[str, Any]
    d_out: Any = None
    dtype: str = "float64"
    exact: bool = True
    outputs: Mapping[str, Any] = field(default_factory=dict)
    size: Any = None
    further: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class WrongKernel:
    """One way to be wrong.

    Attributes
    ----------
    name
        Unique among those of a mechanism.
    kind
        "equation": an equation disturbed; "convention": another reading of the paper or of an option; "gradient": a
        wrong backward pass; "fault": a mistake of a kernel, most of them reported; "input": an input that is read
        wrongly; "storing": results that are written wrongly.
    run
        Gives its results by name: with gradients where they are asked and it has some, and those alone where outputs
        are right.
    wrong
        What is wrong, in words; of a convention and of a gradient the name says it.
    of
        What it is an error of: ids of equations, and names of conventions or inputs.
    link
        The report that it is modelled on; "" where none is known.
    backward
        Whether outputs are right, and gradients alone are wrong.
    sizes
        The sizes that make a difference, by the words that are added to what is wrong.
    change
        If all that is wrong is that other arguments are read, gives those that are others, of all that are given.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> wrong = ra.mechanism("softmax").wrong["scale left out"]
    >>> wrong.kind, wrong.wrong
    ('convention', 'scale left out')
    >>> x = np.ones((1, 1, 2, 4))
    >>> wrong(x, x, x)[1]  # lse
    array([[[4.69314718, 4.69314718]]])
    """

    name: str
    kind: str
    run: Callable[[Call], Mapping[str, Any]]
    wrong: str = ""
    of: tuple[str, ...] = ()
    link: str = ""
    backward: bool = False
    sizes: Mapping[str, Any] = field(default_factory=lambda: {"": None})
    change: Change | None = None

    def __str__(self) -> str:
        return self.name

    def __call__(self, q: Array, k: Array, v: Array, **given: Any) -> Any:
        """Return its outputs for arguments of the core."""
        return (*self.results(Call({"q": q, "k": k, "v": v}, given)).values(),)

    @property
    def usual(self) -> str:
        """The words of the size that it is served in: the second, where there are several."""
        return [*self.sizes][min(1, len(self.sizes) - 1)]

    def in_words(self, size: str = "") -> str:
        """Return what is wrong in words, with those of a size."""
        return self.wrong + size

    def results(self, call: Call, size: str = "") -> Mapping[str, Any]:
        """Return what it gives in a size."""
        return self.run(replace(call, size=self.sizes[size] if size else next(iter(self.sizes.values()))))


def conventions(
    readings: Mapping[str, Core], outputs: tuple[str, ...] = (), sizes: Mapping[str, Any] | None = None
) -> dict[str, WrongKernel]:
    """Return wrong readings, which return out and these outputs; with `sizes` they take a keyword ``size``."""

    def run(reading: Core, call: Call) -> dict[str, Any]:
        more = {"size": call.size} if sizes else {}
        return dict(zip(("out", *outputs), reading(**call.inputs, **call.options, **more), strict=False))

    return {
        name: WrongKernel(
            name,
            "convention",
            partial(run, one),
            name,
            (name,),
            sizes=sizes or {"": None},
            change=getattr(one, "change", None),
        )
        for name, one in readings.items()
    }


def gradients(backwards: Mapping[str, Backward]) -> dict[str, WrongKernel]:
    """Return wrong backward passes of a right forward."""

    def run(backward: Backward, call: Call) -> dict[str, Any]:
        if call.d_out is None:
            return {}
        return {f"d_{name}": x for name, x in backward(**call.inputs, **call.options, d_out=call.d_out).items()}

    return {
        name: WrongKernel(name, "gradient", partial(run, one), name, (name,), backward=True)
        for name, one in backwards.items()
    }


@dataclass(frozen=True)
class Changed:
    """The core with other arguments: those that `change`, a function of all that are given, returns."""

    core: Core
    change: Change

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        given = {"q": q, "k": k, "v": v, **options}
        return self.core(**{**given, **self.change(given)})


def if_given(core: Core, name: str, change: Change) -> Changed:
    """Return the core with other arguments if the option `name` is given."""
    return Changed(core, lambda given: {} if given.get(name) is None else change(given))


def recomputed(core: Core, changes: Mapping[str, Callable[[Values, dict[str, Any]], Array]]) -> Core:
    """Return the core with other values of some equations.

    `changes` gives, by the id of an equation, its value in terms of those of the equations up to it, its own right one
    among them, and of all arguments.
    """

    def reading(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        seen: Values = {}
        given = {"q": q, "k": k, "v": v, **options}

        def hook(id: str, name: str, value: Array) -> Array:
            seen[id] = value
            if id in changes:
                seen[id] = changes[id](seen, given)
            return seen[id]

        with equations.apply(hook):
            return core(q, k, v, **options)

    return reading


def other_outputs(core: Core, change: Callable[[Outputs, dict[str, Any]], Outputs]) -> Core:
    """Return the core with other outputs: a function of the right ones and of all arguments."""

    def reading(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        given = {"q": q, "k": k, "v": v, **options}
        return change(core(**given), given)

    return reading


def other_gradients(core: ModuleType, change: GradientChange) -> Backward:
    """Return the backward of a core with other gradients."""

    def wrong(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> Gradients:
        given = {"q": q, "k": k, "v": v, "d_out": d_out, **options}
        right, saved = gradients_of(core, given)
        return right | change(right, given, saved)

    return wrong


def gradients_of(core: ModuleType, given: Mapping[str, Any]) -> tuple[Gradients, Any]:
    """Return the gradients of a call of a core for its `d_out`, and what its forward saved."""
    _, saved = core.forward(**{name: x for name, x in given.items() if name != "d_out"})
    return core.backward(saved, given["d_out"]), saved


def _aligned(alignment: str) -> Change:
    """Return the change of causality; an offset that is given aligns the queries."""
    return lambda given: {"causal": alignment} if given.get("causal") and given.get("offset") is None else {}


def _strict(given: dict[str, Any]) -> dict[str, Any]:
    """Return a mask of the keys before the token itself."""
    causal = given.get("causal", False)
    if causal is False or {"offset", "q_lengths", "k_lengths"} & set(given):
        return {}
    q, queries, keys = given["q"], given["q"].shape[2], given["k"].shape[2]
    offset = causal_offset(causal, queries, keys)
    assert offset is not None
    return {"mask": allowed_pairs(given.get("mask"), offset - 1, queries, keys, q)}


def _interleaved(given: dict[str, Any]) -> dict[str, Any]:
    """Return the key/value heads of all query heads."""
    times = given["q"].shape[1] // max(given["k"].shape[1], 1)
    return {name: namespace(given[name]).concat([given[name]] * times, axis=1) for name in "kv"}


def _of_masks(given: dict[str, Any], change: Callable[[Array], Array | None]) -> dict[str, Any]:
    return {name: change(given[name]) for name in MASKS if given.get(name) is not None}


MASK_READINGS: dict[str, Change] = {
    "mask ignored": lambda given: _of_masks(given, lambda mask: None),
    "mask inverted": lambda given: _of_masks(given, lambda mask: ~mask),
    "top-left causality": _aligned("top_left"),
    "bottom-right causality": _aligned("bottom_right"),
    "a token does not see itself": _strict,
    "interleaved groups": _interleaved,  # query head h has key/value head h mod g, not floor(h g / h_total)
}
"""Wrong readings of masks, causality and groups: the arguments that change."""


def of_masks(core: Core, *names: str) -> dict[str, Core]:
    """Return wrong readings of masks, causality and groups by name: some, or all."""
    return {name: Changed(core, MASK_READINGS[name]) for name in names or MASK_READINGS}


def scale_of(given: Mapping[str, Any]) -> float:
    """Return the scale of a call: 1 / sqrt(width of q) if none is given."""
    return float(1.0 / math.sqrt(given["q"].shape[3])) if given.get("scale") is None else given["scale"]


def usual_scale(core: Core, width: Callable[[dict[str, Any]], int]) -> Changed:
    """Return the core with 1 / sqrt(another width) if no scale is given."""
    return Changed(
        core, lambda given: {} if given.get("scale") is not None else {"scale": 1.0 / math.sqrt(width(given))}
    )


def of_scales(core: Core) -> dict[str, Core]:
    """Return wrong readings of the scale of the scores by name."""
    return {
        "scale left out": Changed(core, lambda given: {"scale": 1.0}),
        "scale applied twice": Changed(core, lambda given: {"scale": scale_of(given) ** 2}),
        "scale of the values' width": usual_scale(core, lambda given: given["v"].shape[3]),
    }


def of_group_gradients(core: ModuleType) -> dict[str, WrongKernel]:
    """Return wrong sums over the query heads that share a key/value head, by name."""

    def shared(given: dict[str, Any]) -> int:
        return given["q"].shape[1] // max(given["k"].shape[1], 1)

    def averaged(right: Gradients, given: dict[str, Any], _: Any) -> Gradients:
        return {name: right[name] / shared(given) for name in ("k", "v")}

    def of_last_head(right: Gradients, given: dict[str, Any], _: Any) -> Gradients:
        times = shared(given)
        alone = {name: namespace(given[name]).repeat(given[name], times, axis=1) for name in ("k", "v")}
        found, _ = gradients_of(core, {**given, **alone})
        return {name: found[name][:, times - 1 :: times, ...] for name in ("k", "v")}

    return gradients(
        {
            "gradients averaged over a group": other_gradients(core, averaged),
            "gradients of the last head of a group": other_gradients(core, of_last_head),
        }
    )
