"""Windows, offsets, biases, sinks, lengths and dropout: what no law says of them, and what they refuse."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import refattn as ra
from tests.mechanisms.softmax.calls import cut

Arrays = dict[str, Any]


def run(inputs: Arrays, options: Arrays, d_out: Any, d_lse: Any, implementation: str = "dense") -> Arrays:
    out, saved = ra.softmax.forward(**inputs, **options, implementation=implementation)
    return {"out": out, "lse": saved.lse, "max": saved.max, **ra.softmax.backward(saved, d_out, d_lse)}


EVERY = {
    "mask": np.arange(35).reshape(5, 7) % 4 != 0, "causal": True, "window": (4, None), "offset": np.asarray([3, 1]),
    "bias": np.linspace(-1.0, 1.0, 28).reshape(4, 1, 7), "sink": np.linspace(-1.0, 1.0, 8).reshape(4, 2),
    "q_lengths": np.asarray([5, 3]), "k_lengths": np.asarray([7, 6]), "keep": np.arange(35).reshape(5, 7) % 3 * 1.0,
}  # fmt: skip
RNG = np.random.default_rng(0)
INPUTS = {"q": RNG.normal(size=(2, 4, 5, 3)), "k": RNG.normal(size=(2, 2, 7, 3)), "v": RNG.normal(size=(2, 2, 7, 4))}
D_OUT, D_LSE = RNG.normal(size=(2, 4, 5, 4)), RNG.normal(size=(2, 4, 5))


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_what_does_not_exist_may_hold_anything(implementation: str) -> None:
    expected = run(INPUTS, EVERY, D_OUT, D_LSE, implementation)
    rows = (np.arange(5) >= EVERY["q_lengths"][:, None])[:, None, :, None]
    columns = (np.arange(7) >= EVERY["k_lengths"][:, None])[:, None, :, None]
    poisoned = {name: np.where(rows if name == "q" else columns, math.nan, x) for name, x in INPUTS.items()}
    d_out, d_lse = np.where(rows, math.inf, D_OUT), np.where(rows[..., 0], math.nan, D_LSE)
    found = run(poisoned, EVERY, d_out, d_lse, implementation)
    assert all(found[name].tobytes() == x.tobytes() for name, x in expected.items())
    assert not found["out"][1, :, 3:].any() and (found["lse"][1, :, 3:] == -math.inf).all()


def test_hidden_keys_leave_no_sign() -> None:
    """What is outside of every window shows in no bit of the gradients of a bias and of dropout, either."""
    r, shape = np.random.default_rng(3), (1, 1, 4, 9)
    q, k, v, d_out = (r.normal(size=(1, 1, n, 2)) for n in (4, 9, 9, 4))
    options = {"window": (1, 0), "bias": r.normal(size=shape), "keep": np.ones(shape)}
    far = np.arange(9)[:, None] < 3
    found = [run({"q": q, "k": k + far * x, "v": v - far * x}, options, d_out, None) for x in (0.0, 50.0)]
    assert all(found[0][name].tobytes() == x.tobytes() for name, x in found[1].items())


def test_a_row_of_sinks_alone() -> None:
    """It gives 0, an lse of the sinks, and a gradient of lse goes to them."""
    q, sink = np.ones((1, 2, 3, 4)), np.asarray([0.5, -1.0])
    out, saved = ra.softmax.forward(q, q[:, :, :0], q[:, :, :0], sink=sink)
    assert not out.any() and (saved.lse == sink[:, None]).all() and (saved.max == -math.inf).all()
    assert (ra.softmax.backward(saved, out, np.ones((1, 2, 3)))["sink"] == 3.0).all()


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_whole_numbers_come_out_as_they_are(implementation: str) -> None:
    """Of falling scores the oldest key in a window, the mean of those that a bias does not hide, and parts of sinks."""
    values = np.arange(1.0, 17.0).reshape(1, 1, 16, 1) * [4.0, -64.0]
    ones, falling = np.ones((1, 2, 16, 1)), -128.0 * np.arange(16.0).reshape(1, 1, 16, 1)
    i = np.arange(16)

    def attended(k: Any, **options: Any) -> Any:
        return ra.softmax.forward(ones, k, values, implementation=implementation, **options)[0]

    oldest = attended(falling, scale=1.0, causal=True, window=(2, None))
    assert (oldest == values[:, :, np.maximum(i - 2, 0)]).all()
    hidden = np.where(i // 4 == i[:, None] // 4, 0.0, -math.inf)  # four neighbours
    mean = values.reshape(1, 1, 4, 4, 2).mean(axis=3).repeat(4, axis=2)
    assert (attended(0.0 * falling, bias=hidden) == mean).all()
    for several, part in ((1, 2.0), (3, 4.0)):  # as large as the only score that is not far below
        sinks = np.zeros((2, several))
        assert (attended(falling, scale=1.0, sink=sinks) == values[:, :, :1] / part).all()


def test_no_batch_element_with_every_option() -> None:
    for implementation in ("dense", "tiled"):
        none = {name: x[:0] for name, x in INPUTS.items()}
        options = {**EVERY, **{name: EVERY[name][:0] for name in ("offset", "q_lengths", "k_lengths")}}
        found = run(none, options, D_OUT[:0], D_LSE[:0], implementation)
        assert found["out"].shape == (0, 4, 5, 4) and found["max"].shape == (0, 4, 5)
        assert not any(found[name].any() for name in ("bias", "sink", "keep"))


def test_a_window_reads_no_tile_far_away() -> None:
    """The keys of tiles before and after the window are not even multiplied: what they hold does not come in."""
    x = np.random.default_rng(1).normal(size=(1, 1, 40, 2))
    k = np.where(np.arange(40)[:, None] < 24, math.nan, x)
    out, _ = ra.softmax.forward(x, x, x, causal=True, window=(3, None), implementation="dense")
    with cut(4, 4):
        found, _ = ra.softmax.forward(
            x[:, :, 32:], k, np.where(np.isnan(k), k, x), causal=True, window=(3, None), implementation="tiled"
        )
    np.testing.assert_allclose(found, out[:, :, 32:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_bounds_beyond_all_numbers_are_none(implementation: str) -> None:
    """Sums with lengths and offsets that differ stay in 64 bits."""
    lengths: Arrays = {
        "q_lengths": np.asarray([3, 2]),
        "k_lengths": np.asarray([2, 3]),
        "implementation": implementation,
    }
    x = np.random.default_rng(3).normal(size=(2, 1, 3, 2))
    out, _ = ra.softmax.forward(x, x, x, **lengths)
    for far in (2**63 - 1, 2**70):
        np.testing.assert_array_equal(ra.softmax.forward(x, x, x, window=(far, far), **lengths)[0], out)
    plain, _ = ra.softmax.forward(x, x, x, implementation=implementation)
    for far, found in ((2**70, plain), (-(2**70), 0.0 * plain)):
        np.testing.assert_array_equal(
            ra.softmax.forward(x, x, x, offset=far, causal=True, implementation=implementation)[0], found
        )


F, I = np.zeros, np.asarray
BAD: tuple[tuple[Arrays, type[Exception], str], ...] = (
    ({"window": 3}, TypeError, "window: got 3, needs a tuple"),
    ({"window": [1, 2]}, TypeError, "window: got list, needs a tuple"),
    ({"window": (1,)}, ValueError, "window: got 1 numbers"),
    ({"window": (True, 1)}, TypeError, "window: got bool"),
    ({"window": (1.0, 1)}, TypeError, "window: got float"),
    ({"window": (-1, 0)}, ValueError, "None is what others write as -1"),
    ({"offset": 1.0}, TypeError, "offset: got float"),
    ({"offset": True}, TypeError, "offset: got bool"),
    ({"offset": I([1, 2, 3])}, ValueError, r"offset: got shape \(3,\)"),
    ({"offset": I([1.0, 2.0])}, TypeError, "offset: got dtype float64"),
    ({"offset": I([2**63 - 1, 0])}, ValueError, "offset: got one outside of -268435456 to 268435456"),
    ({"offset": I([-(2**63), 0])}, ValueError, "offset: got one outside of -268435456 to 268435456"),
    ({"offset": np.asarray([2**64 - 1, 0], np.uint64)}, ValueError, "offset: got one outside of 0 to 268435456"),
    ({"offset": 1, "causal": "top_left"}, ValueError, "offset: got one beside causal"),
    ({"bias": F((5, 7), bool)}, TypeError, "bias: got dtype bool.*is a mask"),
    ({"bias": F((5, 7), "float32")}, TypeError, "got arrays of several dtypes"),
    ({"bias": F((5, 6))}, ValueError, r"bias: got shape \(5, 6\)"),
    ({"mask": F((5, 7))}, TypeError, "mask: got dtype float64.*is a bias"),
    ({"sink": F(3)}, ValueError, r"sink: got shape \(3,\)"),
    ({"sink": F((4, 0))}, ValueError, r"sink: got shape \(4, 0\)"),
    ({"sink": I([1, 2, 3, 4])}, TypeError, "sink: got dtype int64"),
    ({"q_lengths": I([1.0, 2.0])}, TypeError, "q_lengths: got dtype float64"),
    ({"k_lengths": [1, 2]}, TypeError, "k_lengths: got list"),
    ({"k_lengths": I([1])}, ValueError, r"k_lengths: got shape \(1,\)"),
    ({"k_lengths": I([8, 1])}, ValueError, "k_lengths: got lengths outside of 0 to 7"),
    ({"q_lengths": I([-1, 1])}, ValueError, "q_lengths: got lengths outside of 0 to 5"),
    ({"keep": F((5, 7), int)}, TypeError, "keep: got dtype int64"),
    ({"keep": F((6, 7))}, ValueError, r"keep: got shape \(6, 7\)"),
    *(({"softcap": x}, ValueError, "softcap: got .*, needs a finite number above 0") for x in (0.0, 0, -2.5, I(-1.0))),
)  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=lambda x: str(x)[:30])
def test_bad_input(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        ra.softmax.forward(**{**INPUTS, **options})
    assert type(caught.value) is kind and re.search(text, str(caught.value)), caught.value
