"""The public core of Koopman attention: arguments are checked once, cast once, and handed to an implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from refattn import equations
from refattn.args import (
    ROUNDS,
    Maybe,
    Real,
    check,
    check_arrays,
    check_choice,
    check_floating,
    check_number,
    check_whole,
    naming,
)
from refattn.mechanisms.core_arguments import check_saved, enter, implementation_of, returned, upstream
from refattn.mechanisms.koopman import definition, dense, rounding_error
from refattn.mechanisms.koopman.implementations import shared
from refattn.mechanisms.koopman.options.fits import FITS, Fit, Stein
from refattn.mechanisms.koopman.options.kernel import KERNELS, Kernel, Own, kernel_of
from refattn.mechanisms.koopman.options.own_kernel import check_own
from refattn.mechanisms.koopman.options.perturbation import (
    PERTURBATIONS,
    STALLED,
    KoopmanInverseError,
    Perturbation,
    failure_of,
    first_that_inverts,
    picked,
    picked_backward,
)
from refattn.mechanisms.koopman.options.ridges import OneRidge, RidgeByCoordinate
from refattn.mechanisms.koopman.options.similarity import SIMILARITIES
from refattn.mechanisms.koopman.options.spaces import SPACES
from refattn.mechanisms.option_kinds import choose
from refattn.mechanisms.precision import bound_of, report
from refattn.mechanisms.record import Unsupported
from refattn.mechanisms.use_definition import backward_of_definition, defined_by
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import Causal
from refattn.tree import Shown
from refattn.xp import Array, concrete, device, dtype_name, is_array, namespace, raised, widest, zeros

IMPLEMENTATIONS: dict[str, Any] = {"dense": dense, "shared": shared}

LARGEST = 2**25
"""Elements of all matrices that the dense implementation may hold at once; it takes a few times as much memory."""

DENSE_UP_TO = 2**12
"""Such elements up to which `implementation="auto"` takes the dense implementation."""

MEAN = 0.1
"""Ridge and epsilon where none is given: the mean 1 / (1 + b) of their distribution Beta(1, b) with b = 9."""

CANDIDATES = 64
"""The most candidates for ridge and epsilon."""

JITTER = {"float64": 1e-8, "float32": 1e-4}
"""What is added to the diagonal of the Gram matrix, in units of the kernel's weight + 1."""

KINDS: dict[str, Mapping[str, type[Any]]] = {"kernel": KERNELS, "fit": FITS, "perturbation": PERTURBATIONS}
"""The options that are families, with their kinds by name."""

FAMILIES: dict[str, Callable[[Any], Any]] = {name: partial(choose, name, kinds=kinds) for name, kinds in KINDS.items()}
FAMILIES["kernel"] = kernel_of
"""What makes an object of such an option."""

DIFFERENTIABLE = ("ridge", "epsilon", "bandwidth", "weight", "mix")


@dataclass(frozen=True, repr=False)
class Saved(Shown):
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    implementation
        The implementation that ran.
    trajectory
        The queries q^0, q^1, ..., the last of them the output, (b, h, i, d) each, in the dtype that was computed in.
    error
        (b, h, i): an estimate of the relative error of the output by rounding, before it is cast to the dtype of the
        inputs. It is 0 with one update, which solves nothing.
    """

    implementation: str
    trajectory: tuple[Array, ...]
    error: Array
    shape: tuple[int, ...]  # of the output
    inputs: tuple[Array, Array, Array]  # q, k, v: for their shapes and dtype
    given: dict[str, tuple[int, ...]]  # the differentiable numbers that were given, with their shapes
    inner: Any
    tables: dict[str, Array]  # ridge and epsilon, for each candidate and update
    chosen: tuple[int, ...]  # the candidate of each update from the second on
    repeated: tuple[Array, ...] | None  # the arguments of the implementation, where it was computed again
    seen: dict[str, Any]  # mask and offset


def _as_printed(options: dict[str, Any], q: Array, k: Array, v: Array) -> str | None:
    low = getattr(getattr(q, "dtype", None), "itemsize", 8) < 8
    options.setdefault("jitter", JITTER["float32" if low else "float64"])
    return None


@defined_by(definition, _as_printed, widest)
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    updates: int = 2,
    kernel: str | Kernel = "rbf",
    space: str = "keys",
    fit: str | Fit = "stein",
    perturbation: str | Perturbation = "identity",
    similarity: str = "dot",
    jitter: float | None = None,
    mask: Array | None = None,
    causal: Causal = False,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Queries q, updated by a Koopman operator that is fitted to the trajectory of each.

    `refattn show koopman > koop.py` writes the definition, how it is computed, as one file on NumPy alone; in a block
    ``with ra.reading():`` a debugger steps through it.

    Parameters
    ----------
    q
        (b, h, i, d), float64, float32, float16 or bfloat16. All are computed in float64 where the library has it, since
        the systems to solve may lose all digits of float32; JAX has it if ``jax_enable_x64`` is set.
    k
        (b, g, j, d) with g a divisor of h: each key/value head serves h/g consecutive query heads.
    v
        (b, g, j, d): as wide as k, because what a query attends is its next place.
    updates
        m, at least 1. The first update is plain attention; each later one fits an operator to all transitions so far.
    kernel
        `Linear` (x . y alone), or with a second kernel `Rbf`, `Matern32`, `Matern52` or `Polynomial`, with a bandwidth
        and a weight. As every family of options an object, its name ("rbf"), or text ("rbf(bandwidth=2.0)"). `Own` is
        a second kernel of your own, an object; "rational" is one that the library has, as an example.
    space
        "keys": the operator acts on the span of the kernel's sections at the keys; "augmented": on that of the
        coordinate functions, too; "full": on all functions.
    fit
        `Stein` or `Separable`, with the ridge; the latter with an operator of limited norm or rank, too.
    perturbation
        `Identity`, `Shift` or `Pencil`, with epsilon. `Shift` is the article's words taken literally, and has no
        inverse in up to 4 % of calls with random numbers and two updates, in more than half with four: docs/deviations.
    similarity
        "dot" (q . k / sqrt(d)) or "kernel": what the softmax is taken of.
    jitter
        At least 0: what is added to the diagonal of the Gram matrix, in units of the kernel's weight + 1 (of 1 where
        the kernel is x . y alone). None means 1e-8 for arguments in float64 and 1e-4 for others.
    mask
        Boolean, broadcastable to (b, h, i, j); True = may attend, and is an observable of the query.
    causal
        False; True or "bottom_right": the last query sees every key; "top_left": query i sees keys 0 to i.
    implementation
        "dense", "shared" (one factorisation for all queries, in chunks: where all see the same keys, or the fit is
        separable), or "auto".

    Returns
    -------
    out : Array
        (b, h, i, d): the last query of each trajectory; 0 for a query that sees no key.
    saved : Saved
        What `backward` reads, with `saved.trajectory` and `saved.error`.

    Warns
    -----
    PrecisionWarning
        Where rounding may have moved the output by more than 1e-6 of its size, for arguments in float64, or 1e-2.

    Raises
    ------
    KoopmanInverseError
        Where psi was not inverted for some query by any candidate. Under ``jax.jit`` the query is NaN instead, and
        only the first candidate is tried. Numbers that come in as NaN or infinite go on as NaN, and raise nothing.
    PrecisionError
        Where rounding may have moved the output by half of its size. Under ``jax.jit`` nothing is said of rounding.
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, a choice, an alignment, the implementation or a device does not fit, or psi is not
        certified.

    Notes
    -----
    Equations KOOP.1 to KOOP.15 of `refattn.mechanisms.koopman.dense`. Source: Tie 2024; Khosravi 2023
    (arXiv:2208.01681).

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.koopman.forward(q, k, v, perturbation=ra.koopman.Identity(epsilon=0.2))
    >>> out.shape, len(saved.trajectory)
    ((1, 1, 2, 2), 3)
    """
    call = enter(q, k, v, mask=mask, causal=causal)
    wide = widest(call.q), widest(call.k), widest(call.v)
    if v.shape[3] != q.shape[3]:
        raise ValueError(
            f"v: got width {v.shape[3]}, needs {q.shape[3]} as q: what is attended is the query's next place"
        )
    check_choices(updates=updates, space=space, similarity=similarity, jitter=jitter)
    families = chosen_families(kernel=kernel, fit=fit, perturbation=perturbation)
    jitter = jitter_of(q) if jitter is None else jitter
    options, given, tables = placed(
        wide[0], updates=updates, space=space, similarity=similarity, jitter=jitter, **families
    )
    chosen = dispatch(implementation, options, call.mask, call.offset, call.plane, q.shape[3])
    trajectory: tuple[Array, ...]
    if 0 in call.plane:
        nothing = 0.0 * wide[0]
        trajectory = (wide[0], *([nothing] * updates))
        error = zeros(q.shape[:3], nothing)
        return call.back(nothing), Saved(
            chosen, trajectory, error, tuple(q.shape), (q, k, v), given, None, {}, (), None, {}
        )

    seen = {"mask": call.mask, "offset": call.offset}

    def run(candidates: tuple[int, ...]) -> tuple[Array, Any, KoopmanInverseError | None]:
        taken = replace(options, **{name: picked(table, candidates) for name, table in tables.items()})
        out, inner = equations.active(IMPLEMENTATIONS[chosen]).forward(*wide, **seen, options=taken)
        lefts = inner.left
        for left in lefts:  # under jax.jit nothing is raised
            out = namespace(out).where((left <= STALLED)[..., None], out, float("nan"))
        failures = (failure_of(left, partial(_lost, *wide), n) for n, left in enumerate(lefts, start=2))
        return out, inner, next((failure for failure in failures if failure is not None), None)

    out, inner, taken = first_that_inverts(run, max(x.shape[0] for x in tables.values()), updates - 1)
    error, bound = inner.error, bound_of(q)
    again = not equations.is_active() and rounding_error.is_true(rounding_error.suspects(error, out, bound))
    if again:
        doubtful = rounding_error.suspects(error, out, bound)
        others = [_again(chosen, *each, seen) for each in rounding_error.repeats(wide, inner.options)]
        found = rounding_error.apart(out, [None if x is None else x[0] for x in others], -1)
        error = namespace(out).where(doubtful, found, error)
        report("out", error, bound, rounding_error.needs_of(out), stacklevel=3)
    rest = (given, inner, tables, taken, wide if again else None, seen)
    return call.back(out), Saved(chosen, inner.trajectory, error, tuple(out.shape), (q, k, v), *rest)


def _again(chosen: str, arrays: tuple[Array, ...], options: dense.Options, seen: dict[str, Any]) -> Any:
    """Return what an implementation gives; None where it cannot invert psi, or factor the Gram matrix."""
    try:
        out, inner = IMPLEMENTATIONS[chosen].forward(*arrays, **seen, options=options)
    except ValueError:
        return None
    return out, inner


@backward_of_definition
@naming("saved")
def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, i, d): gradient of the loss with respect to `out`.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", and "ridge", "epsilon", "bandwidth", "weight" and "mix" where they were given, each of the shape
        of its argument. A candidate that was not taken has gradient 0.

    Raises
    ------
    PrecisionError
        Where rounding may have moved a gradient by half of its largest element.
    TypeError, ValueError
        Where the gradient is of a wrong type, dtype, shape, library or device.

    Warns
    -----
    PrecisionWarning
        Where rounding may have moved a gradient by more than 1e-6, for arguments in float64, or 1e-2 of its largest
        element.

    Notes
    -----
    Equations dKOOP.1 to dKOOP.weight. Called twice it gives the same bits.
    """
    check_saved(saved, Saved)
    like = saved.inputs[0]
    d_wide = widest(upstream(like, d_out=(d_out, saved.shape))[0])
    if saved.inner is None:
        gradients = {name: raised(0.0 * x) for name, x in zip("qkv", saved.inputs, strict=True)}
    else:
        implementation = IMPLEMENTATIONS[saved.implementation]
        gradients = equations.active(implementation).backward(saved.inner, d_wide)
        if saved.repeated is not None and not equations.is_active():
            calls = rounding_error.repeats(saved.repeated, saved.inner.options)
            others = [_again(saved.implementation, *each, saved.seen) for each in calls]
            found = [None if x is None else implementation.backward(x[1], d_wide) for x in others]
            xp = namespace(d_wide)
            loss, arrays = xp.sum(xp.abs(d_wide * saved.trajectory[-1])), dict(zip("qkv", saved.repeated, strict=True))
            for name in ("q", "k", "v", *(name for name in saved.given if name in gradients)):
                least = rounding_error.FAINT * loss / (1.0 + (xp.max(xp.abs(arrays[name])) if name in arrays else 0.0))
                each = [None if x is None else x[name] for x in found]
                error = rounding_error.apart(gradients[name], each, None, least)
                report(f"gradient of {name}", error, bound_of(like), rounding_error.needs_of(d_wide), stacklevel=4)
        for name, table in saved.tables.items():
            gradients |= {name: picked_backward(table, saved.chosen, gradients[name])} if saved.chosen else {}
    for name, shape in saved.given.items():
        gradients[name] = _shaped(gradients.get(name), shape, raised(like))
    return returned(gradients, ("q", "k", "v", *saved.given), like)


def jitter_of(like: Array) -> float:
    """Return the jitter of a call where none is given, for arguments of the dtype of `like`."""
    return JITTER["float64" if dtype_name(like) == "float64" else "float32"]


def _lost(q: Array, k: Array, v: Array) -> Array:
    """Return whether a query (b, h, i), or the keys and values of its head, are not finite."""
    xp = namespace(q)
    of_heads = repeat_heads(xp.sum(0.0 * k + 0.0 * v, axis=(-2, -1))[:, :, None, None], q.shape[1])[..., 0]
    return xp.isnan(xp.sum(0.0 * q, axis=-1) + of_heads)


def check_choices(*, updates: Any, space: Any, similarity: Any, jitter: Any) -> None:
    """Raise where an option that is no family is of a wrong type or value."""
    check_whole("updates", updates, 1, ROUNDS)
    check_choice("space", space, tuple(SPACES))
    check_choice("similarity", similarity, tuple(SIMILARITIES))
    check("jitter", jitter, Maybe(Real(0.0)))


def chosen_families(**given: Any) -> dict[str, Any]:
    """Return the kernel, the fit and the perturbation that are meant; raise where they do not go together."""
    found = {name: FAMILIES[name](value) for name, value in given.items()}
    if found["perturbation"].certify and found["kernel"].steepest is None:
        raise ValueError("certify: got True for a kernel whose slope has no bound, needs another one")
    return found


def placed(
    like: Array,
    *,
    updates: int,
    kernel: Kernel,
    space: str,
    fit: Fit,
    perturbation: Perturbation,
    similarity: str,
    jitter: float | None,
) -> tuple[dense.Options, dict[str, tuple[int, ...]], dict[str, Array]]:
    """Return what the implementations are given, numbers as arrays like `like`, and the shapes of the numbers that were
    given.

    Last come ridge and epsilon for all candidates; the options have those of the first.
    """
    later = updates - 1
    owners = {"ridge": fit, "epsilon": perturbation, "bandwidth": kernel, "weight": kernel, "mix": perturbation}
    asked = {n: getattr(owner, n) for n, owner in owners.items() if n in [field.name for field in fields(owner)]}  # type: ignore[arg-type]
    given = {name: tuple(getattr(x, "shape", ())) for name, x in asked.items() if x is not None}
    usual = {"bandwidth": math.sqrt(like.shape[3]), "weight": 1.0, "mix": 1.0}
    numbers = {}
    for name, value in usual.items():
        number = value if asked.get(name) is None else check_number(name, asked[name], positive=True)
        numbers[name] = _like(name, number, like)
    tables = {name: table(name, asked[name], like, later) for name in ("ridge", "epsilon")}
    candidates = {name: x.shape[0] for name, x in tables.items()}
    if len({n for n in candidates.values() if n != 1}) > 1:
        raise ValueError(f"epsilon: got {candidates['epsilon']} candidates, the ridge has {candidates['ridge']}")
    kernel = replace(kernel, **{n: x for n, x in numbers.items() if n in asked and n != "mix"})  # type: ignore[type-var]
    if isinstance(kernel, Own):
        check_own(kernel, like, space)
    jitter = jitter_of(like) if jitter is None else jitter
    if "mix" in asked:
        perturbation = replace(perturbation, mix=numbers["mix"])  # type: ignore[call-arg]
    options = dense.Options(
        updates=updates,
        similarity=SIMILARITIES[similarity](kernel),
        kernel=kernel,
        space=SPACES[space],
        jitter=float(jitter),
        fit=fit.solver(),
        ridge=picked(tables["ridge"], (0,) * (updates - 1)),
        ridges=RidgeByCoordinate() if len(tables["ridge"].shape) == 3 else OneRidge(),
        scale=fit.scale,
        tau=float(fit.tau),
        window=fit.window,
        perturbation=perturbation,
        epsilon=picked(tables["epsilon"], (0,) * (updates - 1)),
        certify=perturbation.certify,
    )
    return options, given, tables


def table(name: str, value: Any, like: Array, later: int) -> Array:
    """Return a ridge or an epsilon as an array (candidates or 1, updates after the first or 1[, d])."""
    value = MEAN if value is None else value
    one = not is_array(value) or tuple(getattr(value, "shape", ())) == ()
    x = _like(name, check_number(name, value) if one else value, like)
    shape = (1,) * (2 - len(x.shape)) + tuple(x.shape)
    xp, own, width = namespace(like), name == "ridge" and len(shape) == 3, like.shape[-1]
    if len(shape) != 2 + own or not 1 <= shape[0] <= CANDIDATES or shape[1] not in (1, later):
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, needs a number, ({later},) for the updates after the first, or "
            f"(at most {CANDIDATES} candidates, {later})"
        )
    if own and shape[2] != width:
        raise ValueError(f"ridge: got shape {shape}, needs one number for each of the {width} coordinates")
    low = x <= 0.0 if name == "ridge" else x < 0.0
    fine = type(value) is float and 0.0 < value < math.inf  # known on the host: no look at the device
    if not fine and concrete(xp.any(low | ~xp.isfinite(x))):
        raise ValueError(f"{name}: got {value}, needs finite numbers {'above' if name == 'ridge' else 'of at least'} 0")
    return xp.reshape(x, shape)


def dispatch(
    implementation: str,
    options: dense.Options,
    mask: Array | None,
    offset: int | None,
    plane: tuple[int, ...],
    width: int,
) -> str:
    """Return the implementation to run for scores of a shape (b, h, i, j) and points of a width."""
    size, why = _elements(options, plane, width), _not_shared(options, mask, offset, plane)
    chosen = implementation_of(
        implementation, IMPLEMENTATIONS, usual="shared" if why is None and size > DENSE_UP_TO else "dense", plane=plane
    )
    if chosen == "shared" and why is not None:
        raise Unsupported(f'implementation: got "shared" with {why}, or implementation="dense"')
    if chosen == "dense" and size > LARGEST:
        instead = 'needs implementation="shared"' if why is None else f"{why};"
        raise Unsupported(
            f"implementation: got {implementation!r} for a system for each query, with {size} elements, {instead} "
            f"or matrices of at most {LARGEST} elements"
        )
    return chosen


def _not_shared(options: dense.Options, mask: Array | None, offset: int | None, plane: tuple[int, ...]) -> str | None:
    """Return what keeps the shared implementation from running, and what it needs instead; None where it can run."""
    if options.updates > 1 and mask is not None and mask.shape[2] != 1:
        return "a mask that differs between queries, needs one of shape (..., 1, keys)"
    if options.updates > 1 and offset is not None and offset < plane[3] - 1 and isinstance(options.fit, Stein):
        return 'fit="stein" where the future is hidden, needs fit="separable"'
    return None


def _elements(options: dense.Options, plane: tuple[int, ...], width: int) -> int:
    """Return how many elements the matrices of the dense implementation have together."""
    b, h, queries, keys = plane
    if options.updates == 1:
        return 0
    transitions = options.updates - 1 if options.window is None else min(options.window, options.updates - 1)
    rows = transitions if isinstance(options.fit, Stein) else 1
    return b * h * queries * (options.space.size(keys, width) * rows) ** 2


def _like(name: str, value: Any, like: Array) -> Array:
    """Return a number or an array as an array of the dtype of `like`."""
    xp = namespace(like)
    if not is_array(value):
        return xp.full((), value, dtype=like.dtype, device=device(like))
    if type(value).__module__.partition(".")[0] == "numpy" and value.shape == ():
        return xp.asarray(float(value), dtype=like.dtype, device=device(like))
    check_arrays(q=like, **{name: value})
    check_floating(**{name: value})
    return xp.astype(value, like.dtype, copy=False)


def _shaped(gradient: Array | None, shape: tuple[int, ...], like: Array) -> Array:
    """Return the gradient of an option in the shape of the option; 0 where it was not used."""
    if gradient is None:
        return zeros(shape, like)
    xp = namespace(like)
    return xp.reshape(gradient if math.prod(gradient.shape) == math.prod(shape) else xp.sum(gradient), shape)
