"""What no core and no block takes: one error, which names the argument, says what it got and what it needs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends

E, T = ValueError, TypeError
CORES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]
KINDS = "needs float64, float32, float16 or bfloat16"
ARRAY = re.escape("needs an array of NumPy, CuPy, PyTorch, JAX, ...")
AXES = r"needs 4 axes \(batch, heads, tokens, width\)"
MASK = r"needs one that broadcasts to \(batch, heads, queries, keys\) = \(2, 2, 5, 5\)"


def zeros(*shape: int, dtype: Any = "float64") -> Any:
    return np.zeros(shape, dtype=dtype)


def ones(*shape: int) -> Any:
    return np.ones(shape, dtype=bool)


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert re.fullmatch(text, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


# --- cores

GOOD = {name: zeros(2, 2, 5, 4) + 0.5 for name in "qkv"}

FORWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": zeros(2, 5, 4)}, E, rf"q: got shape \(2, 5, 4\), {AXES}"),
    ({"k": zeros(1, 2, 2, 5, 4)}, E, rf"k: got shape \(1, 2, 2, 5, 4\), {AXES}"),
    ({"v": zeros(5)}, E, rf"v: got shape \(5,\), {AXES}"),
    ({"q": zeros()}, E, rf"q: got shape \(\), {AXES}"),
    ({"k": zeros(3, 2, 5, 4)}, E, r"k: got shape \(3, 2, 5, 4\), needs \(2, heads, .*, 4\) to fit q \(2, 2, 5, 4\)"),
    ({"k": zeros(2, 2, 5, 3)}, E, r"k: got shape \(2, 2, 5, 3\), needs \(2, heads, .*, 4\) to fit q \(2, 2, 5, 4\)"),
    ({"v": zeros(2, 2, 8, 6)}, E, r"v: got shape \(2, 2, 8, 6\), needs \(2, .*, 5.*width,?\) to fit .*"),
    ({"v": zeros(1, 2, 5, 6)}, E, r"v: got shape \(1, 2, 5, 6\), needs \(2, .*, 5.*width,?\) to fit .*"),
    (
        {"q": zeros(2, 3, 5, 4)},
        E,
        "[qk]: got [23] heads, needs a (number that divides|multiple or a divisor of) the .*",
    ),
    ({"q": zeros(2, 2, 5, 4, dtype="int64")}, T, f"q: got dtype int64, {KINDS}"),
    ({"v": zeros(2, 2, 5, 4, dtype="complex128")}, T, f"v: got dtype complex128, {KINDS}"),
    ({"q": zeros(2, 2, 5, 4, dtype="bool")}, T, f"q: got dtype bool, {KINDS}"),
    ({"q": zeros(2, 2, 5, 4, dtype=object)}, T, f"q: got dtype object, {KINDS}"),
    ({"k": zeros(2, 2, 5, 4, dtype="float32")}, T, r"got arrays of several dtypes \(q, v: float64; k: float32\), .*"),
    ({"q": [[1.0]]}, T, f"q: got list, {ARRAY}"),
    ({"k": None}, T, f"k: got NoneType, {ARRAY}"),
    ({"v": 1.0}, T, f"v: got float, {ARRAY}"),
    ({"mask": [True]}, T, f"mask: got list, {ARRAY}"),
    ({"mask": True}, T, f"mask: got bool, {ARRAY}"),
    ({"mask": zeros(5, 5)}, T, r"mask: got dtype float64, needs bool \(True = may attend\).*"),
    ({"mask": zeros(5, 5, dtype="int32")}, T, r"mask: got dtype int32, needs bool \(True = may attend\)"),
    *(
        ({"mask": ones(*shape)}, E, rf"mask: got shape {re.escape(str(shape))}, {MASK}")
        for shape in ((4, 5), (6,), (2, 3, 5, 5), (3, 1, 1, 1), (1, 2, 2, 5, 5), (0, 5))
    ),
    *(
        ({"causal": value}, E, f'causal: got {re.escape(repr(value))}, needs True, False, "top_left" or "bottom_right"')
        for value in ("left", "True", 1, 0, None, 1.0, [True], np.True_)
    ),
    ({"causal": ones(2, 2, 2)}, E, r"causal: got ndarray of shape \(2, 2, 2\) and dtype bool, needs True, False, .*"),
    *(
        ({"implementation": value}, E, f"implementation: got {re.escape(repr(value))}, needs one of auto, .*")
        for value in ("flash", "", "Dense", None, 1)
    ),
]


@pytest.mark.parametrize("name", CORES)
def test_forward(name: str) -> None:
    """In every implementation, and without a change of what is given."""
    record, arrays = ra.mechanism(name), {n: x.copy() for n, x in GOOD.items()}
    assert record.core is not None
    forward = record.core.forward
    for changed, kind, text in FORWARD:
        if changed.keys() <= {*"qkv", *record.defaults}:
            for implementation in ("auto", *record.implementations[:2]):
                raises(kind, text, partial(forward, **{**arrays, "implementation": implementation, **changed}))
    for wrong in ({**arrays, "dropout": 0.1}, {"q": arrays["q"], "k": arrays["k"]}):
        with pytest.raises(TypeError):
            forward(**wrong)
    assert all(np.array_equal(arrays[n], GOOD[n]) for n in arrays)
    assert forward(**arrays)[0].shape == (2, 2, 5, 4)


@pytest.mark.parametrize("name", CORES)
def test_backward(name: str) -> None:
    core: Any = ra.mechanism(name).core
    out, saved = core.forward(**GOOD)
    home = re.escape(type(saved).__module__)
    name_of_other = "delta" if name != "delta" else "softmax"
    _, other = ra.mechanism(name_of_other).core.forward(**GOOD)  # type: ignore[union-attr]
    needs = f"needs the Saved of {home} that forward returned"
    cases: list[tuple[tuple[Any, Any], type[Exception], str]] = [
        ((None, out), T, f"saved: got None, {needs}"),
        (((out, saved), out), T, f"saved: got tuple, {needs}"),
        ((other, out), T, rf"saved: got Saved of refattn\.mechanisms\.{name_of_other}\.core, {needs}"),
        ((saved, None), T, f"d_out: got NoneType, {ARRAY}"),
        ((saved, 1.0), T, f"d_out: got float, {ARRAY}"),
        ((saved, out[..., :3]), E, r"d_out: got shape \(2, 2, 5, 3\), needs \(2, 2, 5, 4\)"),
        ((saved, out[:1]), E, r"d_out: got shape \(1, 2, 5, 4\), needs \(2, 2, 5, 4\)"),
        ((saved, out.astype("int64")), T, f"d_out: got dtype int64, {KINDS}"),
        ((saved, out.astype("complex64")), T, f"d_out: got dtype complex64, {KINDS}"),
        ((saved, out.astype("float32")), T, "d_out: got dtype float32, needs float64"),
    ]
    for arguments, kind, text in cases:
        raises(kind, text, partial(core.backward, *arguments))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", CORES)
def test_every_upstream_gradient_has_a_dtype_of_the_call(name: str, dtype: str) -> None:
    core: Any = ra.mechanism(name).core
    out, saved = core.forward(**{n: x.astype(dtype) for n, x in GOOD.items()})
    names = [name for name in inspect.signature(core.backward).parameters if name not in ("saved", "d_out")]
    given = {"d_out": out, **{name: x for name in names if (x := _like_of(name, saved)) is not None}}
    right = ("float16", "float32") if dtype == "float16" else (dtype,)
    for each in right:  # of float16 what is in `saved` is float32, as it is computed
        core.backward(saved, **{name: x.astype(each) for name, x in given.items()})
    for wrong in {"float64", "float32", "float16"} - {*right}:
        for each, x in given.items():
            text = f"{each}: got dtype {wrong}, needs {' or '.join(right)}"
            raises(T, text, partial(core.backward, saved, **{**given, each: x.astype(wrong)}))
    if dtype != "float16" and backends.get("strict").why_unavailable() is None:  # which it does not have
        for each, x in given.items():
            other = {**given, each: backends.get("strict").from_numpy(x)}
            with pytest.raises(TypeError, match=rf"several libraries \({each}: array_api_strict; .*, needs one"):
                core.backward(saved, **other)


def _like_of(name: str, saved: Any) -> Any:
    """Return an array of the shape that a further upstream gradient has, None where the call has no such output."""
    if name == "d_energy":
        return ra.graph_energy.energy(saved)[..., -1]
    found = getattr(saved, name.removeprefix("d_"), None)
    return found if hasattr(found, "dtype") else None


@pytest.mark.parametrize("name", CORES)
def test_arrays_of_several_libraries(name: str, backend: Any) -> None:
    other, core = backends.get("strict" if backend.owner.name == "numpy" else "numpy"), ra.mechanism(name).core
    assert core is not None
    here, there = (type(f(zeros(1))).__module__.partition(".")[0] for f in (backend.array, other.from_numpy))
    arrays = {n: backend.array(x) for n, x in GOOD.items()}
    text = r"got arrays of several libraries \({}: {}; {}: {}\), needs one library"
    raises(
        T, text.format("q", there, "k, v", here), partial(core.forward, **arrays | {"q": other.from_numpy(zeros(1))})
    )
    raises(
        T, text.format("q, k", here, "v", there), partial(core.forward, **arrays | {"v": other.from_numpy(zeros(1))})
    )
    if "mask" in ra.mechanism(name).defaults:
        with pytest.raises(TypeError, match=f"mask: {there}.*needs one library"):
            core.forward(**arrays, mask=other.from_numpy(ones(5, 5)))
    _, saved = core.forward(**arrays)
    with pytest.raises(TypeError, match=rf"several libraries \(d_out: {there}; .*: {here}\), needs one library"):
        core.backward(saved, other.from_numpy(zeros(2, 2, 5, 4)))


@pytest.mark.parametrize("name", CORES)
def test_arrays_on_several_devices(name: str) -> None:
    strict, core = backends.get("strict"), ra.mechanism(name).core
    if strict.why_unavailable():
        pytest.skip("array-api-strict has devices to mix")
    assert core is not None
    here, there = strict.devices()[:2]
    arrays = {n: strict.from_numpy(x, device=here) for n, x in GOOD.items()}
    elsewhere = strict.from_numpy(GOOD["k"], device=there)
    text = rf"got arrays on several devices \(q, v: .*{here}.*; k: .*{there}.*\), needs one device"
    raises(E, text, partial(core.forward, **{**arrays, "k": elsewhere}))
    _, saved = core.forward(**arrays)
    raises(
        E, r"got arrays on several devices \(d_out: .*\), needs one device", partial(core.backward, saved, elsewhere)
    )


# --- blocks

X = zeros(2, 5, 6) + 0.5
SEVERAL = r"got arrays of several dtypes \(params.*: float64; .*{}: float32\), needs one dtype"


def small(name: str) -> Any:
    """A configuration of width 6 with two heads."""
    config = ra.mechanism(name).block.Config
    known = {field.name for field in dataclasses.fields(config)}
    return config(**{n: x for n, x in {"width": 6, "heads": 2, "bias": True}.items() if n in known})


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_configurations(name: str) -> None:
    config = small(name)
    known = {field.name for field in dataclasses.fields(config)}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        *(
            ({field: value}, kind, rf"{field}: got {re.escape(repr(value))}, needs a whole number of at least 1.*")
            for field in ("width", "heads", "kv_heads", "head_width", "value_width")
            for value, kind in ((0, E), (-1, E), (2.0, T), ("2", T), (True, T))
        ),
        ({"width": None}, T, "width: got None, needs a whole number of at least 1"),
        ({"heads": 4}, E, "heads: got 4, needs a divisor of the width 6.*"),
        ({"kv_heads": 3}, E, "kv_heads: got 3, needs a divisor of the 2 heads"),
        ({"kv_heads": 4}, E, "kv_heads: got 4, needs a divisor of the 2 heads"),
        ({"bias": None}, T, "bias: got None, needs true or false"),
        ({"residual": 1}, T, "residual: got 1, needs true or false"),
    ]
    for changed, kind, text in cases:
        if changed.keys() <= known:
            raises(kind, text, partial(replace, config, **changed))


def blocks(params: Any) -> list[tuple[dict[str, Any], type[Exception], str]]:
    """What is given to a block with these parameters in place of tokens, the context or parameters."""
    home = re.escape(type(params).__module__)
    return [
        ({"x": zeros(5, 6)}, E, r"state.x: got shape \(5, 6\), needs \(batch, tokens, 6\)"),
        ({"x": zeros(2, 5, 7)}, E, r"state.x: got shape \(2, 5, 7\), needs \(batch, tokens, 6\)"),
        ({"x": zeros(2, 5, 6, dtype="int64")}, T, f"state.x: got dtype int64, {KINDS}"),
        ({"x": zeros(2, 5, 6, dtype="complex64")}, T, f"state.x: got dtype complex64, {KINDS}"),
        ({"x": zeros(2, 5, 6, dtype="float32")}, T, SEVERAL.format("state.x")),
        ({"x": [1.0]}, T, "state.x: got list, needs an array"),
        ({"x": X + np.nan}, E, "state.x: got an element that is not finite, needs finite numbers"),
        ({"context": {}}, T, "context: got dict, needs a Context of refattn.mechanisms.context"),
        ({"memory": zeros(2, 6)}, E, r"context.memory: got shape \(2, 6\), needs \(2, keys, 6\)"),
        ({"memory": zeros(2, 4, 5)}, E, r"context.memory: got shape \(2, 4, 5\), needs \(2, keys, 6\)"),
        ({"memory": zeros(3, 4, 6)}, E, r"context.memory: got shape \(3, 4, 6\), needs \(2, keys, 6\)"),
        ({"memory": zeros(2, 4, 6, dtype="int64")}, T, f"context.memory: got dtype int64, {KINDS}"),
        ({"memory": [1.0]}, T, f"context.memory: got list, {ARRAY}"),
        ({"memory": zeros(2, 4, 6) - np.inf}, E, "context.memory: got an element that is not finite, .*"),
        ({"mask": [True]}, T, f"context.mask: got list, {ARRAY}"),
        ({"mask": zeros(5, 5, dtype="int64")}, T, "context.mask: got dtype int64, needs bool"),
        ({"mask": ones(5, 4)}, E, r"context.mask: got shape \(5, 4\), needs one that broadcasts to .*, 5, 5\)"),
        ({"mask": ones(5, 4), "key_mask": ones(2, 5)}, E, r"context.mask: got shape \(5, 4\), needs .*"),
        ({"key_mask": zeros(2, 5)}, T, "context.key_mask: got dtype float64, needs bool"),
        ({"key_mask": ones(5)}, E, r"context.key_mask: got shape \(5,\), needs \(2, 5\) \(True = a token\)"),
        ({"key_mask": ones(1, 5)}, E, r"context.key_mask: got shape \(1, 5\), needs \(2, 5\) \(True = a token\)"),
        ({"memory_mask": ones(2, 5)}, E, "context.memory_mask was given without context.memory"),
        ({"memory": X, "memory_mask": ones(2, 4)}, E, r"context.memory_mask: got shape \(2, 4\), needs \(2, 5\) .*"),
        (
            {"memory": X, "key_mask": ones(2, 5)},
            E,
            "context.key_mask was given with context.memory, .*: use memory_mask",
        ),
        ({"causal": "left"}, E, 'causal: got \'left\', needs True, False, "top_left" or "bottom_right"'),
        ({"params": None}, T, f"params: got None, needs a Params of {home}"),
        ({"params": {"w_q": X}}, T, f"params: got dict, needs a Params of {home}"),
    ]


UNREAD = {"graph": 3, "positions": np.arange(5), "draws": {"noise": X}, "memory": X, "tokens": np.arange(5)}


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_blocks(name: str) -> None:
    record = ra.mechanism(name)
    block, fields = record.block, record.context_fields
    params = block.init(small(name), like=X)

    def forward(x: Any = X, params: Any = params, context: Any = None, **given: Any) -> Any:
        state = replace(block.start(made, X, ra.Context()), x=x)
        return block.forward(params, state, ra.Context(**{**causal, **given}) if context is None else context)

    made, causal = params, {"causal": True} if "causal" in fields else {}
    known = {"x", "params", "context", *fields} - (
        {"memory"} if name == "graph_energy" else set()
    )  # not with its links
    for changed, kind, text in blocks(params):
        if changed.keys() <= known:
            raises(kind, text, partial(forward, **changed))
    told = "context.{} was given, but {} reads only: {}"
    for field, value in UNREAD.items():
        if field not in fields:
            text = re.escape(told.format(field, record.title, ", ".join(fields)))
            raises(E, text, partial(forward, **{field: value}))
            raises(E, text, partial(block.start, params, X, ra.Context(**{field: value})))
    _, saved = forward(training=True, layer=3)
    cases: list[tuple[Any, type[Exception], str]] = [
        (zeros(2, 5, 7), E, r"d_state.x: got shape \(2, 5, 7\), needs \(2, 5, 6\)"),
        (zeros(5, 6), E, r"d_state.x: got shape \(5, 6\), needs \(2, 5, 6\)"),
        (X + np.nan, E, "d_state.x: got an element that is not finite, needs finite numbers"),
        (zeros(2, 5, 6, dtype="int64"), T, f"d_state.x: got dtype int64, {KINDS}"),
        (zeros(2, 5, 6, dtype="float32"), T, SEVERAL.format("d_state.x")),
    ]
    state = block.start(params, X, ra.Context())
    for x, kind, text in cases:
        raises(kind, text, partial(block.backward, params, saved, replace(state, x=x)))
    raises(T, "d_state: got ndarray, needs a State of .*", partial(block.backward, params, saved, X))
    raises(T, "saved: got ndarray, needs a Saved of .*", partial(block.backward, params, X, state))


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_parameters_of_a_block(name: str) -> None:
    block, fields = ra.mechanism(name).block, ra.mechanism(name).context_fields
    params = block.init(small(name), like=X)
    state = block.start(params, X, ra.Context())

    def forward(**changed: Any) -> Any:
        return block.forward(replace(params, **changed), state, ra.Context(causal="causal" in fields))

    (leaf, w), *_ = [(n, x) for n, x in vars(params).items() if hasattr(x, "shape") and len(x.shape) == 2]
    raises(E, rf"params.{leaf}: got shape .*, its configuration needs .*", partial(forward, **{leaf: w[:, 1:]}))
    raises(E, rf"params.{leaf}: got an element that is not finite, .*", partial(forward, **{leaf: w + np.inf}))
    raises(T, rf"got .* several dtypes .*{leaf}: float32.*", partial(forward, **{leaf: w.astype("float32")}))
    told = f"config: got dict, needs a Config of {re.escape(block.Config.__module__)}"
    raises(T, told, lambda: block.init({}, like=X))
    raises(T, f"like: got float, {ARRAY}", lambda: block.init(small(name), like=1.0))
    raises(T, f"like: got dtype int64, {KINDS}", lambda: block.init(small(name), like=zeros(1, dtype="int64")))
    raises(E, "seed: got -1, needs a whole number of at least 0", lambda: block.init(small(name), like=X, seed=-1))
    raises(T, "layer: got 0.5, needs a whole number of at least 0", lambda: block.init(small(name), like=X, layer=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_the_start_of_a_block(name: str) -> None:
    block = ra.mechanism(name).block
    params = block.init(small(name), like=X)
    cases: list[tuple[Any, type[Exception], str]] = [
        (zeros(5, 6), E, r"x: got shape \(5, 6\), needs \(batch, tokens, 6\)"),
        (zeros(2, 5, 5), E, r"x: got shape \(2, 5, 5\), needs \(batch, tokens, 6\)"),
        (zeros(2, 5, 6, dtype="int64"), T, f"x: got dtype int64, {KINDS}"),
        (None, T, f"x: got NoneType, {ARRAY}"),
        ([1.0], T, f"x: got list, {ARRAY}"),
        (X + np.inf, E, "x: got an element that is not finite, needs finite numbers"),
    ]
    for x, kind, text in cases:
        raises(kind, text, partial(block.start, params, x, ra.Context()))


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_block_with_arrays_of_several_libraries(name: str) -> None:
    strict, block = backends.get("strict"), ra.mechanism(name).block
    if strict.why_unavailable():
        pytest.skip("a second library is needed")
    params = block.init(small(name), like=X)
    state = block.start(params, X, ra.Context())
    with pytest.raises(TypeError, match=r"state.x: array_api_strict.*, needs one library"):
        block.forward(params, replace(state, x=strict.from_numpy(X)), ra.Context())
    for field in {"memory", "mask", "key_mask"} & {*ra.mechanism(name).context_fields}:
        given = strict.from_numpy(X if field == "memory" else ones(2, 5))
        with pytest.raises(TypeError, match=rf"context.{field}: array_api_strict.*, needs one library"):
            block.forward(params, state, ra.Context(**{field: given}))
