"""Stacks of blocks: gradients of every variant, no parameter without one, causality, oracle calls, identities."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest

from refattn import Context, tree
from refattn.mechanisms import option_kinds
from refattn.mechanisms.softmax import core as softmax
from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer import mlp as substep
from refattn.mechanisms.sympformer.config import INTEGRATORS as INTEGRATORS_BY_NAME
from refattn.mechanisms.sympformer.integrators import coefficients, four_calls
from refattn.mechanisms.sympformer.integrators.coefficients import phi
from refattn.mechanisms.sympformer.integrators.damping import damping
from refattn.mechanisms.sympformer.params import Integrator, Layer
from refattn.ops.layer_norm import layer_norm_forward
from refattn.verify.selfcheck import gradients
from tests.mechanisms.sympformer.calls import (
    BASELINES,
    BLOCK,
    FOUR_CALLS,
    INTEGRATORS,
    OLD_DRIFT,
    RECORD,
    SUBSTEPS,
    back,
    check_gradients,
    draw,
    run,
    second_layer,
    stack,
)
from tests.rows import claimed, holds
from tests.thinned import thinned

EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"look_ahead": True, "start": "linear"},
    {"look_ahead": True, "damping": "log", "normalise": "none"},
    {"damping": "linear", "oracle": "softmax(mobility='identity')", "angle": 1.0},
    {"oracle": "linear(implementation='state')", "look_ahead": True, "start": "linear"},
    {"oracle": "linear"},
    {"normalise": "each_substep", "detach": True},
)


def goes(layers: int, options: dict[str, Any]) -> bool:
    """Whether these choices go together, by the table of the configuration."""
    try:
        BLOCK.Config(width=6, heads=2, layers=layers, **options)
    except ValueError:
        return False
    return True


def variants() -> list[tuple[int, dict[str, Any]]]:
    """Every integrator, substep and number of layers, with each of the extras that goes with them."""
    found = []
    for integrator, mlp, layers, extra in itertools.product((*INTEGRATORS, *BASELINES), SUBSTEPS, (1, 2, 3), EXTRAS):
        given = dict(extra)
        if given.pop("angle", None) and integrator in FOUR_CALLS:
            integrator = f"{integrator}(angle=1.0)"
        options = {"integrator": integrator, "mlp": mlp, **given}
        if goes(layers, options):
            found.append((layers, options))
    return found


OPTIONS = ("integrator", "oracle", "damping", "mlp", "normalise", "look_ahead", "start")
OF_RECORD = [
    (layers, {**{name: x for name, x in config.items() if name in OPTIONS}, **more})
    for config in RECORD.configs
    for layers, more in ((2, {}), (3, {}), (2, {"bias": True}), (2, {"start": "table"}))
]
"""The record's own, in stacks: every force, connection and kind of step, with biases and with tables."""

HAMILTONIAN = [
    (2, {"integrator": integrator, "oracle": "hamiltonian", **extra})
    for integrator in INTEGRATORS
    for extra in ({}, {"look_ahead": True, "start": "linear", "mlp": "momentum"})
]

BY_LENGTH = [
    (2, {"integrator": integrator, "oracle": f"{oracle}(normaliser='length')", "start": "linear"})
    for integrator in ("presymplectic_euler", "forward_euler", "strang")
    for oracle in ("softmax", "linear")
]

KINDS: tuple[dict[str, Any], ...] = (
    {"integrator": "classical", "mlp": "plain", "oracle": "signed(implementation='state')"},
    {"integrator": "lie_trotter(connection='h1', strength=0.7)", "mlp": "momentum(shared_norm=True)"},
    {"integrator": "lie_trotter(connection='r2', strength=0.7)", "mlp": "velocity", "oracle": "signed(ridge=0.3)"},
    {"integrator": "lie_trotter", "mlp": "momentum", "oracle": "linear(implementation='state')", "look_ahead": True},
    {"integrator": "strang", "mlp": "velocity(ratio=2, start='table')"},
    {"integrator": "exponential_midpoint", "mlp": "velocity", "oracle": "reduced", "normalise": "none"},
    {"integrator": "ab2", "mlp": "attention_velocity", "oracle": "reduced", "normalise": "none", "bias": True},
)

FURTHER = [each for each in [*OF_RECORD, *HAMILTONIAN, *BY_LENGTH, *((3, kind) for kind in KINDS)] if goes(*each)]
ALL = [*variants(), *FURTHER]
SLOW = ALL[:: 25 if os.environ.get("REFATTN_SLOW_SAMPLE") else 1]


def said(variant: Any) -> str:
    layers, options = variant
    return " ".join([str(layers), *(f"{name}={value}" for name, value in options.items())])


@pytest.mark.parametrize("variant", [*variants()[::20], *FURTHER[: -len(KINDS) : 2], *FURTHER[-len(KINDS) :]], ids=said)
def test_gradients_agree_and_no_parameter_is_dead(variant: Any) -> None:
    layers, options = variant
    check_gradients(stack(layers, **options))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_gradients_of_all_variants(part: int) -> None:
    for layers, options in SLOW[part::10]:
        check_gradients(stack(layers, **options))


@pytest.mark.parametrize("variant", thinned([(one,) for one in ALL[::11]], 3), ids=said)
def test_what_is_left_out_would_have_changed_nothing(variant: Any) -> None:
    """The other side of no dead parameter: a number that could be learned and is not there is not read."""
    layers, options = variant
    params, x = stack(layers, **options), draw("x", 1, 4, 6)
    expected = run(params, x)[0].x
    for n, each in enumerate(params):
        starts = {"h_x": "step", "h_y": "step", "c_log": "c_log", "c_lin": "c_lin"}
        missing = {
            field for name, field in starts.items() if name in each.config.numbers() and name not in each.numbers
        }
        missing -= {field for name, field in starts.items() if name in each.numbers}
        if "step" in missing and n == 0 and layers > 1:
            missing -= {"step"}  # of a first layer that moves nothing: it still is the time that passes
        stepped = dataclasses.replace(each.config.integrator, **{name: 0.7 for name in missing & {"step"}})
        damped = dataclasses.replace(each.config.damping, **{name: 0.7 for name in missing - {"step"}})
        other = dataclasses.replace(each.config, integrator=stepped, damping=damped)
        changed = (*params[:n], dataclasses.replace(each, config=other), *params[n + 1 :])
        assert np.array_equal(run(changed, x)[0].x, expected), missing


OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"mlp": "momentum"},
    {"oracle": "linear(implementation='gram')"},
    {"oracle": "linear(implementation='state')"},
)
REDUCED_FORCE = {"mlp": "none", "oracle": "reduced", "normalise": "none", "look_ahead": False}
CAUSAL = [
    *itertools.product(INTEGRATORS, OTHERS),
    *((name, {"mlp": "plain", "oracle": oracle}) for name in BASELINES for oracle in ("softmax", "linear")),
    *((f"lie_trotter(connection={name!r})", {"mlp": "momentum"}) for name in ("h1", "r2")),
    ("lie_trotter(connection='r2')", {"mlp": "none", "oracle": "signed(ridge=0.3)"}),
    *((name, REDUCED_FORCE) for name in ("exponential_midpoint", "ab2")),
]


@pytest.mark.parametrize(("integrator", "others"), thinned(CAUSAL, 3))
def test_a_token_knows_nothing_of_its_future(integrator: str, others: dict[str, Any]) -> None:
    params, x = stack(3, **{"integrator": integrator, "look_ahead": True, **others}), draw("x", 1, 9, 6)
    whole, saves = run(params, x)
    for now in (1, 4, 8):
        d_x = draw("d_x", 1, 9, 6)
        d_x[:, now:] = 0.0
        assert not np.any(back(params, whole, saves, d_x)["x"][:, now:])  # the Jacobian of the prefix, exactly
        other = x.copy()
        other[:, now:] += 100.0
        assert np.array_equal(run(params, other)[0].x[:, :now], whole.x[:, :now])
        np.testing.assert_allclose(run(params, x[:, :now])[0].x, whole.x[:, :now], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("integrator", [*INTEGRATORS, *BASELINES])
def test_calls_of_the_oracle(integrator: str) -> None:
    params, x = stack(2, integrator=integrator, mlp="plain"), draw("x", 1, 4, 6)
    oracle = softmax if integrator in BASELINES else core
    with mock.patch.object(oracle, "forward", wraps=oracle.forward) as counted:
        run(params, x)
    assert counted.call_count == 2 * (4 if integrator in FOUR_CALLS else 1)
    assert "four times for presymplectic and Strang; twice" in holds("sympformer", "a step calls attention as often")


@pytest.mark.parametrize(("connection", "calls"), [("none", 2), ("h1", 3), ("r2", 4)])
def test_a_connection_is_a_second_call(connection: str, calls: int) -> None:
    """Where there is one: along the old momentum there is none at rest."""
    params, x = stack(2, integrator=f"lie_trotter(connection={connection!r})", mlp="plain"), draw("x", 1, 4, 6)
    with mock.patch.object(softmax, "forward", wraps=softmax.forward) as counted:
        run(params, x)
    assert counted.call_count == calls


def test_the_first_step_from_rest_is_residual_attention() -> None:
    """x + h_x h_y e^-a B attention: z cancels."""
    (params,) = stack(1, mlp="none")
    x = draw("x", 2, 7, 6)
    state, saves = run((params,), x)
    numbers, saved = saves[0].numbers, saves[0].attention.asked
    a = damping(Layer(None, params, numbers, True), np.ones(1), numbers["h_y"])
    attention = saved.attended / np.exp(saved.core.log_z[:, 0, :, None])
    step = numbers["h_x"] * numbers["h_y"] * np.exp(-a) * (attention @ params.w_o @ params.w_b)
    np.testing.assert_allclose(state.x, x + step, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("integrator", OLD_DRIFT)
def test_with_the_old_momentum_a_first_layer_moves_nothing(integrator: str) -> None:
    params, x = stack(2, integrator=integrator, mlp="none"), draw("x", 1, 5, 6)
    state, _ = BLOCK.forward(params[0], BLOCK.start(params[0], x, Context()), Context())
    assert np.array_equal(state.x, x)
    assert np.any(state.p)
    with pytest.raises(ValueError, match=f"layers: got 1, but {integrator} moves no token in a first layer"):
        BLOCK.Config(width=6, heads=2, integrator=integrator)


def test_forward_euler_and_presymplectic_euler_share_their_momentum() -> None:
    stacks = (stack(2, integrator=name, moved=0.0) for name in ("presymplectic_euler", "forward_euler"))
    one, other = (second_layer(params, draw("x", 1, 5, 6))[0] for params in stacks)
    assert np.array_equal(one.p, other.p)


def test_momenta_are_normalised() -> None:
    """After tokens have moved: these go as far as without it."""
    state, free = (second_layer(stack(2, moved=0.0, normalise=name), draw("x", 1, 5, 6))[0] for name in ("end", "none"))
    np.testing.assert_allclose(np.mean(state.p, axis=-1), 0.0, atol=1e-12)
    assert np.all(np.mean(state.p**2, axis=-1) <= 1.0)
    assert np.array_equal(state.x, free.x) and np.max(np.abs(state.p - free.p)) > 0.1


def test_attention_looks_ahead_along_the_momentum() -> None:
    """A layer moves tokens as one that does not look ahead moves those that stand there already."""
    params = stack(2, look_ahead=True, normalise="none", mlp="none")
    state, after, saved = second_layer(params, draw("x", 1, 5, 6))
    config = dataclasses.replace(params[1].config, look_ahead=False)
    numbers = {name: value for name, value in params[1].numbers.items() if name != "look"}
    there = dataclasses.replace(state, x=state.x + saved.numbers["look"] * state.p)
    still = dataclasses.replace(params[1], config=config, numbers=numbers)
    other, unmoved = (BLOCK.forward(still, each, Context(causal=True))[0] for each in (there, state))
    np.testing.assert_allclose(after.x - state.x, other.x - there.x, rtol=0.0, atol=1e-14)
    assert np.max(np.abs(after.x - unmoved.x)) > 1e-6


@pytest.mark.parametrize("kind", ["attention_velocity", "momentum", "velocity"])
def test_the_mlp_steps_along_what_it_is_called_by(kind: str) -> None:
    """MLP(norm(x + mu u)) for the velocity u of attention, the momentum or one of its own; the latter two go on."""
    params, x = stack(3, mlp=kind, normalise="none"), draw("x", 1, 5, 6)
    state, after, saved = second_layer(params, x)
    config = dataclasses.replace(params[1].config, mlp="none")
    numbers = {name: value for name, value in params[1].numbers.items() if name in config.numbers()}
    plain = dataclasses.replace(params[1], mlp=None, config=config, numbers=numbers)
    bare, _ = BLOCK.forward(plain, dataclasses.replace(state, v=None), Context(causal=True))
    number, mlp = saved.numbers, params[1].mlp
    u = {"momentum": bare.p, "velocity": state.v, "attention_velocity": (bare.x - state.x) / number["h_x"]}[kind]
    hidden = layer_norm_forward(bare.x + number["mu"] * u, mlp.gain)[0] @ mlp.w_in
    gelu = 0.5 * hidden * (1.0 + np.vectorize(math.erf)(hidden / math.sqrt(2.0)))
    push = number["gamma"] * gelu @ mlp.w_out
    if kind != "attention_velocity":
        push = layer_norm_forward(number["beta"] * u + push, mlp.gain_v)[0]
    np.testing.assert_allclose(after.x, bare.x + push, rtol=0.0, atol=1e-13)
    np.testing.assert_allclose(after.p, push if kind == "momentum" else bare.p, rtol=0.0, atol=1e-13)
    assert (after.v is not None) is (kind == "velocity")
    if after.v is not None:
        np.testing.assert_allclose(after.v, push, rtol=0.0, atol=1e-13)


def test_detached_gradients_are_those_of_a_fixed_time() -> None:
    """With `detach` the time and the steps of the layer before are constants of the backward."""
    torch = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    params, x, d_x = stack(3, integrator="ab2", detach=True), draw("x", 1, 4, 6), draw("d_x", 1, 4, 6)
    found = back(params, *run(params, x), d_x)
    whole = {"x": x, "params": params}
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in tree.flatten(whole).items()}
    placed = tree.unflatten(whole, leaves)
    context = Context(causal=True)
    state = BLOCK.start(placed["params"][0], placed["x"], context)
    divided = substep.forward

    def detached(layer: Any, *rest: Any) -> Any:
        numbers = layer.numbers | {"h_x": layer.numbers["h_x"].detach()}
        return divided(dataclasses.replace(layer, numbers=numbers), *rest)

    with mock.patch.object(substep, "forward", detached):
        for each in placed["params"]:
            state, _ = BLOCK.forward(each, state, context)
            old = state.history
            if old is not None:
                old = dataclasses.replace(old, t=old.t.detach(), h_x=old.h_x.detach(), h_y=old.h_y.detach())
            state = dataclasses.replace(state, t=state.t.detach(), history=old)
    loss = (state.x * torch.tensor(d_x)).sum()
    expected = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    named = {name: value.numpy() for name, value in zip(leaves, expected, strict=True)}
    assert gradients.largest_error(found, named)[0] < gradients.TOLERANCES["autograd"]
    attached = back(stack(3, integrator="ab2"), *run(stack(3, integrator="ab2"), x), d_x)
    assert gradients.largest_error(attached, named)[0] > 1e-6


@pytest.mark.parametrize(
    ("numbers", "xi"),
    [
        ("xi=0.4", 0.4),  # not learned
        ("angle=1.0, xi=0.4", 0.4),
        ("angle=1.0, xi=50.0", 1.0 / (2.0 * 0.1)),  # the largest angle
        ("angle=1.0, xi=0.4, most=0.3", 0.3),
        ("angle=1.0, xi=0.4, least=0.6", 0.6),
    ],
)
def test_xi_starts_where_it_is_told_within_its_bounds(numbers: str, xi: float) -> None:
    params, x = stack(1, moved=0.0, integrator=f"presymplectic(step=0.1, {numbers})", mlp="none"), draw("x", 1, 4, 6)
    state, saves = run(params, x)
    np.testing.assert_allclose(saves[0].attention.angle, 2.0 * xi * 0.1, rtol=2e-4)
    found = back(params, state, saves, draw("d_x", 1, 4, 6))
    clipped = "least" in numbers or "most" in numbers
    assert np.any(found.get("params.0.numbers.xi", 1.0)) != clipped


def test_a_clipped_damping_has_no_gradient() -> None:
    params, x = stack(1, damping="loglin(clip=0.01)", mlp="none"), draw("x", 1, 4, 6)
    found = back(params, *run(params, x), draw("d_x", 1, 4, 6))
    assert not np.any(found["params.0.numbers.c_log"]) and not np.any(found["params.0.numbers.c_lin"])


@pytest.mark.parametrize("a", [0.0, 1e-9, 1e-3, 0.176, 0.3, 0.4999999, 0.5, 2.0, 40.0])
def test_weight_of_a_force_in_a_damped_step(a: float) -> None:
    value, slope = phi(np.asarray([a]))
    exact = (-np.expm1(-a) / a) if a else 1.0
    np.testing.assert_allclose(value, exact, rtol=1e-14)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    s = 0.5 * (nodes + 1.0)  # phi' = - integral of s e^(-a s) over 0 to 1
    np.testing.assert_allclose(slope, -np.sum(0.5 * weights * s * np.exp(-a * s)), rtol=1e-12)
    if a in (0.176, 0.3):  # how far the kick of Euler, e^-a, and of half-damping, e^-a/2, are from it
        (layer,) = stack(1, damping="linear", integrator="half_damped", mlp="momentum")
        numbers = {"h_y": np.asarray([0.1]), "c_lin": np.asarray([a / 0.1])}
        far, near = 8, 0.4  # percent
        errors = []
        for rule in (coefficients.euler, coefficients.half):
            found, _ = rule(Layer(None, layer, numbers, True), np.ones(1))
            errors.append(100.0 * abs(float((found.weight * found.after)[0]) / 0.1 / exact - 1.0))
        assert errors[0] > far and errors[1] < near
        claimed("sympformer", f"e^-a is more than {far} % off at a = 0.176 and 0.3, half-damping below {near} %")


def test_damping_is_the_difference_of_eta() -> None:
    c_log, c_lin, t, h = (np.asarray([x]) for x in (3.0, 0.2, 1.7, 0.4))
    a = damping(Layer(None, stack(1)[0], {"c_log": c_log, "c_lin": c_lin}, True), t, h)
    np.testing.assert_allclose(a, 3.0 * np.log(2.1 / 1.7) + 0.2 * 0.4, rtol=1e-14)


def test_the_table_of_pairs_forbids_no_more_than_it_did() -> None:
    """The variants above are those that it lets through: of 1470 that can be written."""
    assert len(variants()) == 1077


def test_biases_are_those_of_their_projections() -> None:
    """They start at 0 and change nothing there; keys have none where nobody would see it."""
    given: dict[str, Any] = {"integrator": "lie_trotter", "mlp": "momentum"}
    x = draw("x", 1, 5, 6)
    (plain,), (params,) = (stack(1, moved=0.0, bias=bias, **given) for bias in (False, True))
    assert np.array_equal(run((plain,), x)[0].x, run((params,), x)[0].x)
    shapes, others = params.config.shapes(), plain.config.shapes()
    more = {"b_q", "b_v", "b_o", "shift", "shift_p", "mlp.b_in", "mlp.b_out", "mlp.shift", "mlp.shift_v"}
    assert set(shapes) - set(others) == more and shapes["mlp.b_in"] == (12,)
    moved = dataclasses.replace(params, b_o=draw("b_o", 6))
    state, saves = run((moved,), x)
    force = saves[0].attention.attended.joined @ moved.w_o + moved.b_o
    np.testing.assert_allclose(saves[0].attention.force, force, rtol=1e-13)
    assert {f"b_{name}" for name in "qkvo"} <= set(stack(2, bias=True)[1].config.shapes())
    assert not {f"b_{name}" for name in "qkvo"} & set(stack(2, bias=True, oracle="linear")[1].config.shapes())


# --- bad input


LIE: dict[str, Any] = {"integrator": "lie_trotter", "mlp": "none"}
CLASSICAL: dict[str, Any] = {"integrator": "classical"}
R2: dict[str, Any] = {"integrator": "lie_trotter(connection='r2')", "mlp": "none"}
WRONG: dict[str, dict[str, Any]] = {
    "; least: got 2.0, needs less than most, which is 1.0": {"integrator": "strang(least=2.0, most=1.0)"},
    "layer: got 2, needs one below the 2 layers": {"layer": 2, "layers": 2},
    "integrator: got .*; step: got 0.0, needs a finite number above 0": {"integrator": "strang(step=0.0)"},
    "; retention: got 1.0, needs a finite number above 0 to": {"integrator": "plain_euler(retention=1.0)"},
    "; ratio: got 0, needs a whole number of at least 1": {"mlp": "plain(ratio=0)"},
    "; clip: got 0.0, needs a finite number above 0": {"damping": "loglin(clip=0.0)"},
    "; strength: got 1.0, but connection='none' has nothing": {"integrator": "lie_trotter(strength=1.0)"},
    "got 'connection' in .*, but strang has step, learned, xi, angle": {"integrator": "strang(connection='h1')"},
    # what does not go together
    "normalise: got 'each_substep', which only presymplectic and strang have": {"normalise": "each_substep"},
    "got Hamiltonian.*, but the attention of lie_trotter is": {**LIE, "oracle": "hamiltonian"},
    "lie_trotter is one of softmax, signed$": {**R2, "oracle": "linear"},
    "bias: got True, the connection of lie_trotter is defined without biases: it needs False": {**R2, "bias": True},
    "oracle: got 'signed', which baselines alone have": {"oracle": "signed"},
    "oracle: got 'reduced', whose momenta are matrices: it needs integrator='ab2'": {"oracle": "reduced"},
    "mlp: got 'attention_velocity', classical has no steps": CLASSICAL,
    "mlp: got 'momentum', classical has none": {**CLASSICAL, "mlp": "momentum"},
    "mlp: got shared_norm=True with normalise='none'": {"mlp": "momentum(shared_norm=True)", "normalise": "none"},
    "start: got 'linear', classical has no momentum": {**CLASSICAL, "mlp": "plain", "start": "linear"},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_configuration(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK.Config(**{"width": 6, "heads": 2, **WRONG[message]})


def test_kinds_are_taken_as_objects_names_and_text() -> None:
    kinds = ("strang(xi=0.5)", four_calls.Strang(xi=0.5))
    one, other = (BLOCK.Config(width=6, heads=2, integrator=kind) for kind in kinds)
    assert one == other and one.integrator.step == Integrator().step
    assert dataclasses.replace(one, layers=2).integrator == one.integrator
    assert option_kinds.text_of(one.integrator, INTEGRATORS_BY_NAME) == "strang(xi=0.5)"


def test_a_state_of_another_layer() -> None:
    params, x = stack(2), draw("x", 1, 4, 6)
    first = BLOCK.start(params[0], x, Context())
    second, _ = BLOCK.forward(params[0], first, Context())
    with pytest.raises(ValueError, match=r"state.p: got None, layer 1 of 2 needs \(1, 4, 6\)"):
        BLOCK.forward(params[1], first, Context())
    with pytest.raises(
        ValueError, match=r"state.p: got shape \(1, 4, 6\), layer 0 of 2 needs None: a stack starts at rest"
    ):
        BLOCK.forward(params[0], second, Context())
