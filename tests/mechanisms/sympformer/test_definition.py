"""SympFormer's definition, against a layer of the library, against differences of a loss, and against its energy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from refattn import Context, equations
from refattn.mechanisms.sympformer import definition
from tests.mechanisms.sympformer.calls import BLOCK
from tests.test_equation_ids import SIZES, line_problems

MATRICES = ("gain", "w_q", "w_k", "w_v", "w_o", "w_b", "gain_p")
NUMBERS = ("h_x", "h_y", "c_log", "c_lin")
CAUSAL = Context(causal=True)


@dataclass(frozen=True)
class Task:
    """A layer between others, its state, and the gradients of what it hands on."""

    params: Any
    state: Any
    d_x: Any
    d_p: Any

    def inputs(self) -> dict[str, Any]:
        """Return what the definition takes, by name."""
        numbers = {name: one.value(self.params.numbers[name], self.state.x) for name, one in self.kinds.items()}
        state = {name: getattr(self.state, name) for name in ("x", "p", "t")}
        return {**state, **{name: getattr(self.params, name) for name in MATRICES}, **numbers}

    @property
    def kinds(self) -> Mapping[str, Any]:
        """Return how the numbers are kept positive, by name."""
        return {name: self.params.config.numbers()[name] for name in NUMBERS}

    def forward(self) -> tuple[Any, Any]:
        """Run the library's layer."""
        return BLOCK.forward(self.params, self.state, CAUSAL)

    def backward(self, saved: Any, following: Any) -> tuple[Any, Any]:
        """Return the library's gradients of the state and of the parameters."""
        upstream = replace(following, x=self.d_x, p=self.d_p, t=0.0 * following.t)
        return BLOCK.backward(self.params, saved, upstream)[:2]


def task(seed: int, sizes: Mapping[str, int] | None = None) -> Task:
    """Return a layer of random sizes, whose parameters are neither 0 nor 1 and whose B is not symmetric."""
    random = np.random.default_rng(seed)
    b, i, m = int(random.integers(1, 3)), int(random.integers(1, 9)), int(random.integers(2, 7))
    if sizes is not None:
        b, i, m = (sizes[axis] for axis in "bim")
    config = BLOCK.Config(width=m, heads=1, layer=1, layers=3, mlp="none")
    params = BLOCK.init(config, seed=seed, like=np.zeros(1))
    moved = {name: getattr(params, name) + random.standard_normal(getattr(params, name).shape) / 3 for name in MATRICES}
    numbers = {name: one + random.uniform(-0.5, 0.5) for name, one in params.numbers.items()}
    x, p, d_x, d_p = random.standard_normal((4, b, i, m))
    params = replace(params, numbers=numbers, **moved)
    state = replace(BLOCK.start(params, x, CAUSAL), p=p, t=1.0 + random.uniform(size=1))
    return Task(params, state, d_x, d_p)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_layer_of_the_library(seed: int) -> None:
    given = task(seed)
    following, kept = given.forward()
    (x, p), saved = definition.forward(**given.inputs())
    np.testing.assert_allclose(x, following.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(p, following.p, rtol=1e-12, atol=1e-12)
    d_state, d_params = given.backward(kept, following)
    found = definition.backward(saved, given.d_x, given.d_p)
    wanted = {name: getattr(d_state, name) for name in ("x", "p", "t")} | {n: getattr(d_params, n) for n in MATRICES}
    assert found.keys() == wanted.keys() | set(NUMBERS)
    for name, d in wanted.items():
        np.testing.assert_allclose(found[name], d, rtol=1e-12, atol=1e-12, err_msg=name)
    for name, kind in given.kinds.items():
        d = kind.backward(given.params.numbers[name], found[name])
        np.testing.assert_allclose(d, d_params.numbers[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_equal_ids_are_equal_values() -> None:
    """But for the axis of the one head that the force has in the library."""
    given = task(0)
    with equations.trace() as there:
        following, kept = given.forward()
        given.backward(kept, following)
    with equations.trace() as here:
        hooked = equations.active(definition)
        hooked.backward(hooked.forward(**given.inputs())[1], given.d_x, given.d_p)
    numbered = {f"SYMP.{n}" for n in range(1, 20)}
    assert numbered <= here.keys() and numbered <= there.keys()
    common = here.keys() & there.keys()
    assert {f"dSYMP.{n}" for n in (1, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17)} <= common
    for id in common:
        shape = here[id].shape
        assert there[id].shape in (shape, (*shape[:1], 1, *shape[1:])), id
        np.testing.assert_allclose(here[id], there[id].reshape(shape), rtol=1e-12, atol=1e-12, err_msg=id)


def test_every_array_has_its_axes_and_they_hold() -> None:
    given = task(0, SIZES)

    def run() -> None:
        own = equations.active(definition)
        own.backward(own.forward(**given.inputs())[1], given.d_x, given.d_p)

    assert line_problems((definition,), [({**SIZES, "j": SIZES["i"]}, run)]) == []


def test_its_force_is_the_slope_of_the_energy() -> None:
    """The formula of -dH/dx_i, for scores x_i A x_j with a symmetric A, and dH/dp_i for a symmetric B."""
    n, m = 5, 3
    random = np.random.default_rng(0)
    x, p = random.standard_normal((2, n, m))
    a, b = (0.2 * (w + w.T) for w in random.standard_normal((2, m, m)))

    def energy(x: Any, p: Any) -> Any:
        pairs = np.exp(x @ a @ x.T)
        return np.sum(np.sum(p @ b * p, axis=-1) / np.mean(pairs, axis=-1)) / 2 - np.sum(pairs) / (2 * n)

    pairs = np.exp(x @ a @ x.T)
    z = np.mean(pairs, axis=-1)
    u = np.sum(p @ b * p, axis=-1) / z**2
    force = pairs * (u[:, None] + u + 2.0) @ (x @ a) / (2 * n)
    velocity = p @ b / z[:, None]
    for along in np.eye(n * m).reshape(-1, n, m):
        step = 1e-5 * along
        assert -np.sum(force * along) == pytest.approx((energy(x + step, p) - energy(x - step, p)) / 2e-5, abs=1e-7)
        assert np.sum(velocity * along) == pytest.approx((energy(x, p + step) - energy(x, p - step)) / 2e-5, abs=1e-7)


def test_the_slope_of_an_energy_with_causal_masses_needs_later_tokens() -> None:
    """The docstring's -dH/dx_i where z_i is over j <= i: u_i + 1 of earlier tokens, u_j + 1 of later ones."""
    n, m = 5, 3
    random = np.random.default_rng(1)
    x, p = random.standard_normal((2, n, m))
    a, b = (0.2 * (w + w.T) for w in random.standard_normal((2, m, m)))
    count = np.arange(1.0, n + 1.0)

    def parts(x: Any) -> tuple[Any, Any, Any]:
        pairs = np.exp(x @ a @ x.T)
        z = np.sum(np.tril(pairs), axis=-1) / count
        return pairs, z, np.sum(p @ b * p, axis=-1)

    def energy(x: Any) -> Any:
        _, z, e = parts(x)
        return np.sum(e / (2.0 * z) - z / 2.0)

    pairs, z, e = parts(x)
    u = e / z**2
    earlier = np.tril(pairs) / count[:, None] * (u[:, None] + 1.0)
    later = np.triu(pairs) / count * (u + 1.0)
    force = 0.5 * (earlier + later) @ (x @ a)
    for along in np.eye(n * m).reshape(-1, n, m):
        step = 1e-5 * along
        assert -np.sum(force * along) == pytest.approx((energy(x + step) - energy(x - step)) / 2e-5, abs=1e-7)


def test_tokens_at_rest_move_as_usual_attention_moves_them() -> None:
    """And friction does not reach the next layer, but for the epsilon of the norm."""
    given = {**task(0).inputs(), "p": np.zeros_like(task(0).inputs()["p"])}
    (x, _), saved = definition.forward(**given)
    _, _, _, _, _, _, v = saved[0]
    weights, damping = saved[1][0], saved[2][0]
    attention = weights @ v @ given["w_o"] @ given["w_b"]
    expected = given["h_x"] * given["h_y"] * np.exp(-damping) * attention
    np.testing.assert_allclose(x - given["x"], expected, rtol=1e-12, atol=1e-12)

    given = task(0).inputs()
    (x, p), _ = definition.forward(**given)
    (x2, p2), _ = definition.forward(**{**given, "c_lin": 1.0 + given["c_lin"]})
    assert np.max(np.abs(x - x2)) > 0.1
    np.testing.assert_allclose(p, p2, rtol=0.0, atol=1e-3)


def test_a_token_knows_nothing_of_later_ones() -> None:
    given = task(0).inputs()
    (x, p), _ = definition.forward(**given)
    changed = {name: np.concatenate([given[name][:, :2], -given[name][:, 2:]], axis=1) for name in ("x", "p")}
    (x2, p2), _ = definition.forward(**{**given, **changed})
    assert x.shape[1] > 2 and not np.array_equal(x, x2)
    assert np.array_equal(x[:, :2], x2[:, :2]) and np.array_equal(p[:, :2], p2[:, :2])


def test_what_the_paper_does_not_have_is_refused() -> None:
    call: Any = definition.forward
    with pytest.raises(TypeError, match="look: the definition does not have it"):
        call(**task(0).inputs(), look=1.0)
