"""Plausible wrong readings of power attention, each with the signature of the core, and a wrong gradient."""

from typing import Any

from refattn import equations
from refattn.mechanisms.wrong import Changed, conventions, gradients, recomputed
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs, causal_offset, where_allowed
from refattn.xp import Array, max_last, namespace, transpose

from .chunked import features_of, phi

Outputs = tuple[Array, ...]


def of(core: Any) -> dict[str, Any]:
    """Return the wrong kernels by name, made of a core."""

    def run(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        return (core.forward(q, k, v, **options)[0],)

    def each_product_once(
        q: Array, k: Array, v: Array, *, p: int = 2, mask: Any = None, causal: Any = False, scale: Any = None
    ) -> Outputs:
        """Count each multiset of coordinates once: its features have no weights."""
        xp, h = namespace(q), q.shape[1]
        features = features_of(q.shape[3], p, q)
        plain = features._replace(weights=xp.ones_like(features.weights))
        weights = phi(q, plain) @ transpose(phi(repeat_heads(k, h), plain))
        allowed = allowed_pairs(mask, causal_offset(causal, q.shape[2], k.shape[2]), q.shape[2], k.shape[2], q)
        weights = where_allowed(allowed, weights, 0.0)
        total = xp.sum(weights, axis=-1, keepdims=True)
        return (weights @ repeat_heads(v, h) / xp.where(total == 0.0, 1.0, total),)

    def without_p(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        """Forget the factor p of the power rule."""
        with equations.mutate("dPOW.1", lambda d_scores: d_scores / options.get("p", 2)):
            _, saved = core.forward(q, k, v, **options)
            return core.backward(saved, d_out)

    return {
        **conventions(
            {
                "the next power": Changed(run, lambda given: {"p": given.get("p", 2) + 2}),
                "one power less": recomputed(run, {"POW.2": lambda seen, given: _less(seen, given.get("p", 2))}),
                "each product counted once": each_product_once,
                "weights not normalised": recomputed(
                    run, {"POW.3": lambda seen, given: namespace(seen["POW.3"]).ones_like(seen["POW.3"])}
                ),
                "normalised by the root of the squares": recomputed(run, {"POW.3": _root_of_squares}),
                "a millionth of the largest weight in the sum": recomputed(run, {"POW.3": _with_a_millionth}),
            }
        ),
        **gradients({"p left out of the power rule": without_p}),
    }


def _less(seen: dict[str, Any], p: int) -> Array:
    """Return |s|^(p - 1) where a key may be attended."""
    xp = namespace(seen["POW.1"])
    return xp.where(seen["POW.2"] == 0.0, 0.0, xp.abs(seen["POW.1"]) ** (p - 1))


def _with_a_millionth(seen: dict[str, Any], given: dict[str, Any]) -> Array:
    """Return the sum as power-attention 1.4.4 has it in its reference, attention in _attention/reference.py."""
    return seen["POW.3"] + 1e-6 * max_last(seen["POW.2"])


def _root_of_squares(seen: dict[str, Any], given: dict[str, Any]) -> Array:
    xp = namespace(seen["POW.2"])
    total = xp.sqrt(xp.sum(seen["POW.2"] ** 2, axis=-1, keepdims=True))
    return xp.where(total == 0.0, 1.0, total)
