"""Sums that regularise a loss: their gradients, and the blocks that add them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context, mechanism, tree
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.layer import regularisers
from tests.mechanisms.graph_energy.calls import STATES, B, H, agree, draw, forward, gradients_of, kept, qkv, run


@pytest.mark.parametrize(
    ("state", "name"),
    [(state, name) for state in STATES for name in ("size", "roughness", "level")]
    + [(state, name) for state in ("token", "query") for name in ("entropy", "gini")],
)
def test_the_gradient_of_a_loss_with_a_sum_in_it(state: str, name: str) -> None:
    arrays = dict(zip("qkv", qkv(5), strict=True)) | {"mu": np.abs(draw("mu", H)), "kappa": np.abs(draw("kappa", H))}

    def total(**leaves: Any) -> Any:
        out, saved = forward(**leaves, state=state, kind="soft", tau=0.02, symmetrise="mean", step=0.1, steps=4)
        return out, saved, regularisers.part_of(name, saved)

    out, saved, (_, gradients) = total(**arrays)
    d_out = draw("d_out", *out.shape)
    found = core.backward(saved, d_out, **{n: 0.3 * x for n, x in gradients.items()})

    def loss(**leaves: Any) -> Any:
        out, _, (value, _) = total(**leaves)
        return (out * out.new_tensor(d_out) + 0.3 * value / out.numel(),)

    agree(found, gradients_of(loss, arrays, np.ones(out.shape)))


@pytest.mark.parametrize(
    "options",
    [
        {"symmetrise": "kernel"},
        {"symmetrise": "kernel", "intrinsic": "double_well", "implementation": "tiled"},
        {"symmetrise": "min", "state": "query", "intrinsic": "none", "integrator": "heun"},
        {"symmetrise": "kernel", "coupling": "polynomial", "coefficients": True, "kind": "proximal"},
        {"symmetrise": "kernel", "over": "keys", "start": True},
        {"causal": True, "state": "query", "symmetrise": "causal_mirror"},
        {"causal": True, "state": "prefix"},
        {"symmetrise": "kernel", "mu": True, "adjoint": "implicit", "steps": 300},
    ],
    ids=str,
)
def test_the_gradient_of_the_energy_is_that_of_autograd(options: dict[str, Any]) -> None:
    """Of all that it reads: scores, links, their weights pi, where scores start, and numbers."""
    arrays = dict(zip("qkv", qkv(5), strict=True)) | {"kappa": np.abs(draw("kappa", H)), "scale": np.asarray(0.6)}
    given = {"coefficients": np.asarray([0.8, 0.3]), "start": draw("start", H, 5), "mu": 0.5 + np.abs(draw("mu", H, 5))}
    arrays |= {name: x for name, x in given.items() if name in options}
    options = {"steps": 3, "step": 0.1, **{name: x for name, x in options.items() if name not in given}}
    mask = kept("mask", B, 1, 5, 5, keep=0.8)

    def total(**leaves: Any) -> Any:
        plain = isinstance(leaves["q"], np.ndarray)
        more = {**options, "mask": mask if plain else leaves["q"].new_tensor(mask).bool()}
        if not plain:
            more |= {"implementation": "dense", "adjoint": "unroll"}
        return forward(**leaves, **more)[1]

    saved = total(**arrays)
    found = core.backward(saved, np.zeros(saved.shape), **regularisers.level(saved)[1])

    def loss(**leaves: Any) -> Any:
        return (regularisers.level(total(**leaves))[0][None],)

    expected = gradients_of(loss, arrays, np.ones(1))
    assert np.max(np.abs(expected["k"])) > 1e-3
    agree(found, expected)


def test_a_graph_without_an_energy_has_no_gradient_of_one() -> None:
    out, saved = run(symmetrise="none")
    with pytest.raises(ValueError, match="an energy exists only for graphs with detailed balance"):
        core.backward(saved, out, d_energy=np.ones((B, H)))
    with pytest.raises(ValueError, match="d_energy: got shape"):
        core.backward(saved, out, d_energy=np.ones(3))


@pytest.mark.parametrize("name", regularisers.NAMES)
def test_a_block_adds_it_to_the_gradients_in_training(name: str) -> None:
    """What it adds is the derivative of strength times the sum, by differences along one direction."""
    block, strength = mechanism("graph_energy").block, 0.7
    options: dict[str, Any] = {"width": 6, "heads": 2, "threshold": "soft(tau=0.1)", "learn_tau": True, "steps": 3}
    x, d_x = draw("x", 2, 5, 6), draw("d_x", 2, 5, 6)

    def gradients(params: Any, training: bool) -> Any:
        state, saved = block.forward(params, block.start(params, x, Context()), Context(training=training))
        d_state, _ = block.read_backward(params, state, d_x)
        return saved, tree.flatten(block.backward(params, saved, d_state)[1])

    params = block.init(block.Config(**options, regulariser=name, strength=strength), seed=1, like=x)
    plain = block.init(block.Config(**options), seed=1, like=x)
    alone, (_, without) = gradients(plain, True), gradients(params, False)
    added = {n: z - without[n] for n, z in gradients(params, True)[1].items()}
    for n, z in without.items():
        assert np.array_equal(z, alone[1][n]), n

    def value(by: float) -> float:
        moved = tree.map_leaves(lambda w: w + by * draw("direction", *w.shape), params)
        return strength * float(regularisers.part_of(name, gradients(moved, False)[0].core)[0])

    slope = sum(float(np.sum(z * draw("direction", *z.shape))) for z in added.values())
    # Central differences of fourth order: the error is of the order 1e-4^4 beside roundings of 1e-16 / 1e-4.
    differences = (8.0 * (value(1e-4) - value(-1e-4)) - (value(2e-4) - value(-2e-4))) / 12e-4
    assert abs(slope) > 1e-3 and differences == pytest.approx(slope, rel=1e-8, abs=1e-9)
