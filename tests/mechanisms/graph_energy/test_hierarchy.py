"""Levels of tokens, and parameters that nodes share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context, backends, mechanism
from refattn.mechanisms.graph_energy import core, longest_step
from refattn.mechanisms.graph_energy.layer import hierarchy, sharing
from tests.mechanisms.graph_energy.calls import STATES, B, H, draw, flat, forward, qkv

LONG = 11


def gradients_of(call: Any, arrays: dict[str, Any], d_out: Any) -> dict[str, Any]:
    """The gradients of a call's first result by the autograd of torch."""
    torch: Any = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    leaves = {name: torch.tensor(np.asarray(x), requires_grad=True) for name, x in arrays.items()}
    loss = (call(**leaves)[0] * torch.tensor(d_out)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {name: x.numpy() for name, x in zip(leaves, found, strict=True)}


def agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    floor = 1e-2 * max(float(np.max(np.abs(x))) for x in expected.values())
    for name, x in expected.items():
        size = max(float(np.max(np.abs(x))), floor)
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-12 * size, err_msg=name)


# --- levels


def numbers() -> dict[str, Any]:
    per_head = {"mu": np.abs(draw("mu", H, LONG)), "kappa": np.abs(draw("kappa", H)), "tau": np.full((H,), 0.3)}
    others = {"step": np.asarray(0.05), "scale": np.asarray(0.6), "bias": draw("bias", H, 1, LONG)}
    return {**per_head, **others, "level_logits": draw("logits", 4)}


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 2, "kind": "proximal"},
        {"causal": False, "integrator": "heun"},
        {"causal": False, "symmetrise": "min", "coupling": "tanh", "intrinsic": "double_well"},
    ],
    ids=str,
)
def test_gradients_of_levels_are_those_of_autograd(options: dict[str, Any]) -> None:
    arrays = dict(zip("qkv", qkv(LONG), strict=True)) | numbers()
    options = {"stride": 2, "levels": 4, "kind": "soft", "steps": 3, **options}

    def call(**leaves: Any) -> Any:
        return hierarchy.forward(**flat(**leaves, **options))

    out, saved = call(**arrays)
    assert [len(level.tokens) for level in saved.levels] == ([11, 5, 2, 1] if options["causal"] else [11, 6, 3, 2])
    d_out = draw("d_out", *out.shape)
    found = hierarchy.backward(saved, d_out)
    assert {name: x.shape for name, x in found.items()} == {name: np.shape(x) for name, x in arrays.items()}
    agree(found, gradients_of(call, arrays, d_out))


def test_one_level_is_the_core() -> None:
    q, k, v = qkv()
    for causal in (False, True):
        out, saved = hierarchy.forward(q, k, v, levels=1, causal=causal)
        plain, other = forward(q, k, v, causal=causal)
        np.testing.assert_allclose(out, plain, rtol=0, atol=1e-15)
        found, expected = hierarchy.backward(saved, out), core.backward(other, out)
        for name in "qkv":
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-14)


def test_levels_gather_the_one_below() -> None:
    """A second derivation: every stage by loops over its readers, with readers of a level apart from all tokens."""
    q, k, v = (x[:1, :1] for x in qkv(LONG))
    known = [range(LONG), range(1, LONG, 2), range(3, LONG, 4)]

    def stage(readers: Any, tokens: Any, values: Any) -> Any:
        s = lambda i, j: float(q[0, 0, i] @ k[0, 0, j]) / np.sqrt(3.0)  # noqa: E731
        x = b = np.array([1.0 / (1.0 + np.exp(-s(j, j))) for j in tokens])
        w = np.zeros((len(tokens), len(tokens)))
        for row, i in enumerate(tokens):
            weights = np.exp([s(i, j) for j in tokens[: row + 1]])
            w[row, : row + 1] = weights / np.sum(weights)
        np.fill_diagonal(w, 0.0)
        for _ in range(4):
            x = x + 0.2 * (b - x + np.sum(w * np.sin(x[None, :] - x[:, None]), axis=1))
        y, out = np.where(x >= 0.2, x, 0.0), np.zeros((len(readers), 5))
        for row, i in enumerate(readers):
            seen = [at for at, j in enumerate(tokens) if j <= i][-3:]
            if seen:
                parts = np.exp([s(i, tokens[at]) for at in seen]) * y[seen]
                out[row] = parts @ values[seen] / np.sum(parts)
        return out

    values = [v[0, 0]]
    for level in (0, 1):
        values.append(stage(known[level + 1], known[level], values[level]))
    weights = np.exp(draw("logits", 3)) / np.sum(np.exp(draw("logits", 3)))
    expected = sum(w * stage(known[0], known[level], values[level]) for level, w in enumerate(weights))
    options: dict[str, Any] = {"step": 0.2, "steps": 4, "tau": 0.2, "level_logits": draw("logits", 3)}
    out, saved = hierarchy.forward(q, k, v, stride=2, levels=3, window=3, causal=True, **flat(**options))
    assert np.all(saved.levels[0].readout.filled)
    np.testing.assert_allclose(out[0, 0], expected, rtol=0, atol=1e-14)


def test_levels_read_nothing_later_and_stop_where_tokens_end() -> None:
    q, k, v = qkv(LONG)
    base, _ = hierarchy.forward(q, k, v, stride=2, levels=4, causal=True)
    for now in range(1, LONG):
        changed = [x.copy() for x in (q, k, v)]
        for x in changed:
            x[:, :, now:] = 1.0 - x[:, :, now:]
        out, _ = hierarchy.forward(*changed, stride=2, levels=4, causal=True)
        assert np.array_equal(out[:, :, :now], base[:, :, :now])
    assert hierarchy.tokens_of(3, 4, 5, True) == [(0, 1, 2)]
    assert hierarchy.tokens_of(9, 4, 5, False) == [tuple(range(9)), (3, 7, 8)]


def test_levels_run_on_every_library() -> None:
    q, k, v = qkv(5)
    expected, _ = hierarchy.forward(q, k, v, stride=2, causal=True, window=1)
    strict = backends.get("strict")
    out, saved = hierarchy.forward(*map(strict.from_numpy, (q, k, v)), stride=2, causal=True, window=1)
    np.testing.assert_allclose(strict.to_numpy(out), expected, rtol=0, atol=1e-14)
    hierarchy.backward(saved, out)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stride": 1}, ValueError, "stride: got 1, needs a whole number of at least 2"),
        ({"levels": 0}, ValueError, "levels: got 0, needs a whole number of at least 1"),
        ({"window": 2}, ValueError, "window: got 2 without causal scores"),
        ({"state": "query"}, ValueError, "state: got an option that a hierarchy does not take"),
        ({"level_logits": np.zeros(2)}, ValueError, r"level_logits: got shape \(2,\), needs \(3,\)"),
    ],
)
def test_levels_that_do_not_fit(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hierarchy.forward(*qkv(), **options)


# --- shared parameters


def test_nodes_of_a_class_share_a_strength_and_a_start() -> None:
    q, k, v = qkv()
    classes = np.array([0, 1, 2, 1, 0, 2, 2])
    tables = {"mu": np.abs(draw("mu table", H, 3)), "start": np.abs(draw("start table", B, H, 3))}

    def call(mu: Any, start: Any) -> Any:
        index = classes if isinstance(mu, np.ndarray) else __import__("torch").tensor(classes)
        given = {"mu": sharing.nodes_forward(mu, index), "start": sharing.nodes_forward(start, index)}
        like = [x if isinstance(mu, np.ndarray) else __import__("torch").tensor(x) for x in (q, k, v)]
        return forward(*like, **given, step=0.2)

    out, saved = call(**tables)
    d_out = draw("d_out", *out.shape)
    d = core.backward(saved, d_out)
    found = {name: sharing.nodes_backward(d[name], classes, 3) for name in tables}
    agree(found, gradients_of(call, tables, d_out))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ["soft", "proximal"])
def test_a_strength_of_each_node(kind: str, state: str) -> None:
    arrays = dict(zip("qkv", qkv(5), strict=True)) | {"mu": np.abs(draw("mu", H, 5)), "tau": np.full((H,), 0.05)}

    def call(**leaves: Any) -> Any:
        return forward(**leaves, state=state, kind=kind, steps=3, step=0.2)

    out, saved = call(**arrays)
    d_out = draw("d_out", *out.shape)
    agree(core.backward(saved, d_out), gradients_of(call, arrays, d_out))
    with pytest.raises(ValueError, match=r"mu: got shape \(4, 6\), needs a number or an array \(4,\) or \(4, 5\)"):
        forward(**arrays | {"mu": np.ones((H, 6))})
    # One bound for all nodes, from the strongest.
    strongest = np.max(arrays["mu"], axis=1)
    np.testing.assert_allclose(longest_step(forward(**arrays)[1]), 2.0 / (strongest + 2.0), rtol=1e-15)


def test_pairs_of_classes_share_a_bias() -> None:
    """Each element is that of the table, and its adjoint adds up by class."""
    table, d = draw("table", H, 3, 2), draw("d", B, H, 4, 5)
    rows, columns = np.array([2, 0, 1, 2]), np.array([1, 1, 0, 0, 1])
    taken = sharing.pairs_forward(table, rows, columns)
    assert np.array_equal(taken, table[:, rows][:, :, columns])
    expected = np.zeros((B, H, 3, 2))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            expected[:, :, row, column] += d[:, :, i, j]
    np.testing.assert_allclose(sharing.pairs_backward(d, rows, columns, (3, 2)), expected, rtol=0, atol=1e-14)
    with pytest.raises(
        IndexError, match="columns: got a class that the table does not have, needs numbers from 0 to 1"
    ):
        sharing.pairs_forward(table, rows, columns + 1)
    with pytest.raises(TypeError, match="classes: got dtype float64, needs an integer one"):
        sharing.nodes_forward(table, np.zeros(3))


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


def test_a_polynomial_of_a_block_starts_as_the_identity() -> None:
    x = draw("x", 2, 6, 4)
    found = []
    for more in ({"coupling": "identity"}, {"coupling": "polynomial(coefficients=(1.0, 0.0, 0.0))"}):
        params = BLOCK.init(BLOCK.Config(width=4, heads=2, step=0.2, **more), seed=1, like=x)
        found.append(BLOCK.forward(params, BLOCK.start(params, x, Context()), Context())[0].x)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0, "step": 0.1}, "classes: got 0, needs a whole number of at least 1"),
        ({"classes": 2}, "step: got None with classes, needs a number, or learn_step"),
        (
            {"coupling": "polynomial(coefficients=(1.0,))"},
            "step: got None with coupling='polynomial.*, needs a number, or learn_step",
        ),
        ({"classes": 2, "intrinsic": "none"}, 'classes: got 2 with intrinsic="none", which has no mu'),
        ({"graph": np.ones((6, 6))}, "graph: got ndarray, needs the links of a block"),
    ],
)
def test_what_a_block_does_not_share(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        BLOCK.Config(width=4, heads=2, **options)


@pytest.mark.parametrize(
    ("classes", "positions", "message"),
    [
        (2, None, "classes: got some, needs context.positions"),
        (2, np.zeros((2, 6), int), r"context.positions: got shape \(2, 6\) with classes, needs \(tokens,\)"),
        (None, np.zeros(6, int), "context.positions was given to a block without classes"),
    ],
)
def test_positions_that_do_not_fit(classes: int | None, positions: Any, message: str) -> None:
    x, context = draw("x", 2, 6, 4), Context(positions=positions)
    params = BLOCK.init(BLOCK.Config(width=4, heads=2, step=0.1, classes=classes), seed=1, like=x)
    with pytest.raises((ValueError, IndexError), match=message):
        BLOCK.forward(params, BLOCK.start(params, x, context), context)
