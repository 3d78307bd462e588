"""Manners of calling: the same numbers in other memory, and other calls around the one that counts.

A manner changes where arrays lie, or what happens before and after a call, and never what it has to return.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from refattn.backends import blas, use_workers

LAYOUTS = ("transposed", "columns", "sliced", "strided", "expanded", "reversed", "guarded")
"""Where arrays lie; `expanded` is for arrays whose heads are all the same."""

THREADS = "threads "
"""Before how many there are."""

TIMES = 50
"""How often the same call is repeated."""

_manner: ContextVar[str] = ContextVar("manner", default="")


@contextlib.contextmanager
def using(manner: str) -> Iterator[None]:
    """Call in a manner."""
    token = _manner.set(manner)
    try:
        with _around_all(manner):
            yield
    finally:
        _manner.reset(token)


def _around_all(manner: str) -> contextlib.AbstractContextManager[None]:
    if manner.startswith(THREADS):
        return threads(int(manner.removeprefix(THREADS)))
    return poisoned() if manner == "poisoned" else contextlib.nullcontext()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let BLAS, OpenMP and torch use so many threads, and refattn so many workers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(blas.threads(count))
        stack.enter_context(use_workers(count))
        if "torch" in sys.modules:
            import torch

            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(count)
        yield


def current() -> str:
    """Return the manner; "" for none."""
    return _manner.get()


def laid_out(x: Any) -> Any:
    """Return an array of NumPy or torch in the layout of the manner; others, and what is no (b, h, n, d), as it is."""
    manner = _manner.get()
    library = type(x).__module__.partition(".")[0]
    if manner not in LAYOUTS or len(x.shape) != 4 or 0 in x.shape or library not in ("numpy", "torch"):
        return x
    contiguous: Any = np.ascontiguousarray if library == "numpy" else lambda x: x.contiguous()
    found = _laid_out(x, manner, contiguous)
    if library == "numpy":
        found.setflags(write=False)
    return found


def _laid_out(x: Any, manner: str, contiguous: Callable[[Any], Any]) -> Any:
    if manner in ("transposed", "columns"):
        axes = (1, 2) if manner == "transposed" else (2, 3)
        return contiguous(x.swapaxes(*axes)).swapaxes(*axes)
    if manner == "expanded":
        first = contiguous(x[:, :1])
        return np.broadcast_to(first, x.shape) if isinstance(x, np.ndarray) else first.expand(x.shape)
    if manner == "reversed":  # torch has no negative strides
        return contiguous(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] if isinstance(x, np.ndarray) else x
    shape, part = _around(tuple(x.shape), manner)
    floats = x.dtype.kind == "f" if isinstance(x, np.ndarray) else x.is_floating_point()
    fill = np.nan if floats else True
    whole = np.full(shape, fill, dtype=x.dtype) if isinstance(x, np.ndarray) else x.new_full(shape, fill)
    whole[part] = x if manner != "guarded" else x.reshape(-1)
    return whole[part] if manner != "guarded" else whole[part].reshape(x.shape)


def _around(shape: tuple[int, ...], manner: str) -> tuple[tuple[int, ...], Any]:
    """Return the shape of a larger array, and where in it the smaller one lies."""
    if manner == "strided":
        return (*shape[:3], 2 * shape[3]), np.s_[..., ::2]
    if manner == "guarded":
        size = int(np.prod(shape))
        return (size + 8192,), np.s_[4096 : 4096 + size]
    return tuple(n + 2 for n in shape), tuple(slice(1, n + 1) for n in shape)


def around(forward: Callable[..., Any], arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """Call, with what the manner does around a call, and return what the call that counts has returned."""
    manner = _manner.get()
    if manner == "poisoned":
        _dirty(arguments)
    returned = forward(**arguments, **extra)
    if manner == "held":  # the result is looked at after another call
        forward(**{name: _other(x) for name, x in arguments.items()}, **extra)
    if manner == "repeated":
        first = _bytes(returned)
        for _ in range(TIMES - 1):
            again = forward(**arguments, **extra)
            if _bytes(again) != first:
                return again
    return returned


def interleaved(forward: Callable[..., Any], arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Call once more between a forward and its backward, where the manner is that."""
    if _manner.get() == "interleaved":
        forward(**{name: _other(x) for name, x in arguments.items()}, **extra)


def _other(x: Any) -> Any:
    """Return another array of the same shape, dtype and library."""
    if type(x).__module__.partition(".")[0] == "torch":
        import torch

        other = torch.roll(x.detach(), 1, dims=-1) if x.ndim else x
        return (-other if x.is_floating_point() else other).requires_grad_(x.requires_grad)
    flipped = np.roll(np.asarray(x), 1, axis=-1) if np.ndim(x) else np.asarray(x)
    flipped = -flipped if flipped.dtype.kind == "f" else flipped
    if isinstance(x, np.ndarray):
        return flipped
    import jax.numpy as jnp

    return jnp.asarray(flipped, dtype=x.dtype)


def _bytes(returned: Any) -> Any:
    """Return what was returned as bytes, to be compared."""
    if isinstance(returned, dict):
        return {name: _bytes(x) for name, x in returned.items()}
    if isinstance(returned, (tuple, list)):
        return [_bytes(x) for x in returned]
    if hasattr(returned, "detach"):
        returned = returned.detach()
        return returned.float().cpu().numpy().tobytes() if returned.is_floating_point() else bytes(returned.numpy())
    return np.asarray(returned).tobytes() if hasattr(returned, "shape") else repr(returned)


def _dirty(arguments: Mapping[str, Any]) -> None:
    """Leave NaN in memory that was just freed, in blocks of the sizes that outputs have."""
    sizes = {int(np.prod(x.shape)) for x in arguments.values() if hasattr(x, "shape")}
    blocks = [np.full(size, np.nan, dtype) for size in sizes for dtype in ("f4", "f8") for _ in range(8)]
    del blocks


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `numpy.empty` and `torch.empty` return with NaN."""
    before = {name: getattr(np, name) for name in ("empty", "empty_like")}

    def filling(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **more: Any) -> Any:
            x = make(*given, **more)
            if x.dtype.kind in "fciu":
                x[...] = np.nan if x.dtype.kind in "fc" else np.iinfo(x.dtype).max // 2
            return x

        return made

    for name, make in before.items():
        setattr(np, name, filling(make))
    torch = sys.modules.get("torch")
    known = None
    if torch is not None:
        known = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what torch.empty returns, too
    try:
        yield
    finally:
        for name, make in before.items():
            setattr(np, name, make)
        if torch is not None and known is not None:
            torch.use_deterministic_algorithms(known[0], warn_only=known[1])
