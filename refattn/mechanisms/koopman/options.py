"""What may be chosen: static choices of the core, checked once, and its differentiable numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.arguments import check_arrays, check_floating, check_number
from refattn.mechanisms.koopman.kernel import KERNELS, Kernel
from refattn.mechanisms.koopman.operator import FITS
from refattn.mechanisms.koopman.perturbation import PERTURBATIONS
from refattn.xp import Array, concrete, device, is_array, namespace

MEAN = 0.1
"""Ridge and epsilon where none is given: the mean 1 / (1 + b) of their distribution Beta(1, b) with b = 9."""

CANDIDATES = 8
"""The most candidates for ridge and epsilon."""

JITTER = {"float64": 1e-8, "float32": 1e-4}
"""What is added to the diagonal of the Gram matrix, in units of its elements."""

SPACES = ("keys", "full")
SIMILARITIES = ("dot", "kernel")
SCALES = ("sum", "mean")

DIFFERENTIABLE = ("ridge", "epsilon", "bandwidth", "weight", "mix")


@dataclass(frozen=True)
class Options:
    """The static choices; see `refattn.mechanisms.koopman.core.forward`."""

    updates: int
    kernel: str
    degree: int
    constant: float
    fit: str
    space: str
    tau: float
    augment: bool
    ridge_scale: str
    perturbation: str
    similarity: str
    window: int | None
    jitter: float | None
    certify: bool

    def jitter_of(self, like: Array) -> float:
        """Return the jitter for arrays of the dtype of `like`."""
        if self.jitter is not None:
            return self.jitter
        return JITTER["float64" if namespace(like).finfo(like.dtype).bits == 64 else "float32"]


@dataclass(frozen=True)
class Numbers:
    """The differentiable numbers, as arrays of the dtype of the computation.

    `ridge` and `epsilon` are (candidates, updates after the first), or 1 in place of either; `ridge` may have a third
    axis, of the coordinates.
    """

    ridge: Array
    epsilon: Array
    bandwidth: Array
    weight: Array
    mix: Array

    def kernel(self, options: Options) -> Kernel:
        """Return the kernel."""
        return Kernel(options.kernel, self.bandwidth, self.weight, options.degree, options.constant)


def check_options(**given: Any) -> Options:
    """Return the choices; raise where one is of a wrong type or value."""
    check_whole("updates", given["updates"], 1)
    check_whole("degree", given["degree"], 1)
    if given["window"] is not None:
        check_whole("window", given["window"], 1)
    for name, among in (
        ("kernel", KERNELS),
        ("fit", FITS),
        ("space", SPACES),
        ("ridge_scale", SCALES),
        ("perturbation", PERTURBATIONS),
        ("similarity", SIMILARITIES),
    ):
        if not isinstance(given[name], str) or given[name] not in among:
            raise ValueError(f"{name}: got {given[name]!r}, needs one of {', '.join(among)}")
    for name in ("augment", "certify"):
        if not isinstance(given[name], bool):
            raise TypeError(f"{name}: got {type(given[name]).__name__}, needs a bool")
    tau = given["tau"]
    if isinstance(tau, bool) or not isinstance(tau, int | float) or tau not in (0, 1):
        raise ValueError(f"tau: got {tau!r}, needs 0 (the ridge draws the operator to 0) or 1 (to the identity)")
    for name in ("jitter", "constant"):
        value = given[name]
        if value is None and name == "jitter":
            continue
        number = check_number(name, value)
        if not isinstance(number, float) or number < 0.0:
            raise ValueError(f"{name}: got {value!r}, needs a finite number of at least 0")
        given[name] = number
    if given["augment"] and given["space"] == "full":
        raise ValueError('augment: got True with space="full", which holds the coordinates already; needs space="keys"')
    if given["certify"] and given["kernel"] == "linear+polynomial":
        raise ValueError("certify: got True for a polynomial kernel, whose slope has no bound; needs another kernel")
    return Options(**{**given, "tau": float(tau)})


def check_numbers(options: Options, like: Array, **given: Any) -> Numbers:
    """Return the numbers as arrays like `like`; raise where one is of a wrong type, shape or value."""
    xp, later = namespace(like), max(options.updates - 1, 1)
    whole: dict[str, Array] = {}
    for name in ("bandwidth", "weight", "mix"):
        number = check_number(name, given[name], positive=True)
        whole[name] = _placed(name, number, like)
    for name in ("ridge", "epsilon"):
        value = MEAN if given[name] is None else given[name]
        one = not is_array(value) or tuple(getattr(value, "shape", ())) == ()
        x = _placed(name, check_number(name, value) if one else value, like)
        shape = (1,) * (2 - len(x.shape)) + tuple(x.shape)
        own, width = name == "ridge" and len(shape) == 3, like.shape[-1]
        if len(shape) != 2 + own or not 1 <= shape[0] <= CANDIDATES or shape[1] not in (1, later):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, needs a number, ({later},) for the updates after the first, or "
                f"(at most {CANDIDATES} candidates, {later})"
            )
        if own and shape[2] != width:
            raise ValueError(f"ridge: got shape {shape}, needs one number for each of the {width} coordinates")
        low = x <= 0.0 if name == "ridge" else x < 0.0
        if concrete(xp.any(low | ~xp.isfinite(x))):
            raise ValueError(
                f"{name}: got {value}, needs finite numbers {'above' if name == 'ridge' else 'of at least'} 0"
            )
        whole[name] = xp.reshape(x, shape)
    candidates = {name: whole[name].shape[0] for name in ("ridge", "epsilon")}
    if len({n for n in candidates.values() if n != 1}) > 1:
        raise ValueError(f"epsilon: got {candidates['epsilon']} candidates, the ridge has {candidates['ridge']}")
    return Numbers(**whole)


def _placed(name: str, value: Any, like: Array) -> Array:
    """Return a number or an array as an array of the dtype of `like`."""
    xp = namespace(like)
    if not is_array(value):
        return xp.asarray(value, dtype=like.dtype, device=device(like))
    if type(value).__module__.partition(".")[0] == "numpy" and value.shape == ():
        return xp.asarray(float(value), dtype=like.dtype, device=device(like))
    check_arrays(q=like, **{name: value})
    check_floating(**{name: value})
    return xp.astype(value, like.dtype, copy=False)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise where a value is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}, needs a whole number of at least {least}")
