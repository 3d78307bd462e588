"""The entry that all cores share: arguments come in checked, are cast once, and results are cast back.

A core reads::

    call = enter(q, k, v, mask=mask, causal=causal)
    chosen = implementation_of(implementation, IMPLEMENTATIONS, usual="dense", plane=call.plane)
    run = equations.active(IMPLEMENTATIONS[chosen]).forward
    out, ... = run(call.q, call.k, call.v, mask=call.mask, offset=call.offset, ...)
    return call.back(out), Saved(...)

and its backward::

    check_saved(saved, Saved)
    d_out, d_lse = upstream(saved.like, d_out=(d_out, saved.shape), d_lse=(d_lse, saved.shape[:3]))
    ...
    return returned(gradients, ("q", "k", "v"), saved.like)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from refattn import equations
from refattn.args import (
    check_arrays,
    check_causal,
    check_choice,
    check_gradient,
    check_inputs,
    check_mask,
    check_number,
    refused,
)
from refattn.mechanisms.use_definition import defaults_of as defaults_of
from refattn.mechanisms.use_definition import is_reading
from refattn.ops.masks import Causal, causal_offset
from refattn.tree import check_fields
from refattn.xp import LOW_PRECISION, Array, is_array, namespace, raised


class Call(NamedTuple):
    """The arguments of a core, checked.

    Attributes
    ----------
    q, k, v
        In the dtype that is computed in.
    mask
        With four axes, or None.
    offset
        Of the causal mask: query i may attend key j where j <= i + offset. None: not causal.
    plane
        (b, h, i, j), the shape of the scores.
    like
        q as it came, for its library, device and dtype.
    """

    q: Array
    k: Array
    v: Array
    mask: Array | None
    offset: int | None
    plane: tuple[int, int, int, int]
    like: Array

    def number(self, name: str, value: float | Array, *, positive: bool = False) -> float | Array:
        """Return a number that may have a gradient, in the dtype that is computed in."""
        number = check_number(name, value, positive=positive)
        if not is_array(number):
            return number
        xp = check_arrays(q=self.like, **{name: number})
        return xp.astype(number, self.q.dtype)

    def back(self, x: Array) -> Array:
        """Return a result in the dtype of the inputs."""
        return x if x.dtype == self.like.dtype else cast(x, self.like)


def enter(q: Array, k: Array, v: Array, *, mask: Array | None = None, causal: Causal = False) -> Call:
    """Return the arguments that all cores have, checked and cast.

    Raises
    ------
    TypeError
        Where one is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, the alignment or a device does not fit.
    """
    dtype, like, offset = check_inputs(q, k, v), q, None
    plane = (*q.shape[:3], k.shape[2])
    if mask is not None:
        check_arrays(q=q, mask=mask)
        mask = check_mask(mask, plane)
    if causal is not False:
        offset = causal_offset(check_causal(causal), *plane[2:])
    if dtype in LOW_PRECISION:
        q, k, v = raised(q), raised(k), raised(v)
    return Call(q, k, v, mask, offset, plane, like)


def implementation_of(
    implementation: str, implementations: Iterable[str], *, usual: str, plane: tuple[int, ...] = ()
) -> str:
    """Return the implementation that runs; "auto" means `usual`, and the definition, the first, for a trace and a
    reader.

    Scores of a shape `plane` without an element cannot be cut, so that for them it is the definition, too.

    Raises
    ------
    ValueError
        Where the implementation is none of them.
    """
    names = tuple(implementations)
    if type(implementation) is not str or implementation not in ("auto", *names):
        check_choice("implementation", implementation, ("auto", *names))
    if 0 in plane:
        return names[0]
    if implementation != "auto":
        return implementation
    return names[0] if usual == names[0] or equations.is_active() or is_reading() else usual


def check_saved(saved: Any, kind: type) -> None:
    """Raise TypeError where `saved` is not what the core's forward returned, or has no arrays where that has them."""
    if not isinstance(saved, kind):
        raise refused("saved", saved, f"the Saved of {kind.__module__} that forward returned")
    check_fields("saved", saved)


def upstream(like: Array, **given: tuple[Array | None, tuple[int, ...]]) -> list[Any]:
    """Return the gradients that come in, each given with the shape it needs, in the dtype that is computed in.

    None stays None, for a result that the loss does not depend on; that of the output, "d_out", has to be given.

    Raises
    ------
    TypeError, ValueError
        Where one is of a wrong type, dtype, shape, library or device.
    """
    found: list[Any] = []
    for name, (gradient, shape) in given.items():
        x: Any = gradient
        if x is not None or name == "d_out":
            check_gradient(name, x, shape, like)
            x = raised(x)
        found.append(x)
    return found


def returned(gradients: Mapping[str, Array], names: Iterable[str], like: Array) -> dict[str, Array]:
    """Return the named gradients in the dtype of the inputs."""
    return {name: x if (x := gradients[name]).dtype == like.dtype else cast(x, like) for name in names}


def cast(x: Array, like: Array) -> Array:
    """Return x in the dtype of another array."""
    return x if x.dtype == like.dtype else namespace(x).astype(x, like.dtype)
