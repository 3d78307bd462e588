"""What a layer gives to its attention is recorded as it was, and judged with its gradients; the page's recipes run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra

PAGE = Path(__file__).parents[1] / "docs" / "layers.md"
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


# Some of these libraries take half a minute to import.
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=str(n), marks=pytest.mark.slow if re.search("transformers|flax|keras", code) else ())
        for n, code in enumerate(RECIPES)
    ],
)
def test_a_recipe_of_the_page_agrees(code: str, tmp_path: Path) -> None:
    wanted = {name for name in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)}
    if missing := [name for name in sorted(wanted) if find_spec(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    (tmp_path / "recipe.py").write_text(code, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "softmax: agrees: 1 case run" in ran.stdout


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 6


def of_torch() -> Any:
    return pytest.importorskip("torch", reason='needs torch: pip install "refattn[torch]"')


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_of_torch_is_recorded_with_its_mask_and_gradients(training: bool) -> None:
    torch = of_torch()
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    x = torch.randn(2, 6, 16)
    hidden = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with ra.bridges.attention_calls() as calls:
        y, _ = layer(x, x, x, key_padding_mask=hidden, need_weights=False)
        y.square().sum().backward()
    (call,) = calls
    assert call["q"].shape == (2, 4, 6, 4)
    assert {*call["gradients"]} == {*"qkv"}
    assert ra.assert_close("softmax", **call)
    for name in ("bias", "out"):  # each is what the verdict stands on
        with pytest.raises(AssertionError):
            ra.assert_close("softmax", **{**call, name: call[name] * 0})
    with pytest.raises(AssertionError, match="d_k"):
        ra.assert_close("softmax", **{**call, "gradients": call["gradients"] | {"k": 2 * call["gradients"]["k"]}})


def test_gradients_are_of_one_call() -> None:
    """The same tensor goes into two calls, and into each three times."""
    torch = of_torch()
    from torch.nn.functional import scaled_dot_product_attention as sdpa  # by another name than the module's

    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    with ra.bridges.attention_calls() as calls:
        (sdpa(x, x, x, is_causal=True) + sdpa(x, x, x, scale=0.3)).square().sum().backward()
    assert [call.get("causal", False) for call in calls] == [True, False]
    assert [call.get("scale") for call in calls] == [None, 0.3]
    total = sum(g for call in calls for g in call["gradients"].values())
    assert torch.allclose(total, x.grad, atol=1e-5)
    for call in calls:
        assert ra.assert_close("softmax", **call)


def test_torch_aligns_top_left_and_takes_fewer_axes() -> None:
    torch = of_torch()
    q, k = torch.randn(3, 4, 8), torch.randn(3, 7, 8)
    with ra.bridges.attention_calls() as calls:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        torch.nn.functional.scaled_dot_product_attention(q[0], k[0], k[0], torch.ones(4, 7, dtype=torch.bool).tril(1))
    assert calls[0]["causal"] == "top_left"
    for call in calls:
        assert ra.assert_close("softmax", **call)


def test_what_is_recorded_is_what_was_given() -> None:
    """A layer that writes into its arrays afterwards changes no record."""
    torch = of_torch()
    q = torch.randn(1, 1, 4, 8)
    with ra.bridges.attention_calls() as calls:
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        out += 1.0
        q *= 2.0
    assert ra.assert_close("softmax", **calls[0])


def test_no_call_and_dropout_are_errors() -> None:
    torch = of_torch()
    layer = torch.nn.MultiheadAttention(16, 4, dropout=0.1)
    x = torch.randn(6, 1, 16)
    before = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"got no call.*need_weights=False"), ra.bridges.attention_calls():
        layer(x, x, x)
    with pytest.raises(ValueError, match=r"dropout_p: got 0\.1"), ra.bridges.attention_calls():
        layer(x, x, x, need_weights=False)
    assert torch.nn.functional.scaled_dot_product_attention is before
    with pytest.raises(KeyError), ra.bridges.attention_calls():  # the layer's own error is not hidden by ours
        raise KeyError


class Layer:
    @staticmethod
    def attention(q: Any, k: Any, v: Any) -> Any:
        return ra.softmax.forward(q, k, v)[0]

    def __call__(self, x: Any) -> Any:
        return self.attention(x, x, x)


def test_a_kernel_is_recorded_where_it_is_looked_up() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4))

    def read(q: Any, k: Any, v: Any) -> dict[str, Any]:
        return {"q": q, "k": k, "v": v}

    layer = Layer()
    for owner in (Layer, layer):
        before = dict(vars(owner))
        with ra.bridges.attention_calls(owner, "attention", read) as calls:
            layer(x)
        assert ra.assert_close("softmax", **calls[0])
        assert dict(vars(owner)) == before
    with pytest.raises(ValueError, match="got no call.*looks attention up in Layer"):
        with ra.bridges.attention_calls(Layer, "attention", read):
            pass
    with pytest.raises(TypeError, match="needs all three or none"), ra.bridges.attention_calls(Layer):
        pass
    with pytest.raises(ValueError, match="axes: got 'nbhd'"):
        with ra.bridges.attention_calls(Layer, "attention", read, axes="nbhd"):
            pass


def test_a_gradient_that_goes_around_what_read_returns_is_an_error() -> None:
    torch = of_torch()

    class Wrapped:
        def attention(self, q: Any, k: Any, v: Any) -> Any:
            return torch.softmax(q @ k.mT, -1) @ v

    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    with pytest.raises(ValueError, match="read: got another q, needs the tensor that the call was given"):
        with ra.bridges.attention_calls(
            Wrapped, "attention", lambda self, q, k, v: {"q": 1.0 * q, "k": k, "v": v, "scale": 1.0}
        ):
            Wrapped().attention(x, x, x).sum().backward()


def test_jax_is_recorded_outside_of_jit() -> None:
    jax = pytest.importorskip("jax", reason='needs jax: pip install "refattn[jax]"')
    q, k = (jax.random.normal(jax.random.key(n), (2, 5 + 2 * n, 2, 4), "float32") for n in (0, 1))
    lengths = jax.numpy.array([7, 4], "int32")
    with ra.bridges.attention_calls() as calls:
        jax.nn.dot_product_attention(q, k, k, is_causal=True)
        jax.nn.dot_product_attention(q[0], k[0], k[0], scale=0.3)
        jax.nn.dot_product_attention(q, k, k, key_value_seq_lengths=lengths)
        jax.nn.dot_product_attention(k, k, k, local_window_size=(2, 1))
    for call in calls:
        assert ra.assert_close("softmax", **call)
    with pytest.raises(TypeError, match="q: got a value that JAX traces"), ra.bridges.attention_calls():
        jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x))(q)
