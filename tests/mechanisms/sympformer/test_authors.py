"""The authors' integrators with copied weights: how far they are from ours, and which of ours does the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import Context, tree
from refattn.ops.layer_norm import layer_norm_forward
from tests.mechanisms.sympformer.calls import BLOCK, back, draw, run, stack
from tests.rows import holds

N, D, H = 5, 6, 0.3
PAST = Context(causal=True)
DEVIATIONS = (Path(__file__).resolve().parents[3] / "docs" / "deviations.md").read_text(encoding="utf-8")
X, P = draw("x", N, D), draw("p", N, D)


def changed(params: Any, **given: Any) -> Any:
    """The parameters with some of them replaced, numbers by what they are, and the integrator by its text."""
    config = dataclasses.replace(params.config, **{name: given.pop(name) for name in ("integrator",) if name in given})
    numbers = config.numbers()
    for name in set(given) & set(numbers):
        given[f"numbers.{name}"] = np.asarray([dataclasses.replace(numbers[name], start=given.pop(name)).raw()])
    return dataclasses.replace(tree.unflatten(params, {**tree.flatten(params), **given}), config=config)


def middle(integrator: str, **options: Any) -> Any:
    """A layer with one before it and one behind it, with steps of H."""
    given = {"mlp": "none", "normalise": "none", "damping": "loglin(c_log=3.0, c_lin=0.1)", **options}
    return changed(stack(3, moved=0.05, spread=0.2, integrator=integrator, **given)[1], h_x=H, h_y=H)


def value(params: Any, name: str) -> float:
    return float(params.config.numbers()[name].value(params.numbers[name], X)[0])


def ours(params: Any, x: Any, p: Any, t: float, history: Any = None) -> Any:
    """The state after a layer that gets tokens x with momenta p at the time t."""
    state = BLOCK.start(params, x[None], PAST)
    return BLOCK.forward(params, dataclasses.replace(state, p=p[None], t=np.asarray([t]), history=history), PAST)[0]


def apart(found: Any, theirs: Any, x: Any = X) -> float:
    """How far two results are from one another, in parts of how far theirs moves."""
    return float(np.linalg.norm(found - theirs) / np.linalg.norm(theirs - x))


def percent(part: float) -> str:
    """A part in percent, as docs/deviations.md has it."""
    return f"{100 * part:.{1 if part < 0.005 else 0}f} %"


def ask(params: Any, x: Any, p: Any, euclidean: bool = False) -> tuple[Any, Any]:
    """The velocity and the force of the prefix as the equations have them, or with <P, P> in place of <BP, P>."""
    y, n = layer_norm_forward(x, params.gain)[0], np.arange(1.0, len(x) + 1.0)[:, None]
    growth = np.tril(np.exp(params.config.scale * (y @ params.w_q) @ (y @ params.w_k).T))
    z, moved = np.sum(growth, axis=1, keepdims=True) / n, p @ params.w_b
    s = np.sum((p if euclidean else moved) * p, axis=1, keepdims=True) / z**2
    return moved / z, (growth * (s + s.T + 2.0)) @ (y @ params.w_v) / (2.0 * n) @ params.w_o


def eta(params: Any, t: float) -> float:
    """Their integral of the damping."""
    return float(value(params, "c_log") * np.log(t) + value(params, "c_lin") * t)


def copies(oracle: Any, x: Any, p: Any, h: float, t: float, clock: Any, xi: float, norm: Any) -> tuple[Any, Any]:
    """The two copies of v1, with momenta in units of exp(-clock(t))."""

    def at(time: float, x: Any, scaled: Any) -> tuple[Any, Any]:
        f, g = oracle(x, np.exp(-clock(time)) * scaled)
        return 0.5 * h * f, 0.5 * h * np.exp(clock(time)) * g

    one, two, first, second = x, x, np.exp(clock(t)) * p, np.exp(clock(t)) * p
    f, g = at(t, one, second)
    two, first = two + f, norm(first + g)
    f, g = at(t + 0.5 * h, two, first)
    one, second = one + f, norm(second + g)
    (d_x, d_p), cos, sin = (one - two, first - second), np.cos(2.0 * xi * h), np.sin(2.0 * xi * h)
    turned_x, turned_p = cos * d_x + sin * d_p, cos * d_p - sin * d_x
    one, two = 0.5 * (one + two + turned_x), 0.5 * (one + two - turned_x)
    first, second = norm(0.5 * (first + second + turned_p)), norm(0.5 * (first + second - turned_p))
    f, g = at(t + 0.5 * h, two, first)
    one, second = one + f, second + g
    return one, np.exp(-clock(t + h)) * (first + at(t + h, one, second)[1])


def presymplectic(params: Any, x: Any, p: Any, t: float, norm: Any = lambda p: p) -> tuple[Any, Any]:
    """That of v1: momenta are in units of the damping since the time 1, and rotated and normalised in these."""
    xi = params.config.integrator.xi
    return copies(lambda x, p: ask(params, x, p), x, p, H, t, lambda t: eta(params, t), xi, norm)


def strang(params: Any, x: Any, p: Any, t: float, h: float = H, euclidean: bool = True) -> tuple[Any, Any]:
    """That of v1: both halves are damped as the first one is, and the energy of a momentum has no B."""
    half, xi = np.exp(eta(params, t) - eta(params, t + 0.5 * h)), params.config.integrator.xi
    x, p = copies(lambda x, p: ask(params, x, p, euclidean), x, half * p, h, t, lambda t: 0.0, xi, lambda p: p)
    return x, half * p


def etd_ab2(params: Any, x: Any, p: Any, t: float, before: Any, h: float = H) -> tuple[Any, Any, Any]:
    """That of v1: the momentum follows Adams and Bashforth, and the tokens drift with the new one; and its past."""
    scaled = np.exp(eta(params, t)) * ask(params, x, p)[1]
    ahead = scaled if before is None else 1.5 * scaled - 0.5 * before
    p = np.exp(-eta(params, t + h)) * (np.exp(eta(params, t)) * p + h * ahead)
    return x + h * ask(params, x, p)[0], p, scaled


def order(step: Callable[..., tuple[Any, ...]], time: float = 0.5) -> float:
    """The order of a method, by three numbers of steps."""
    found = []
    for n in (20, 40, 80):
        state: tuple[Any, ...] = (X, P)
        for k in range(n):
            state = step(*state[:2], 1.0 + k * time / n, time / n, *state[2:])
        found.append(state[0])
    return float(np.log2(np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1] - found[2])))


def test_presymplectic_rotates_in_units_of_the_first_time() -> None:
    """Ours rotates in those of the layer's own time; given other numbers it does as theirs, to the last places."""
    params = middle("presymplectic(xi=0.5)")
    said = []
    for t, far in ((1.0, 0.003), (1.7, 0.089), (3.0, 0.40)):
        (x, p), unit = presymplectic(params, X, P, t), np.exp(eta(params, t))
        away = apart(ours(params, X, P, t).x[0], x)
        assert away == pytest.approx(far, rel=0.15)
        said.append(percent(away))
        rescaled = {"w_b": params.w_b / unit**2, "w_o": params.w_o * unit, "h_x": H * unit}
        found = ours(changed(params, integrator=f"presymplectic(xi={0.5 / unit})", **rescaled), X, unit * P, t)
        np.testing.assert_allclose(found.x[0], x, rtol=1e-12)
        np.testing.assert_allclose(found.p[0] / unit, p, rtol=1e-12)
    assert f"{said[0]} apart at t = 1, {said[1]} at 1.7, {said[2]} at 3." in DEVIATIONS


def test_each_substep_normalises_momenta_in_these_units() -> None:
    """Ours are normalised as they are, in every map; theirs in the first two maps and after the rotation."""
    params = middle("presymplectic(xi=0.5)", normalise="each_substep")
    said = []
    for t, far in ((1.0, 0.091), (1.3, 1.25)):
        theirs, _ = presymplectic(params, X, P, t, lambda p: layer_norm_forward(p, params.gain_p)[0])
        away = apart(ours(params, X, P, t).x[0], theirs)
        assert away == pytest.approx(far, rel=0.05)
        said.append(percent(away))
    assert f"{said[0]} apart at t = 1, {said[1]} at 1.3;" in DEVIATIONS


def damped_twice_as_in_the_first_half(params: Any) -> Any:
    """The state after a layer with so much more damping, at the time 1."""
    more = 2.0 * np.log1p(0.5 * H) / np.log1p(H)
    return ours(changed(params, c_log=more * value(params, "c_log")), X, P, 1.0)


def test_strang_damps_twice_as_in_the_first_half() -> None:
    """And so it is of first order. A layer with a stronger damping does the same."""
    params = middle("strang(xi=0.5)")
    (x, p), found = strang(params, X, P, 1.0, euclidean=False), ours(params, X, P, 1.0)
    assert apart(found.x[0], x) == pytest.approx(0.026, rel=0.05)
    assert f"second order. {percent(apart(found.x[0], x))} apart at t = 1, less later;" in DEVIATIONS
    found = damped_twice_as_in_the_first_half(params)
    np.testing.assert_allclose(found.x[0], x, rtol=1e-13)
    np.testing.assert_allclose(found.p[0], p, rtol=1e-13)
    assert order(lambda x, p, t, h: strang(params, x, p, t, h, euclidean=False)) == pytest.approx(1.0, abs=0.1)


def test_the_energy_of_strang_has_no_b() -> None:
    """<P, P> in the force, though tokens move by B P. With the identity for B there is no difference."""
    params = middle("strang(xi=0.5)")
    params = changed(params, w_b=2.0 * params.w_b)
    ours_of_it, theirs = (strang(params, X, P, 1.0, euclidean=euclidean)[0] for euclidean in (False, True))
    assert apart(ours_of_it, theirs) == pytest.approx(0.098, rel=0.05)
    assert f"{percent(apart(ours_of_it, theirs))} apart where B is about twice the identity" in DEVIATIONS
    np.testing.assert_allclose(damped_twice_as_in_the_first_half(params).x[0], ours_of_it, rtol=1e-13)
    same = changed(params, w_b=np.eye(D))
    assert np.array_equal(strang(same, X, P, 1.0, euclidean=False)[0], strang(same, X, P, 1.0)[0])


def test_etd_ab2_drifts_with_the_new_momentum() -> None:
    """Its momenta are ours; its tokens move by the new one as those of presymplectic Euler, which is of first order."""
    params = middle("etd_ab2")
    x, p, before = etd_ab2(params, X, P, 1.0, None)
    found = ours(params, X, P, 1.0)
    np.testing.assert_allclose(found.p[0], p, rtol=1e-13)
    assert apart(found.x[0], x) == pytest.approx(1.19, rel=0.05)
    first = percent(apart(found.x[0], x))
    later, momenta, _ = etd_ab2(params, x, p, 1.0 + H, before)
    found = ours(params, x, p, 1.0 + H, found.history)
    np.testing.assert_allclose(found.p[0], momenta, rtol=1e-13)
    np.testing.assert_allclose(x + H * ask(params, x, found.p[0])[0], later, rtol=1e-13)
    assert apart(found.x[0], later, x) == pytest.approx(0.36, rel=0.05)
    assert f"{first} apart in a first layer, {percent(apart(found.x[0], later, x))} in the next." in DEVIATIONS
    assert order(lambda x, p, t, h, past=None: etd_ab2(params, x, p, t, past, h)) == pytest.approx(1.0, abs=0.1)


def test_the_damping_is_that_of_the_step_of_tokens() -> None:
    """Theirs of presymplectic and ETD-AB2; ours that of the step of momenta, which they are kicked by."""
    params = middle("etd_ab2")
    force, h_y = ask(params, X, P)[1], 0.1
    theirs = np.exp(eta(params, 1.0) - eta(params, 1.0 + H)) * (P + h_y * force)
    less = changed(params, h_y=h_y)
    assert np.linalg.norm(ours(less, X, P, 1.0).p[0] - theirs) > 0.3 * np.linalg.norm(theirs)
    c_log = value(params, "c_log") * np.log1p(H) / np.log1p(h_y)
    less = changed(less, c_log=c_log, c_lin=value(params, "c_lin") * H / h_y)
    np.testing.assert_allclose(ours(less, X, P, 1.0).p[0], theirs, rtol=1e-13)


@pytest.mark.parametrize(
    ("integrator", "kick"), [("presymplectic_euler", np.exp(-12.0)), ("exponential_euler", 1 / 12)]
)
def test_linear_attention_begins_at_time_zero(integrator: str, kick: float) -> None:
    """The number of the layer is its time: the damping of the first is infinite, and clipped at 12 in their runs."""
    params = middle(integrator, oracle="linear", damping="loglin(clip=12)")
    y, n = layer_norm_forward(X, params.gain)[0], np.arange(1.0, N + 1.0)[:, None]
    force = y @ params.w_v - np.tril(P @ P.T) @ (y @ params.w_a) / n
    theirs = np.exp(-12.0) * P + kick * (1.0 - np.exp(-12.0) if kick > 0.01 else 1.0) * H * force
    np.testing.assert_allclose(ours(params, X, P, 1e-9).p[0], theirs, rtol=1e-12)
    assert BLOCK.start(stack(1)[0], X[None], PAST).t == 1.0  # where it begins here
    kept = np.linalg.norm(theirs) / np.linalg.norm(ours(params, X, P, 1.0).p[0])
    assert kept < (2e-5 if integrator == "presymplectic_euler" else 0.2)


def test_a_clipped_damping_at_time_zero_has_a_gradient_of_nan() -> None:
    torch = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    c_log, h, t = (torch.tensor(number, requires_grad=True) for number in (3.0, H, 0.0))
    torch.exp(-torch.clamp(c_log * torch.log((t + h) / t), -12.0, 12.0)).backward()
    assert torch.isnan(c_log.grad) and torch.isnan(h.grad)


def test_the_floor_of_a_gain() -> None:
    """1e-6 beside gamma, in the manuscript of October 2026: a gamma that is larger by so much."""
    assert holds("sympformer", "gains are gamma + 1e-6") == "no: gamma; one that is larger by 1e-6 does theirs"
    params = changed(stack(2, integrator="lie_trotter", mlp="none")[1], attention_gamma=0.5)
    state = dataclasses.replace(BLOCK.start(params, X[None], PAST), p=P[None])
    _, saved = BLOCK.forward(params, state, PAST)
    whole = value(params, "attention_beta") * P + (0.5 + 1e-6) * saved.attention.force[0]
    theirs = X + layer_norm_forward(whole, params.gain_p)[0]
    assert 1e-9 < apart(ours(params, X, P, 1.0).x[0], theirs) < 1e-5
    np.testing.assert_allclose(ours(changed(params, attention_gamma=0.5 + 1e-6), X, P, 1.0).x[0], theirs, rtol=1e-13)


def test_two_steps_let_the_gradient_through_the_velocity() -> None:
    """AB2 and ETD-AB2 of v1 hold the time constant but not the step that divides the velocity: `detach` does both.

    Backward without it, with zeros for the gradients of the time and the past steps between layers, is theirs.
    """
    torch = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    params, x, d_x = stack(3, integrator="ab2"), draw("x", 1, 4, 6), draw("d_x", 1, 4, 6)
    whole = {"x": x, "params": params}
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in tree.flatten(whole).items()}
    placed = tree.unflatten(whole, leaves)
    state = BLOCK.start(placed["params"][0], placed["x"], PAST)
    for each in placed["params"]:
        state, _ = BLOCK.forward(each, state, PAST)
        state = constant(state, lambda number: number.detach())
    loss = (state.x * torch.tensor(d_x)).sum()
    theirs = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    state, saves = run(params, x)
    d_state, _ = BLOCK.read_backward(params[-1], state, d_x)
    found: dict[str, Any] = {}
    for n in (2, 1, 0):
        d_state, d_params, _ = BLOCK.backward(params[n], saves[n], constant(d_state, np.zeros_like))
        found |= {f"params.{n}.{name}": gradient for name, gradient in tree.flatten(d_params).items()}
    found["x"] = BLOCK.start_backward(params[0], d_state)[0]
    for detach in (True, False):
        options = tuple(
            dataclasses.replace(each, config=dataclasses.replace(each.config, detach=detach)) for each in params
        )
        other = back(options, state, saves, d_x)
        far = [np.max(np.abs(other[name] - their.numpy())) for name, their in zip(leaves, theirs, strict=True)]
        assert max(far) > 1e-3
    for name, their in zip(leaves, theirs, strict=True):
        np.testing.assert_allclose(found[name], their.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


def constant(state: Any, made: Callable[[Any], Any]) -> Any:
    """A state, or its gradient, with something else for the time and for the steps of the past."""
    past = state.history
    if past is not None:
        past = dataclasses.replace(past, t=made(past.t), h_x=made(past.h_x), h_y=made(past.h_y))
    return dataclasses.replace(state, t=made(state.t), history=past)
