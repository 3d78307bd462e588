"""Plausible wrong readings of Hopfield attention, each with the signature of the core, and a wrong gradient."""

from typing import Any

from refattn.mechanisms.wrong import Changed, conventions, gradients
from refattn.xp import Array

Outputs = tuple[Array, ...]


def of(core: Any) -> dict[str, Any]:
    """Return the wrong kernels by name, made of a core."""

    def run(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        return (core.forward(q, k, v, **options)[0],)

    def moved(state: Array, k: Array, beta: Any, options: Any) -> Array:
        """Return the states after one update: keys are read in place of values."""
        return run(state, k, k, updates=0, beta=beta, **options)[0]

    def with_a_residual(q: Array, k: Array, v: Array, *, updates: int = 2, beta: Any = None, **options: Any) -> Outputs:
        options.pop("fixed_point", None)
        for _ in range(updates):
            q = q + moved(q, k, beta, options)
        return run(q, k, v, updates=0, beta=beta, **options)

    def without_beta(q: Array, k: Array, v: Array, *, updates: int = 2, beta: Any = None, **options: Any) -> Outputs:
        options.pop("fixed_point", None)
        for _ in range(updates):
            q = moved(q, k, 1.0, options)
        return run(q, k, v, updates=0, beta=beta, **options)

    def unrolled(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        """Stop the gradient at the last state: the updates are taken for constants."""
        _, saved = core.forward(q, k, v, **options)
        right = core.backward(saved, d_out)
        return {**right, "q": 0.0 * right["q"]}

    return {
        **conventions(
            {
                "one update more": Changed(run, lambda given: {"updates": given.get("updates", 2) + 1}),
                "one update less": Changed(run, lambda given: {"updates": max(0, given.get("updates", 2) - 1)}),
                "a residual in the updates": with_a_residual,
                "no beta in the updates": without_beta,
                "beta left out": Changed(run, lambda given: {"beta": 1.0} if given.get("beta") is None else {}),
            }
        ),
        **gradients({"no gradient through the updates": unrolled}),
    }
