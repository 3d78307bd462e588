"""The cores inside PyTorch and JAX: the autograd of both gives our gradients, for every mechanism."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.inputs import make, make_upstream
from refattn.verify.itself.samples import shrunk

NAMES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]

Arrays = dict[str, Any]


def arguments(name: str, case_name: str = "tiny") -> tuple[Arrays, Arrays, Any]:
    """Inputs of a case on the host, its options, and an upstream gradient."""
    case = shrunk(ra.mechanism(name).case(case_name))
    inputs = make(name, case, "float64")
    shape = (*inputs["q"].shape[:3], inputs["v"].shape[3])
    return inputs, dict(case.options), make_upstream(name, case, "out", shape, "float64")


def by_hand(name: str, inputs: Arrays, options: Arrays, d_out: Any) -> Arrays:
    core: Any = ra.mechanism(name).core
    _, saved = core.forward(**inputs, **options)
    gradients = core.backward(saved, d_out)  # some with numbers that were not given, too
    return {each: x for each, x in gradients.items() if each in {**inputs, **options}}


@pytest.mark.parametrize("name", NAMES)
def test_torch_finds_our_gradients_and_differences_agree(name: str) -> None:
    torch = pytest.importorskip("torch", reason='needs torch: pip install "refattn[torch]"')
    inputs, options, d_out = arguments(name)
    tensors = {each: torch.tensor(x, requires_grad=x.dtype != bool) for each, x in inputs.items()}
    out = ra.bridges.torch(name)(**tensors, **options)
    out.backward(torch.tensor(d_out))
    for each, wanted in by_hand(name, inputs, options, d_out).items():
        np.testing.assert_allclose(tensors[each].grad.numpy(), wanted, rtol=1e-12, atol=1e-12)
    leaves = [each for each, x in tensors.items() if x.requires_grad]
    whole = ra.bridges.torch(name, outputs=True)

    def call(*xs: Any) -> Any:
        return whole(**tensors | dict(zip(leaves, xs, strict=True)), **options)

    assert len(call(*(tensors[each] for each in leaves))) == 1 + len(ra.mechanism(name).pulled)
    # Every output has its gradient, and one that nothing depends on is no error.
    assert torch.autograd.gradcheck(call, [tensors[each] for each in leaves], fast_mode=True)


# JAX compiles each of the many steps of a Koopman operator.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "koopman" else name for name in NAMES]
)
def test_jax_finds_our_gradients(name: str) -> None:
    jax = pytest.importorskip("jax", reason='needs jax: pip install "refattn[jax]"')
    inputs, options, d_out = arguments(name)
    arrays = {each: jax.numpy.asarray(x) for each, x in inputs.items()}
    learned = {each: x for each, x in arrays.items() if x.dtype != bool}
    attend = ra.bridges.jax(name)

    def loss(learned: Arrays) -> Any:
        return jax.numpy.sum(attend(**arrays | learned, **options) * d_out)

    found = jax.jit(jax.grad(loss))(learned)
    for each, wanted in by_hand(name, inputs, options, d_out).items():
        np.testing.assert_allclose(np.asarray(found[each]), wanted, rtol=1e-12, atol=1e-12)


def test_numbers_of_objects_have_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    inputs, _, d_out = arguments("koopman")
    numbers = {"weight": np.asarray(0.7), "ridge": np.asarray(0.2)}

    def options(given: Any) -> dict[str, Any]:
        kernel, fit = ra.koopman.Rbf(weight=given["weight"]), ra.koopman.Stein(ridge=given["ridge"])
        return {"kernel": kernel, "fit": fit, "perturbation": "identity"}

    out, saved = ra.koopman.forward(**inputs, **options(numbers))
    wanted = ra.koopman.backward(saved, d_out)
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in (inputs | numbers).items()}
    found = ra.bridges.torch("koopman")(*(tensors[name] for name in "qkv"), **options(tensors))
    np.testing.assert_allclose(found.detach().numpy(), out, rtol=1e-12)
    found.backward(torch.tensor(d_out))
    for name in ("q", "k", "v", "weight", "ridge"):
        np.testing.assert_allclose(tensors[name].grad.numpy(), wanted[name], rtol=1e-9, atol=1e-12)


def test_numbers_that_are_tensors_have_a_gradient_and_masks_are_none() -> None:
    torch = pytest.importorskip("torch", reason='needs torch: pip install "refattn[torch]"')
    inputs, _, d_out = arguments("softmax", "mask-full")
    wanted = by_hand("softmax", inputs, {"scale": 0.3}, d_out)
    tensors = {each: torch.tensor(x) for each, x in inputs.items()}
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    out, lse = ra.bridges.torch("softmax", outputs=True)(**tensors, scale=scale)
    (out * torch.tensor(d_out)).sum().backward()
    np.testing.assert_allclose(scale.grad.numpy(), wanted["scale"], rtol=1e-12)
    scale.grad = None
    finite = torch.isfinite(lse)
    assert not finite.requires_grad
    _, lse = ra.bridges.torch("softmax", outputs=True)(**tensors, scale=scale)
    lse[finite].sum().backward()  # out alone has no upstream gradient then
    _, saved = ra.softmax.forward(**inputs, scale=0.3)
    expected = ra.softmax.backward(saved, np.zeros(out.shape), d_lse=np.where(np.isfinite(saved.lse), 1.0, 0.0))
    np.testing.assert_allclose(scale.grad.numpy(), expected["scale"], rtol=1e-12)


def torch_function(name: str, case: str = "tiny") -> tuple[Any, list[Any]]:
    """The bridge of all outputs as a function of tensors alone, and these; an lse of -inf is a constant."""
    torch = pytest.importorskip("torch", reason='needs torch: pip install "refattn[torch]"')
    inputs, options, _ = arguments(name, case)
    tensors = {each: torch.tensor(x, requires_grad=x.dtype.kind == "f") for each, x in inputs.items()}
    leaves, whole = [each for each, x in tensors.items() if x.requires_grad], ra.bridges.torch(name, outputs=True)

    def call(*xs: Any) -> Any:
        outputs = whole(**tensors | dict(zip(leaves, xs, strict=True)), **options)
        return tuple(torch.where(torch.isfinite(x), x, torch.zeros_like(x)) for x in outputs)

    return call, [tensors[each] for each in leaves]


def test_torch_finds_second_derivatives() -> None:
    call, tensors = torch_function("softmax")
    from torch.autograd import gradgradcheck

    assert gradgradcheck(call, tensors, fast_mode=True)


# Torch refuses to take differences of what is empty.
DESIGNED = [
    (name, case.name)
    for name in NAMES
    for case in ra.mechanism(name).cases
    if all(0 not in x.shape for x in shrunk(case).inputs.values())
][:: 24 if "REFATTN_SLOW_SAMPLE" in os.environ else 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "case"), DESIGNED)
def test_torch_agrees_with_differences_in_both_modes_and_of_second_order(name: str, case: str) -> None:
    call, tensors = torch_function(name, case)
    from torch.autograd import gradcheck, gradgradcheck

    assert gradcheck(call, tensors, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(call, tensors, fast_mode=True)


def test_what_torch_is_given_is_not_returned_as_it_is() -> None:
    """Without tokens the gradient of the first state of delta is the one that comes in."""
    torch = pytest.importorskip("torch", reason='needs torch: pip install "refattn[torch]"')
    x = torch.zeros((1, 1, 0, 2), dtype=torch.float64)
    state = torch.ones((1, 1, 2, 2), dtype=torch.float64, requires_grad=True)
    outputs = ra.bridges.torch("delta", outputs=True)(x, x, x, state=state)
    (gradient,) = torch.autograd.grad((outputs[1] ** 2).sum(), state, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), state)
    assert torch.equal(second, torch.full_like(second, 2.0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_transformations_of_torch() -> None:
    call, (q, k, v) = torch_function("softmax")
    import torch

    fixed = [x.detach() for x in (k, v)]
    q = q.detach()

    def attend(q: Any) -> Any:
        return call(q, *fixed)[0]

    t = torch.linspace(-1.0, 1.0, q.numel(), dtype=q.dtype).reshape(q.shape)
    y, dy = torch.func.jvp(attend, (q,), (t,))
    x = {name: x.numpy() for name, x in zip("qkv", (q, *fixed), strict=True)}
    expected = ra.tangent(lambda **x: ra.softmax.forward(**x)[0], x, {"q": t.numpy()})
    for got, wanted in zip((y, dy), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-14)
    jacobian = torch.func.jacrev(attend)(q)
    assert torch.allclose(torch.func.jacfwd(attend)(q), jacobian, rtol=1e-12, atol=1e-14)
    loss: Any = lambda q: attend(q).pow(3).sum()  # noqa: E731
    twice = torch.autograd.functional.hessian(loss, q)
    assert torch.allclose(torch.func.hessian(loss)(q), twice, rtol=1e-11, atol=1e-13)
    batch = torch.stack([q, 2.0 * q])
    assert torch.equal(torch.func.vmap(attend)(batch)[1], attend(2.0 * q))
    assert torch.allclose(torch.func.vmap(torch.func.grad(loss))(batch)[1], torch.func.grad(loss)(2.0 * q))
    with pytest.raises(TypeError, match="mask: got a torch.bool that vmap splits"):
        torch.func.vmap(lambda x, mask: ra.bridges.torch("softmax")(x, x, x, mask=mask))(batch, batch[..., :1] > 0.0)


def test_a_third_derivative_is_refused() -> None:
    torch = pytest.importorskip("torch", reason='needs torch: pip install "refattn[torch]"')
    q = torch.ones((1, 1, 2, 3), dtype=torch.float64, requires_grad=True)
    out = ra.bridges.torch("softmax")(q, q, 2.0 * q)
    (gradient,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"bridges.torch\('softmax'\): has no third derivative"):
        second.sum().backward()
