"""That it is really the foreign library that an adapter's answer comes from: the model that ONNX Runtime got, the
arguments and the kernel that torch used. Whether the answer is right, tests/examples/test_real.py asks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def test_torch_differentiates_through_the_cast_to_bfloat16(sdpa: ModuleType) -> None:
    import torch

    (q, k, v), _ = Case("plain").arrays("bfloat16")
    inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    out = sdpa.attend(*inputs, dtype="bfloat16")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(x.grad is not None and bool(torch.isfinite(x.grad).all()) for x in inputs)
