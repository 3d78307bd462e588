"""Under jax.jit, where values are not known while the code runs, and eagerly, where they are: the same results."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import tree
from refattn.mechanisms.softmax.layer.block import State
from tests.conftest import Arrays, Library
from tests.mechanisms.softmax.calls import Call, assert_close, bounds, make, run

jax = pytest.importorskip("jax")


@pytest.fixture(scope="module")
def arrays() -> Any:
    made = Arrays(Library.JAX)
    made.owner.enable_float64()
    return made


def limits(call: Call) -> dict[str, Any]:
    """Both are off by what `bounds` grants; XLA's exp and tanh are good to a few units."""
    return {name: 8.0 * x for name, x in bounds(call).items()}


def test_numbers_may_be_traced(arrays: Any) -> None:
    """The scale and the soft-cap are values like others: one compilation serves them all."""
    call = make(1, 2, 1, 4, 5, 3, 2)
    compiled = []

    @jax.jit
    def attend(q: Any, k: Any, v: Any, d_out: Any, scale: Any, softcap: Any) -> Any:
        compiled.append(1)
        out, saved = ra.softmax.forward(q, k, v, scale=scale, softcap=softcap, implementation="tiled")
        return out, ra.softmax.backward(saved, d_out)

    given = [arrays.array(x) for x in (call.q, call.k, call.v, call.d_out)]
    for scale, softcap in ((0.3, 2.0), (-40.0, 500.0)):
        out, gradients = attend(*given, arrays.array(scale), arrays.array(softcap))
        exact = Call(call.q, call.k, call.v, call.d_out, None, {"scale": scale, "softcap": softcap})
        expected = run(exact)
        del expected["lse"]
        found = {"out": out, **gradients}
        assert_close({n: arrays.host(found[n]) for n in expected}, expected, {n: limits(exact)[n] for n in expected})
    assert len(compiled) == 1


def test_wrong_shapes_raise_while_it_is_compiled(arrays: Any) -> None:
    x = arrays.array(np.zeros((1, 2, 3, 4)))
    with pytest.raises(ValueError, match=r"v: got shape \(1, 2, 2, 4\), needs \(1, 2, 3\) \+ \(width,\) to fit k"):
        jax.jit(ra.softmax.forward)(x, x, x[:, :, :2])


def test_a_block(arrays: Any) -> None:
    block = ra.mechanism("softmax").block
    config = block.Config(width=4, heads=2, bias=True, softcap=3.0)
    x = np.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)
    params = block.init(config, like=x)

    def step(leaves: Any, x: Any) -> Any:
        given = tree.unflatten(params, leaves)
        state, saved = block.forward(given, block.start(given, x, ra.Context()), ra.Context(causal=True))
        d_state, d_params, _ = block.backward(given, saved, State(x))
        return state.x, d_state.x, tree.flatten(d_params)

    expected = step(tree.flatten(params), x)
    leaves = {name: arrays.array(w) for name, w in tree.flatten(params).items()}
    found = jax.jit(step)(leaves, arrays.array(x))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(arrays.host(a), b, rtol=1e-11, atol=1e-13)


def test_a_block_compiles_around_its_parameters(arrays: Any) -> None:
    block = ra.mechanism("softmax").block
    x = arrays.xp.asarray(np.linspace(-1.0, 1.0, 24).reshape(1, 3, 8))
    params = block.init(block.Config(width=8, heads=2), seed=0, like=x)

    def step(x: Any) -> Any:
        context = ra.Context(causal=True)
        return block.forward(params, block.start(params, x, context), context)[0].x

    np.testing.assert_allclose(jax.jit(step)(x), step(x), rtol=1e-12, atol=1e-14)


def test_without_float64_nothing_warns() -> None:
    code = """
import warnings; warnings.simplefilter("error")
import jax, jax.numpy as jnp, refattn as ra
q = jnp.ones((1, 2, 5, 4))
for implementation in ("dense", "tiled"):
    out = jax.jit(lambda q: ra.softmax.forward(q, q, q, causal=True, implementation=implementation)[0])(q)
    assert out.dtype == jnp.float32
"""
    environment = {name: x for name, x in os.environ.items() if name != "JAX_ENABLE_X64"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
