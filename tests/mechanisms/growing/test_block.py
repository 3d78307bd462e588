"""The report's block: its numbers by hand, its laws, its functional gradient, and its implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import tree
from refattn.mechanisms.record import Unsupported
from tests.mechanisms.growing.calls import BLOCK, SIZES, block_of, cut, draw, step, uniform


def statistics_of(params: Any, x: Any, context: ra.Context) -> tuple[Any, Any, Any, Any]:
    """N by head, augmented tokens, the functional gradient, and the gradients of the parameters, for one upstream."""
    y, saved = step(params, x, context)
    d_y = draw("d_y", *y.shape)
    _, gradients, _ = BLOCK.backward(params, saved, BLOCK.module.State(d_y))
    d_attended = BLOCK.module.attended_backward(params, saved, BLOCK.module.State(d_y))
    g = ra.growing.functional_gradient(saved.core, d_attended)
    n = np.sum(ra.growing.contract(saved.core, d_attended, saved.tokens), axis=0)
    return n, saved.tokens, g, gradients


def test_the_numbers_by_hand() -> None:
    """Two tokens of width 1, all weights and the scale 1."""
    one = np.ones((1, 1, 1))
    params = BLOCK.module.Params(BLOCK.Config(width=1, heads=1, scale=1.0), one, one, one, np.ones((1, 1)))
    x = np.asarray([[[1.0], [2.0]]])
    with ra.trace() as t:
        state, saved = BLOCK.forward(params, BLOCK.module.State(x), ra.Context())
        _, gradients, _ = BLOCK.backward(params, saved, BLOCK.module.State(np.ones((1, 2, 1))))
    np.testing.assert_array_equal(t["SM.1"][0, 0], [[1.0, 2.0], [2.0, 4.0]])
    np.testing.assert_allclose(state.x[0, :, 0], [2.731059, 3.880797], atol=5e-7)
    np.testing.assert_allclose(t["dSM.2"][0, 0], [[-0.196612, 0.196612], [-0.104994, 0.104994]], atol=5e-7)
    np.testing.assert_allclose([gradients.w_q[0, 0, 0], gradients.w_k[0, 0, 0]], [0.406599, 0.406599], atol=5e-7)


def naive(params: Any, x: Any, context: ra.Context) -> Any:
    """The block once more from the report, head by head."""
    config = params.config
    y = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2) if config.bias else x
    b, n, _ = x.shape
    h = config.heads
    visible: Any = np.ones((b, h, n, n), bool)
    if context.causal:
        visible = np.tril(visible)
    if context.mask is not None:
        visible = visible & context.mask
    if context.key_mask is not None:
        visible = visible & context.key_mask[:, None, None, :]
    heads = []
    for i in range(h):
        scores = config.factor * (y @ params.w_q[i]) @ np.swapaxes(y @ params.w_k[i], 1, 2)
        weights = np.where(visible[:, i], np.exp(scores), 0.0)
        total = weights.sum(axis=2, keepdims=True)
        heads.append(weights / np.where(total > 0.0, total, 1.0) @ (y @ params.w_v[i]))
    joined = np.concatenate(heads + ([np.ones((b, n, 1))] if config.bias else []), axis=2)
    return joined @ params.w_o + (x if config.residual else 0.0)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_the_block_is_the_reports(name: str, residual: bool) -> None:
    params, x, context = block_of(name, residual=residual)
    np.testing.assert_allclose(step(params, x, context)[0], naive(params, x, context), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_those_of_autograd(name: str) -> None:
    """Test 1, of the parameters and the tokens, and of the scores: the functional gradient."""
    torch = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    params, x, context = block_of(name, train_scale=True)
    leaves = {"x": x, **tree.flatten(params)}
    given = {n: torch.tensor(w, requires_grad=True) for n, w in leaves.items()}
    masks = {n: torch.tensor(m) for n in ("mask", "key_mask") if (m := getattr(context, n)) is not None}
    at = replace(context, **masks)
    inner = {n: w for n, w in given.items() if n != "x"}
    out, _ = step(tree.unflatten(params, inner), given["x"], at)
    d_y = draw("d_y", *x.shape)
    expected = torch.autograd.grad(torch.sum(torch.tensor(d_y) * out), list(given.values()), materialize_grads=True)
    _, saved = step(params, x, context)
    d_state, gradients, _ = BLOCK.backward(params, saved, BLOCK.module.State(d_y))
    found = {"x": d_state.x, **tree.flatten(gradients)}
    for leaf, wanted in zip(given, expected, strict=True):
        np.testing.assert_allclose(found[leaf], wanted.numpy(), rtol=0.0, atol=1e-12, err_msg=leaf)
    with ra.trace() as t:
        _, traced = step(params, x, context)
        BLOCK.backward(params, traced, BLOCK.module.State(d_y))
    scores = torch.tensor(t.get("SM.2", t["SM.1"]), requires_grad=True)
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1))
    d_attended = torch.tensor(t["dGROW.o"])
    (wanted,) = torch.autograd.grad(torch.sum(weights @ torch.tensor(t["GROW.values"]) * d_attended), [scores])
    np.testing.assert_allclose(t["dSM.2"], torch.nan_to_num(wanted).numpy(), rtol=0.0, atol=1e-12)


# --- the functional gradient


@pytest.mark.parametrize("name", SIZES)
def test_rows_of_the_functional_gradient_sum_to_0(name: str) -> None:
    """Test 2."""
    _, _, g, _ = statistics_of(*block_of(name))
    assert np.max(np.abs(g.sum(axis=-1))) < 1e-13


@pytest.mark.parametrize("name", [name for name in SIZES if SIZES[name][6]])
def test_the_bias_of_the_keys_has_no_gradient(name: str) -> None:
    """Test 2, its second part."""
    n, _, _, gradients = statistics_of(*block_of(name))
    assert np.max(np.abs(gradients.w_k[:, -1, :])) < 1e-13
    assert np.max(np.abs(n[:, :, -1])) < 1e-13


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name", SIZES)
def test_all_gradients_of_queries_and_keys_follow_from_n(name: str, softcap: float | None) -> None:
    """Test 3."""
    params, x, context = block_of(name, train_scale=True, softcap=softcap)
    n, tokens, g, gradients = statistics_of(params, x, context)
    s = float(params.scale)
    np.testing.assert_allclose(np.einsum("bni,bhnk,bkj->hij", tokens, g, tokens), n, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gradients.w_q, s * n @ params.w_k, rtol=0.0, atol=1e-12)
    np.testing.assert_allclose(gradients.w_k, s * np.swapaxes(n, 1, 2) @ params.w_q, rtol=0.0, atol=1e-12)
    kernel = s * params.w_q @ np.swapaxes(params.w_k, 1, 2)
    np.testing.assert_allclose(s * float(gradients.scale), np.sum(n * kernel), rtol=0.0, atol=1e-12)


def test_one_token_attends_itself_alone_and_has_no_functional_gradient() -> None:
    n, _, g, gradients = statistics_of(*block_of("one token"))
    for x in (n, g, gradients.w_q, gradients.w_k):
        assert not np.any(x)


def test_a_row_that_may_attend_nothing_passes_its_token_through() -> None:
    params, x, _ = block_of("two heads")
    mask = uniform("mask", 3, 2, 6, 6) < 0.7
    mask[:, :, 2] = False
    context = ra.Context(mask=mask)
    y, _ = step(params, x, context)
    np.testing.assert_array_equal(y[:, 2], x[:, 2] + params.w_o[-1])
    _, _, g, _ = statistics_of(params, x, context)
    assert not np.any(g[:, :, 2])


# --- implementations


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 9), st.integers(1, 4)),
    st.sampled_from((False, True, "top_left")),
    st.booleans(),
    st.sampled_from((None, 1.5)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_contractions_in_tiles_of_any_size_are_those_of_the_dense_implementation(
    sizes: tuple[int, ...], causal: Any, masked: bool, softcap: float | None, rows: int, columns: int, shared: int
) -> None:
    b, g, i, d = sizes
    h = g * shared  # query heads
    q, k, v = draw("q", b, h, i, d) * 2.0, draw("k", b, g, i, d), draw("v", b, g, i, 3)
    options: dict[str, Any] = {"causal": causal, "scale": 0.7, "softcap": softcap}
    if masked:
        options["mask"] = uniform("mask", b, 1, i, i) < 0.5
    d_out = draw("d_out", b, h, i, 3)
    x = draw("tokens", b, i, 5)
    _, saved = ra.growing.forward(q, k, v, implementation="dense", **options)
    n = ra.growing.contract(saved, d_out, x)
    with cut(rows, columns):
        _, tiled_saved = ra.growing.forward(q, k, v, implementation="tiled", **options)
        np.testing.assert_allclose(ra.growing.contract(tiled_saved, d_out, x), n, rtol=1e-12, atol=1e-12)
        for each in (saved, tiled_saved):
            total = ra.growing.contract(each, d_out, x, total=True)
            np.testing.assert_allclose(total, n.sum(axis=0), rtol=1e-12, atol=1e-12)


def test_statistics_may_be_summed_in_float64_where_the_block_runs_in_float32(backend: Any) -> None:
    q, k, v, d_out = (draw(name, 1, 2, 6, 3) for name in ("q", "k", "v", "d_out"))
    x = draw("tokens", 1, 6, 4)
    for implementation in ("dense",) if str(backend) == "jax" else ("dense", "tiled"):
        given = [backend.array(z, "float32") for z in (q, k, v, d_out)]
        _, saved = ra.growing.forward(*given[:3], implementation=implementation)
        n = ra.growing.contract(saved, given[3], backend.array(x))
        assert str(n.dtype).endswith("float64")
        _, exact = ra.growing.forward(q, k, v, implementation="dense")
        np.testing.assert_allclose(backend.host(n), ra.growing.contract(exact, d_out, x), rtol=0.0, atol=1e-4)


# --- fresh parameters and bad input


def test_fresh_parameters() -> None:
    config = BLOCK.Config(width=12, heads=3, bias=True, train_scale=True)
    params = BLOCK.init(config, seed=1, like=np.zeros(1, "float32"), layer=2)
    assert {n: (w.shape, w.dtype) for n, w in tree.flatten(params).items()} == {
        "w_q": ((3, 13, 4), np.float32),
        "w_k": ((3, 13, 4), np.float32),
        "w_v": ((3, 13, 4), np.float32),
        "w_o": ((13, 12), np.float32),
        "scale": ((), np.float32),
    }
    assert not any(np.any(w[..., -1, :]) for w in (params.w_q, params.w_k, params.w_v, params.w_o))
    assert float(params.scale) == 0.5
    assert abs(np.std(params.w_q[:, :-1]) - 12.0**-0.5) < 0.05


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 0.0}, "scale: got 0.0, needs a finite number above 0"),
        ({"softcap": -1.0}, "softcap: got -1.0, needs a finite number above 0"),
    ],
)
def test_a_wrong_configuration(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BLOCK.Config(**{"width": 8, "heads": 2, **given})


def test_wrong_arguments() -> None:
    q = draw("q", 1, 2, 4, 3)
    _, saved = ra.growing.forward(q, q, q, implementation="tiled")
    with pytest.raises(Unsupported, match=r'saved: got "tiled", which holds no scores; needs implementation="dense"'):
        ra.growing.functional_gradient(saved, q)
    with pytest.raises(ValueError, match=r"x: got shape \(1, 3, 2\), needs \(1, 4, width\)"):
        ra.growing.contract(saved, q, draw("x", 1, 3, 2))
    _, saved = ra.growing.forward(q, q[:, :, :3], q[:, :, :3])
    with pytest.raises(ValueError, match=r"x: got shape .*, needs as many queries \(4\) as keys \(3\)"):
        ra.growing.contract(saved, q, draw("x", 1, 4, 2))
    with pytest.raises(TypeError, match="saved: got None, needs the Saved of .* that forward returned"):
        ra.growing.contract(None, q, q)  # type: ignore[arg-type]
