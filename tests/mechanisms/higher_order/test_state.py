"""The state: of constant size, carried over from part to part, merged, with gradients and with all its digits."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox, tree
from tests.mechanisms.higher_order.calls import WELL, Call, assert_close, cut, make, run


def pieces(call: Call, t: int) -> list[dict[str, Any]]:
    n = call.q.shape[2]
    return [{x: getattr(call, x)[:, :, at] for x in ("q", "k", "v", "d_out")} for at in (slice(0, t), slice(t, n))]


def empty(call: Call) -> Any:
    known = ("order", "alpha", "normaliser", "layer_norm", "norm_eps")
    return ra.higher_order.empty_state(call.k, call.v, **{n: x for n, x in call.options.items() if n in known})


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
@pytest.mark.parametrize("name", ["causal", "half", "order 3", "given", "plain denominator"])
@pytest.mark.parametrize("t", [1, 8, 20, 32])
def test_two_parts_are_the_whole(t: int, name: str, implementation: str) -> None:
    """To 1e-12 forward, backward and through the state that is carried over."""
    call = WELL[name]
    whole = run(call, "chunked")
    (a, b), options = pieces(call, t), {**call.options, "implementation": implementation}
    with cut(4):
        first, saved_a = ra.higher_order.forward(a["q"], a["k"], a["v"], **options, state=empty(call))
        second, saved_b = ra.higher_order.forward(b["q"], b["k"], b["v"], **options, state=saved_a.state)
        gradients_b = ra.higher_order.backward(saved_b, b["d_out"])
        gradients_a = ra.higher_order.backward(saved_a, a["d_out"], gradients_b["state"])
    found = {"out": np.concatenate([first, second], axis=2)}
    found |= {x: np.concatenate([gradients_a[x], gradients_b[x]], axis=2) for x in "qkv"}
    assert_close(found, {x: whole[x] for x in found}, 1e-12)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_chunks_merge_to_the_whole_in_a_tree(count: int) -> None:
    """And so do chunks of chunks; the gradients of the chunks are those of one call over all keys."""
    call = make(1, 2, 1, 12, 12, 4, 3, keep=0.8, normaliser="exact(delta=0.5)")
    options, cut_at = {**call.options, "causal": True}, np.linspace(0, 12, count + 1).astype(int)

    def of(first: int, last: int) -> Any:
        k, v = call.k[:, :, first:last], call.v[:, :, first:last]
        given = {**options, "key_mask": options["key_mask"][:, first:last]}
        return ra.higher_order.forward(k[:, [0, 0]], k, v, **given, state=empty(call))[1]

    chunks = [of(first, last) for first, last in zip(cut_at, cut_at[1:], strict=False)]
    states: list[Any] = [saved.state for saved in chunks]
    whole, merged = of(0, 12), ra.higher_order.merge_states(states)
    nested = ra.higher_order.merge_states(
        [states[0], *([ra.higher_order.merge_states(states[1:])] if count > 1 else [])]
    )
    for name in ("products", "values", "settings"):
        for one in (merged, nested):
            np.testing.assert_allclose(getattr(one, name), getattr(whole.state, name), rtol=0.0, atol=1e-13)
    weigh: Any = replace(
        merged, **{n: philox.normal(x.shape, seed=3, purpose=n) for n, x in tree.flatten(merged).items()}
    )
    none = np.zeros((1, 2, 12, 3))
    expected = ra.higher_order.backward(whole, none, weigh)
    parts = [
        ra.higher_order.backward(saved, none[:, :, : saved.shape[2]], d_state)
        for saved, d_state in zip(chunks, ra.higher_order.merge_states_backward(states, weigh), strict=True)
    ]
    for name in ("k", "v"):
        found = np.concatenate([part[name] for part in parts], axis=2)
        np.testing.assert_allclose(found, expected[name], rtol=0.0, atol=1e-12)


def test_states_that_do_not_merge() -> None:
    x = np.ones((1, 2, 3, 4))
    states = [ra.higher_order.empty_state(x, x), ra.higher_order.empty_state(x, x, order=1)]
    with pytest.raises(ValueError, match=r"states\[1\].products: got shape \(1, 2, 5, 5\), needs \(1, 2, 10, 5\)"):
        ra.higher_order.merge_states(states)
    with pytest.raises(ValueError, match=r"state: got one of order 2, alpha 1, .* needs one of order 2, alpha 3"):
        ra.higher_order.merge_states([states[0], ra.higher_order.empty_state(x, x, alpha=1.0)])
    with pytest.raises(ValueError, match=r"states: got none, needs one at least"):
        ra.higher_order.merge_states([])
    with pytest.raises(TypeError, match=r"states\[0\]: got ndarray, needs a State"):
        ra.higher_order.merge_states([x])  # type: ignore[list-item]


def test_the_state_is_of_constant_size() -> None:
    """4 F (e + 1) bytes per head: 9.2 kB for width 16, less than 72 tokens of a cache of keys and values."""
    q = philox.normal((1, 1, 300, 16), seed=1, purpose="state").astype("float32")
    state, sizes = ra.higher_order.empty_state(q, q), []
    for _ in range(3):
        _, saved = ra.higher_order.forward(q, q, q, causal=True, state=state)
        assert saved.state is not None
        state = saved.state
        sizes.append(state.products.nbytes)
    assert sizes == [136 * 17 * 4] * 3
    assert sizes[0] < 73 * 32 * 4
    assert float(state.values[0, 0, 0, -1]) == 900.0


@pytest.mark.slow
def test_a_million_tokens() -> None:
    """Causal forward of 4 heads of width 16, in pieces, with nothing that grows; the sums stay good in float32."""
    length, piece = 1 << (16 if os.environ.get("REFATTN_SLOW_SAMPLE") else 20), 1 << 14
    wide = narrow = None
    for n in range(length // piece):
        q, k, v = (philox.normal((1, 4, piece, 16), seed=n, purpose=f"million.{x}") for x in "qkv")
        small = [x.astype("float32") for x in (q, k, v)]
        if narrow is None:
            narrow, wide = ra.higher_order.empty_state(*small[1:]), ra.higher_order.empty_state(k, v)
        narrow = ra.higher_order.forward(*small, causal=True, state=narrow)[1].state
        wide = ra.higher_order.forward(q, k, v, causal=True, state=wide)[1].state
    assert narrow is not None and wide is not None
    np.testing.assert_array_equal(narrow.values[..., -1], float(length))
    assert np.abs(narrow.products - wide.products).max() < 1e-4 * np.abs(wide.products).max()


@pytest.mark.parametrize("parts", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["linear", "chunked", "recurrent"])
def test_a_mean_of_the_values_costs_float32_no_digits_of_the_gradients(implementation: str, parts: int) -> None:
    """That of a weight is da . (v_j - o_i): values have a mean of 30 here, and sums over keys of 30 n would be rounded.

    Where it comes in parts, the state carries the values about their mean.
    """
    n, causal = 2048 if implementation == "recurrent" else 8192, implementation != "linear"
    if parts > 1 and not causal:
        return
    arrays = [philox.normal((1, 1, n, 16), seed=2, purpose=name) for name in ("q", "k", "v", "d_out")]
    arrays[2] = arrays[2] + 30.0
    small = [x.astype("float32") for x in arrays]
    q, k, v, d_out = (x.astype("float64") for x in small)
    _, saved = ra.higher_order.forward(q, k, v, causal=causal, implementation="tiled")
    truth = ra.higher_order.backward(saved, d_out)
    state = ra.higher_order.empty_state(*small[1:3]) if parts > 1 else None
    found: dict[str, list[Any]] = {"q": [], "k": []}
    pieces, step = [], n // parts
    for first in range(0, n, step):
        q, k, v, d_out = (x[:, :, first : first + step] for x in small)
        _, saved = ra.higher_order.forward(q, k, v, causal=causal, implementation=implementation, state=state)
        state = saved.state
        pieces.append((saved, d_out))
    d_state = None
    for saved, d_out in reversed(pieces):
        gradients = ra.higher_order.backward(saved, d_out, d_state)
        d_state = gradients.get("state")
        for name, of in found.items():
            of.insert(0, gradients[name])
    # The first queries of a causal call attend few keys and have large gradients, which would hide the others.
    for name, of in found.items():
        late, expected = (
            x[:, :, n // 2 :] if name == "q" else x[:, :, : n // 2] for x in (np.concatenate(of, 2), truth[name])
        )
        assert np.abs(late - expected).max() < 4e-5 * np.abs(expected).max(), name


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_the_gradient_of_a_state_is_that_of_differences(implementation: str) -> None:
    """Of all its numbers, and of the values through the mean that is subtracted from them."""
    call = make(1, 2, 1, 9, 9, 4, 3, keep=0.8, normaliser="exact(delta=0.5)")
    options = {**call.options, "causal": True, "implementation": implementation}
    start = ra.higher_order.forward(call.q, call.k, call.v + 2.0, **options, state=empty(call))[1].state
    assert start is not None
    weigh = {n: philox.normal(x.shape, seed=3, purpose=n) for n, x in tree.flatten(start).items() if n != "settings"}
    steps, h = {1: 3.0 / 4.0, 2: -3.0 / 20.0, 3: 1.0 / 60.0}, 2.0**-10

    def loss(v: Any, **state: Any) -> float:
        out, saved = ra.higher_order.forward(call.q, call.k, v, **options, state=replace(start, **state))
        last = tree.flatten(saved.state)
        return float(np.sum(out * call.d_out) + sum(np.sum(w * last[n]) for n, w in weigh.items()))

    _, saved = ra.higher_order.forward(call.q, call.k, call.v, **options, state=start)
    gradients = ra.higher_order.backward(saved, call.d_out, replace(start, **weigh))
    hand = {"v": gradients["v"]} | {n: getattr(gradients["state"], n) for n in weigh}
    given: dict[str, Any] = {"v": call.v, **{n: getattr(start, n) for n in weigh}}
    for name, x in given.items():
        along = philox.normal(x.shape, seed=4, purpose=name)
        ends = {n: loss(**{"v": call.v, name: x + n * h * along}) for n in (-3, -2, -1, 1, 2, 3)}
        expected = sum(w * (ends[n] - ends[-n]) for n, w in steps.items()) / h
        assert math.isclose(float(np.sum(hand[name] * along)), expected, rel_tol=1e-8, abs_tol=1e-8), name
