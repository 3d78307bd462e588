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
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from refattn.verify.outcome import Decline

Arrays = Mapping[str, NDArray[Any]]

REFUSALS = (NotImplementedError, RuntimeError, TypeError)
"""What libraries raise for a derivative that they do not have; the forward has run before."""


@dataclass(frozen=True)
class Called:
    """A call of a kernel, as it is made again for derivatives.

    Attributes
    ----------
    kernel, forward
        The kernel, and its forward.
    inputs, extra
        Its arrays on the host, and the other arguments.
    place
        Gives a fresh copy of an array in the library of that name, where the kernel wants it.
    named
        Gives what was returned by name.
    library
        Of its output, whose derivatives are of its own arrays.
    """

    kernel: Any
    forward: Callable[..., Any]
    inputs: Arrays
    extra: Mapping[str, Any]
    place: Callable[[NDArray[Any], str | None], Any]
    named: Callable[[Any], dict[str, Any]]
    library: str

    def of(self, names: tuple[str, ...], given: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
        """Return the map of the arrays of these names, among all that are given, to what comes out by name."""

        def run(*values: Any) -> dict[str, Any]:
            return self.named(self.forward(**{**given, **dict(zip(names, values, strict=True))}, **self.extra))

        return run


def derivatives(
    call: Called, along: Arrays, upstream: NDArray[Any] | None, outputs: tuple[str, ...], asked: tuple[str, ...]
) -> tuple[dict[str, Any], str]:
    """Return "t_out", ... and "h_q", ..., as they were asked, and why some are missing."""
    found: dict[str, Any] = {}
    refused = []
    known = call.library in ("torch", "jax")
    library = call.library if known else None
    for what in asked:
        own = getattr(call.kernel, what, None)
        if own is None and not known:
            refused.append(f"no {what}: it has no method of this name, and is no function of torch or jax")
            continue
        directions = {name: call.place(t, library) for name, t in along.items()}
        pulls = [] if what == "tangent" or upstream is None else [call.place(upstream, library)]
        try:
            if own:
                got = own(directions, *pulls)
            else:
                given = {name: call.place(x, library) for name, x in call.inputs.items()}
                run = call.of(tuple(along), given)
                points = [given[name] for name in along]
                got = _WAYS[call.library, what](run, points, directions, outputs[0], *pulls)
        except REFUSALS as error:
            refused.append(f"no {what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        if isinstance(got, Decline):
            refused.append(str(got.reason))
            continue
        if not isinstance(got, dict):
            parts = got if isinstance(got, tuple) else (got,)
            got = {name: x for name, x in zip(outputs, parts, strict=False) if x is not None}
        found |= {f"{what[0]}_{name}": x for name, x in got.items()}
    return found, "; ".join(refused)


def _torch_tangent(run: Any, points: list[Any], along: Mapping[str, Any], out: str) -> Any:
    import torch

    with warnings.catch_warnings():  # of torch about its own code, which it then imports
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.func.jvp(run, tuple(points), tuple(along.values()))[1]


def _torch_hessian(run: Any, points: list[Any], along: Mapping[str, Any], out: str, d_out: Any) -> dict[str, Any]:
    import torch

    for point in points:
        point.requires_grad_(True)
    gradients = torch.autograd.grad(run(*points)[out], points, d_out, create_graph=True)
    slope = sum(torch.sum(g * t) for g, t in zip(gradients, along.values(), strict=True))
    if not slope.requires_grad:  # no gradient depends on anything
        return {name: torch.zeros_like(point) for name, point in zip(along, points, strict=True)}
    found = torch.autograd.grad(slope, points, materialize_grads=True)
    return dict(zip(along, found, strict=True))


def _jax_tangent(run: Any, points: list[Any], along: Mapping[str, Any], out: str) -> Any:
    import jax

    return jax.jvp(run, tuple(points), tuple(along.values()))[1]


def _jax_hessian(run: Any, points: list[Any], along: Mapping[str, Any], out: str, d_out: Any) -> dict[str, Any]:
    import jax

    def gradients(*values: Any) -> Any:
        return jax.vjp(lambda *x: run(*x)[out], *values)[1](d_out)

    return dict(zip(along, jax.jvp(gradients, tuple(points), tuple(along.values()))[1], strict=True))


_WAYS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "tangent"): _torch_tangent,
    ("torch", "hessian"): _torch_hessian,
    ("jax", "tangent"): _jax_tangent,
    ("jax", "hessian"): _jax_hessian,
}
