"""Every library gives what NumPy gives where no designed case does, and it can be compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import core
from tests.conftest import Library
from tests.mechanisms.graph_energy.calls import B, H, N, draw, forward, kept, qkv

CALLS: dict[str, dict[str, Any]] = {
    "implicit": {"adjoint": "implicit", "steps": 80},
    "stops": {"stop_force": 0.1, "state": "feature", "coupling": "sin", "steps": 8},
}
"""What no designed case has: a gradient that solves systems of equations, and channels that stop."""


@pytest.mark.parametrize("call", CALLS)
def test_every_library_gives_what_numpy_gives(call: str, backend: Any) -> None:
    if backend.library is Library.JAX and call == "implicit":
        pytest.skip("JAX compiles it for seconds")
    options = CALLS[call]
    numbers = {"mu": np.abs(draw("mu", H)) + 0.5, "kappa": np.abs(draw("kappa", H))}
    arrays = dict(zip("qkv", qkv(), strict=True)) | numbers | {"mask": kept("mask", B, 1, N, N)}
    expected, saved = forward(**arrays, **options, implementation="dense")
    d_out = draw("d_out", *expected.shape)
    wanted = {"out": expected, **core.backward(saved, d_out)}
    out, saved = forward(**{n: backend.array(x) for n, x in arrays.items()}, **options)
    found = {"out": out, **core.backward(saved, backend.array(d_out))}
    for name, x in wanted.items():
        size = max(1.0, float(np.max(np.abs(x))))
        np.testing.assert_allclose(backend.host(found[name]), x, rtol=0, atol=1e-12 * size, err_msg=name)


def test_it_can_be_compiled() -> None:
    jax: Any = pytest.importorskip("jax", reason='needs JAX: pip install "refattn[jax]"')
    jax.config.update("jax_enable_x64", True)
    q, k, v = (jax.numpy.asarray(x) for x in qkv())
    mask = jax.numpy.asarray(kept("mask", N, N))

    def run(q: Any, k: Any, v: Any, mu: Any, d_out: Any) -> Any:
        out, saved = forward(q, k, v, mu=mu, mask=mask, causal=True)
        return out, core.backward(saved, d_out)

    mu, d_out = jax.numpy.asarray(0.7), jax.numpy.asarray(draw("d_out", B, H, N, 5))
    compiled, plain = jax.jit(run)(q, k, v, mu, d_out), run(q, k, v, mu, d_out)
    for a, b in zip(jax.tree_util.tree_leaves(compiled), jax.tree_util.tree_leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
