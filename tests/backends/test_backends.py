"""Every backend meets one protocol; what cannot be used says why; other packages can add theirs."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import backends
from refattn.backends.numpy import kernel_note
from tests.processes import python

USABLE = [name for name in backends.BUILT_IN if backends.get(name).why_unavailable() is None]
OPTIONAL = [name for name in backends.BUILT_IN if name != "numpy"]
DTYPES = ["float32", "float64", "int64", "bool", "complex64"]


@pytest.fixture
def jax_float64() -> Iterator[None]:
    if "jax" not in USABLE:
        yield
        return
    jax = importlib.import_module("jax")
    before = jax.config.jax_enable_x64
    backends.get("jax").enable_float64()
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("name", backends.BUILT_IN)
def test_protocol(name: str) -> None:
    backend = backends.get(name)
    assert isinstance(backend, backends.Backend)
    assert backend is backends.get(name)
    assert backend.name == name
    for member, own in inspect.getmembers(backends.Backend, inspect.isfunction):
        assert list(inspect.signature(getattr(type(backend), member)).parameters) == list(
            inspect.signature(own).parameters
        )


@pytest.mark.parametrize("name", USABLE)
def test_facts(name: str) -> None:
    backend = backends.get(name)
    assert backend.why_unavailable() is None
    assert backend.version()[0].isdigit()
    assert hasattr(backend.namespace(), "matmul")
    assert backend.devices()
    assert isinstance(backend.pools, bool)
    assert backend.tile_bytes > 0
    backend.synchronize()
    backend.reset_peak_memory()
    peak = backend.peak_memory()
    assert peak is None or peak >= 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
@pytest.mark.parametrize("name", USABLE)
def test_round_trip(name: str, shape: tuple[int, ...], dtype: str, jax_float64: None) -> None:
    backend = backends.get(name)
    x = np.asarray(np.arange(6)[: math.prod(shape)].reshape(shape) - 2, dtype=dtype)
    x.flags.writeable = False
    for device in (None, *(d for d in backend.devices() if not d.startswith("no_"))):
        y = backend.from_numpy(x, device=device)
        assert backend.owns(y)
        assert backends.of(y) is backend
        assert tuple(y.shape) == shape
        assert str(y.dtype).rpartition(".")[2] == dtype
        z = backend.to_numpy(y)
        assert type(z) is np.ndarray
        assert z.dtype == dtype
        np.testing.assert_array_equal(z, x)


@pytest.mark.parametrize("name", USABLE)
def test_from_numpy_takes_any_strides_and_copies(name: str) -> None:
    backend = backends.get(name)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (x[::-1], x.T, x[:, ::2], np.broadcast_to(x[0], (5, 4))):
        np.testing.assert_array_equal(backend.to_numpy(backend.from_numpy(view)), view)
    if name == "numpy":
        assert backend.to_numpy(backend.from_numpy(x)) is x
        return
    y = backend.from_numpy(x)
    x[:] = -1
    assert backend.to_numpy(y)[2, 3] == 11


@pytest.mark.parametrize("name", USABLE)
def test_an_unknown_device_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device: got abacus:0, {name} has .*{backends.get(name).devices()[0]}"):
        backends.get(name).from_numpy(np.ones(2, dtype=np.float32), device="abacus:0")


@pytest.mark.parametrize("name", ["cupy", "torch", "jax"])
def test_bfloat16_comes_back_as_float32(name: str) -> None:
    if name not in USABLE:
        pytest.skip(f"{name} cannot be used here")
    backend = backends.get(name)
    x: Any = backend.from_numpy(np.asarray([1.0, 2.5], dtype=np.float32))
    try:
        x = x.bfloat16() if name == "torch" else x.astype("bfloat16")
    except TypeError:
        pytest.skip(f"{name} has no bfloat16 here")
    y = backend.to_numpy(x)
    assert y.dtype == np.float32
    assert y.tolist() == [1.0, 2.5]


def test_torch_tensors_with_gradients_and_lazy_views() -> None:
    torch = pytest.importorskip("torch")
    to_numpy = backends.get("torch").to_numpy
    assert to_numpy(torch.ones(2, requires_grad=True) * 2).tolist() == [2.0, 2.0]
    assert to_numpy(torch.asarray([1j]).conj()).tolist() == [-1j]
    assert to_numpy(torch.asarray([1j]).conj().imag).tolist() == [-1.0]
    assert backends.of(torch.nn.Parameter(torch.ones(1))).name == "torch"


def test_conditions_are_not_known_under_torch_compile() -> None:
    torch = pytest.importorskip("torch")
    backend = backends.get("torch")

    def function(x: Any) -> Any:
        return x + 1 if backend.concrete(torch.all(x > 0)) is None else x

    assert torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(1)).tolist() == [1.0]
    assert function(torch.zeros(1)).tolist() == [0.0]


def test_jax_is_not_cut_to_float32_in_silence() -> None:
    pytest.importorskip("jax")
    code = """if True:
        import numpy as np
        from refattn import backends
        jax = backends.get("jax")
        assert not jax.float64() and "JAX_ENABLE_X64" in jax.note()
        try:
            jax.from_numpy(np.ones(2))
        except ValueError as error:
            print(error)
        jax.enable_float64()
        assert jax.float64() and jax.note() == ""
        print(jax.from_numpy(np.ones(2)).dtype)
    """
    assert python("-c", code, JAX_ENABLE_X64="0").splitlines() == [
        "x: got float64, which JAX would cut to half; call enable_float64() first or cast it",
        "float64",
    ]


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_missing_library_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = backends.get(name)
    monkeypatch.setitem(sys.modules, backend.package, None)
    text = f"{backend.package} is not installed: pip install "
    assert (backend.why_unavailable() or "").startswith(text)
    with pytest.raises(ImportError, match=text):
        backend.namespace()
    assert not backend.owns(np.ones(2))
    row = next(row for row in backends.describe() if row["name"] == name)
    assert not row["available"]
    assert row["version"] is None
    assert (row["why_unavailable"] or "").startswith(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise OSError('libx.so:\\n  cannot open shared object file')", "libx.so: cannot open shared object file"),
        ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_broken_library_is_told_from_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    class Broken(backends.Backend):
        package = "refattn_broken_library"

    (tmp_path / "refattn_broken_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert Broken().why_unavailable() == f"refattn_broken_library cannot be imported: {reason}"


def test_the_owner_follows_the_type() -> None:
    assert backends.of(np.ones(2)) is backends.get("numpy")
    assert backends.of(np.float32(1)) is backends.get("numpy")
    for thing in ([1.0], 1.0, None, "numpy"):
        with pytest.raises(TypeError) as caught:
            backends.of(thing)
        assert f"got {type(thing).__name__}, needs an array of one of numpy, cupy, torch, jax, strict" in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("libraries", "features", "note", "advice"),
    [
        ([("openblas", "0.3.31", "Haswell")], {"X86_V3", "X86_V4"}, "openblas 0.3.31 (Haswell)", True),
        ([("openblas", "0.3.29", "Zen")], {"AVX512F", "AVX512_SKX"}, "openblas 0.3.29 (Zen)", True),
        ([("openblas", "0.3.31", "Haswell")], {"X86_V3", "AVX512F"}, "openblas 0.3.31 (Haswell)", False),
        ([("openblas", "0.3.31", "SkylakeX")] * 2, {"X86_V4"}, "openblas 0.3.31 (SkylakeX)", False),
        ([("mkl", "2024.2", None)], {"X86_V4"}, "mkl 2024.2 (unknown kernels)", False),
        ([], {"X86_V4"}, "", False),
    ],
)
def test_advice_on_kernels(
    libraries: list[tuple[str, str, str | None]], features: set[str], note: str, advice: bool
) -> None:
    infos = [
        {"internal_api": api, "version": version} | ({"architecture": kernel} if kernel else {})
        for api, version, kernel in libraries
    ]
    got = kernel_note(infos, features)
    assert got.startswith(note)
    assert ("OPENBLAS_CORETYPE=SkylakeX" in got) == advice
    assert (got == note) == (not advice)
