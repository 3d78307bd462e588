"""Foreign kernels: what can be loaded, what a call gives it, and what is accepted from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.verify.adapters.adapter import CallError, LoadError, call, load
from refattn.verify.outcome import Result

RNG = np.random.default_rng(7)
INPUTS = {name: RNG.normal(size=(1, 2, 3, 4)).astype(np.float32) for name in "qkv"}
OUT = RNG.normal(size=(1, 2, 3, 4)).astype(np.float32)
MASK = np.eye(3, dtype=bool)


def called(kernel: Any, dtype: str = "float32", upstream: Any = None, **options: Any) -> Result:
    """Call with INPUTS; it must not decline."""
    result = call(kernel, INPUTS, options, dtype, upstream)
    assert isinstance(result, Result)
    return result


# Loading


def test_a_function_of_a_module_or_file_is_loaded(tmp_path: Path) -> None:
    assert load("refattn.verify.adapters.adapter:load") is load
    (tmp_path / "beside.py").write_text("value = 3\n")
    (tmp_path / "kernel.py").write_text("import beside\n\n\ndef attend():\n    return beside.value\n")
    assert load(f"{tmp_path / 'kernel.py'}:attend")() == 3


def test_a_class_is_made_and_an_object_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "class Kernel:\n    def forward(self, q, k, v):\n        return q\n\n\nready = Kernel()\n"
    )
    made, ready = (load(f"{tmp_path / 'kernel.py'}:{name}") for name in ("Kernel", "ready"))
    assert type(made).__name__ == type(ready).__name__ == "Kernel"
    assert called(made).tensors["out"].shape == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        (None, "attend", "there is no file"),
        ("def attend(:", "attend", "SyntaxError"),
        ("import a_module_that_is_not_there", "attend", "No module named 'a_module_that_is_not_there'"),
        ("raise ValueError('why')", "attend", "ValueError: why"),
        ("", "attend", "has no 'attend'"),
        ("attend = 3", "attend", "int, needs a function or an object with forward"),
        ("class attend:\n    def __init__(self, size): ...", "attend", "TypeError"),
        ("", "", "needs MODULE_OR_FILE:FUNCTION"),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path: Path, source: str | None, name: str, words: str) -> None:
    file = tmp_path / "kernel.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(LoadError) as raised:
        load(f"{file}:{name}")
    assert words in str(raised.value) and str(file) in str(raised.value)


def test_neighbours_of_a_file_are_found_also_when_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_the_kernel.py").write_text("out = 3")
    (tmp_path / "kernel.py").write_text("def attend():\n    import neighbour_of_the_kernel as n\n    return n.out")
    assert load(f"{tmp_path / 'kernel.py'}:attend")() == 3


# What a call gives


def test_inputs_are_fresh_and_read_only() -> None:
    def attend(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
        for name, x in {"q": q, "k": k, "v": v, "mask": mask}.items():
            given = (INPUTS | {"mask": MASK})[name]
            assert not x.flags.writeable and not np.shares_memory(x, given)
            assert x.dtype == given.dtype and np.array_equal(x, given)
        return OUT

    assert isinstance(call(attend, INPUTS | {"mask": MASK}, {}, "float32"), Result)


def test_options_come_by_name_and_those_at_their_default_do_not() -> None:
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.update(options)
        return OUT

    seen: dict[str, Any] = {}
    called(attend, causal="top_left", scale=0.5)
    assert seen == {"causal": "top_left", "scale": 0.5}


def test_the_dtype_is_told_to_who_asks() -> None:
    def told(q: Any, k: Any, v: Any, dtype: str = "") -> Any:
        assert dtype == "bfloat16"
        return OUT

    class Told:
        def forward(self, q: Any, k: Any, v: Any, *, dtype: str) -> Any:
            return told(q, k, v, dtype)

    called(told, "bfloat16")
    called(Told(), "bfloat16")


# What is accepted


@pytest.mark.parametrize("returned", [OUT, OUT.tolist(), (OUT,), (OUT, None), np.asfortranarray(OUT)])
def test_an_output_alone(returned: Any) -> None:
    result = called(lambda q, k, v: returned)
    assert list(result.tensors) == ["out"]
    np.testing.assert_array_equal(result.tensors["out"].astype(np.float32), OUT)


def test_an_output_with_its_lse() -> None:
    result = called(lambda q, k, v: (OUT, OUT[..., 0]))
    assert result.dtypes == {"out": "float32", "lse": "float32"}
    assert result.tensors["lse"].shape == (1, 2, 3)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_arrays_of_any_library(backend: Any, kind: str) -> None:
    if not backend.has(kind):
        pytest.skip(f"it has no {kind}")
    result = called(lambda q, k, v: backend.array(OUT, kind))
    assert result.dtypes["out"] == kind
    assert isinstance(result.tensors["out"], np.ndarray)
    np.testing.assert_array_equal(result.tensors["out"], OUT)


class Exported:
    """An array of a library that nobody knows: it can export its memory, and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_arrays_of_whatever_exports_its_memory() -> None:
    result = called(lambda q, k, v: (Exported(OUT.copy()), Exported(OUT[..., 0].copy())))
    assert result.dtypes == {"out": "float32", "lse": "float32"}
    np.testing.assert_array_equal(result.tensors["out"], OUT)
    np.testing.assert_array_equal(result.tensors["lse"], OUT[..., 0])


def test_bfloat16_of_torch_is_known_by_its_name() -> None:
    torch = pytest.importorskip("torch")
    result = called(lambda q, k, v, dtype: torch.tensor(OUT).to(torch.bfloat16), "bfloat16")
    assert result.dtypes["out"] == "bfloat16" and result.tensors["out"].dtype == np.float32


def test_who_cannot_be_told_of_bfloat16_declines() -> None:
    declined = call(lambda q, k, v: q, INPUTS, {}, "bfloat16")
    assert isinstance(declined, ra.Decline) and "takes no dtype=" in declined.reason


@pytest.mark.parametrize(
    "returned",
    [
        None,
        (),
        (None, OUT),
        "text",
        [object()],
        {"lse": OUT},
        {"out": OUT, "odd": OUT},
        ra.Decline,
        (OUT,) * 3,
        [OUT, OUT[0]],
        iter(OUT),
    ]
    + [OUT + 1j, OUT.astype(object), np.array(["a"])],
)
def test_what_is_no_result_is_refused(returned: Any) -> None:
    with pytest.raises(CallError, match="returned|needs an array"):
        call(lambda q, k, v: returned, INPUTS, {}, "float32")


def test_what_it_raises_becomes_one_line() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        raise KeyError("first line\nsecond line")

    with pytest.raises(CallError, match="^raised KeyError: .*first line.*second line") as raised:
        call(attend, INPUTS, {}, "float32")
    assert "\n" not in str(raised.value)


def test_what_it_has_no_parameter_for_is_declined_by_name() -> None:
    found = call(lambda q, k, v, scale=None: OUT, INPUTS, {"causal": True, "scale": 1.0, "window": (1, 0)}, "float32")
    assert isinstance(found, ra.Decline) and found.reason == "it takes no causal, window"
    found = call(lambda query, key, v: OUT, INPUTS, {}, "float32")
    assert isinstance(found, ra.Decline)
    assert found.reason == "it takes no q, k, and is called by name, attend(q=q, k=k, v=v)"

    def hidden(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return (lambda scale=None: OUT)(**options)

    with pytest.raises(CallError, match="raised TypeError: .*causal"):
        call(hidden, INPUTS, {"causal": True}, "float32")


def test_changing_inputs_is_refused() -> None:
    def forced(q: Any, k: Any, v: Any) -> Any:
        k.setflags(write=True)
        k[0, 0, 0, 0] += 1.0
        return OUT

    def tried(q: Any, k: Any, v: Any) -> Any:
        q += 1.0
        return OUT

    with pytest.raises(CallError, match="changed its inputs: k"):
        call(forced, INPUTS, {}, "float32")
    with pytest.raises(CallError, match="raised ValueError: .*read-only"):
        call(tried, INPUTS, {}, "float32")


# Gradients


class Pair:
    """out = q + 2 k + 3 v."""

    def __init__(self, shape: Callable[[Any], Any] = lambda g: {"q": g, "k": 2.0 * g, "v": 3.0 * g}) -> None:
        self.shape = shape

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return q + 2.0 * k + 3.0 * v

    def backward(self, d_out: Any) -> Any:
        assert not d_out.flags.writeable
        return self.shape(d_out)


@pytest.mark.parametrize(
    "shape", [lambda g: {"q": g, "k": 2.0 * g, "v": 3.0 * g}, lambda g: (g, 2.0 * g, 3.0 * g)], ids=["dict", "tuple"]
)
def test_a_backward_of_its_own(shape: Callable[[Any], Any]) -> None:
    result = called(Pair(shape), upstream=OUT)
    assert list(result.tensors) == ["out", "d_q", "d_k", "d_v"]
    for name, factor in {"d_q": 1.0, "d_k": 2.0, "d_v": 3.0}.items():
        np.testing.assert_array_equal(result.tensors[name], np.float32(factor) * OUT)


@pytest.mark.parametrize("gradients", [None, OUT, (OUT, OUT), [OUT, OUT, OUT]])
def test_a_backward_that_gives_no_gradients_is_refused(gradients: Any) -> None:
    with pytest.raises(CallError, match="backward returned"):
        call(Pair(lambda g: gradients), INPUTS, {}, "float32", OUT)


def test_a_backward_that_raises_or_declines() -> None:
    def fail(g: Any) -> Any:
        raise RuntimeError("not yet")

    with pytest.raises(CallError, match="raised RuntimeError: not yet"):
        call(Pair(fail), INPUTS, {}, "float32", OUT)

    def decline(g: Any) -> Any:
        raise ra.Decline("later")

    for backward in (lambda g: ra.Decline("later"), decline):
        result = called(Pair(backward), upstream=OUT)
        assert result.declined == "later" and list(result.tensors) == ["out"]


def test_a_kernel_may_raise_what_it_declines() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        raise ra.Decline("not yet")

    found = call(attend, INPUTS, {}, "float32")
    assert isinstance(found, ra.Decline) and found.reason == "not yet"


def test_a_backward_that_changes_the_inputs_is_refused() -> None:
    class Careless(Pair):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            self.q = q
            return super().forward(q, k, v)

        def backward(self, d_out: Any) -> Any:
            self.q.flags.writeable = True
            self.q += 1.0
            return super().backward(d_out)

    with pytest.raises(CallError, match="changed its inputs: q"):
        call(Careless(), INPUTS, {}, "float32", OUT)


def test_a_function_of_numpy_has_no_gradients() -> None:
    result = called(lambda q, k, v: q + k + v, upstream=OUT)
    assert "no gradients" in result.declined and list(result.tensors) == ["out"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torch_differentiates(dtype: str) -> None:
    torch = pytest.importorskip("torch")

    def attend(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
        q, k, v = (x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (q, k, v))
        return (q + 2.0 * k) * v, None

    attend.framework = "torch"  # type: ignore[attr-defined]
    inputs = {name: x.astype("float32" if dtype == "bfloat16" else dtype) for name, x in INPUTS.items()}
    result = call(attend, inputs | {"mask": MASK}, {}, dtype, np.ones(OUT.shape, np.float32))
    assert isinstance(result, Result)
    assert {result.dtypes[name] for name in ("out", "d_q", "d_k", "d_v")} == {dtype}
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
    np.testing.assert_allclose(result.tensors["d_k"], 2.0 * INPUTS["v"], rtol=tolerance)
    np.testing.assert_allclose(result.tensors["d_v"], INPUTS["q"] + 2.0 * INPUTS["k"], rtol=tolerance, atol=tolerance)


def test_torch_says_that_nothing_can_be_differentiated() -> None:
    torch = pytest.importorskip("torch")
    assert "depends on no input" in called(lambda q, k, v: torch.tensor(OUT), upstream=OUT).declined


def test_jax_differentiates() -> None:
    jnp = pytest.importorskip("jax.numpy")

    def attend(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
        return (jnp.asarray(q) + 2.0 * jnp.asarray(k)) * jnp.asarray(v)

    result = call(attend, INPUTS | {"mask": MASK}, {}, "float32", np.ones(OUT.shape, np.float32))
    assert isinstance(result, Result)
    assert result.dtypes["d_q"] == "float32"
    np.testing.assert_allclose(result.tensors["d_q"], INPUTS["v"], rtol=1e-6)
    np.testing.assert_allclose(result.tensors["d_k"], 2.0 * INPUTS["v"], rtol=1e-6)


def test_who_takes_numpy_and_computes_in_torch_says_so() -> None:
    torch = pytest.importorskip("torch")

    def attend(q: Any, k: Any, v: Any) -> Any:
        if isinstance(q, np.ndarray):
            return q + k + v
        return torch.add(q + k, v)

    assert called(attend, upstream=OUT).declined
    attend.framework = "torch"  # type: ignore[attr-defined]
    np.testing.assert_array_equal(called(attend, upstream=OUT).tensors["d_v"], OUT)


def test_float64_of_jax_is_as_it_was_afterwards() -> None:
    jax = pytest.importorskip("jax", reason='needs jax: pip install "refattn[jax]"')
    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", False)
        seen = []

        def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
            seen.append(jax.config.jax_enable_x64)
            return q

        x = np.ones((1, 1, 2, 2))
        call(attend, {"q": x, "k": x, "v": x}, {}, "float64")
        assert seen == [True] and not jax.config.jax_enable_x64
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_torch_differentiates_in_a_whole_backward() -> None:
    """Reentrant checkpoints refuse `torch.autograd.grad`."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

    def attend(q: Any, k: Any, v: Any, *, scale: float | None = None) -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return checkpoint(lambda *x: sdpa(*x, scale=scale), q, k, v, use_reentrant=True)

    def without_keys(q: Any, k: Any, v: Any) -> Any:
        return q + v

    for kernel in (attend, without_keys):
        kernel.framework = "torch"  # type: ignore[attr-defined]
    report = ra.verify("softmax", attend, grad=True, cases=["plain", "scale"])
    assert report.passed and report.outcomes[0].verdicts[-1].tensor == "d_v", report
    given = dict(zip("qkv", np.ones((3, 1, 1, 2, 4), np.float32), strict=True))
    with pytest.raises(CallError, match="no gradient of k: torch says that the output does not depend on it"):
        call(without_keys, given, {}, "float32", given["q"])
