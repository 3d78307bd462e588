"""Plausible wrong readings of Koopman attention: what an implementation computes that follows another convention.

Each has the signature of the core without `implementation` and returns (out,). Verification has to tell them from the
core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.koopman import core
from refattn.mechanisms.koopman.options.fits import LIMITS, Fit, Separable, Stein
from refattn.mechanisms.koopman.options.kernel import Linear, Own
from refattn.mechanisms.option_kinds import numbers_of
from refattn.mechanisms.wrong import conventions, of_group_gradients, of_masks
from refattn.xp import Array

Wrong = Callable[..., tuple[Array]]


def _core(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    return (core.forward(q, k, v, **options)[0],)


def _family(options: dict[str, Any], name: str, **numbers: Any) -> dict[str, Any]:
    """Return the options with other numbers of a family, each made of the number that was given or its default."""
    kind = core.FAMILIES[name](options.get(name, defaults_of(core.forward)[name]))
    return {**options, name: replace(kind, **numbers)}


def operator_on_the_vector(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Take K psi(q') for phi of the vector psi(q'), not for the function K psi at q'.

    With psi = pi, which inverts itself, what is left of the operator is phi(q').
    """
    return _core(q, k, v, **{**options, "perturbation": "identity(epsilon=0.0)"})


def plain_attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Stop after as many plain updates: the attended vector is the next query."""
    for _ in range(options.get("updates", 2)):
        (q,) = _core(q, k, v, **{**options, "updates": 1})
    return (q,)


def one_update_more(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Count the Koopman updates alone."""
    options = _family(_family(options, "fit", ridge=None), "perturbation", epsilon=None)
    return _core(q, k, v, **{**options, "updates": options.get("updates", 2) + 1})


def ridge_halved(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Count the squared norm of the operator half."""
    ridge = numbers_of(options, core.FAMILIES).get("ridge", core.MEAN)
    return _core(q, k, v, **_family(options, "fit", ridge=ridge / 2))


def bandwidth_doubled(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Take exp(-rho / (4 bandwidth^2)), and likewise for other kernels."""
    if isinstance(core.FAMILIES["kernel"](options.get("kernel", "rbf")), (Linear, Own)):
        return _core(q, k, v, **options)
    bandwidth = numbers_of(options, core.FAMILIES).get("bandwidth", q.shape[3] ** 0.5)
    return _core(q, k, v, **_family(options, "kernel", bandwidth=2**0.5 * bandwidth))


def other_fit(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Measure the error in the other norm."""
    fit = core.FAMILIES["fit"](options.get("fit", "stein"))
    other = Stein if isinstance(fit, Separable) else Separable
    numbers = {field.name: getattr(fit, field.name) for field in fields(Fit)}
    return _core(q, k, v, **{**options, "fit": other(**numbers)})


def no_limit(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Leave the limit of the operator out."""
    given = [name for name in LIMITS if name in numbers_of(options, core.FAMILIES)]
    return _core(q, k, v, **_family(options, "fit", **dict.fromkeys(given)))


def limit_halved(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array]:
    """Take half the norm, or count the nuclear norm half, as |W M - Y|^2 / 2 with it in place of 2 of it."""
    known = numbers_of(options, core.FAMILIES)
    return _core(q, k, v, **_family(options, "fit", **{n: known[n] / 2 for n in ("norm", "nuclear") if n in known}))


def ignored_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> tuple[Array]:
    """Let every query see all keys: in its softmax, and as its observables."""
    return _core(q, k, v, **options)


READINGS: dict[str, Wrong] = {
    "the operator applied to the vector": operator_on_the_vector,
    "every update is plain attention": plain_attention,
    "one update more": one_update_more,
    "the ridge halved": ridge_halved,
    "the bandwidth doubled in the exponent": bandwidth_doubled,
    "the other fit": other_fit,
    "no limit": no_limit,
    "the limit halved": limit_halved,
    "drawn to the identity": lambda q, k, v, **options: _core(q, k, v, **_family(options, "fit", tau=1.0)),
    "the full space": lambda q, k, v, **options: _core(q, k, v, **{**options, "space": "full"}),
    "causality ignored": ignored_causality,
    **of_masks(_core, "top-left causality", "a token does not see itself"),
    **of_masks(_core, "mask ignored", "mask inverted", "interleaved groups"),
}

WRONG = {
    **conventions(READINGS),
    **of_group_gradients(core),
}
