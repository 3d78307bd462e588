"""Levels of tokens, and parameters that nodes share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context, backends, equations, mechanism
from refattn.analysis.graph_flow import flow_of_call
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.layer import hierarchy, regularisers
from refattn.mechanisms.graph_energy.layer import numbers as of_nodes
from refattn.mechanisms.graph_energy.system import energy
from refattn.verify.selfcheck import sections
from tests.mechanisms.graph_energy.calls import B, H, agree, draw, flat, forward, gradients_of, kept, qkv

LONG = 11


# --- levels


def numbers(**more: Any) -> dict[str, Any]:
    per_head = {"mu": np.abs(draw("mu", H, LONG)), "kappa": np.abs(draw("kappa", H)), "tau": np.full((H,), 0.3)}
    others = {"step": np.asarray(0.05), "scale": np.asarray(0.6), "level_logits": draw("logits", 5)}
    return {**per_head, **others, **more}


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"symmetrise": "min", "coupling": "tanh", "intrinsic": "double_well", "window": 3},
        {"causal": True, "state": "prefix"},
        {"causal": False, "state": "prefix", "window": 3},
        {"causal": True, "window": 2, "kind": "proximal"},
        {"causal": False, "window": 2, "integrator": "heun"},
    ],
    ids=str,
)
def test_gradients_of_levels_are_those_of_autograd(options: dict[str, Any]) -> None:
    arrays = dict(zip("qkv", qkv(LONG), strict=True)) | numbers(bias=draw("bias", H, 1, LONG))
    options = {"stride": 2, "levels": 5, "kind": "soft", "steps": 3, **options}

    def call(**leaves: Any) -> Any:
        return hierarchy.forward(**flat(**leaves, **options))

    out, saved = call(**arrays)
    assert [level.count for level in saved.levels] == ([11, 5, 2, 1] if saved.options.causal else [11, 6, 3, 2, 1])
    d_out = draw("d_out", *out.shape)
    found = hierarchy.backward(saved, d_out)
    assert {name: x.shape for name, x in found.items()} == {name: np.shape(x) for name, x in arrays.items()}
    agree(found, gradients_of(call, arrays, d_out))


@pytest.mark.parametrize("name", regularisers.OF_SCORES)
def test_gradients_of_a_loss_with_a_sum_over_levels(name: str) -> None:
    """Of a causal model, too: every prefix of every level has an energy."""
    arrays: dict[str, Any] = dict(zip("qkv", qkv(LONG), strict=True)) | {"kappa": np.abs(draw("kappa", H))}
    options: dict[str, Any] = {"stride": 2, "levels": 3, "window": 4, "causal": True, "state": "prefix", "step": 0.1}
    options |= {"steps": 3}

    def call(**leaves: Any) -> Any:
        out, saved = hierarchy.forward(**leaves, **options)
        return out, sum(regularisers.part_of(name, stage.core)[0] for stage in saved.stages)[None]

    out, saved = hierarchy.forward(**arrays, **options)
    d_out = draw("d_out", *out.shape)
    found = hierarchy.backward(saved, d_out, name, 0.3)
    agree(found, gradients_of(call, arrays, d_out, np.asarray([0.3])))
    with pytest.raises(ValueError, match="regulariser: got 'gini', needs one of size, roughness, level"):
        hierarchy.backward(saved, d_out, "gini")


def test_levels_of_prefixes_are_levels_of_what_a_token_reads() -> None:
    """A token reads, on each level, as the last token would of a text that ends with it, without causality."""
    q, k, v = qkv(LONG)
    options: dict[str, Any] = {"stride": 3, "levels": 2, "window": None, "step": 0.05, "steps": 12, "coupling": "tanh"}
    out, saved = hierarchy.forward(q, k, v, causal=True, state="prefix", **options)
    for level, stage, read, values in zip(saved.levels, saved.stages, saved.read, (v, saved.read[0]), strict=True):
        nodes = np.asarray(level.positions(q))
        for i in range(level.first(), LONG):
            own = nodes[nodes <= i]
            cut = [np.repeat(x, H // x.shape[1], axis=1)[:, :, own] for x in (q, k, values)]
            below = np.tril(forward(*cut, state="query", causal=True, kappa=0.0, tau=0.0)[1].weights, -1)
            graph = below + np.swapaxes(below, 2, 3)
            known = {name: x for name, x in options.items() if name in ("step", "steps", "coupling")}
            x = forward(*cut, graph=graph, **known)[1].scores[..., 0]
            scores = np.einsum("bhd,bhjd->bhj", q[:, :, i], cut[1]) / np.sqrt(q.shape[3])
            parts = np.exp(scores) * np.where(x >= 0.4, x, 0.0)
            some = np.sum(parts, axis=-1) > 0.0
            expected = np.einsum("bhj,bhje->bhe", parts, cut[2])[some] / np.sum(parts, axis=-1)[some][:, None]
            assert np.any(some)
            np.testing.assert_allclose(read[:, :, i][some], expected, rtol=0, atol=1e-13)
        assert np.all(np.diff(energy(stage.core), axis=-1) < 0.0)


def test_one_level_is_the_core() -> None:
    """Without a window all pairs; with one those that a mask leaves."""
    q, k, v = qkv()
    apart = np.arange(7)[:, None] - np.arange(7)
    for causal, window, mask in ((False, None, None), (True, None, None), (True, 3, apart < 3)):
        out, saved = hierarchy.forward(q, k, v, levels=1, causal=causal, window=window)
        plain, other = forward(q, k, v, causal=causal, mask=mask)
        np.testing.assert_allclose(out, plain, rtol=0, atol=1e-15)
        found, expected = hierarchy.backward(saved, out), core.backward(other, out)
        for name in "qkv":
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("causal", [False, True])
def test_levels_gather_the_one_below(causal: bool, window: int | None) -> None:
    """Token by token, from the nodes that it reads; scores flow in the core, on the nodes of a level alone."""
    q, k, v = qkv(LONG)
    logits, k_heads, below = draw("logits", 3), np.repeat(k, H // k.shape[1], axis=1), np.repeat(v, H // v.shape[1], 1)
    options: dict[str, Any] = {"causal": causal, "step": 0.2, "steps": 4, "threshold": "hard(tau=0.2, empty='zero')"}
    out, saved = hierarchy.forward(q, k, v, stride=2, window=window, level_logits=logits, **options)
    expected, counts = np.zeros(out.shape), np.zeros(LONG)
    for level, stage in enumerate(saved.stages):
        nodes = [*range(2**level - 1, LONG, 2**level), *([LONG - 1] if not causal and LONG % 2**level else [])]
        assert stage.level.positions(q).tolist() == nodes
        near = np.zeros((LONG, len(nodes)), bool)
        for i in range(LONG):
            home = sum(j <= i for j in nodes) - 1 if causal else i // 2**level
            near[i] = [
                (place <= home or not causal) and abs(place - home) < (window or 99) for place in range(len(nodes))
            ]
        x = forward(*(each[:, :, nodes] for each in (q, k, v)), mask=near[nodes], **options)[1].scores[..., 0]
        powers = np.where(near, np.exp(q @ np.swapaxes(k_heads[:, :, nodes], 2, 3) / np.sqrt(q.shape[3])), 0.0)
        parts = powers * np.where(x >= 0.2, x, 0.0)[:, :, None, :]
        weights = parts / np.maximum(np.sum(parts, axis=-1, keepdims=True), 1e-300)
        read = weights @ below[:, :, nodes]
        np.testing.assert_allclose(saved.read[level], read, rtol=0, atol=1e-14)
        share = np.exp(logits[level]) * np.any(near, axis=1)
        expected, counts, below = expected + share[:, None] * read, counts + share, read
    np.testing.assert_allclose(out, expected / counts[:, None], rtol=0, atol=1e-14)


def test_a_window_bounds_what_a_token_reads() -> None:
    """On each level it reads at most so many nodes, and so does a node in its graph: n w numbers are enough."""
    for causal, most in ((True, 3), (False, 5)):
        _, saved = hierarchy.forward(*qkv(70), stride=3, levels=3, window=3, causal=causal)
        for stage in saved.stages:
            links: Any = stage.core.graph
            assert np.max(np.sum(stage.readout.weights > 0.0, axis=-1)) <= most
            assert np.max(np.sum(links > 0.0, axis=-1)) <= most - 1


def test_a_check_has_the_levels() -> None:
    """And it fails where the gradient of a level is wrong."""
    scope = sections.Scope(mechanism("graph_energy"), backends.get("numpy"))
    task, *others = (task for task in sections.tasks(scope) if task.name.startswith("levels"))
    assert {each.section for each in (task, *others)} == {"gradients"} and task.run()[0] <= 1.0
    with equations.apply(lambda id, name, x: 1.01 * x if id == "dGE.level_reads" else x):
        assert task.run()[0] > 1.0


def test_levels_read_nothing_later() -> None:
    """Neither does a token read that more follow: what comes first is the same without them."""
    q, k, v = qkv(LONG)
    for options in ({}, {"state": "prefix", "step": 0.1}):
        given: dict[str, Any] = {"stride": 2, "levels": 4, "causal": True, "window": 2, **options}
        base, _ = hierarchy.forward(q, k, v, **given)
        for now in range(1, LONG):
            out, _ = hierarchy.forward(*(x[:, :, :now] for x in (q, k, v)), **given)
            np.testing.assert_allclose(out, base[:, :, :now], rtol=0, atol=1e-15)


def test_padding_counts_for_nothing() -> None:
    padding, pairs = kept("padding", B, LONG), np.ones((1, 1, LONG, LONG), bool)
    others = [np.where(padding[:, None, :, None], x, 9.0) for x in qkv(LONG)]
    options: dict[str, Any] = {"stride": 2, "window": 3, "key_mask": padding}
    out, _ = hierarchy.forward(*qkv(LONG), **options)
    assert np.array_equal(out, hierarchy.forward(*others, **options)[0])
    assert not np.any(out[np.broadcast_to(~padding[:, None, :], out.shape[:3])])
    as_pairs, _ = hierarchy.forward(*qkv(LONG), stride=2, window=3, mask=pairs & padding[:, None, None, :])
    np.testing.assert_allclose(np.where(padding[:, None, :, None], as_pairs, 0.0), out, rtol=0, atol=1e-14)


# --- shared parameters


def test_nodes_of_a_class_share_a_strength_and_a_start() -> None:
    q, k, v = qkv()
    classes = np.array([0, 1, 2, 1, 0, 2, 2])
    tables = {"mu": np.abs(draw("mu table", H, 3)), "start": np.abs(draw("start table", B, H, 3))}

    def call(mu: Any, start: Any) -> Any:
        index = classes if isinstance(mu, np.ndarray) else __import__("torch").tensor(classes)
        given = {"mu": of_nodes.nodes_forward(mu, index), "start": of_nodes.nodes_forward(start, index)}
        like = [x if isinstance(mu, np.ndarray) else __import__("torch").tensor(x) for x in (q, k, v)]
        return forward(*like, **given, step=0.2)

    out, saved = call(**tables)
    d_out = draw("d_out", *out.shape)
    d = core.backward(saved, d_out)
    found = {name: of_nodes.nodes_backward(d[name], classes, 3) for name in tables}
    agree(found, gradients_of(call, tables, d_out))


def test_pairs_of_classes_share_a_bias() -> None:
    """Each element is that of the table, and its adjoint adds up by class."""
    table, d = draw("table", H, 3, 2), draw("d", B, H, 4, 5)
    rows, columns = np.array([2, 0, 1, 2]), np.array([1, 1, 0, 0, 1])
    taken = of_nodes.pairs_forward(table, rows, columns)
    assert np.array_equal(taken, table[:, rows][:, :, columns])
    expected = np.zeros((B, H, 3, 2))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            expected[:, :, row, column] += d[:, :, i, j]
    np.testing.assert_allclose(of_nodes.pairs_backward(d, rows, columns, (3, 2)), expected, rtol=0, atol=1e-14)
    with pytest.raises(
        IndexError, match="columns: got a class that the table does not have, needs numbers from 0 to 1"
    ):
        of_nodes.pairs_forward(table, rows, columns + 1)
    with pytest.raises(TypeError, match="classes: got dtype float64, needs an integer one"):
        of_nodes.nodes_forward(table, np.zeros(3))


BLOCK = mechanism("graph_energy").block


def test_a_block_learns_a_mu_of_each_class() -> None:
    """The same for all classes it is that of a block without; a class without nodes has no gradient."""
    x, d_x = draw("x", 2, 6, 4), draw("d_x", 2, 6, 4)
    options: dict[str, Any] = {"width": 4, "heads": 2, "step": 0.2, "threshold": "soft(tau=0.1)"}
    found = []
    for more, positions in (({}, None), ({"classes": 3}, np.asarray([2, 0, 2, 2, 0, 0]))):
        params = BLOCK.init(BLOCK.Config(**options, **more), seed=1, like=x)
        context = Context(positions=positions, causal=True)
        state, saved = BLOCK.forward(params, BLOCK.start(params, x, context), context)
        found.append((state.x, BLOCK.backward(params, saved, BLOCK.read_backward(params, state, d_x)[0])[1].raw_mu))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.sum(found[1][1], axis=1), found[0][1], rtol=0, atol=1e-14)
    assert found[1][1].shape == (2, 3) and not np.any(found[1][1][:, 1]) and np.all(found[1][1][:, [0, 2]])


def test_a_block_with_levels() -> None:
    """It is a hierarchy between its projections; how far it is from rest is the sum over levels."""
    x, context = draw("x", 2, 40, 4), Context(causal=True, key_mask=kept("padding", 2, 40))
    config = BLOCK.Config(width=4, heads=2, levels=2, window=3, step=0.1, residual=False, intrinsic="double_well")
    params = BLOCK.init(config, seed=1, like=x)
    state, saved = BLOCK.forward(params, BLOCK.start(params, x, context), context)
    q, k, v = (np.moveaxis((x @ w).reshape(2, 40, 2, 2), 2, 1) for w in (params.w_q, params.w_k, params.w_v))
    options: dict[str, Any] = {"levels": 2, "window": 3, "step": 0.1, "intrinsic": "double_well"}
    expected, _ = hierarchy.forward(q, k, v, causal=True, key_mask=context.key_mask, **options)
    np.testing.assert_allclose(state.x, np.moveaxis(expected, 1, 2).reshape(2, 40, 4) @ params.w_o, rtol=0, atol=1e-14)
    force = mechanism("graph_energy").diagnostics.force
    whole, count = force(saved)
    assert count == 4
    np.testing.assert_allclose(whole, sum(np.sum(stage.rate**2) for stage in saved.core.stages), rtol=1e-12)


def test_a_flow_of_levels_is_no_single_one() -> None:
    saved: Any = hierarchy.forward(*qkv())[1]
    with pytest.raises(ValueError, match="saved: got levels of tokens, each with a graph of its own"):
        flow_of_call(saved)


@pytest.mark.filterwarnings("ignore:overflow|invalid value")
def test_steps_of_levels_that_are_too_long() -> None:
    with pytest.warns(UserWarning, match=r"step: got more than 2/L = 0\.667"):
        hierarchy.forward(*qkv(), step=0.7)
    with pytest.raises(FloatingPointError, match="the scores diverged"), pytest.warns(UserWarning):
        hierarchy.forward(*qkv(), step=9.0, steps=60, coupling="cubic")


def test_a_polynomial_of_a_block_starts_as_the_identity() -> None:
    x = draw("x", 2, 6, 4)
    found = []
    for more in ({"coupling": "identity"}, {"coupling": "polynomial(coefficients=(1.0, 0.0, 0.0))"}):
        params = BLOCK.init(BLOCK.Config(width=4, heads=2, step=0.2, **more), seed=1, like=x)
        found.append(BLOCK.forward(params, BLOCK.start(params, x, Context()), Context())[0].x)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-14)
