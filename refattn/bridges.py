"""A mechanism inside a model of PyTorch or JAX, and a model's attention beside the reference.

`torch` and `jax` return a core as a function whose gradient is our backward; `attention_calls` records what a layer
gives to its attention and gets from it::

    attend = ra.bridges.torch("softmax")
    out = attend(q, k, v, causal=True)
    out.sum().backward()
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from types import ModuleType
from typing import Any

from refattn import backends, tree
from refattn.mechanisms import registry
from refattn.xp import is_array


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
        numbers of options that are objects, has a gradient where the mechanism's backward gives one. Its gradient has
        one too, and it has forward-mode derivatives: both by the arrays of `refattn.tangent`, on the CPU. There is no
        third derivative. `torch.func.vmap` calls it once for each element of the batch, whose masks
        and lengths are the same.

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

    class Kept:
        """What a call has beside tensors, and what its forward leaves for its backward."""

        def __init__(self, names: tuple[str, ...], fixed: dict[str, Any]) -> None:
            self.names, self.fixed, self.saved = names, fixed, None
            self.gradients: tuple[str, ...] = ()  # the names of those that its backward has returned

    def one_by_one(function: Any, count: int, in_dims: Any, *given: Any) -> tuple[Any, Any]:
        """The rule of torch.func.vmap: the calls of a batch one after the other, for cores decide on values."""
        first, results = given[0], []
        for n in range(count):
            parts = [x if dim is None else x.select(dim, n) for x, dim in zip(given, in_dims, strict=True)][1:]
            kept = Kept(first.names, first.fixed)
            kept.gradients = first.gradients
            results.append(function.apply(kept, *parts))
            first.gradients = kept.gradients
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    def apart(results: Any, given: Any) -> tuple[Any, ...]:
        """Return results as tensors of their own: one that was given is not returned as it is."""
        return tuple(x.view_as(x) if any(x is each for each in given) else x for x in results)

    class Last(torch.autograd.Function):
        """Returns what it is given after `count` others, which it depends on, and has no derivative."""

        generate_vmap_rule = True

        @staticmethod
        def forward(count: int, *given: Any) -> tuple[Any, ...]:
            return tuple(x.clone() for x in given[count:])

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *moved: Any) -> Any:
            raise RuntimeError(f"refattn.bridges.torch({name!r}): has no third derivative")

    def last(origins: Any, results: Any) -> list[Any]:
        """Refuse to differentiate results that came about outside of torch from the origins."""
        if not torch.is_grad_enabled():
            return list(results)
        origins, there = [x for x in origins if x is not None], [x for x in results if x is not None]
        refusing = iter(Last.apply(len(origins), *origins, *there))
        return [None if x is None else next(refusing) for x in results]

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(kept: Any, *tensors: Any) -> tuple[Any, ...]:
            with owner.full_precision():  # whatever torch.autocast says outside
                out, kept.saved = core.forward(**_arguments(dict(zip(kept.names, tensors, strict=True)), kept.fixed))
            return apart((out, *(getattr(kept.saved, each) for each in further)), tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.kept, *tensors = inputs
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.out = {"size": output[0].shape, "dtype": output[0].dtype, "device": output[0].device}
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, d_out: Any, *d_further: Any) -> tuple[Any, ...]:
            d_out = torch.zeros(**ctx.out) if d_out is None else d_out
            found = Pull.apply(ctx.kept, *ctx.saved_tensors, d_out, *d_further)
            gradients = dict(zip(ctx.kept.gradients, found, strict=True))
            return (None, *(gradients.get(each) for each in ctx.kept.names))

        @staticmethod
        def jvp(ctx: Any, *moved: Any) -> Any:
            tensors = ctx.saved_tensors
            along = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, moved[1:], strict=True)]
            return Push.apply(ctx.kept, *tensors, *along)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
            return one_by_one(Bridge, info.batch_size, in_dims, *given)

    class Pull(torch.autograd.Function):
        """The backward as a function that has a derivative."""

        @staticmethod
        def forward(kept: Any, *given: Any) -> tuple[Any, ...]:
            names = kept.names
            tensors, (d_out, *rest) = given[: len(names)], given[len(names) :]
            upstream = {f"d_{each}": d for each, d in zip(further, rest, strict=True) if d is not None}
            with owner.full_precision():
                if kept.saved is None:
                    kept.saved = core.forward(**_arguments(dict(zip(names, tensors, strict=True)), kept.fixed))[1]
                found = core.backward(kept.saved, d_out, **upstream)
            kept.gradients = tuple(each for each in names if each in found)
            return apart([found[each] for each in kept.gradients], given)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.kept, *given = inputs
            ctx.gradients = ctx.kept.gradients
            ctx.save_for_backward(*given)
            ctx.save_for_forward(*given)

        @staticmethod
        def backward(ctx: Any, *moved: Any) -> tuple[Any, ...]:
            names = ctx.kept.names
            tensors, upstream = ctx.saved_tensors[: len(names)], ctx.saved_tensors[len(names) :]
            along = dict(zip(ctx.gradients, moved, strict=True))
            pushed, turned = pushes(ctx.kept, tensors, [along.get(each) for each in names], upstream)
            rest = [t if d is not None else None for t, d in zip(pushed, upstream, strict=True)]
            return (None, *last(ctx.saved_tensors, (*(turned.get(each) for each in names), *rest)))

        @staticmethod
        def jvp(ctx: Any, *moved: Any) -> Any:
            given = ctx.saved_tensors
            along = [
                torch.zeros_like(x) if t is None and x is not None else t for x, t in zip(given, moved[1:], strict=True)
            ]
            return Turn.apply(ctx.kept, *given, *along)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
            return one_by_one(Pull, info.batch_size, in_dims, *given)

    class Turn(torch.autograd.Function):
        """The tangents of the gradients, for those of the arguments and of the upstream gradients."""

        @staticmethod
        def forward(kept: Any, *given: Any) -> tuple[Any, ...]:
            count, half = len(kept.names), len(given) // 2
            upstream, moved = given[count:half], given[half + count :]
            _, found = pushes(kept, given[:count], given[half : half + count], upstream, moved)
            return tuple(found[each] for each in kept.gradients)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
            return one_by_one(Turn, info.batch_size, in_dims, *given)

    class Push(torch.autograd.Function):
        """The tangents of the outputs, for those of the arguments."""

        @staticmethod
        def forward(kept: Any, *given: Any) -> tuple[Any, ...]:
            count = len(kept.names)
            return tuple(pushes(kept, given[:count], given[count:], None)[0])

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.kept, *given = inputs
            ctx.save_for_backward(*given)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
            names = ctx.kept.names
            tensors, along = ctx.saved_tensors[: len(names)], ctx.saved_tensors[len(names) :]
            _, turned = pushes(ctx.kept, tensors, along, upstream)
            kept = Kept(names, ctx.kept.fixed)
            pulled = Pull.apply(kept, *tensors, *upstream)
            found = dict(zip(kept.gradients, pulled, strict=True))
            return (None, *last(ctx.saved_tensors, [each.get(n) for each in (turned, found) for n in names]))

        @staticmethod
        def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
            return one_by_one(Push, info.batch_size, in_dims, *given)

    def pushes(
        kept: Any, tensors: Any, along: Any, upstream: Any, changed: Any = ()
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the derivatives of the outputs, and with upstream gradients of the gradients, computed by NumPy."""
        names, fixed = kept.names, kept.fixed
        host = [None if x is None else owner.to_numpy(x) for x in (*tensors, *along, *(upstream or ()), *changed)]
        count, like = len(names), dict(zip(names, tensors, strict=True))
        learned, moved = dict(zip(names, host[:count], strict=True)), host[count : 2 * count]
        there = {each: _on_host(owner, x) for each, x in fixed.items()}
        pushed, turned = _derivatives(core, further, learned, there, moved, host[2 * count :] if upstream else None)

        def placed(x: Any, other: Any) -> Any:
            return torch.tensor(x, dtype=other.dtype, device=other.device)

        return [placed(t, tensors[0]) for t in pushed], {n: placed(t, like[n]) for n, t in turned.items() if n in like}

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, **options, **_numbers(options)}
        learned = {each: x for each, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        fixed = {each: x for each, x in options.items() if each not in learned}
        split = [n for n, x in fixed.items() if isinstance(x, torch.Tensor) and torch._C._functorch.is_batchedtensor(x)]
        if split:
            raise TypeError(f"{split[0]}: got a {fixed[split[0]].dtype} that vmap splits, needs floating point there")
        found = Bridge.apply(Kept(tuple(learned), fixed), *learned.values())
        return found if outputs else found[0]

    return attend


def jax(name: str, *, outputs: bool = False) -> Callable[..., Any]:
    """Return the core of a mechanism as a function of JAX arrays with a gradient, also under ``jax.jit``.

    The arguments are those of `torch`. The backward computes the forward again, and so nothing but the arguments is
    kept for it. Second derivatives are those that JAX finds of our backward, in both modes. There is no forward-mode
    derivative of the function itself: JAX lets a function have a backward of its own (``custom_vjp``) or a forward mode
    of its own (``custom_jvp``), of which it then derives the backward; its ``linear_call``, which could have both, has
    neither a second derivative nor ``vmap``. `refattn.tangent` has a forward mode.
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
            upstream = tuple(map(jnp.asarray, upstream))
            rest = {f"d_{each}": d for each, d in zip(further, upstream[1:], strict=True)}
            with owner.full_precision():
                gradients = core.backward(saved, upstream[0], **rest)
            return {
                each: gradients[each] if each in gradients else jnp.zeros_like(x) for each, x in learned.items()
            }, None

        call = jax.custom_vjp(lambda learned, masks: forward(learned, masks)[0])
        # The plain forward, so that a gradient has a forward-mode derivative.
        call.defvjp(lambda learned, masks: (forward(learned, masks)[0], (learned, masks)), backward)
        found = call(learned, masks)
        return found if outputs else found[0]

    return attend


# --- what a layer gives to its attention, and gets from it

AXES = ("bhnd", "bnhd")


@contextlib.contextmanager
def attention_calls(
    owner: Any = None,
    name: str = "",
    read: Callable[..., Mapping[str, Any]] | None = None,
    *,
    axes: str = "bhnd",
    out_axes: str = "",
) -> Iterator[list[dict[str, Any]]]:
    """Record the calls of attention that layers make in a ``with`` block, each as the arguments of `assert_close`.

    Without arguments these are the calls of ``torch.nn.functional.scaled_dot_product_attention``, from wherever it was
    imported, and of ``jax.nn.dot_product_attention`` by this name. With arguments they are the calls of another
    function, which stands in place of ``owner.name`` as long as the block runs.

    Parameters
    ----------
    owner, name
        The module, class or object, and its attribute that the layer calls; of a ``torch.nn.Module`` "forward".
    read
        Takes the arguments of such a call and returns what they mean: a dict with q, k, v, and the options of the
        mechanism. The tensors q, k and v are those that it was given: their gradients are found by that.
    axes, out_axes
        How q, k, v, and the output, lie for that function: bhnd (batch, heads, tokens, width) or bnhd; the output as q
        by default. If the function returns a tuple, the output is its first element.

    Yields
    ------
    list
        A dict for each call, in order: q, k, v, out, and the options. If torch differentiates q, k and v, a backward
        adds their gradients and d_out, for this call alone.

    Raises
    ------
    ValueError
        If nothing was called: a loop over no calls would agree with everything. If a call has dropout, or a gradient
        went around the tensors that `read` returned.
    TypeError
        If a call is traced by ``jax.jit`` or a transformation, so that there are no numbers.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> class Layer:
    ...     def attention(self, queries, keys, values, is_causal):  # a kernel
    ...         return ra.softmax.forward(queries, keys, values, causal=is_causal)[0]
    ...     def __call__(self, x):
    ...         return x + self.attention(x, x, 2.0 * x, True)
    >>> def read(self, queries, keys, values, is_causal):
    ...     return {"q": queries, "k": keys, "v": values, "causal": is_causal}
    >>> with ra.bridges.attention_calls(Layer, "attention", read) as calls:
    ...     y = Layer()(np.random.default_rng(0).standard_normal((1, 2, 5, 4)))
    >>> [*calls[0]], ra.assert_close("softmax", **calls[0]).passed
    (['q', 'k', 'v', 'causal', 'out'], True)
    """
    for argument, given in (("axes", axes), ("out_axes", out_axes or axes)):
        if given not in AXES:
            raise ValueError(f"{argument}: got {given!r}, needs one of {', '.join(AXES)}")
    if (owner is None) != (read is None) or (owner is None) != (not name):
        raise TypeError("owner, name, read: got some of them, needs all three or none")
    calls: list[dict[str, Any]] = []
    finished: list[Callable[[], None]] = []
    busy: list[Callable[..., Any]] = []

    def around(function: Callable[..., Any], read: Callable[..., Mapping[str, Any]], axes: str, out_axes: str) -> Any:
        def watched(*given: Any, **named: Any) -> Any:
            if busy:  # the function itself, by another of its names
                return function(*given, **named)
            given, named = tuple(map(_apart, given)), {each: _apart(x) for each, x in named.items()}
            meant = read(*given, **named)
            arrays = {each: meant[each] for each in "qkv"}
            options = {each: x for each, x in meant.items() if each not in arrays and x is not None and x is not False}
            call = {each: _copied(each, x, axes) for each, x in arrays.items()}
            call |= {each: _copied(each, x, "") for each, x in options.items()}
            busy.append(function)
            try:
                result = function(*given, **named)
            finally:
                busy.pop()
            first = result[0] if isinstance(result, tuple) else result
            call["out"] = _copied("out", first, out_axes)
            if _is_tensor(first) and first.requires_grad:
                finished.append(_watch_gradients(call, arrays, first, axes, out_axes))
            calls.append(call)
            return result

        return watched

    with contextlib.ExitStack() as stack:
        if owner is not None and read is not None:
            stack.enter_context(_in_place(owner, name, around(getattr(owner, name), read, axes, out_axes or axes)))
            needs = f"a layer that looks {name} up in {getattr(owner, '__name__', type(owner).__name__)}"
        else:
            needs = (
                "a layer that calls torch's scaled_dot_product_attention (nn.MultiheadAttention does with "
                "need_weights=False, transformers with attn_implementation='sdpa') or jax.nn.dot_product_attention; or "
                "owner, name and read of what it calls"
            )
            if "torch" in sys.modules:
                function = sys.modules["torch"].nn.functional.scaled_dot_product_attention
                watched = around(function, _read_torch, "bhnd", "bhnd")
                stack.enter_context(_everywhere_in_torch(function, watched))
                stack.enter_context(_in_place(sys.modules["torch"].nn.functional, function.__name__, watched))
            if "jax" in sys.modules:
                function = sys.modules["jax"].nn.dot_product_attention
                watched = around(function, _read_jax, "bnhd", "bnhd")
                stack.enter_context(_in_place(sys.modules["jax"].nn, "dot_product_attention", watched))
        yield calls
    if not calls:
        raise ValueError(f"attention_calls: got no call in its block, needs {needs}")
    for check in finished:
        check()


@contextlib.contextmanager
def _in_place(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = vars(owner).get(name, _in_place)
    setattr(owner, name, staticmethod(function) if isinstance(before, staticmethod) else function)
    try:
        yield
    finally:
        if before is _in_place:  # it came from a class
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _everywhere_in_torch(function: Callable[..., Any], watched: Callable[..., Any]) -> Any:
    """Return a context in which `watched` is called for a function of torch, whatever name it was imported by.

    torch runs its own composite functions, such as that of nn.MultiheadAttention, without the mode. They look the
    function up by its name, so it is replaced there, too.
    """
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (watched if called is function else called)(*args, **(kwargs or {}))

    return Watch()


def _read_torch(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Return what the arguments of torch's scaled_dot_product_attention mean; its causal mask is top left."""
    if dropout_p:
        raise ValueError(
            f"dropout_p: got {dropout_p}, needs 0, for torch draws what it drops: call eval() of the layer"
        )
    kind = "mask" if attn_mask is None or str(attn_mask.dtype) == "torch.bool" else "bias"
    aligned = True if query.shape[-2] == key.shape[-2] else "top_left"
    return {"q": query, "k": key, "v": value, kind: attn_mask, "causal": is_causal and aligned, "scale": scale}


def _read_jax(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> dict[str, Any]:
    """Return what the arguments of jax.nn.dot_product_attention mean; its causal mask is top left."""
    square = query.shape[-3] == key.shape[-3]
    if local_window_size is not None and not square:
        raise ValueError(f"local_window_size: got {local_window_size}, needs as many queries as keys to be judged")
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    found = {"q": query, "k": key, "v": value, "bias": bias, "mask": mask, "scale": scale, "window": window}
    found |= {"q_lengths": query_seq_lengths, "k_lengths": key_value_seq_lengths}
    return found | {"causal": is_causal and "top_left"}


def _is_tensor(x: Any) -> bool:
    return "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor)


def _apart(x: Any) -> Any:
    """Return a tensor as one of its own, so that its gradient is that of one call; anything else as it is."""
    return x.view_as(x) if _is_tensor(x) and x.requires_grad else x


def _copied(name: str, x: Any, axes: str) -> Any:
    """Return an array as it is now, in four axes (batch, heads, tokens, width) where `axes` says how it lies."""
    if not is_array(x):
        return x
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].core.Tracer):
        raise TypeError(f"{name}: got a value that JAX traces, needs numbers: call the layer outside of jit and grad")
    x = x.detach().clone() if _is_tensor(x) else x.copy()
    return _four_axes(name, x, axes) if axes else x


def _four_axes(name: str, x: Any, axes: str) -> Any:
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"{name}: got {x.ndim} axes, needs 2 to 4")
    if axes == "bnhd":
        return (x if x.ndim == 4 else x[None]).swapaxes(1, 2)
    return x[None, None] if x.ndim == 2 else x[:, None] if x.ndim == 3 else x


def _watch_gradients(
    call: dict[str, Any], arrays: Mapping[str, Any], out: Any, axes: str, out_axes: str
) -> Callable[[], None]:
    """Have a backward write the gradients of a call into it; return a check that they came."""
    wanted = [each for each, x in arrays.items() if x.requires_grad]
    gradients: dict[str, Any] = {}
    pulled: list[Any] = []

    def arrived(name: str, x: Any) -> None:
        gradients[name] = _copied(f"d_{name}", x, axes)
        if len(gradients) == len(arrays):
            call["gradients"], call["d_out"] = dict(gradients), pulled[-1]

    out.register_hook(lambda x: pulled.append(_copied("d_out", x, out_axes)))
    for each in wanted:
        arrays[each].register_hook(lambda x, name=each: arrived(name, x))

    def check() -> None:
        if pulled and (missing := [each for each in wanted if each not in gradients]):
            needs = "the tensor that the call was given, as it came, so that its gradient is found"
            raise ValueError(f"read: got another {missing[0]}, needs {needs}")

    return check


def _on_host(owner: Any, x: Any) -> Any:
    """Return an option with NumPy's arrays in place of a library's."""
    try:
        return tree.map_leaves(owner.to_numpy, x)
    except TypeError:  # no tree of arrays
        return x


def _derivatives(
    core: ModuleType,
    further: tuple[str, ...],
    learned: Mapping[str, Any],
    fixed: Mapping[str, Any],
    along: Iterable[Any],
    upstream: list[Any] | None,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the derivatives of the outputs along a direction of what is learned, and with upstream gradients those of
    the gradients, which are the products of the second derivative and the direction."""
    from refattn.instruments.dual import tangents

    with tangents() as instrument:
        lifted = {n: instrument.array(x, t) for (n, x), t in zip(learned.items(), along, strict=True)}
        constant = {n: tree.map_leaves(instrument.array, x) if _is_tree(x) else x for n, x in fixed.items()}
        out, saved = core.forward(**_arguments(lifted, constant))
        pushed = [out.tangent, *(getattr(saved, each).tangent for each in further)]
        if upstream is None:
            return pushed, {}
        size = 1 + len(further)  # after the gradients that come in there may be their own tangents
        moved = upstream[size:] or [None] * size
        d_out, *rest = (
            None if d is None else instrument.array(d, t) for d, t in zip(upstream[:size], moved, strict=True)
        )
        given = {f"d_{each}": d for each, d in zip(further, rest, strict=True) if d is not None}
        return pushed, {n: g.tangent for n, g in core.backward(saved, d_out, **given).items()}


def _is_tree(x: Any) -> bool:
    try:
        return bool(tree.flatten(x))
    except TypeError:
        return False


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
