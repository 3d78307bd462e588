"""What growing attention has beside the core, twice: a small block and its growth step, traced and by the loops."""

from __future__ import annotations

from refattn import equations, philox, tree
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.growing import loops
from refattn.mechanisms.growing.growth import step
from refattn.mechanisms.growing.layer import block

FACTORS = ("GROW.left_factor", "GROW.right_factor", *(f"GROW.{n}" for n in range(14, 19)))

SIGNLESS = ("GROW.5", "GROW.6", "GROW.11", *FACTORS)
"""Equations whose values are what they are up to signs: those of eigenvectors and of singular vectors."""

DAMPING, AMPLITUDE = 0.01, 0.3


def block_derived_twice() -> tuple[loops.Values, loops.Values]:
    """Return the value of each equation by id, in the order that they ran: as traced, and by the loops."""
    x, d_result = (philox.normal((2, 4, 3), seed=0, purpose=f"growing.beside.{name}") for name in ("x", "d_result"))
    params = block.init(block.Config(width=3, heads=2, head_width=2, value_width=1, bias=True), seed=0, like=x, layer=0)
    # Biases start at 0, where an error could hide.
    params = tree.map_leaves(lambda w: w + 0.3 * philox.normal(w.shape, seed=0, purpose="growing.beside"), params)
    with equations.trace() as traced:
        own = equations.active(block)
        _, saved = projections.forward(own, params, block.State(x), Context())
        statistics = step.observe(params, saved, block.State(d_result))
        own.backward(params, saved, block.State(d_result))
        step.apply(step.plan(params, statistics, step.Options(damping=DAMPING), columns=1), AMPLITUDE)
    w_q, w_k, w_v, w_o, scale = params.w_q, params.w_k, params.w_v, params.w_o, params.config.factor
    expected = loops.block(x, w_q, w_k, w_v, w_o, d_result, scale)
    expected |= loops.step(
        expected["GROW.augmented"],
        w_q,
        w_k,
        expected["GROW.values"],
        expected["dGROW.o"],
        scale=scale,
        damping=DAMPING,
        rank=w_q.shape[2] + 1,
        amplitude=AMPLITUDE,
    )
    found = {id: traced[id] for id in traced if id in expected}
    return _comparable(found), _comparable(expected)


def _comparable(values: loops.Values) -> loops.Values:
    return {id: abs(value) if id in SIGNLESS else value for id, value in values.items()}
