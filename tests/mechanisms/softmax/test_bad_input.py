"""Every wrong argument raises one message that names it, says what it got and what it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.mechanisms.softmax.layer.block import State
from tests.mechanisms.softmax.calls import make, run

BLOCK = ra.mechanism("softmax").block
Config = BLOCK.Config


def zeros(*shape: int, dtype: Any = "float64") -> Any:
    return np.zeros(shape, dtype=dtype)


def good() -> dict[str, Any]:
    return {"q": zeros(2, 4, 5, 3), "k": zeros(2, 2, 7, 3), "v": zeros(2, 2, 7, 6)}


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert re.fullmatch(text, message), message
    assert "\n" not in message


CHOICES = "auto, dense, tiled"
KINDS = "needs float64, float32, float16 or bfloat16"
ARRAY = re.escape("needs an array of NumPy, CuPy, PyTorch, JAX, ...")

# Changed arguments -> the error. `E` and `T` are ValueError and TypeError.
E, T = ValueError, TypeError
FORWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    # ranks and lengths
    ({"q": zeros(4, 5, 3)}, E, r"q: got shape \(4, 5, 3\), needs 4 axes \(batch, heads, tokens, width\)"),
    ({"k": zeros(1, 2, 2, 7, 3)}, E, r"k: got shape \(1, 2, 2, 7, 3\), needs 4 axes \(batch, heads, tokens, width\)"),
    ({"v": zeros(7)}, E, r"v: got shape \(7,\), needs 4 axes \(batch, heads, tokens, width\)"),
    ({"q": zeros()}, E, r"q: got shape \(\), needs 4 axes .*"),
    ({"k": zeros(3, 2, 7, 3)}, E, r"k: got shape \(3, 2, 7, 3\), needs \(2, heads, keys, 3\) to fit q \(2, 4, 5, 3\)"),
    ({"k": zeros(2, 2, 7, 4)}, E, r"k: got shape \(2, 2, 7, 4\), needs \(2, heads, keys, 3\) to fit q \(2, 4, 5, 3\)"),
    ({"v": zeros(2, 2, 8, 6)}, E, r"v: got shape \(2, 2, 8, 6\), needs \(2, 2, 7\) \+ \(width,\) to fit k"),
    ({"v": zeros(2, 1, 7, 6)}, E, r"v: got shape \(2, 1, 7, 6\), needs \(2, 2, 7\) \+ \(width,\) to fit k"),
    ({"v": zeros(1, 2, 7, 6)}, E, r"v: got shape \(1, 2, 7, 6\), needs \(2, 2, 7\) \+ \(width,\) to fit k"),
    ({"q": zeros(2, 4, 5, 0), "k": zeros(2, 2, 7, 0)}, E, r"q: got width 0 in shape .*, needs a width of at least 1"),
    # heads
    ({"q": zeros(2, 3, 5, 3)}, E, "k: got 2 heads, needs a number that divides the 3 heads of q"),
    ({"q": zeros(2, 1, 5, 3)}, E, "k: got 2 heads, needs a number that divides the 1 heads of q"),
    ({"k": zeros(2, 0, 7, 3), "v": zeros(2, 0, 7, 6)}, E, "k: got 0 heads, needs a number that divides the 4 heads .*"),
    # dtypes
    ({"q": zeros(2, 4, 5, 3, dtype="int64")}, T, f"q: got dtype int64, {KINDS}"),
    ({"k": zeros(2, 2, 7, 3, dtype="uint8")}, T, f"k: got dtype uint8, {KINDS}"),
    ({"v": zeros(2, 2, 7, 6, dtype="complex128")}, T, f"v: got dtype complex128, {KINDS}"),
    ({"q": zeros(2, 4, 5, 3, dtype="bool")}, T, f"q: got dtype bool, {KINDS}"),
    ({"q": zeros(2, 4, 5, 3, dtype=object)}, T, f"q: got dtype object, {KINDS}"),
    ({"k": zeros(2, 2, 7, 3, dtype="float32")}, T, r"got arrays of several dtypes \(q, v: float64; k: float32\), .*"),
    # no arrays
    ({"q": [[1.0]]}, T, f"q: got list, {ARRAY}"),
    ({"k": None}, T, f"k: got NoneType, {ARRAY}"),
    ({"v": 1.0}, T, f"v: got float, {ARRAY}"),
    ({"mask": [True]}, T, f"mask: got list, {ARRAY}"),
    ({"mask": True}, T, f"mask: got bool, {ARRAY}"),
    # masks
    ({"mask": zeros(5, 7)}, T, r"mask: got dtype float64, needs bool \(True = may attend\); what is added is a bias"),
    ({"mask": zeros(5, 7, dtype="int32")}, T, r"mask: got dtype int32, needs bool \(True = may attend\)"),
    *(
        (
            {"mask": zeros(*shape, dtype="bool")},
            E,
            rf"mask: got shape {re.escape(str(shape))}, needs one that broadcasts to "
            r"\(batch, heads, queries, keys\) = \(2, 4, 5, 7\)",
        )
        for shape in ((7, 5), (6,), (2, 7), (2, 2, 5, 7), (3, 1, 1, 1), (1, 2, 4, 5, 7), (0, 7))
    ),
    # causal, implementation
    *(
        ({"causal": value}, E, f'causal: got {re.escape(repr(value))}, needs True, False, "top_left" or "bottom_right"')
        for value in ("left", "True", 1, 0, None, 1.0, [True], np.asarray([True, False]), np.True_)
    ),
    *(
        ({"implementation": value}, E, f"implementation: got {re.escape(repr(value))}, needs one of {CHOICES}")
        for value in ("flash", "", "Dense", None, 1)
    ),
    ({"implementation": ["dense"]}, E, f"implementation: got list, needs one of {CHOICES}"),
    # numbers
    *(
        ({name: value}, kind, f"{name}: got {got}, needs a finite number{above}")
        for name, above in (("scale", ""), ("softcap", " above 0"))
        for value, kind, got in (
            (True, T, "True"), ("1", T, "'1'"), (1j, T, "complex"), ([1.0], T, "list"),
            (math.nan, E, "nan"), (math.inf, E, "inf"), (-math.inf, E, "-inf"),
            (np.float64("nan"), E, "nan"), (np.asarray(math.nan), E, "nan"), (np.asarray(math.inf), E, "inf"),
        )
    ),
    *(
        ({"softcap": value}, E, rf"softcap: got {re.escape(str(value))}, needs a finite number above 0")
        for value in (0.0, 0, -1, -2.5, np.asarray(-1.0), np.asarray(0.0))
    ),
    *(
        ({name: value}, E, rf"{name}: got an array of shape {re.escape(str(value.shape))}, needs .* 0-d .*")
        for name in ("scale", "softcap")
        for value in (np.ones(1), np.ones((4, 1)))
    ),
    *(
        ({name: value}, T, rf"{name}: got an array of dtype {value.dtype}, needs .* 0-d .*")
        for name in ("scale", "softcap")
        for value in (np.asarray(1), np.asarray(True), np.asarray(1j))
    ),
    *(({name: 10**400}, E, rf"{name}: got a whole number of 1329 bits, needs.*") for name in ("scale", "softcap")),
]  # fmt: skip


@pytest.mark.parametrize("implementation", ["auto", "dense", "tiled"])
def test_forward(implementation: str) -> None:
    for changed, kind, text in FORWARD:
        arguments = {**good(), "implementation": implementation, **changed}
        raises(kind, text, partial(ra.softmax.forward, **arguments))
    out, _ = ra.softmax.forward(**good(), implementation=implementation)
    assert out.shape == (2, 4, 5, 6)


def test_unknown_and_missing_arguments() -> None:
    for call in (
        lambda: ra.softmax.forward(**good(), dropout=0.1),
        lambda: ra.softmax.forward(zeros(1, 1, 1, 1), zeros(1, 1, 1, 1)),
        lambda: ra.softmax.forward(*good().values(), None),
    ):
        with pytest.raises(TypeError):
            call()


def test_arrays_of_several_libraries(backend: Any) -> None:
    other = backends.get("strict" if backend.owner.name == "numpy" else "numpy")
    here, there = backend.array, other.from_numpy
    names = {n: type(f(zeros(1))).__module__.partition(".")[0] for n, f in (("a", here), ("b", there))}
    text = r"got arrays of several libraries \({}: {}; {}: {}\), needs one library"
    arrays = {name: here(x) for name, x in good().items()}
    for wrong in "qkv":
        rest = ", ".join(n for n in "qkv" if n != wrong)
        kinds = {wrong: names["b"], rest: names["a"]}
        order = [wrong, rest] if wrong == "q" else [rest, wrong]
        expected = text.format(order[0], kinds[order[0]], order[1], kinds[order[1]])
        changed = {**arrays, wrong: there(good()[wrong])}
        raises(T, expected, partial(ra.softmax.forward, **changed))
    for name, value in (("mask", zeros(5, 7, dtype="bool")), ("scale", np.ones(())), ("softcap", np.ones(()))):
        with pytest.raises(TypeError, match=f"{name}: {names['b']}\\), needs one library"):
            ra.softmax.forward(**arrays, **{name: there(value)})
    out, saved = ra.softmax.forward(**arrays)
    for gradients in ((there(zeros(2, 4, 5, 6)),), (out, there(zeros(2, 4, 5)))):
        name = "d_lse" if len(gradients) == 2 else "d_out"
        expected = text.format(name, names["b"], "the output", names["a"])
        raises(T, expected, partial(ra.softmax.backward, saved, *gradients))


def test_arrays_on_several_devices() -> None:
    strict = backends.get("strict")
    if strict.why_unavailable():
        pytest.skip("array-api-strict has devices to mix")
    here, there = strict.devices()[:2]
    arrays = {name: strict.from_numpy(x, device=here) for name, x in good().items()}
    elsewhere = strict.from_numpy(good()["k"], device=there)
    text = rf"got arrays on several devices \(q, v: .*{here}.*; k: .*{there}.*\), needs one device"
    raises(E, text, lambda: ra.softmax.forward(**{**arrays, "k": elsewhere}))
    mask = strict.from_numpy(zeros(5, 7, dtype="bool"), device=there)
    raises(
        E,
        r"got arrays on several devices \(.*mask: .*\), needs one device",
        lambda: ra.softmax.forward(**arrays, mask=mask),
    )
    _, saved = ra.softmax.forward(**arrays)
    d_out = strict.from_numpy(zeros(2, 4, 5, 6), device=there)
    raises(
        E, r"got arrays on several devices \(d_out: .*\), needs one device", lambda: ra.softmax.backward(saved, d_out)
    )


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_backward(implementation: str) -> None:
    _, saved = ra.softmax.forward(**good(), implementation=implementation)
    d_out, d_lse = zeros(2, 4, 5, 6), zeros(2, 4, 5)
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((None, d_out), T, "saved: got NoneType, needs what forward returned"),
        ((saved.inner, d_out), T, "saved: got Saved, needs what forward returned"),
        (((d_out, saved), d_out), T, "saved: got tuple, needs what forward returned"),
        ((saved, None), T, f"d_out: got NoneType, {ARRAY}"),
        ((saved, 1.0), T, f"d_out: got float, {ARRAY}"),
        ((saved, zeros(2, 4, 5, 3)), E, r"d_out: got shape \(2, 4, 5, 3\), needs \(2, 4, 5, 6\)"),
        ((saved, zeros(4, 5, 6)), E, r"d_out: got shape \(4, 5, 6\), needs \(2, 4, 5, 6\)"),
        ((saved, zeros(1, 4, 5, 6)), E, r"d_out: got shape \(1, 4, 5, 6\), needs \(2, 4, 5, 6\)"),
        ((saved, zeros(2, 4, 5, 6, dtype="int64")), T, f"d_out: got dtype int64, {KINDS}"),
        ((saved, zeros(2, 4, 5, 6, dtype="complex64")), T, f"d_out: got dtype complex64, {KINDS}"),
        ((saved, d_out, zeros(2, 4, 5, 1)), E, r"d_lse: got shape \(2, 4, 5, 1\), needs \(2, 4, 5\)"),
        ((saved, d_out, zeros(2, 4, 5, dtype="bool")), T, f"d_lse: got dtype bool, {KINDS}"),
        ((saved, d_out, 0.0), T, f"d_lse: got float, {ARRAY}"),
    ]
    for arguments, kind, text in cases:
        raises(kind, text, partial(ra.softmax.backward, *arguments))
    assert set(ra.softmax.backward(saved, d_out, d_lse)) == {"q", "k", "v"}


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_propagates_in_the_core(value: float, implementation: str) -> None:
    """It reaches the rows that it belongs to, and no others."""
    call = make(1, 2, 2, 4, 5, 3, 2)
    plain = run(call, implementation)
    with np.errstate(all="ignore"):
        for name, rows in (("q", [2]), ("k", range(4)), ("v", range(4))):
            array: Any = np.array(getattr(call, name))
            array[0, 1, 2, 0] = value
            out = run(replace(call, **{name: array}), implementation)["out"]
            assert np.array_equal(out[0, 0], plain["out"][0, 0])
            kept = [row for row in range(4) if row not in rows]
            assert np.array_equal(out[0, 1, kept], plain["out"][0, 1, kept])
            if name != "k" or math.isnan(value):
                assert not np.any(np.isfinite(out[0, 1, list(rows), 0]))
        d_out = np.array(call.d_out)
        d_out[0, 1, 2, 0] = value
        found = run(replace(call, d_out=d_out), implementation)
        assert not np.any(np.isfinite(found["q"][0, 1, 2])) and np.array_equal(found["q"][0, 0], plain["q"][0, 0])


# --- blocks

X = zeros(2, 5, 6)
CONFIG = Config(width=6, heads=2, bias=True)
PARAMS = BLOCK.init(CONFIG, like=X)
SEVERAL = r"got arrays of several {} \(params.w_q, .*: {}; .*{}: {}\), needs one {}"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        *(
            ({name: value}, kind, rf"{name}: got {re.escape(repr(value))}, needs a whole number of at least 1")
            for name in ("width", "heads", "kv_heads", "head_width", "value_width")
            for value, kind in ((0, E), (-1, E), (2.0, T), ("2", T), (True, T))
        ),
        ({"width": None}, T, "width: got None, needs a whole number of at least 1"),
        ({"heads": 4}, E, "heads: got 4, needs a divisor of the width 6, or a head_width"),
        ({"kv_heads": 3}, E, "kv_heads: got 3, needs a divisor of the 2 heads"),
        ({"kv_heads": 4}, E, "kv_heads: got 4, needs a divisor of the 2 heads"),
        ({"bias": None}, T, "bias: got None, needs true or false"),
        ({"residual": 1}, T, "residual: got 1, needs true or false"),
        ({"scale": "1"}, T, "scale: got '1', needs a finite number"),
        ({"scale": math.nan}, E, "scale: got nan, needs a finite number"),
        ({"softcap": -1.0}, E, "softcap: got -1.0, needs a finite number above 0"),
    ],
)
def test_configurations(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    raises(kind, text, lambda: Config(**{"width": 6, "heads": 2, **options}))


def forward(x: Any = X, params: Any = PARAMS, context: Any = None, **fields: Any) -> Any:
    return BLOCK.forward(params, State(x), ra.Context(**fields) if context is None else context)


def ones(*shape: int) -> Any:
    return np.ones(shape, dtype=bool)


READS = "Softmax attention reads only: mask, key_mask, causal, memory, memory_mask"
BLOCKS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # x
    ({"x": zeros(5, 6)}, E, r"state.x: got shape \(5, 6\), needs \(batch, tokens, 6\)"),
    ({"x": zeros(2, 5, 7)}, E, r"state.x: got shape \(2, 5, 7\), needs \(batch, tokens, 6\)"),
    ({"x": zeros(2, 5, 6, dtype="int64")}, T, f"state.x: got dtype int64, {KINDS}"),
    ({"x": zeros(2, 5, 6, dtype="complex64")}, T, f"state.x: got dtype complex64, {KINDS}"),
    ({"x": zeros(2, 5, 6, dtype="float32")}, T, SEVERAL.format("dtypes", "float64", "state.x", "float32", "dtype")),
    ({"x": [1.0]}, T, "state.x: got list, needs an array"),
    ({"x": X + math.nan}, E, "state.x: got an element that is not finite, needs finite numbers"),
    # the context
    ({"context": {}}, T, "context: got dict, needs a Context of refattn.mechanisms.context"),
    ({"memory": zeros(2, 6)}, E, r"context.memory: got shape \(2, 6\), needs \(2, keys, 6\)"),
    ({"memory": zeros(2, 4, 5)}, E, r"context.memory: got shape \(2, 4, 5\), needs \(2, keys, 6\)"),
    ({"memory": zeros(3, 4, 6)}, E, r"context.memory: got shape \(3, 4, 6\), needs \(2, keys, 6\)"),
    ({"memory": zeros(2, 4, 6, dtype="int64")}, T, f"context.memory: got dtype int64, {KINDS}"),
    ({"memory": [1.0]}, T, f"context.memory: got list, {ARRAY}"),
    ({"memory": zeros(2, 4, 6) - math.inf}, E, "context.memory: got an element that is not finite, .*"),
    ({"mask": [True]}, T, f"context.mask: got list, {ARRAY}"),
    ({"mask": zeros(5, 5, dtype="int64")}, T, "context.mask: got dtype int64, needs bool"),
    ({"mask": ones(5, 4)}, E, r"context.mask: got shape \(5, 4\), needs one that broadcasts to .* = \(2, 2, 5, 5\)"),
    ({"mask": ones(5, 4), "key_mask": ones(2, 5)}, E, r"context.mask: got shape \(5, 4\), needs .*"),
    ({"key_mask": zeros(2, 5)}, T, "context.key_mask: got dtype float64, needs bool"),
    ({"key_mask": ones(5)}, E, r"context.key_mask: got shape \(5,\), needs \(2, 5\) \(True = a token\)"),
    ({"key_mask": ones(1, 5)}, E, r"context.key_mask: got shape \(1, 5\), needs \(2, 5\) \(True = a token\)"),
    ({"memory_mask": ones(2, 5)}, E, "context.memory_mask was given without context.memory"),
    ({"memory": X, "memory_mask": ones(2, 4)}, E, r"context.memory_mask: got shape \(2, 4\), needs \(2, 5\) .*"),
    ({"memory": X, "key_mask": ones(2, 5)}, E, "context.key_mask was given with context.memory, .*: use memory_mask"),
    ({"causal": "left"}, E, "causal: got 'left', needs True, False, \"top_left\" or \"bottom_right\""),
    # fields that softmax does not read
    ({"graph": 3}, E, f"context.graph was given, but {READS}"),
    ({"positions": np.arange(5)}, E, f"context.positions was given, but {READS}"),
    ({"draws": {"noise": X}}, E, f"context.draws was given, but {READS}"),
    # parameters
    ({"params": None}, T, "params: got None, needs a Params of refattn.mechanisms.softmax.layer.block"),
    ({"params": {"w_q": X}}, T, "params: got dict, needs a Params of refattn.mechanisms.softmax.layer.block"),
    ({"params": replace(PARAMS, w_q=zeros(6, 5))}, E, r"params.w_q: got shape \(6, 5\), its configuration .* \(6, 6\)"),
    ({"params": replace(PARAMS, w_o=zeros(6))}, E, r"params.w_o: got shape \(6,\), its configuration .* \(6, 6\)"),
    ({"params": replace(PARAMS, b_v=zeros(1, 6))}, E, r"params.b_v: got shape \(1, 6\), its configuration .* \(6,\)"),
    ({"params": replace(PARAMS, b_k=None)}, E, r"params.b_k: got shape None, its configuration .* \(6,\)"),
    (
        {"params": replace(PARAMS, config=Config(width=6, heads=2))},
        E,
        r"params.b_q: got shape \(6,\), its configuration needs None",
    ),
    ({"params": replace(PARAMS, w_k=PARAMS.w_k + math.inf)}, E, "params.w_k: got an element that is not finite, .*"),
    ({"params": replace(PARAMS, w_v=zeros(6, 6, dtype="float32"))}, T, r"got .* several dtypes .*w_v: float32\).*"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "text"), BLOCKS)
def test_blocks(changed: dict[str, Any], kind: type[Exception], text: str) -> None:
    raises(kind, text, lambda: forward(**changed))


def test_a_good_block_raises_nothing() -> None:
    state, saved = forward(mask=ones(5, 5), key_mask=ones(2, 5), causal="top_left", training=True, layer=3)
    assert state.x.shape == X.shape
    forward(memory=zeros(2, 0, 6), memory_mask=ones(2, 0))
    BLOCK.backward(PARAMS, saved, state)


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (zeros(5, 6), E, r"x: got shape \(5, 6\), needs \(batch, tokens, 6\)"),
        (zeros(2, 5, 5), E, r"x: got shape \(2, 5, 5\), needs \(batch, tokens, 6\)"),
        (zeros(2, 5, 6, dtype="int64"), T, f"x: got dtype int64, {KINDS}"),
        (None, T, f"x: got NoneType, {ARRAY}"),
        ([1.0], T, f"x: got list, {ARRAY}"),
        (X + math.inf, E, "x: got an element that is not finite, needs finite numbers"),
    ],
)
def test_the_start_of_a_block(x: Any, kind: type[Exception], text: str) -> None:
    raises(kind, text, lambda: BLOCK.start(PARAMS, x, ra.Context()))


def test_the_start_checks_its_context() -> None:
    raises(E, f"context.graph was given, but {READS}", lambda: BLOCK.start(PARAMS, X, ra.Context(graph=1)))


def test_a_context_of_draws() -> None:
    raises(T, "draws: got list, needs a dict of arrays by name", lambda: ra.Context(draws=[X]))  # type: ignore[arg-type]


def test_the_backward_of_a_block() -> None:
    _, saved = forward()
    cases: list[tuple[Any, type[Exception], str]] = [
        (State(zeros(2, 5, 7)), E, r"d_state.x: got shape \(2, 5, 7\), needs \(2, 5, 6\)"),
        (State(zeros(5, 6)), E, r"d_state.x: got shape \(5, 6\), needs \(2, 5, 6\)"),
        (State(X + math.nan), E, "d_state.x: got an element that is not finite, needs finite numbers"),
        (State(zeros(2, 5, 6, dtype="int64")), T, f"d_state.x: got dtype int64, {KINDS}"),
        (
            State(zeros(2, 5, 6, dtype="float32")),
            T,
            SEVERAL.format("dtypes", "float64", "d_state.x", "float32", "dtype"),
        ),
        (X, T, "d_state: got ndarray, needs a State of refattn.mechanisms.projections"),
    ]
    for d_state, kind, text in cases:
        raises(kind, text, partial(BLOCK.backward, PARAMS, saved, d_state))
    wrong = "saved: got Saved, needs a Saved of refattn.mechanisms.softmax.layer.block"
    raises(T, wrong, lambda: BLOCK.backward(PARAMS, saved.core, State(X)))


def test_a_block_with_arrays_of_several_libraries() -> None:
    strict = backends.get("strict")
    if strict.why_unavailable():
        pytest.skip("a second library is needed")
    there = strict.from_numpy
    for changed, name in (
        ({"x": there(X)}, "state.x"),
        ({"memory": there(X)}, "context.memory"),
        ({"params": replace(PARAMS, w_q=there(PARAMS.w_q))}, "params.w_q"),
    ):
        with pytest.raises(TypeError, match=f"{name}: array_api_strict.*, needs one library"):
            forward(**changed)
    for field in ("mask", "key_mask"):
        text = (
            rf"got arrays of several libraries \(params: numpy; context.{field}: array_api_strict\), needs one library"
        )
        raises(T, text, partial(forward, **{field: there(ones(2, 5))}))


def test_fresh_parameters() -> None:
    raises(
        T, "config: got dict, needs a Config of refattn.mechanisms.softmax.layer.block", lambda: BLOCK.init({}, like=X)
    )
    raises(T, f"like: got float, {ARRAY}", lambda: BLOCK.init(CONFIG, like=1.0))
    raises(T, f"like: got dtype int64, {KINDS}", lambda: BLOCK.init(CONFIG, like=zeros(1, dtype="int64")))
    raises(E, "seed: got -1, needs a whole number of at least 0", lambda: BLOCK.init(CONFIG, like=X, seed=-1))
    raises(T, "layer: got 0.5, needs a whole number of at least 0", lambda: BLOCK.init(CONFIG, like=X, layer=0.5))  # type: ignore[arg-type]


def test_wrong_input_leaves_arrays_alone() -> None:
    arrays = {name: x + 1.0 for name, x in good().items()}
    before = {name: x.copy() for name, x in arrays.items()}
    for changed, _, _ in FORWARD:
        with pytest.raises((TypeError, ValueError)):
            ra.softmax.forward(**{**arrays, **changed})
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays)
