"""Arrays that mean something else than their numbers are refused by every core, and settings that cost digits too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.xp import namespace

CORES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]
X = np.random.default_rng(0).standard_normal((1, 2, 5, 4))


class Metres(np.ndarray):
    """A class of a user's own, with units."""


STRANGE: dict[str, Callable[[Any], Any]] = {
    "masked": lambda x: np.ma.masked_greater(x, 1.0),
    "with units": lambda x: x.view(Metres),
    "records": lambda x: x.view(np.recarray),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", CORES)
def test_a_class_with_another_meaning_is_refused(name: str, kind: str) -> None:
    core, change = ra.mechanism(name).core, STRANGE[kind]
    assert core is not None
    out, saved = core.forward(X, X, X)
    for n in range(3):
        given = [change(X) if n == m else X for m in range(3)]
        with pytest.raises(TypeError, match="got (MaskedArray|Metres|recarray)"):
            core.forward(*given)
    with pytest.raises(TypeError, match="d_out: got (MaskedArray|Metres|recarray)"):
        core.backward(saved, change(out))


@pytest.mark.filterwarnings("ignore")
def test_functions_that_ask_for_a_namespace_refuse_them_too() -> None:
    from refattn.ops.layer_norm import layer_norm_forward

    with pytest.raises(TypeError, match="got MaskedArray, needs a plain array"):
        layer_norm_forward(np.ma.masked_array(X), np.ones(4), np.ones(4))
    with pytest.raises(TypeError, match="got matrix, needs a plain array"):
        namespace(np.asmatrix(np.ones((2, 2))))


def test_a_mapped_file_is_as_plain_as_an_array(tmp_path: Path) -> None:
    held = np.memmap(tmp_path / "x", X.dtype, "w+", shape=X.shape)
    held[:] = X
    assert np.array_equal(ra.softmax.forward(held, held, held)[0], ra.softmax.forward(X, X, X)[0])


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "nested"])
@pytest.mark.filterwarnings("ignore")
def test_sparse_and_nested_tensors_are_refused(layout: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.asarray(X)
    strange = torch.nested.nested_tensor([x[0], x[0]]) if layout == "nested" else getattr(x, layout)()
    with pytest.raises(TypeError, match="^k: got a sparse or nested tensor, needs a dense one"):
        ra.softmax.forward(x, strange, x)


# --- settings that cost digits


def library(name: str) -> Any:
    """A backend of the package, which has more than the protocol asks for."""
    return backends.get(name)


def error_of(arrays: Any, forward: Callable[..., Any]) -> float:
    out, _ = forward(*(arrays.asarray(X.astype(np.float32)) for _ in range(3)))
    return float(np.max(np.abs(np.asarray(out, np.float64) - ra.softmax.forward(X, X, X)[0])))


def test_autocast_is_refused_and_a_bridge_computes_with_all_digits() -> None:
    torch = pytest.importorskip("torch")
    x = torch.asarray(X.astype(np.float32))
    out, saved = ra.softmax.forward(x, x, x)
    attend = ra.bridges.torch("softmax", outputs=True)
    q = x.clone().requires_grad_()
    attend(q, x, x)[0].sum().backward()
    expected = q.grad.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="torch.autocast.*full_precision"):
            ra.softmax.forward(x, x, x)
        with pytest.raises(RuntimeError, match="torch.autocast"):
            ra.softmax.backward(saved, out)
        with library("torch").full_precision():
            assert torch.equal(ra.softmax.forward(x, x, x)[0], out)
        assert torch.is_autocast_enabled("cpu")
        q.grad = None
        found = attend(q, x, x)[0]
        found.sum().backward()
    assert found.dtype == torch.float32 and torch.equal(found, out) and torch.equal(q.grad, expected)
    assert error_of(torch, ra.softmax.forward) < 1e-6
    ra.softmax.forward(*(torch.asarray(X) for _ in range(3)))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.filterwarnings("ignore")
def test_fewer_digits_of_products_are_refused_in_torch(precision: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.asarray(X.astype(np.float32))
    torch.set_float32_matmul_precision(precision)
    try:
        with pytest.raises(RuntimeError, match=f"products of float32 are set to '{precision}'"):
            ra.softmax.forward(x, x, x)
        with library("torch").full_precision():
            assert error_of(torch, ra.softmax.forward) < 1e-6
        assert torch.get_float32_matmul_precision() == precision
        ra.softmax.forward(*(torch.asarray(X) for _ in range(3)))  # float64 has no such setting
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("products", "set_to"), [("cuda", "tf32"), ("mkldnn", "bf16")])
@pytest.mark.filterwarnings("ignore")
def test_fewer_digits_that_are_set_for_one_library_of_products(products: str, set_to: str) -> None:
    torch = pytest.importorskip("torch")
    matmul = getattr(torch.backends, products).matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has no such setting")
    before, x = matmul.fp32_precision, torch.asarray(X.astype(np.float32))
    matmul.fp32_precision = set_to
    try:
        with pytest.raises(RuntimeError, match=f"products of float32 are set to '{products} {set_to}'"):
            ra.softmax.forward(x, x, x)
        assert error_of(torch, lambda q, k, v: (ra.bridges.torch("softmax")(q, k, v), None)) < 1e-6
        assert matmul.fp32_precision == set_to
    finally:
        matmul.fp32_precision = before


def test_fewer_digits_of_products_are_refused_in_jax() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X.astype(np.float32))
    for precision in ("bfloat16", "tensorfloat32", "BF16_BF16_F32"):
        with jax.default_matmul_precision(precision):
            with pytest.raises(RuntimeError, match=f"products of float32 are set to '{precision}'"):
                ra.softmax.forward(x, x, x)
    with jax.default_matmul_precision("bfloat16"):
        with library("jax").full_precision():
            assert error_of(jax.numpy, ra.softmax.forward) < 1e-6
        assert error_of(jax.numpy, lambda *given: (ra.bridges.jax("softmax")(*given), None)) < 1e-6
        gradient = jax.grad(lambda q: ra.bridges.jax("softmax")(q, x, x).sum())(x)
    expected = jax.grad(lambda q: ra.bridges.jax("softmax")(q, x, x).sum())(x)
    assert np.array_equal(gradient, expected)
    for full in ("highest", "float32"):
        with jax.default_matmul_precision(full):
            ra.softmax.forward(x, x, x)


def test_float64_of_jax_is_on_in_a_block_only() -> None:
    jax = pytest.importorskip("jax")
    owner = library("jax")
    before = owner.float64()
    try:
        jax.config.update("jax_enable_x64", False)
        with owner.with_float64():
            assert owner.float64() and owner.from_numpy(X).dtype == np.float64
        assert not owner.float64()
        with pytest.raises(ZeroDivisionError), owner.with_float64():
            raise ZeroDivisionError
        assert not owner.float64()
    finally:
        jax.config.update("jax_enable_x64", before)
    with library("numpy").with_float64(), library("numpy").full_precision():
        pass
