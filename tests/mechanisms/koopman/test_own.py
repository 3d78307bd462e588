"""A kernel of one's own: it is the built-in one where it is the same function, it has gradients, and it is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.koopman.options.kernel import Own
from tests.mechanisms.koopman.calls import drawn

AXES = np.asarray([0.5, 1.0, 2.0])
BLOCK = ra.mechanism("koopman").block


draw = drawn(9)


def gaussian(x: Any, y: Any) -> Any:
    """With a width of its own along each axis, which no built-in kernel has."""
    scaled = (x[..., :, None, :] - y[..., None, :, :]) * AXES
    return np.exp(-0.5 * np.sum(scaled * scaled, axis=-1))


def gaussian_gradient(x: Any, y: Any) -> Any:
    return -gaussian(x, y)[..., None] * (x[..., :, None, :] - y[..., None, :, :]) * AXES**2


def isotropic(x: Any, y: Any) -> Any:
    return gaussian(x / AXES, y / AXES)


def isotropic_gradient(x: Any, y: Any) -> Any:
    return gaussian_gradient(x / AXES, y / AXES) / AXES


KERNEL = Own(gaussian, gaussian_gradient)


def run(implementation: str, arrays: Any, **options: Any) -> Any:
    out, saved = ra.koopman.forward(*arrays, implementation=implementation, updates=3, **options)
    return {"out": out} | ra.koopman.backward(saved, draw("d", *out.shape))


@pytest.mark.parametrize("implementation", ["dense", "shared"])
@pytest.mark.parametrize("options", [{}, {"space": "full", "fit": "separable"}, {"similarity": "kernel"}], ids=str)
def test_the_same_function_is_the_same_kernel(implementation: str, options: dict[str, Any]) -> None:
    arrays, weight = [draw(name, 1, 2, 5, 3) for name in "qkv"], np.asarray(0.7)
    own = run(implementation, arrays, kernel=Own(isotropic, isotropic_gradient, weight), jitter=1e-3, **options)
    expected = run(implementation, arrays, kernel=ra.koopman.Rbf(1.0, weight), jitter=1e-3, **options)
    for name, x in own.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-8, atol=1e-10, err_msg=name)


def test_a_block_takes_it() -> None:
    x = draw("x", 1, 4, 6)
    params = BLOCK.init(BLOCK.Config(width=6, heads=2, kernel=KERNEL), like=x)
    state, saved = BLOCK.forward(params, BLOCK.start(params, x, ra.Context()), ra.Context())
    assert np.all(np.isfinite(BLOCK.backward(params, saved, state)[1].w_k))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ((lambda x, y: gaussian(x, 2.0 * y), gaussian_gradient), r"kernel: function: it is not symmetric"),
        ((lambda x, y: -gaussian(x, y), gaussian_gradient), r"kernel: function: it is not positive"),
        ((gaussian, lambda x, y: 1.01 * gaussian_gradient(x, y)), r"kernel: gradient: it is not the derivative"),
        ((gaussian, gaussian), r"kernel: got a gradient of shape \(24, 24\) for points \(24, 3\), needs \(24, 24, 3\)"),
    ],
)
def test_what_is_no_kernel_is_refused(functions: Any, message: str) -> None:
    x = draw("x", 1, 1, 4, 3)
    with pytest.raises(ValueError, match=message):
        ra.koopman.forward(x, x, x, kernel=Own(*functions))


def test_what_a_kernel_of_ones_own_cannot_do() -> None:
    x = draw("x", 1, 1, 4, 3)
    with pytest.raises(ValueError, match=r'space: got "augmented" with a kernel of your own'):
        ra.koopman.forward(x, x, x, kernel=KERNEL, space="augmented")
    with pytest.raises(ValueError, match=r"certify: got True for a kernel whose slope has no bound"):
        ra.koopman.forward(x, x, x, kernel=KERNEL, perturbation="identity(certify=True)")
