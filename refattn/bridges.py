"""A mechanism inside a model of PyTorch or JAX: its core as a function whose gradient is our backward.

attend = ra.bridges.torch("softmax")
out = attend(q, k, v, causal=True)
out.sum().backward()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from types import ModuleType
from typing import Any

from refattn import backends
from refattn.mechanisms import registry


def torch(name: str, *, outputs: bool = False) -> Callable[..., Any]:
    """Return the core of a mechanism as a function of PyTorch tensors with a gradient.

    Parameters
    ----------
    name
        A name of `refattn.list_mechanisms`.
    outputs
        Whether it returns a tuple of `out` and the mechanism's further outputs, such as softmax's lse, which have a
        gradient too. Otherwise it returns `out`.

    Returns
    -------
    callable
        It takes what ``ra.NAME.forward`` takes. Every tensor of floating point among its arguments, and among the
        numbers of options that are objects, has a gradient where the mechanism's backward gives one. There is no
        second derivative.

    Raises
    ------
    ImportError
        Where PyTorch is not installed.
    ValueError
        Where there is no such mechanism, or it is no map of q, k and v.
    """
    core, further = _core(name)
    owner: Any = backends.get("torch")
    import torch
    from torch.autograd.function import once_differentiable

    def forward(ctx: Any, names: tuple[str, ...], fixed: dict[str, Any], *tensors: Any) -> tuple[Any, ...]:
        with owner.full_precision():  # whatever torch.autocast says outside
            out, ctx.saved = core.forward(**_arguments(dict(zip(names, tensors, strict=True)), fixed))
        ctx.names, ctx.out = names, {"size": out.shape, "dtype": out.dtype, "device": out.device}
        ctx.set_materialize_grads(False)
        return (out, *(getattr(ctx.saved, each) for each in further))

    def backward(ctx: Any, d_out: Any, *d_further: Any) -> tuple[Any, ...]:
        upstream = {f"d_{each}": d for each, d in zip(further, d_further, strict=True) if d is not None}
        with owner.full_precision():
            gradients = core.backward(ctx.saved, torch.zeros(**ctx.out) if d_out is None else d_out, **upstream)
        return (None, None, *(gradients.get(each) for each in ctx.names))

    members = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    bridge: Any = type("Bridge", (torch.autograd.Function,), members)

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, **options, **_numbers(options)}
        learned = {each: x for each, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        fixed = {each: x for each, x in options.items() if each not in learned}
        found = bridge.apply(tuple(learned), fixed, *learned.values())
        return found if outputs else found[0]

    return attend


def jax(name: str, *, outputs: bool = False) -> Callable[..., Any]:
    """Return the core of a mechanism as a function of JAX arrays with a gradient, also under ``jax.jit``.

    The arguments are those of `torch`. The backward computes the forward again, and so nothing but the arguments is
    kept for it; there are no
    forward-mode derivatives.
    """
    core, further = _core(name)
    owner: Any = backends.get("jax")
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, **options, **_numbers(options)}
        learned = {
            each: x for each, x in given.items() if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        }
        masks = {each: x for each, x in options.items() if each not in learned and isinstance(x, jax.Array)}
        fixed = {each: x for each, x in options.items() if each not in learned and each not in masks}

        def forward(learned: dict[str, Any], masks: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
            with owner.full_precision():
                out, saved = core.forward(**_arguments(learned, fixed), **masks)
            return (out, *(getattr(saved, each) for each in further)), saved

        def backward(kept: tuple[Any, Any], upstream: tuple[Any, ...]) -> tuple[Any, None]:
            learned, masks = kept
            _, saved = forward(learned, masks)
            rest = {f"d_{each}": d for each, d in zip(further, upstream[1:], strict=True)}
            with owner.full_precision():
                gradients = core.backward(saved, upstream[0], **rest)
            return {
                each: gradients[each] if each in gradients else jnp.zeros_like(x) for each, x in learned.items()
            }, None

        call = jax.custom_vjp(lambda learned, masks: forward(learned, masks)[0])
        call.defvjp(lambda learned, masks: (call(learned, masks), (learned, masks)), backward)
        found = call(learned, masks)
        return found if outputs else found[0]

    return attend


def _numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the options that are objects, such as kernels, by their names."""
    objects = [x for x in options.values() if is_dataclass(x)]
    return {each: number for x in objects for each, number in vars(x).items()}


def _arguments(learned: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a core: learned numbers of an option that is an object go where they belong."""
    found, left = dict(fixed), dict(learned)
    for each, x in fixed.items():
        if is_dataclass(x) and not isinstance(x, type):
            found[each] = replace(x, **{number: left.pop(number) for number in vars(x) if number in left})
    return found | left


def _core(name: str) -> tuple[ModuleType, tuple[str, ...]]:
    """Return the core of a mechanism, and its outputs beside `out` that have a gradient."""
    record = registry.mechanism(name)
    if record.core is None:
        raise ValueError(f"name: got {name!r}, which is no map of q, k and v, needs a mechanism with a core")
    return record.core, record.pulled
