"""Derivatives of a foreign kernel along a direction: its own, or those of the library that it is written in.

For "tangent" it has a method ``tangent(t)``, called after ``forward`` with a dict of the directions of its arrays,
which returns the tangent of `out`, or a tuple of those of what forward returned; or it is a function of torch
(`torch.func.jvp`) or of jax (`jax.jvp`). For "hessian" it has a method ``hessian(t, d_out)``, which returns a dict of
the derivatives of its gradients by the names of the arrays; or torch differentiates twice, and jax its gradient
forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.verify.outcome import Decline

Arrays = Mapping[str, NDArray[Any]]
Place = Callable[[NDArray[Any]], Any]

REFUSALS = (NotImplementedError, RuntimeError, TypeError)
"""What libraries raise for a derivative that they do not have; the forward has run before."""


def derivatives(
    kernel: Any,
    forward: Callable[..., Any],
    place: Place,
    inputs: Arrays,
    extra: Mapping[str, Any],
    out: Any,
    outputs: tuple[str, ...],
    along: Arrays,
    upstream: NDArray[Any] | None,
    asked: tuple[str, ...],
) -> tuple[dict[str, Any], str]:
    """Return "t_out", ... and "h_q", ..., as they were asked, and why some are missing."""
    found: dict[str, Any] = {}
    refused = []
    library = type(out).__module__.partition(".")[0]
    for what in asked:
        own = getattr(kernel, what, None)
        directions = {name: place(t) for name, t in along.items()}
        if own is None and library not in ("torch", "jax", "jaxlib"):
            refused.append(f"no {what}: it has no method of this name, and is no function of torch or jax")
            continue
        given = {name: place(x) for name, x in inputs.items()}
        try:
            if what == "tangent":
                got = own(directions) if own else _WAYS[library, what](forward, given, extra, directions)
            else:
                assert upstream is not None
                d_out = place(upstream)
                got = own(directions, d_out) if own else _WAYS[library, what](forward, given, extra, directions, d_out)
        except REFUSALS as error:
            refused.append(f"no {what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        if isinstance(got, Decline):
            refused.append(str(got.reason))
        elif what == "tangent":
            parts = got if isinstance(got, tuple) else (got,)
            found |= {f"t_{name}": x for name, x in zip(outputs, parts, strict=False) if x is not None}
        else:
            found |= {f"h_{name}": x for name, x in dict(got).items()}
    return found, "; ".join(refused)


def _function(forward: Any, given: Mapping[str, Any], extra: Mapping[str, Any], names: list[str]) -> Any:
    """Return the map of the arrays that have a direction to the tuple of what comes out."""

    def run(*values: Any) -> tuple[Any, ...]:
        found = forward(**{**given, **dict(zip(names, values, strict=True))}, **extra)
        return tuple(x for x in (found if isinstance(found, tuple) else (found,)) if x is not None)

    return run


def _torch_tangent(forward: Any, given: Any, extra: Any, along: Mapping[str, Any]) -> Any:
    import torch

    run = _function(forward, given, extra, list(along))
    with warnings.catch_warnings():  # of torch about its own code, which it then imports
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.func.jvp(run, tuple(given[name] for name in along), tuple(along.values()))[1]


def _torch_hessian(forward: Any, given: Any, extra: Any, along: Mapping[str, Any], d_out: Any) -> dict[str, Any]:
    import torch

    points = [given[name].requires_grad_(True) for name in along]
    out = _function(forward, given, extra, list(along))(*points)[0]
    gradients = torch.autograd.grad(out, points, d_out, create_graph=True)
    slope = sum(torch.sum(g * t) for g, t in zip(gradients, along.values(), strict=True))
    if not slope.requires_grad:  # no gradient depends on anything
        return {name: torch.zeros_like(point) for name, point in zip(along, points, strict=True)}
    found = torch.autograd.grad(slope, points, materialize_grads=True)
    return dict(zip(along, found, strict=True))


def _jax_tangent(forward: Any, given: Any, extra: Any, along: Mapping[str, Any]) -> Any:
    import jax

    run = _function(forward, given, extra, list(along))
    return jax.jvp(run, tuple(given[name] for name in along), tuple(along.values()))[1]


def _jax_hessian(forward: Any, given: Any, extra: Any, along: Mapping[str, Any], d_out: Any) -> dict[str, Any]:
    import jax

    run = _function(forward, given, extra, list(along))

    def gradients(*values: Any) -> Any:
        return jax.vjp(lambda *x: run(*x)[0], *values)[1](d_out)

    found = jax.jvp(gradients, tuple(given[name] for name in along), tuple(along.values()))[1]
    return dict(zip(along, found, strict=True))


_WAYS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "tangent"): _torch_tangent,
    ("torch", "hessian"): _torch_hessian,
    **{(name, "tangent"): _jax_tangent for name in ("jax", "jaxlib")},
    **{(name, "hessian"): _jax_hessian for name in ("jax", "jaxlib")},
}


def split(arrays: dict[str, NDArray[Any]]) -> tuple[Arrays, Arrays]:
    """Return inputs, and directions, which go by the same names with "t_" in front."""
    along = {name[2:]: x for name, x in arrays.items() if name.startswith("t_")}
    return {name: x for name, x in arrays.items() if not name.startswith("t_")}, along


def joined(inputs: Arrays, along: Arrays) -> dict[str, NDArray[Any]]:
    """Return both in one dict, for `split`."""
    return {**inputs, **{f"t_{name}": np.asarray(t) for name, t in along.items()}}
