"""Plausible wrong readings of the force: what an implementation computes that follows another convention.

Each has the signature of the core without `implementation` and returns (out, log_z). Verification has to tell them from
the core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.dense import counts
from refattn.mechanisms.wrong import Changed, conventions, of_group_gradients, of_masks, recomputed
from refattn.xp import Array, namespace

Wrong = Callable[..., tuple[Array, Array]]


def _core(q: Array, k: Array, v: Array, kinetic: Array | None = None, **options: Any) -> tuple[Array, Array]:
    out, saved = core.forward(q, k, v, kinetic=kinetic, **options)
    return out, saved.log_z


_changed = partial(Changed, _core)


def _recomputed(words: str, id: str, value: Callable[[dict[str, Any], dict[str, Any]], Array]) -> Wrong:
    """Return the force with another value of one equation."""
    return recomputed(_core, words, {id: value})


def _log_z(top: float, counted: str) -> Callable[[dict[str, Any], dict[str, Any]], Array]:
    """Return log z with a factor of the largest score, and z divided by the "prefix", "all" tokens or "one"."""

    def value(seen: dict[str, Any], given: dict[str, Any]) -> Array:
        xp, total = namespace(seen["SYMP.total"]), seen["SYMP.total"]
        tokens = total.shape[2]
        offset = 0 if given.get("causal") and counted == "prefix" else None
        number = counts(offset, (0, tokens), 1 if counted == "one" else tokens, total)
        return top * seen["SYMP.largest"] + xp.log(total / number)

    return value


def _factor(own: float, other: float, potential: float) -> Callable[[dict[str, Any], dict[str, Any]], Array]:
    """Return the weights of the push with factors of u_i and u_j, and what is added to their sum."""

    def value(seen: dict[str, Any], given: dict[str, Any]) -> Array:
        push = seen["SYMP.10"]
        brackets = own * push + other * namespace(push).matrix_transpose(push) + potential
        return 0.5 * seen["SYMP.6"] * brackets

    return value


READINGS: dict[str, Wrong] = {
    "the future pushes": _changed(
        "Let every token push every other one, whatever was asked.", lambda given: {"causal": False}
    ),
    "kinetic terms left out": _changed("Leave the kinetic terms out.", lambda given: {"kinetic": None}),
    "scores without a scale": _changed(
        "Take the scores as they are if no scale is given.",
        lambda given: {"scale": 1.0} if given.get("scale") is None else {},
    ),
    **of_masks(_core, "interleaved groups"),
    "a potential that repels": _recomputed("Take -2 for the potential.", "SYMP.11", _factor(1.0, 1.0, -2.0)),
    "a potential of half the size": _recomputed("Take 1 for the potential.", "SYMP.11", _factor(1.0, 1.0, 1.0)),
    "only the token's own kinetic term": _recomputed("Leave u_j out.", "SYMP.11", _factor(1.0, 0.0, 2.0)),
    "only the others' kinetic terms": _recomputed("Leave u_i out.", "SYMP.11", _factor(0.0, 1.0, 2.0)),
    "kinetic terms over z": _recomputed(
        "Divide kinetic terms by z, not by its square.",
        "SYMP.10",
        lambda seen, given: seen["SYMP.10"] * namespace(seen["SYMP.7"]).exp(seen["SYMP.7"]),
    ),
    "z is a mean over all tokens": _recomputed("Divide z by the number of all.", "SYMP.7", _log_z(1.0, "all")),
    "z is a sum": _recomputed("Divide z by nothing.", "SYMP.7", _log_z(1.0, "one")),
    "the largest score is lost": _recomputed("Do not add it again to log z.", "SYMP.7", _log_z(0.0, "prefix")),
    "the output of an attention": _recomputed(
        "Leave z out of the output.",
        "SYMP.12",
        lambda seen, given: seen["SYMP.12"] * namespace(seen["SYMP.7"]).exp(-seen["SYMP.7"]),
    ),
}

WRONG = {
    **conventions(READINGS, ("log_z",)),
    **of_group_gradients(core),
}
