"""How a kernel becomes a fault: a wrong kernel with a report, which may be served in several sizes of its tiles."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, get_type_hints

import numpy as np

from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.bugs.emulator import Array, Flash, Kernel, Unknown, low

GITHUB = "https://github.com/"

MECHANISM = "softmax"
"""The mechanism whose kernels are flash kernels."""

FLASH = ("readings", "online", "scores", "masks", "memory", "splits", "options", "gradients", "addresses")
"""The modules that hold the faults of these."""

ROOMS = {MECHANISM: FLASH, "growing": FLASH, "delta": ("states",), "higher_order": ("sums",)}
"""The modules that hold faults, by mechanism; where the core of one is that of another the faults are the same."""

TILES = (16, 32, 64, 128, 8)
"""Sizes of tiles that are tried, those of kernels first."""

UNEQUAL = ((64, 32), (128, 64), (128, 32), (64, 128), (32, 64), (16, 32), (32, 16))
"""Unequal tiles that are tried where both sizes matter."""

SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "": {"": (64, 64)},
    "rows": {f" (tiles of {n} queries)": (n, 64) for n in TILES},
    "columns": {f" (tiles of {n} keys)": (64, n) for n in TILES},
    "chunk": {f" (chunks of {n} tokens)": (n, 64) for n in (64, 32, 16, 128, 8)},
    "both": {f" (tiles of {n} x {m})": (n, m) for n, m in (*((n, n) for n in TILES), *UNEQUAL)},
}
"""The sizes, of queries and of keys, that give different results, by what of tiles matters and by what is said."""

RECOMPUTED = {
    "given", "head_of", "scale_of", "offset_of", "place_of", "window_of", "lengths_of", "mask_of", "bias_of", "keep_of",
    "starts", "tile", "keys", "values", "inside", "visible", "near", "exist", "allowed", "masked", "product",
    "masked_score", "sinks_of", "scaled", "capped", "biased", "hidden", "scores", "exp", "dropped"
}  # fmt: skip
"""Steps of the forward that the backward goes through again."""

BACKWARD = "in the backward alone: "
"""What the words of an error begin with that the forward of a kernel does not have, and its backward has."""

AGAIN = {"v": ("dSM.4",), "k": ("dSM.q",), "q": ("dSM.k",), "d_out": ("dSM.4",), "keep": ("dSM.4",)}
"""Equations of the backward that read an input, beside those that weights enter which it computes again."""

Kind = TypeVar("Kind", bound=type[Kernel])
Step = TypeVar("Step", bound=Callable[..., Any])

_FOUND: list[tuple[str, WrongKernel]] = []


def fault(*of: str, link: str, tiles: str = "") -> Callable[[Kind], Kind]:
    """Register a kernel, some of whose steps are wrong, as a fault.

    Parameters
    ----------
    of
        What it is an error of: ids of equations first, then names of conventions or inputs.
    link
        The report on GitHub, OWNER/NAME/issues/NUMBER; "" if none is known.
    tiles
        Which sizes of its tiles matter, a key of `SIZES`.

    The first sentence of its docstring says what is wrong. If the backward computes a wrong step again, the same error
    in the backward alone is registered, too.
    """

    def register(kernel: Kind) -> Kind:
        words = " ".join((kernel.__doc__ or "").split()).rstrip(".")
        words = words[:1].lower() + words[1:]
        steps = {name for kind in kernel.__mro__ if kind not in Flash.__mro__ for name in vars(kind)}
        _FOUND.append((kernel.__module__, one := served(kernel, words, of, link and GITHUB + link, tiles)))
        if issubclass(kernel, Flash) and steps & RECOMPUTED and "lse_given" not in steps and not of[0].startswith("d"):
            _FOUND.append((f"{kernel.__module__} again", _again(one, functools.partial(in_the_backward, kernel))))
        return kernel

    return register


def reading(module: str, name: str, convention: WrongKernel, of: tuple[str, ...], link: str) -> None:
    """Register as a fault of a module that a flash kernel reads other arguments: those of a convention.

    Its words are the name of the convention. What it does not read has a gradient of 0. `of` is what else
    it is an error of.
    """
    assert convention.change is not None
    change = convention.change

    def changed(call: Call) -> Call:
        given = {**call.inputs, **call.options}
        given |= change(given)
        arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
        options = {name: x for name, x in given.items() if name not in arrays and x is not None}
        return replace(call, inputs=arrays, options=options)

    def run(flash: Callable[[type[Flash], Call], dict[str, Array]], call: Call) -> dict[str, Array]:
        found = flash(Flash, changed(call))
        if call.d_out is not None:
            unread = (name for name, x in call.inputs.items() if x.dtype.kind == "f" and f"d_{name}" not in found)
            found |= {f"d_{name}": np.zeros_like(call.inputs[name]) for name in unread}
        return found

    ids, sizes = (*of, convention.name), SIZES[""]
    one = WrongKernel(name, "fault", functools.partial(run, _run), convention.name, ids, GITHUB + link, sizes=sizes)
    _FOUND.append((module, one))
    _FOUND.append((f"{module} again", _again(one, functools.partial(run, in_the_backward))))


def _again(one: WrongKernel, run: Callable[[Call], dict[str, Array]]) -> WrongKernel:
    """Return the fault of a kernel that has another one in its backward alone."""
    return replace(one, run=run, wrong=BACKWARD + one.wrong, of=(*one.of, *read_again(one.of)), backward=True)


def wrong(step: Callable[..., Any], *of: str, link: str, tiles: str = "") -> Callable[[Step], Step]:
    """Register a kernel as a fault that has one function in place of a step, such as ``Flash.scaled``; see `fault`.

    The kernel is what the function's `self` is annotated as; `sum_in_half` makes the fault "SumInHalf".
    """

    def register(function: Step) -> Step:
        name = "".join(word[0].upper() + word[1:] for word in function.__name__.split("_"))
        told = {"__doc__": function.__doc__, "__module__": function.__module__}
        fault(*of, link=link, tiles=tiles)(
            type(name, (get_type_hints(function)["self"],), {step.__name__: function, **told})
        )
        return function

    return register


def served(
    kernel: type[Kernel], wrong: str, of: tuple[str, ...] = ("",), link: str = "", tiles: str = ""
) -> WrongKernel:
    """Return the record of a kernel."""
    run = functools.partial(_run, kernel)
    return WrongKernel(kernel.__name__, "fault", run, wrong, of, link, of[0].startswith("d"), SIZES[tiles])


def read_again(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the equations of the backward that weights, or inputs of these names, enter."""
    return ("dSM.2", "dSM.v", *(id for name in names for id in AGAIN.get(name, ())))


def _run(kind: type[Kernel], call: Call) -> dict[str, Array]:
    """Return what a kernel computes; for a short type as kernels do, before it is stored."""
    short = call.dtype in ("float16", "bfloat16") and not call.exact
    rows, columns = call.size
    kernel = kind(rows, columns, functools.partial(low, dtype=call.dtype)) if short else kind(rows, columns)
    if isinstance(kernel, Flash):
        kernel.d_lse = call.further.get("d_lse")
    return kernel.run(call.inputs, call.options, call.d_out, np.float64 if call.exact else call.inputs["q"].dtype)


def in_the_backward(kind: type[Flash], call: Call) -> dict[str, Array]:
    """Return the gradients of a kernel whose backward begins with the right outputs, whatever its forward is."""
    if call.d_out is None:
        raise Unknown("no gradient was asked")
    kernel, out, lse = kind(*call.size), call.outputs["out"], call.outputs["lse"]
    kernel.d_lse = call.further.get("d_lse")
    kernel.forward = lambda: (out, lse[..., None])  # type: ignore[method-assign]
    kernel.written = lambda out, lse: (out, lse)  # type: ignore[method-assign]
    found = kernel.run(call.inputs, call.options, call.d_out)
    return {name: x for name, x in found.items() if name.startswith("d_")}


@functools.cache
def faults(
    mechanism: str = MECHANISM, *, again: bool = False, without: tuple[str, ...] = ()
) -> tuple[WrongKernel, ...]:
    """Return the faults of a mechanism's kernels, or those of the backward alone, but for those of some modules."""
    names = [room for room in ROOMS.get(mechanism, ()) if room not in without]
    rooms = [importlib.import_module(f"refattn.verify.bugs.{name}").__name__ for name in names]
    return tuple(one for room in rooms for where, one in _FOUND if where == room + (" again" if again else ""))


def flash(mechanism: str) -> bool:
    """Tell whether a mechanism's kernels are flash kernels, whose backward reads outputs and computes weights again."""
    return ROOMS.get(mechanism) == FLASH
