"""The adapters in examples/ against attention written here once more, row by row, in float64.

Two questions for each: is the foreign answer right, and was it really the foreign library that gave it (the model that
ONNX Runtime got, the arguments and the kernel that torch used)?
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import refattn

EXAMPLES = Path(__file__).parents[2] / "examples"
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def load(name: str, *needs: str) -> ModuleType:
    for library in needs:
        pytest.importorskip(library, reason=f"{library} is not installed: pip install refattn[onnx,torch]")
    spec = importlib.util.spec_from_file_location(f"adapter_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ort() -> ModuleType:
    return load("onnxruntime_attention", "onnx", "onnxruntime")


@pytest.fixture(scope="module")
def sdpa() -> ModuleType:
    return load("torch_sdpa", "torch")


# --- the other derivation


def sees(i: int, j: int, n_q: int, n_k: int, causal: bool | str) -> bool:
    if causal == "top_left":
        return j <= i
    return j <= i + n_k - n_q if causal else True


def naive(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (b, h, n_q, d), (g, n_k) = q.shape, k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    full = np.broadcast_to(True if mask is None else mask, (b, h, n_q, n_k))
    out = np.zeros((b, h, n_q, v.shape[3]))
    for batch, head, i in np.ndindex(b, h, n_q):
        group = head // (h // g)
        keys = [j for j in range(n_k) if full[batch, head, i, j] and sees(i, j, n_q, n_k, causal)]
        if keys:
            scores = k[batch, group, keys] @ q[batch, head, i] * scale
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[batch, head, i] = weights @ v[batch, group, keys] / weights.sum()
    return out


def allowed_error(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None, dtype: str) -> float:
    """First order: an error of the scores counts twice through the softmax; sums are float32 or better, and the scores,
    the weights and the result may each be rounded to the dtype."""
    store, add = UNIT[dtype], min(UNIT[dtype], UNIT["float32"])
    d, n_k = q.shape[3], k.shape[2]
    norm = abs(d**-0.5 if scale is None else scale)
    score = norm * float(np.abs(q).astype(float).max(axis=2).max() * np.abs(k).astype(float).sum(axis=3).max())
    return float(np.abs(v).max()) * (store * (2 * score + 4) + add * (2 * (d + 4) * score + n_k))


# --- the cases


@dataclass(frozen=True)
class Case:
    name: str
    b: int = 2
    h: int = 4
    g: int = 4
    n_q: int = 5
    n_k: int = 5
    d: int = 8
    e: int = 8
    mask: tuple[int, ...] | None = None
    empty: bool = False  # some rows of the mask allow nothing
    causal: bool | str = False
    scale: float | None = None
    softcap: float | None = None

    def arrays(self, dtype: str) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]:
        rng = np.random.default_rng(list(self.name.encode()))
        kv = (self.b, self.g, self.n_k)
        shapes = ((self.b, self.h, self.n_q, self.d), (*kv, self.d), (*kv, self.e))
        arrays = [rng.standard_normal(shape).astype("float32" if dtype == "bfloat16" else dtype) for shape in shapes]
        if dtype == "bfloat16":  # cut to its eight bits, which is a bfloat16 value as good as any
            arrays = [(x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in arrays]
        options = {name: getattr(self, name) for name in ("causal", "scale", "softcap") if getattr(self, name)}
        if self.scale is not None:
            options["scale"] = self.scale
        if self.mask is not None:
            mask = rng.random(self.mask) < 0.6
            mask[..., 0] = True  # no row is empty by chance
            if self.empty:
                mask[..., mask.shape[-2] // 2, :] = False
            options["mask"] = mask
        for array in (*arrays, *([options["mask"]] if self.mask else [])):
            array.flags.writeable = False
        q, k, v = arrays
        return (q, k, v), options


MASKS: list[tuple[int, ...]] = [(5,), (1,), (4, 5), (4, 1), (1, 5), (3, 4, 5), (3, 1, 5), (3, 1, 1), (1, 4, 5)]
MASKS += [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5), (1, 1, 4, 5), (2, 1, 1, 5), (2, 3, 4, 1), (1, 1, 1, 1)]
CASES = [
    Case("plain"),
    Case("one of each", b=1, h=1, g=1, n_q=1, n_k=1, d=1, e=1),
    Case("one query", n_q=1, n_k=6, causal=True),
    Case("one key", n_q=3, n_k=1),
    Case("larger", b=1, n_q=33, n_k=70, d=16, e=16, g=2, causal=True),
    Case("unequal lengths", n_q=3, n_k=7),
    Case("unequal lengths, more queries", n_q=7, n_k=3),
    Case("d_v smaller", e=3),
    Case("d_v larger", e=12, g=2, causal=True),
    Case("odd d", d=5, e=5),
    Case("causal, square", causal=True),
    Case("causal, by name", causal="bottom_right"),
    Case("causal, more keys", n_q=3, n_k=7, causal=True),
    Case("causal, more queries", n_q=7, n_k=3, causal=True),
    Case("top-left, square", causal="top_left"),
    Case("top-left, more keys", n_q=3, n_k=7, causal="top_left"),
    Case("top-left, more queries", n_q=7, n_k=3, causal="top_left"),
    Case("grouped", g=2),
    Case("one key head", g=1),
    Case("three query heads a key head", h=6, g=2, n_q=3, n_k=7, causal=True),
    *(Case(f"mask {shape}", h=3, g=3, n_q=4, n_k=5, mask=shape) for shape in MASKS),
    Case("mask, grouped, d_v", g=2, e=6, n_q=4, n_k=6, mask=(2, 4, 4, 6)),
    Case("mask and causal", n_q=5, n_k=5, mask=(2, 1, 5, 5), causal=True),
    Case("mask and causal, more keys", g=2, n_q=4, n_k=6, mask=(4, 4, 6), causal=True),
    Case("mask and causal, more queries", n_q=6, n_k=4, mask=(6, 4), causal=True),
    Case("mask and top-left", n_q=4, n_k=6, mask=(1, 6), causal="top_left"),
    Case("empty rows", mask=(2, 1, 5, 5), empty=True),
    Case("empty rows, grouped", g=2, n_q=4, n_k=6, mask=(4, 6), empty=True),
    Case("empty rows and causal", n_q=4, n_k=6, mask=(2, 4, 4, 6), empty=True, causal=True),
    Case("everything masked", n_q=1, n_k=4, mask=(1, 4), empty=True),
    Case("scale", scale=0.3),
    Case("scale, large", scale=2.0, causal=True),
    Case("scale 0", scale=0.0),
    Case("scale below 0", scale=-0.5),
    Case("soft-cap", softcap=0.75, scale=1.0),
    Case("soft-cap, inexact", softcap=0.7, scale=1.0),
    Case("soft-cap, mask, causal", softcap=2.0, scale=1.0, n_q=4, n_k=6, mask=(4, 6), causal=True),
    Case("no batch", b=0),
    Case("no heads", h=0, g=0),
    Case("no queries", n_q=0),
    Case("no keys", n_k=0),
    Case("no d_v", e=0),
]
DTYPES = ("float64", "float32", "float16", "bfloat16")


def declined_by_ort(case: Case, dtype: str) -> str | None:
    empty = case.empty or (case.mask is not None and case.causal is True and case.n_q > case.n_k)
    if dtype == "bfloat16":
        return "no CPU kernel for bfloat16"
    if 0 in (case.b, case.h, case.n_q, case.n_k, case.e):
        return "axes of size 0"
    if dtype == "float64" and case.causal in (True, "bottom_right") and case.n_q > case.n_k:
        return "ignores lengths, and so more queries than keys"
    if case.scale is not None and case.scale <= 0:
        return f"scale={case.scale} is not positive"
    if dtype == "float64" and case.softcap == 0.7:
        return "softcap=0.7 is a float32 attribute"
    return "may attend nothing" if dtype == "float64" and empty else None


def declined_by_torch(case: Case, dtype: str) -> str | None:
    return "has no option softcap" if case.softcap is not None else None


def declined_by_flash(case: Case, dtype: str) -> str | None:
    return "needs d_v = d > 0" if case.e != case.d else declined_by_torch(case, dtype)


ADAPTERS: dict[str, tuple[str, str, Callable[[Case, str], str | None]]] = {
    "onnxruntime": ("ort", "attend", declined_by_ort),
    "torch": ("sdpa", "attend", declined_by_torch),
    "torch-math": ("sdpa", "attend_math", declined_by_torch),
    "torch-flash": ("sdpa", "attend_flash", declined_by_flash),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_agrees_with_a_naive_loop(request: pytest.FixtureRequest, adapter: str, case: Case, dtype: str) -> None:
    fixture, function, declines = ADAPTERS[adapter]
    attend = getattr(request.getfixturevalue(fixture), function)
    (q, k, v), options = case.arrays(dtype)
    before = [x.copy() for x in (q, k, v)]
    out = attend(q, k, v, dtype=dtype, **options)
    reason = declines(case, dtype)
    if reason is not None:
        assert isinstance(out, refattn.Decline)
        assert reason in out.reason
        return
    assert not isinstance(out, refattn.Decline), out.reason
    assert str(out.dtype).removeprefix("torch.") == dtype
    got = np.asarray(out if adapter == "onnxruntime" else out.double(), dtype=np.float64)
    truth = naive(q, k, v, **options)
    assert got.shape == truth.shape
    assert np.isfinite(got).all()
    if truth.size and case.n_k:
        assert np.abs(got - truth).max() <= allowed_error(q, k, v, case.scale, dtype)
    rows = naive(np.ones_like(q), np.ones_like(k), np.ones_like(v), **options).any(axis=-1)  # 0 where a row is empty
    assert not got[~rows].any()
    assert all(np.array_equal(x, y) for x, y in zip(before, (q, k, v), strict=True))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_unknown_option_is_declined_by_name(request: pytest.FixtureRequest, adapter: str) -> None:
    fixture, function, _ = ADAPTERS[adapter]
    (q, k, v), _ = CASES[0].arrays("float32")
    out = getattr(request.getfixturevalue(fixture), function)(q, k, v, order=3)
    assert isinstance(out, refattn.Decline)
    assert "order" in out.reason


# --- ONNX Runtime: what it was asked


class Spy:
    """Stands for `onnxruntime.InferenceSession`: keeps the model, what it was fed and what it gave."""

    made: list[Spy]
    real: Any

    def __init__(self, model: bytes, **options: Any) -> None:
        import onnx

        self.bytes = model
        self.node = onnx.load_from_string(model).graph.node
        self.session = type(self).real(model, **options)
        type(self).made.append(self)

    def run(self, names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.feed = feed
        self.result = self.session.run(names, feed)
        return self.result

    @property
    def attributes(self) -> dict[str, float]:
        return {a.name: a.i if a.type == a.INT else a.f for a in self.node[0].attribute}


@pytest.fixture
def spies(ort: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Spy]]:
    Spy.made, Spy.real = [], ort.onnxruntime.InferenceSession
    ort.session.cache_clear()
    monkeypatch.setattr(ort.onnxruntime, "InferenceSession", Spy)
    yield Spy.made
    ort.session.cache_clear()  # the spies must not outlive the test


NATIVE: list[tuple[Case, list[str], dict[str, float]]] = [
    (Case("plain"), ["q", "k", "v"], {}),
    (Case("square", causal=True), ["q", "k", "v"], {"is_causal": 1}),
    (Case("top-left", n_q=3, n_k=7, causal="top_left"), ["q", "k", "v"], {"is_causal": 1}),
    (Case("right", n_q=3, n_k=7, g=2, causal=True), ["q", "k", "v", "past_k", "past_v"], {"is_causal": 1}),
    (Case("masked", mask=(2, 1, 5, 5)), ["q", "k", "v", "mask"], {}),
    (Case("empty", mask=(5, 5), empty=True), ["q", "k", "v", "mask"], {}),
    (Case("both", mask=(5, 5), causal=True), ["q", "k", "v", "mask"], {"is_causal": 1}),
    (Case("all", n_q=3, mask=(3, 5), causal=True), ["q", "k", "v", "mask", "past_k", "past_v"], {"is_causal": 1}),
    (Case("grouped", g=2), ["q", "k", "v"], {}),
    (Case("unequal", e=3), ["q", "k", "v"], {}),
    (Case("scale", scale=0.5), ["q", "k", "v"], {"scale": 0.5}),
    (Case("soft-cap", softcap=2.0), ["q", "k", "v"], {"softcap": 2.0}),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case, inputs, attributes", NATIVE, ids=lambda x: getattr(x, "name", ""))
def test_onnxruntime_is_asked_through_its_own_inputs(
    ort: ModuleType,
    spies: list[Spy],
    tmp_path: Path,
    case: Case,
    inputs: list[str],
    attributes: dict[str, float],
    dtype: str,
) -> None:
    (q, k, v), options = case.arrays(dtype)
    out = ort.attend(q, k, v, **options)
    (spy,) = spies
    assert out is spy.result[0]  # nothing is done to the answer
    assert [node.op_type for node in spy.node] == ["Attention"]
    assert [name for name in spy.node[0].input if name] == inputs
    assert spy.attributes == attributes
    assert set(spy.feed) == set(inputs)
    assert np.array_equal(spy.feed["q"], q)
    past = [name in inputs for name in ("past_k", "past_v")]
    for name, array in (("k", k), ("v", v)):  # as they came: no head repeated, nothing padded
        parts = [spy.feed[f"past_{name}"]] if all(past) else []
        assert np.array_equal(np.concatenate([*parts, spy.feed[name]], axis=2), array)
    if all(past):
        assert spy.feed["past_k"].shape[2] == case.n_k - case.n_q
    if "mask" in inputs:  # the user's mask and no triangle in it
        given = options["mask"]
        assert spy.feed["mask"].dtype == np.bool_
        assert np.array_equal(spy.feed["mask"], np.broadcast_to(given, (*given.shape[:-2], case.n_q, case.n_k)))
    assert operators(ort, spy, tmp_path) == ["Attention"]  # a kernel of its own


def operators(ort: ModuleType, spy: Spy, folder: Path) -> list[str]:
    """What ONNX Runtime runs after it has optimised the model."""
    import onnx

    options = ort.onnxruntime.SessionOptions()
    options.graph_optimization_level = ort.onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    Spy.real(spy.bytes, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node]


def test_onnxruntime_in_float64_is_scaled_before(ort: ModuleType, spies: list[Spy]) -> None:
    case = Case("double", n_q=3, n_k=7, mask=(3, 7), causal=True)
    (q, k, v), options = case.arrays("float64")
    ort.attend(q, k, v, **options)
    (spy,) = spies
    assert spy.attributes == {"is_causal": 1, "scale": 1.0}
    np.testing.assert_allclose(spy.feed["q"], q * 8**-0.5, rtol=4e-16)
    assert np.array_equal(spy.feed["mask"], options["mask"])
    assert spy.feed["past_k"].shape[2] == 4


def test_onnxruntime_builds_one_session_for_all_sizes(ort: ModuleType, spies: list[Spy]) -> None:
    for n in (2, 3, 4):
        (q, k, v), options = Case("sizes", n_q=n, n_k=n + 2, causal=True).arrays("float32")
        ort.attend(q, k, v, **options)
    assert len(spies) == 1


@pytest.mark.parametrize("softcap", [0.0, -1.0])
def test_onnxruntime_would_ignore_a_softcap_that_is_not_positive(ort: ModuleType, softcap: float) -> None:
    (q, k, v), _ = CASES[0].arrays("float32")
    out = ort.attend(q, k, v, softcap=softcap)
    assert isinstance(out, refattn.Decline)
    assert re.search("softcap=.* is not positive", out.reason)


# --- torch: what it was asked, and its gradients


def test_torch_is_asked_through_its_own_arguments(sdpa: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    real = sdpa.scaled_dot_product_attention

    def spy(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append({"k": k, **options})
        return real(q, k, v, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)

    def asked(**sizes: Any) -> dict[str, Any]:
        (q, k, v), options = Case("asked", **sizes).arrays("float32")
        sdpa.attend(q, k, v, **options)
        return calls.pop()

    plain = asked(g=2)
    assert plain["k"].shape[1] == 2 and plain["enable_gqa"]
    assert plain["attn_mask"] is None and not plain["is_causal"] and plain["scale"] is None
    for square in (asked(causal=True), asked(causal="top_left", n_q=3, n_k=7), asked(causal="top_left", n_q=7, n_k=3)):
        assert square["attn_mask"] is None and square["is_causal"]
    right = asked(causal=True, n_q=3, n_k=7)
    assert type(right["attn_mask"]).__name__ == "CausalBias" and not right["is_causal"]
    masked = asked(mask=(5, 1), empty=True)
    assert masked["attn_mask"].shape == (1, 1, 5, 1) and not masked["is_causal"]
    both = asked(mask=(5, 7), n_k=7, causal=True)  # the documented way: one mask
    assert both["attn_mask"].shape == (1, 1, 5, 7) and not both["is_causal"]


def test_torch_uses_the_kernel_that_is_named(sdpa: ModuleType) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    for name, case, flash in (
        ("attend", Case("plain"), True),
        ("attend", Case("mask", mask=(5,), causal=True), True),
        ("attend", Case("unequal", e=3), False),
        ("attend_flash", Case("top-left", n_k=7, g=2, causal="top_left"), True),
        ("attend_math", Case("plain"), False),
    ):
        names: list[str] = []
        (q, k, v), options = case.arrays("float32")
        with Log():
            getattr(sdpa, name)(q, k, v, **options)
        assert any("flash_attention_for_cpu" in x for x in names) is flash, (name, case.name, names)


def small(name: str, **sizes: Any) -> Case:
    return Case(name, **{"b": 1, "h": 2, "g": 2, "n_q": 3, "n_k": 3, "d": 4, "e": 4, **sizes})


GRADIENTS = [
    small("plain"),
    small("grouped", h=4),
    small("causal", causal=True),
    small("causal, more keys", n_k=5, causal=True),
    small("causal, more queries", n_q=5, causal=True),
    small("top-left", n_k=5, causal="top_left"),
    small("mask", n_k=4, mask=(1, 2, 3, 4)),
    small("mask and causal", n_k=4, mask=(3, 4), causal=True),
    small("empty rows", n_k=4, mask=(3, 4), empty=True),
    small("unequal d_v", e=3),
    small("scale", scale=0.7),
]


@pytest.mark.parametrize("function", ["attend", "attend_math", "attend_flash"])
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.name)
def test_torch_gradients_are_those_of_the_naive_loop(sdpa: ModuleType, case: Case, function: str) -> None:
    import torch

    attend = getattr(sdpa, function)
    assert attend.framework == "torch"
    arrays, options = case.arrays("float64")
    if function == "attend_flash" and declined_by_flash(case, "float64"):
        pytest.skip("the flash kernel needs d_v = d")
    inputs = [torch.tensor(x, requires_grad=True) for x in arrays]
    out = attend(*inputs, **options)
    d_out = np.random.default_rng(1).standard_normal(tuple(out.shape))
    out.backward(torch.tensor(d_out))
    step = 2.0**-16  # central differences: step**2 of truncation against eps / step of rounding, both below 1e-9
    for place, x in enumerate(inputs):
        wanted = np.zeros(tuple(x.shape))
        for at in np.ndindex(*x.shape):
            ends = []
            for sign in (step, -step):
                moved = [y.copy() for y in arrays]
                moved[place][at] += sign
                ends.append(float((naive(*moved, **options) * d_out).sum()))
            wanted[at] = (ends[0] - ends[1]) / (2 * step)
        assert x.grad is not None
        assert np.abs(x.grad.numpy() - wanted).max() < 1e-8


def test_torch_differentiates_through_the_cast_to_bfloat16(sdpa: ModuleType) -> None:
    import torch

    (q, k, v), _ = CASES[0].arrays("bfloat16")
    inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    out = sdpa.attend(*inputs, dtype="bfloat16")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(x.grad is not None and bool(torch.isfinite(x.grad).all()) for x in inputs)
