"""Wrong kernels: the one record that all of them have, and those that any attention with masks and groups allows.

Verification is worth what it catches of these, and it names the one that explains what an implementation returned. A
room writes its own as *readings*, which have the signature of its core and return the outputs, and as wrong backward
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

from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Outputs = tuple[Array, ...]
Core = Callable[..., Outputs]
Backward = Callable[..., dict[str, Array]]

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
    """

    inputs: Mapping[str, Any]
    options: Mapping[str, Any]
    d_out: Any = None
    dtype: str = "float64"
    exact: bool = True
    outputs: Mapping[str, Any] = field(default_factory=dict)
    size: Any = None


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
        What is wrong, in words.
    of
        What it is an error of: ids of equations, and names of conventions or inputs.
    link
        The report that it is modelled on; "" where none is known.
    backward
        Whether outputs are right, and gradients alone are wrong.
    sizes
        The sizes that make a difference, by the words that are added to what is wrong.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> wrong = ra.mechanism("softmax").wrong["scale left out"]
    >>> wrong.kind, wrong.wrong
    ('convention', 'Leave the scale out.')
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

    def __str__(self) -> str:
        return self.name

    def __call__(self, q: Array, k: Array, v: Array, **given: Any) -> Any:
        """Return its outputs for arguments of the core."""
        return (*self.results(Call({"q": q, "k": k, "v": v}, given)).values(),)

    @property
    def usual(self) -> str:
        """The words of the size that it is served in: the second, where there are several."""
        return [*self.sizes][min(1, len(self.sizes) - 1)]

    def told(self, size: str = "") -> str:
        """Return what is wrong in words, with those of a size; its name where that says it."""
        return (self.name if self.kind in ("convention", "gradient") else self.wrong) + size

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
        name: WrongKernel(name, "convention", partial(run, one), _words(one), (name,), sizes=sizes or {"": None})
        for name, one in readings.items()
    }


def gradients(backwards: Mapping[str, Backward]) -> dict[str, WrongKernel]:
    """Return wrong backward passes of a right forward."""

    def run(backward: Backward, call: Call) -> dict[str, Any]:
        if call.d_out is None:
            return {}
        return {f"d_{name}": x for name, x in backward(**call.inputs, **call.options, d_out=call.d_out).items()}

    return {
        name: WrongKernel(name, "gradient", partial(run, one), _words(one), (name,), backward=True)
        for name, one in backwards.items()
    }


def _words(function: Callable[..., Any]) -> str:
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def changed(core: Core, words: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Core:
    """Return the core with other arguments: those that a function of all that are given returns; in words."""

    def reading(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        given = {"q": q, "k": k, "v": v, **options}
        return core(**{**given, **change(given)})

    reading.__doc__ = words
    return reading


def of_masks(core: Core, *names: str) -> dict[str, Core]:
    """Return wrong readings of masks, causality and groups by name: some, or all."""

    def ignored_mask(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        """Let every query attend masked keys."""
        return core(q, k, v, **{name: x for name, x in options.items() if name not in MASKS})

    def inverted_mask(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        """Take True for "may not attend"."""
        return core(q, k, v, **options | {name: ~options[name] for name in MASKS if options.get(name) is not None})

    def top_left_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Align the causal mask at the first key, whatever was asked."""
        if options.get("offset") is not None:  # which aligns the queries
            return core(q, k, v, causal=causal, **options)
        return core(q, k, v, causal="top_left" if causal else False, **options)

    def bottom_right_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Align the causal mask at the last key, whatever was asked."""
        if options.get("offset") is not None:
            return core(q, k, v, causal=causal, **options)
        return core(q, k, v, causal="bottom_right" if causal else False, **options)

    def strict_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Hide a token from itself."""
        if causal is False:
            return core(q, k, v, **options)
        if {"offset", "q_lengths", "k_lengths"} & set(options):
            return core(q, k, v, causal=causal, **options)
        mask = options.pop("mask", None)
        queries, keys = q.shape[2], k.shape[2]
        offset = causal_offset(causal, queries, keys)
        assert offset is not None
        past = allowed_pairs(mask, offset - 1, queries, keys, q)
        return core(q, k, v, mask=past, causal=causal, **options)

    def interleaved_groups(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        """Give query head h the key/value head h mod g, not floor(h g / h_total)."""
        xp = namespace(q, k, v)
        times = q.shape[1] // max(k.shape[1], 1)
        return core(q, xp.concat([k] * times, axis=1), xp.concat([v] * times, axis=1), **options)

    found: dict[str, Core] = {
        "mask ignored": ignored_mask,
        "mask inverted": inverted_mask,
        "top-left causality": top_left_causality,
        "bottom-right causality": bottom_right_causality,
        "a token does not see itself": strict_causality,
        "interleaved groups": interleaved_groups,
    }
    return {name: found[name] for name in names or found}


def attend_over_queries(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, causal: Any = False, scale: float | None = None
) -> Array:
    """Return the output of an attention that is normalised over the queries of a key."""
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q @ xp.matrix_transpose(repeat_heads(k, heads)) * factor
    allowed = allowed_pairs(mask, causal_offset(causal, queries, keys), queries, keys, q)
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    exponentials = xp.exp(scores)
    total = xp.sum(exponentials, axis=-2, keepdims=True)
    return exponentials / xp.where(total == 0.0, 1.0, total) @ repeat_heads(v, heads)


def of_scales(core: Core) -> dict[str, Core]:
    """Return wrong readings of the scale of the scores by name."""

    def given(q: Array, scale: float | None) -> float:
        return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale

    def no_scale(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Leave the scale out."""
        return core(q, k, v, scale=1.0, **options)

    def scale_twice(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Scale q and the scores, each by the whole factor."""
        return core(q, k, v, scale=given(q, scale) ** 2, **options)

    def scale_of_values(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Take 1 / sqrt(width of v) where no scale is given."""
        return core(q, k, v, scale=1.0 / math.sqrt(v.shape[3]) if scale is None else scale, **options)

    return {
        "scale left out": no_scale,
        "scale applied twice": scale_twice,
        "scale of the values' width": scale_of_values,
    }


def of_group_gradients(core: ModuleType) -> dict[str, WrongKernel]:
    """Return wrong sums over the query heads that share a key/value head, by name."""

    def mean_of_group(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        """Average the gradients of k and v over the heads of a group."""
        _, saved = core.forward(q, k, v, **options)
        gradients: dict[str, Array] = core.backward(saved, d_out)
        times = q.shape[1] // max(k.shape[1], 1)
        return gradients | {name: gradients[name] / times for name in ("k", "v")}

    def one_of_group(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        """Keep the gradients of k and v of the last head of a group alone, which overwrote the others."""
        xp, times = namespace(q, k, v), q.shape[1] // max(k.shape[1], 1)
        _, saved = core.forward(q, xp.repeat(k, times, axis=1), xp.repeat(v, times, axis=1), **options)
        gradients: dict[str, Array] = core.backward(saved, d_out)
        return gradients | {name: gradients[name][:, times - 1 :: times, ...] for name in ("k", "v")}

    return gradients(
        {
            "gradients averaged over a group": mean_of_group,
            "gradients of the last head of a group": one_of_group,
        }
    )


def scale_of_all_heads(core: Core) -> Core:
    """Return the core with 1 / sqrt(heads * width) where no scale is given."""

    def reading(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Take 1 / sqrt(heads * width) where no scale is given."""
        factor = 1.0 / math.sqrt(q.shape[1] * q.shape[3]) if scale is None else scale
        return core(q, k, v, scale=factor, **options)

    return reading
