"""Every library gives what NumPy gives, in every implementation, also compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.core import IMPLEMENTATIONS
from tests.conftest import Library
from tests.mechanisms.graph_energy.calls import B, H, N, draw, forward, kept, qkv

CALLS: dict[str, dict[str, Any]] = {
    "token": {"state": "token"},
    "token, causal": {"state": "token", "causal": True, "integrator": "heun"},
    "query": {"state": "query", "symmetrise": "min", "kind": "soft", "tau": 0.02},
    "query, causal": {"state": "query", "causal": True},
    "feature": {"state": "feature", "symmetrise": "mean", "coupling": "sin"},
    "feature, causal": {"state": "feature", "causal": True, "coupling": "identity", "integrator": "rk4"},
    "wells": {"intrinsic": "double_well", "coupling": "polynomial", "coefficients": (1.0, -0.2), "step": 0.05},
    "implicit": {"adjoint": "implicit", "steps": 80},
    "stops": {"stop_force": 0.1, "state": "feature", "coupling": "sin", "steps": 8},
}


DEAR = ("token", "query", "implicit")
"""Calls that JAX compiles for seconds; what they reach is compiled in other calls, too."""


def implementations_of(call: str, library: Library) -> list[str]:
    """The implementations that a library is tried with: one on JAX, which compiles for every shape."""
    implementations = list(IMPLEMENTATIONS)
    return (
        implementations
        if library is not Library.JAX
        else [implementations[list(CALLS).index(call) % len(implementations)]]
    )


@pytest.mark.parametrize("call", CALLS)
def test_every_library_gives_what_numpy_gives(call: str, backend: Any) -> None:
    if backend.library is Library.JAX and call in DEAR:
        pytest.skip("JAX compiles it for seconds")
    options = {"steps": 4, **CALLS[call]}
    numbers = {"mu": np.abs(draw("mu", H)) + 0.5, "kappa": np.abs(draw("kappa", H))}
    arrays = dict(zip("qkv", qkv(), strict=True)) | numbers | {"mask": kept("mask", B, 1, N, N)}
    expected, saved = forward(**arrays, **options, implementation="dense")
    d_out = draw("d_out", *expected.shape)
    wanted = {"out": expected, **core.backward(saved, d_out)}
    for implementation in implementations_of(call, backend.library):
        out, saved = forward(
            **{n: backend.array(x) for n, x in arrays.items()}, **options, implementation=implementation
        )
        found = {"out": out, **core.backward(saved, backend.array(d_out))}
        for name, x in wanted.items():
            size = max(1.0, float(np.max(np.abs(x))))
            np.testing.assert_allclose(
                backend.host(found[name]), x, rtol=0, atol=1e-12 * size, err_msg=f"{implementation} {name}"
            )


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
