"""Error budgets: how far an honest kernel in a given dtype may be from the truth, element by element.

The truth is the dense implementation in float64. A budget is not a number that somebody chose: every equation of the
dense implementation is disturbed, many times, by random errors of the size of its rounding (unit roundoff times the
size of the terms that it sums, as the record tells), forward and backward, and the root mean square of what this does
to an output is the noise that any kernel with such roundings has to be granted. A last rounding to the storage type
comes on top.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations, philox
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import FLOAT8, SCALED, TYPES, has_gradient, round_to, spacing, stored
from refattn.instruments.products import products
from refattn.instruments.sized import Sized, sizes
from refattn.instruments.wrapper import plain
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.outcome import Floats, Truth
from refattn.verify.tolerance import quantised

UNTAGGED = ("products", "q", "k", "v")
"""What may be declared to be rounded and is no equation."""

DRAWS = 16
"""Disturbed runs per case: the noise is known to about 1/sqrt(2 * 16), that is 18 %."""

MORE = 1.5
"""Times that what declared roundings of factors do is granted: these errors are no upper bounds as those of sums are,
and of each element only as much is known as `DRAWS` tell."""

SMALLEST = 2.0**-500
"""An error that is always granted: the squares of smaller ones underflow."""

SIGMA = 3**-0.5
"""Root mean square of a rounding error in units of the unit roundoff. A disturbance has this size and a random sign, so
that where one rounding dominates its effect is known exactly."""


def evaluate(
    mechanism: Mechanism,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    upstream: Any,
    implementation: str = "",
    further: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a core; return its outputs and, where an upstream gradient is given, its gradients, by name.

    Without an implementation it is the definition. `further` are gradients of outputs beside `out`, by the names that
    the backward gives them.
    """
    assert mechanism.core is not None
    out, saved = mechanism.core.forward(
        **inputs, **options, implementation=implementation or mechanism.implementations[0]
    )
    values = {"out": out, **{name: getattr(saved, name) for name in mechanism.outputs}}
    if upstream is not None:
        values |= {f"d_{name}": g for name, g in mechanism.core.backward(saved, upstream, **(further or {})).items()}
    return values


Roundings = Mapping[str, str]
"""What a kernel rounds beside what every kernel rounds, and the type that it rounds to ("" is the storage type): ids of
equations, "q", "k" and "v" (a q that is multiplied by the scale first), and "products", the factors of matrix products.
Only q, k and v may be rounded to int8, with a factor of each head or of blocks of it.
"""

NONE: Roundings = MappingProxyType({})


def wide(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays in float64; masks as they are."""
    return {name: x.astype(np.float64) if has_gradient(x) else x for name, x in arrays.items()}


def truth(
    mechanism: Mechanism,
    case: Case,
    dtype: str,
    *,
    grad: bool,
    seed: int = 0,
    roundings: Roundings = NONE,
    **given: Any,
) -> Truth:
    """Return inputs, true results and error budget of a case in a storage type.

    `roundings` are equations that the kernel declares to round to the storage type, beside the record's. `given` are
    further arguments of `without_values`.
    """
    known = without_values(mechanism, case, dtype, grad=grad, seed=seed, **given)
    return granting(mechanism, case, known.stored["out"], known, roundings, seed)


def without_values(
    mechanism: Mechanism,
    case: Case,
    dtype: str,
    *,
    grad: bool,
    seed: int = 0,
    given: str = "",
    further: Iterable[str] = (),
    replaced: Mapping[str, NDArray[Any]] | None = None,
    result: str = "bfloat16",
    per: int | None = None,
) -> Truth:
    """Return what a kernel is given in a case: a truth that `granting` gives its values, which take most of the time.

    The inputs are rounded to `given` where that is another type than `dtype`, one that `dtype` holds. `further` are
    outputs beside `out` on which the loss of the gradients depends, too; `replaced` are inputs that are not those of
    the case.

    In formats with factors these are of so many tokens, `per` (`refattn.verify.tolerance.quantised`), and there are no
    gradients; the result is of the type `result`, and what kernels round on the way is rounded to that.
    """
    factors: dict[str, tuple[NDArray[Any], ...]] = {}
    times: dict[str, NDArray[Any]] = {}
    if dtype in SCALED:
        inputs, factors, times = quantised.scaled(mechanism, case, dtype, per=per, seed=seed)
        inputs, dtype = inputs | dict(replaced or {}), result
    else:
        inputs = make(mechanism.name, case, given or dtype, seed=seed) | dict(replaced or {})
    kept = "float32" if factors else dtype
    inputs = {name: stored(x.astype(np.float64), kept) if has_gradient(x) else x for name, x in inputs.items()}
    exact = quantised.products(inputs, times)
    upstream: dict[str, NDArray[Any]] = {}
    if grad:
        outputs = evaluate(mechanism, exact, case.options, None)
        for name in ("out", *further):
            pull = make_upstream(mechanism.name, case, name, outputs[name].shape, given or dtype, seed=seed)
            upstream[f"d_{name}"] = stored(pull.astype(np.float64), dtype)
    exact_names = frozenset(name for name, dtypes in case.exact.items() if dtype in dtypes and not factors)
    beside = dict.fromkeys(mechanism.outputs, "float64" if dtype == "float64" else "float32")
    types, d_out = {"out": dtype, **beside}, upstream.pop("d_out", None)
    return Truth(inputs, d_out, {}, {}, {}, types, exact_names, upstream, factors, times)


def granting(
    mechanism: Mechanism, case: Case, dtype: str, known: Truth, roundings: Roundings = NONE, seed: int = 0
) -> Truth:
    """Return a truth with the values of its inputs, and the error that is granted with such roundings."""
    values, errors = disturbances(mechanism, case, dtype, *_exact(known), roundings, seed, factored=known.times)
    types = {name: known.stored.get(name, dtype) for name in values}
    variance, bias = granted(values, errors, types, dtype)
    return replace(known, values=values, variance=variance, bias=bias, stored=types)


def _exact(known: Truth) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs and the upstream gradients of a truth in float64."""
    pulls = {} if known.upstream is None else {"d_out": known.upstream, **known.further}
    return quantised.products(known.inputs, known.times), wide(pulls)


def granted(
    values: Mapping[str, Floats], errors: Mapping[str, Floats], types: Mapping[str, str], dtype: str
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Return the variance and the bias that are granted where disturbed runs, the first axis, had such errors."""
    variance, bias = {}, {}
    for name, value in values.items():
        noise = np.sqrt(np.mean(errors[name] ** 2, axis=0))
        # Against the rounded truth an honest result is off by one spacing where the noise, of mean size 0.8 sigma,
        # carries it over a rounding boundary, and by the noise itself where that is larger. In float64 the truth has
        # errors of the same size as the result that is judged.
        whole = noise**2 + 0.8 * noise * spacing(value, types[name])
        variance[name] = whole * (2.0 if dtype == "float64" else 1.0)
        least = np.maximum(variance[name], SMALLEST**2)
        bias[name] = float(np.sqrt(np.mean([bias_of(name, error, least, value) ** 2 for error in errors[name]])))
    return variance, bias


def with_equations(
    mechanism: Mechanism,
    case: Case,
    dtype: str,
    known: Truth,
    types: Mapping[str, str],
    roundings: Roundings = NONE,
    seed: int = 0,
) -> Truth:
    """Return a truth that has the values of some equations of the forward, too, each with the type it came in.

    An equation that did not run, for an option was not given, stands for the one whose value goes on in its place.

    Raises
    ------
    KeyError
        Where an equation is none of the forward.
    """
    dtype = known.stored["out"] if known.factors else dtype
    more: dict[str, Any] = {"ids": types, "factored": known.times}
    values, errors = disturbances(mechanism, case, dtype, _exact(known)[0], {}, roundings, seed, **more)
    values, errors = ({id: x[id] for id in types} for x in (values, errors))
    variance, bias = granted(values, errors, types, dtype)
    return known.beside(values=values, variance=variance, bias=bias, stored=types)


def disturbances(
    mechanism: Mechanism,
    case: Case,
    dtype: str,
    inputs: Mapping[str, Any],
    upstream: Mapping[str, Any],
    roundings: Roundings = NONE,
    seed: int = 0,
    *,
    grown: Mapping[str, float] | None = None,
    ids: Iterable[str] = (),
    factored: Iterable[str] = (),
    of_int8: Mapping[str, Floats] | None = None,
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return the results of a call, and what rounding errors in every equation do to each: one more axis in front, for
    the draws.

    Parameters
    ----------
    inputs, upstream
        The arguments in float64, and by name the upstream gradients, d_out among them; none of a forward alone.
    grown
        How many times larger the errors of some equations are than this call tells.
    ids
        Equations that are results, too.
    factored
        Inputs that are numbers of few digits times factors: a kernel may round these products to float32.
    of_int8
        The factors of inputs that are rounded to int8; those of this call if it is no part of another.
    """
    if unknown := [name for name in roundings if name not in names_of_roundings(mechanism)]:
        names = ", ".join((*UNTAGGED, *mechanism.named_roundings))
        raise ValueError(f"roundings: got {', '.join(unknown)}, needs ids of {mechanism.name}, {names}")
    further = {name: x for name, x in upstream.items() if name != "d_out"}
    with equations.trace() as traced:
        values = evaluate(mechanism, inputs, case.options, upstream.get("d_out"), further=further)
    ran = {id: _ran(mechanism, id, traced) for id in ids}
    values |= {id: traced[key] for id, key in ran.items()}
    sizes = kernel_sizes(mechanism, {**inputs, **case.options, **upstream}, traced, dtype, roundings)
    sizes |= {id: sizes[id] * times for id, times in (grown or {}).items()}
    held = held_in(mechanism, dtype, roundings)
    low = untagged(roundings, dtype)
    if of_int8 is None:
        of_int8 = quantised.factors_of_int8(inputs, roundings)
    distinct = {name: np.unique(inputs[name], return_inverse=True) for name in factored}
    # Numbers of few digits come again, and the same sums of the same numbers err alike.
    alike = {key: np.unique(x, return_inverse=True)[1].reshape(x.shape) for key, x in traced.items() if distinct}
    errors: dict[str, Any] = {name: [] for name in values}
    if not (ran or held or low or distinct) and _can_stack(case, inputs, traced, values):
        stacked, pulled = ({name: _stacked(x) for name, x in given.items()} for given in (inputs, upstream))
        pull = pulled.pop("d_out", None)
        with equations.apply(_disturbance_of_all(sizes, unit_of(dtype), seed)):
            found = evaluate(mechanism, stacked, case.options, pull, further=pulled)
        for name, value in values.items():
            of_draws = finite(found[name]).reshape(DRAWS, *value.shape)
            errors[name] = np.where(np.isfinite(value), of_draws - finite(value), 0.0)
        return values, errors
    for draw in range(DRAWS):
        disturbing = equations.apply(disturbance(sizes, unit_of(dtype), draw, seed, held, alike))
        tracing: AbstractContextManager[Mapping[str, Any]] = equations.trace() if ran else nullcontext({})
        with tracing as steps, disturbing:
            given = {**inputs, **{name: _alike(*numbers, name, draw, seed) for name, numbers in distinct.items()}}
            found = _with_errors_of_factors(mechanism, case.options, given, upstream, low, of_int8, draw, seed)
        found |= {id: plain(steps[key]) for id, key in ran.items()}
        for name, value in values.items():
            # An output that is not finite has no noise.
            errors[name].append(np.where(np.isfinite(value), finite(found[name]) - finite(value), 0.0))
    return values, {name: np.stack(draws) for name, draws in errors.items()}


STACKED = 1 << 18
"""Traced numbers up to which all draws are made at once: what costs is that there are many calls of small arrays."""


def _can_stack(case: Case, inputs: Mapping[str, Any], traced: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Tell whether draws of a case can be elements of one batch: everything that it is given has an axis for that.

    What is summed over the batch, the gradient of a number, may be no result then; nothing else is computed from it.
    """
    axes = [case.inputs[name].axes if name in case.inputs else "" for name in inputs]
    if not all(each.startswith("b") for each in axes) or any(np.ndim(x) for x in case.options.values()):
        return False
    batch, size = inputs["q"].shape[:1], sum(np.size(x) for x in traced.values())
    kept = [*values.values(), *(x for key, x in traced.items() if np.ndim(x) or not key.startswith("d"))]
    return size <= STACKED and all(np.shape(x)[:1] == batch for x in kept)


def _stacked(x: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([x] * DRAWS)


def _disturbance_of_all(sizes: Mapping[str, Floats], unit: float, seed: int) -> equations.Hook:
    """Return the hook of one run whose batch has all draws, one after the other: what `disturbance` does to each."""
    passes: Counter[str] = Counter()

    def hook(id: str, name: str, value: Floats) -> Floats:
        key = f"{id}[{passes[id]}]" if passes[id] else id
        passes[id] += 1
        if not value.shape:
            return value
        each = value.reshape(DRAWS, -1)
        signs = SIGMA * _signs_of_all(each.shape[1] + 1, f"budget.{key}", seed)
        of_one = np.broadcast_to(sizes[key], (value.shape[0] // DRAWS, *value.shape[1:])).reshape(-1)
        return (each * (1.0 + unit * signs[:, -1:]) + signs[:, :-1] * of_one).reshape(value.shape)

    return hook


def _alike(numbers: Floats, at: NDArray[np.intp], name: str, draw: int, seed: int) -> Floats:
    """Return an array of so many distinct numbers, rounded to float32 in one draw: equal ones err alike."""
    signs = SIGMA * _signs(numbers.size, f"budget.{name}.factored", draw, seed)
    return np.asarray((numbers * (1.0 + TYPES["float32"].unit * signs))[at])


def _ran(mechanism: Mechanism, id: str, traced: Mapping[str, Any]) -> str:
    """Return the equation that ran in place of one whose option was not given."""
    while id not in traced:
        id = mechanism.fallback_equation[id]
    return id


def _with_errors_of_factors(
    mechanism: Mechanism,
    options: Mapping[str, Any],
    inputs: Mapping[str, Any],
    upstream: Mapping[str, Any],
    low: Mapping[str, str],
    of_int8: Mapping[str, Floats],
    draw: int,
    seed: int,
) -> dict[str, Any]:
    """Do what `evaluate` does with one draw of the errors of what is `untagged`, of such types."""

    def near(x: Floats, type_: str, name: str) -> Floats:
        signs = SIGMA * _signs(x.size, f"budget.{name}", draw, seed).reshape(x.shape)
        kind = TYPES[type_]
        least = of_int8.get(name, 1.0) * 2.0 ** (kind.lowest - kind.bits)
        size = MORE * np.maximum(kind.unit * np.abs(finite(x)), least)
        return np.asarray(np.where(np.isfinite(x) & (x != 0.0), x + signs * size, x))

    inputs = {n: near(x, low[n], n) if n in low else x for n, x in inputs.items()}
    further = {name: x for name, x in upstream.items() if name != "d_out"}
    if "products" not in low:
        return evaluate(mechanism, inputs, options, upstream.get("d_out"), further=further)
    product, numbers = low["products"], itertools.count(1)

    def change(x: Floats) -> Floats:
        name = f"factor {next(numbers)}"
        # What the type holds is multiplied as it is: inputs in a type that is as short.
        return x if np.array_equal(round_to(x, product), x, equal_nan=True) else near(x, product, name)

    with products(change) as unit:
        given = {n: unit.array(x) for n, x in inputs.items()}
        pulled = {n: unit.array(x) for n, x in upstream.items()}
        d_out = pulled.pop("d_out", None)
        return {n: plain(x) for n, x in evaluate(mechanism, given, options, d_out, further=pulled).items()}


def names_of_roundings(mechanism: Mechanism) -> tuple[str, ...]:
    """Return what may be declared to be rounded: equations by their ids first."""
    return (*mechanism.equations, *UNTAGGED, *mechanism.named_roundings)


def untagged(roundings: Roundings, dtype: str) -> dict[str, str]:
    """Return what is no equation and rounded to a type with fewer digits than there are: in float64 nothing is."""
    low = {n: roundings[n] or dtype for n in UNTAGGED if n in roundings and dtype != "float64"}
    # A q that was scaled is rounded to the storage type again.
    return {n: t for n, t in low.items() if TYPES[t].bits < TYPES[dtype].bits + (n != "products")}


def held_in(mechanism: Mechanism, dtype: str, roundings: Roundings) -> dict[str, str]:
    """Return the type by equation that a kernel declares to hold values in, beside those that every kernel rounds."""
    if dtype not in ("float16", "bfloat16"):
        return {}
    known = (id for id in roundings if id in mechanism.equations and id not in mechanism.stored)
    return {id: dtype for id in known if roundings[id] in ("", dtype)}


def unit_of(dtype: str) -> float:
    """Return the unit roundoff of the type that a kernel for this storage type computes in."""
    return TYPES["float64" if dtype == "float64" else "float32"].unit


def kernel_sizes(
    mechanism: Mechanism,
    given: Mapping[str, Any],
    traced: Mapping[str, Any],
    dtype: str,
    roundings: Roundings = NONE,
) -> dict[str, Floats]:
    """Return by equation id the size of its rounding error in a kernel for a storage type.

    `roundings` are equations that it rounds beside the record's; `given` and `traced` are those of `rounding_sizes`.
    """
    measured = operations(mechanism, given, traced)
    sizes = rounding_sizes(mechanism, given, traced, unit_of(dtype), measured)
    # What is below the smallest normal number may be flushed to 0, as most accelerators do; 0 is exact.
    flushed = 2.0 ** TYPES["float64" if dtype == "float64" else "float32"].lowest
    sizes = {key: np.hypot(size, np.where(size == 0.0, 0.0, flushed)) for key, size in sizes.items()}
    short = dtype in ("float16", "bfloat16")
    low = dict.fromkeys(mechanism.stored, dtype) if short else {}
    if product := untagged(roundings, dtype).get("products"):
        # The adjoint of a sum is taken from the output, with the errors that it has by then.
        low |= {id: product for id in mechanism.stored if id.startswith("d")}
    for id, type_ in roundings.items():
        if id in mechanism.equations and (type_ or short):
            for place in _felt_in(mechanism, id, type_, traced):
                low[place] = max(low.get(place, type_ or dtype), type_ or dtype, key=lambda name: TYPES[name].unit)
    counts = passes_of(traced)
    for key in [key for key in sizes if key.partition("[")[0] in low]:
        id = key.partition("[")[0]
        relative_to = mechanism.stored.get(id)
        size = np.abs(relative_to(given, Pass(traced, key, counts, measured)) if relative_to else traced[key])
        kind, size = TYPES[low[id]], finite(size)
        # Below the smallest normal number the spacing no longer shrinks with the value; 0 is exact. Numbers of float8
        # are scaled, so that the largest of a row is about 1.
        most = np.max(size, axis=-1, keepdims=True, initial=0.0) if low[id] in FLOAT8 else 1.0
        subnormal = np.where(size == 0.0, 0.0, most * 2.0 ** (kind.lowest - kind.bits))
        sizes[key] = np.hypot(sizes[key], np.maximum(kind.unit * size, subnormal))
    for name in {*roundings} & {*mechanism.named_roundings}:
        if (type_ := roundings[name] or dtype) != "float64":
            sizes_of = mechanism.named_roundings[name]
            for key in [key for key in sizes if key.partition("[")[0] in sizes_of]:
                size = sizes_of[key.partition("[")[0]](given, Pass(traced, key, counts, measured))
                sizes[key] = np.hypot(sizes[key], TYPES[type_].unit * np.abs(finite(size)))
    return sizes


def _felt_in(mechanism: Mechanism, id: str, dtype: str, traced: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the equations that a rounding is felt in: the next one, too, where kernels may sum before they round.

    Nobody sums numbers of float8.
    """
    later = mechanism.accumulates_before_rounding.get(id, ())
    of_sum = tuple(name for name in later if name in traced)[:1]
    return of_sum if of_sum and dtype in FLOAT8 else (id, *of_sum)


def rounding_sizes(
    mechanism: Mechanism,
    given: Mapping[str, Any],
    traced: Mapping[str, Any],
    unit: float,
    measured: Mapping[str, Floats] | None = None,
) -> dict[str, Floats]:
    """Return by equation id the size of its rounding error, in units of 1 / `unit`.

    It is what the operations round that compute an equation from those before it, or what the record tells where
    kernels do something else. `given` holds the arguments of the call and upstream gradients, `traced` the value of
    every equation, `measured` the `operations`.
    """
    counts = passes_of(traced)
    measured = operations(mechanism, given, traced) if measured is None else measured
    sizes = {}
    for key, value in traced.items():
        id = key.partition("[")[0]
        seen = Pass(traced, key, counts, measured)
        if id in mechanism.rounding_scales:
            known = mechanism.rounding_scales[id]
            terms = np.abs(value) if known is None else known(given, seen)
        elif id in mechanism.further_rounding_scales:
            terms = measured[key] + mechanism.further_rounding_scales[id](given, seen)
        else:
            terms = measured[key]
        sizes[key] = unit * finite(terms)
    return sizes


def operations(mechanism: Mechanism, given: Mapping[str, Any], traced: Mapping[str, Any]) -> dict[str, Floats]:
    """Return by equation what the dense implementation rounds on the way to it, in units of the unit roundoff.

    Equations whose size the record tells have none.
    """
    assert mechanism.core is not None
    found: dict[str, Floats] = {}
    passes: Counter[str] = Counter()
    told = {key: key.partition("[")[0] in mechanism.rounding_scales for key in traced}
    rests = dict(zip(traced, [*told.values()][1:], strict=False))  # whether the size of the next one is told

    def hook(id: str, name: str, value: Any) -> Any:
        key = f"{id}[{passes[id]}]" if passes[id] else id
        passes[id] += 1
        if key not in traced:
            return value
        if not told[key]:
            found[key] = np.broadcast_to(np.sqrt(value.square) if isinstance(value, Sized) else 0.0, value.shape)
        unit.resting = rests.get(key, False)
        return unit.array(traced[key])

    with sizes() as unit, equations.apply(hook):
        arrays = {name: unit.array(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        pulls = {name: arrays.pop(name) for name in given if name.startswith("d_")}
        _, saved = mechanism.core.forward(**arrays, implementation=mechanism.implementations[0])
        if pulls.get("d_out") is not None:
            mechanism.core.backward(saved, **pulls)
    return found


class Pass(Mapping[str, Any]):
    """What was traced, as the pass `key` of an equation sees it: other equations by their pass that belongs to it.

    Passes of the forward belong together counted from the last, which all equations of a repetition take part in; those
    of the backward from the first, which is the last of the forward.
    """

    def __init__(
        self, traced: Mapping[str, Any], key: str, counts: Mapping[str, int], measured: Mapping[str, Any]
    ) -> None:
        self.traced, self.key, self.counts, self.measured = traced, key, counts, measured
        id, _, number = key.partition("[")
        at = int(number.rstrip("]") or 0)
        self.from_last = at if id.startswith("d") else self._count(id) - 1 - at

    def _count(self, id: str) -> int:
        return self.counts.get(id, 0)

    def __getitem__(self, id: str) -> Any:
        number = self.from_last if id.startswith("d") else self._count(id) - 1 - self.from_last
        single = self._count(id) == 1
        return self.traced[id if single or number <= 0 else f"{id}[{number}]"]

    def size(self, id: str) -> Any:
        """Return the size of what the operations round that compute an equation."""
        return Pass(self.measured, self.key, self.counts, {})[id]

    def passes(self, id: str) -> list[Any]:
        """Return the values of all passes of an equation, in the order of the call."""
        return [self.traced[f"{id}[{n}]" if n else id] for n in range(self._count(id))]

    def __iter__(self) -> Iterator[str]:
        return iter(self.traced)

    def __len__(self) -> int:
        return len(self.traced)


def passes_of(traced: Mapping[str, Any]) -> Mapping[str, int]:
    """Return how many passes each equation has."""
    return Counter(key.partition("[")[0] for key in traced)


def disturbance(
    sizes: Mapping[str, Floats],
    unit: float,
    draw: int,
    seed: int = 0,
    held: Mapping[str, str] | None = None,
    alike: Mapping[str, NDArray[np.intp]] | None = None,
) -> equations.Hook:
    """Return a hook for one run that adds to each equation a random error of its size: a draw of what rounding does.

    Some equations are `held` in a type: their values, errors included, are rounded to it, up or down by chance, so that
    those which are near come to be equal, as they do in a kernel. The error before that is one more rounding, such as
    that of a product which is scaled afterwards. Elements with the same number in `alike` have the same sign.
    """
    passes: dict[str, int] = {}

    def hook(id: str, name: str, value: Floats) -> Floats:
        number = passes.get(id, 0)
        passes[id] = number + 1
        key = f"{id}[{number}]" if number else id
        signs = SIGMA * _signs(value.size + 1, f"budget.{key}", draw, seed)
        shared = 1.0 + unit * signs[-1]  # a constant of the equation, rounded once
        each = signs[alike[key]] if alike else signs[:-1].reshape(value.shape)
        disturbed = value * shared + each * sizes[key]
        if held and id in held:
            chance = philox.uniform(value.shape, seed=seed, purpose=f"budget.{key}.{draw}") - 0.5
            return round_to(
                disturbed + np.where(np.isfinite(value), chance * spacing(disturbed, held[id]), 0.0), held[id]
            )
        return disturbed

    return hook


def finite(x: Any) -> Floats:
    """Return x with 0 in place of what is not finite."""
    return np.where(np.isfinite(x), x, 0.0)


def _signs(count: int, purpose: str, draw: int, seed: int) -> NDArray[np.int8]:
    """Return +1 or -1, a bit of the counter each."""
    block, number = divmod(draw, DRAWS)
    return _signs_of_all(count, purpose, seed, block, number)


def _signs_of_all(count: int, purpose: str, seed: int, block: int = 0, draw: Any = slice(None)) -> NDArray[np.int8]:
    """Return those of the draws of a block, (DRAWS, count), or of one of them."""
    words = 1 << (count // 32).bit_length()
    if words <= FEW:
        return _few_signs(purpose, block, seed)[draw, :count]
    return _of_bits(_bits(words, purpose, block, seed)[draw, : -(-count // 8)])[..., :count]


FEW = 16
"""Words whose signs are kept, all draws of them: a recurrence takes few in each of many steps."""


@lru_cache(maxsize=1 << 13)
def _few_signs(purpose: str, block: int, seed: int) -> NDArray[np.int8]:
    """Return as many signs for all sizes, of which fewer are the first, so that cases share them."""
    return _of_bits(_bits(FEW, purpose, block, seed))


def _of_bits(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    return (2 * np.unpackbits(packed, axis=-1, bitorder="little").view(np.int8) - 1).astype(np.int8)


@lru_cache(maxsize=1 << 13)  # the cases of a mechanism have the same equations, and the streams are named by these
def _bits(words: int, purpose: str, block: int, seed: int) -> NDArray[np.uint8]:
    """Return the bits of `DRAWS` draws at once: for few words a call takes as long as for many."""
    steps = range(block * DRAWS, (block + 1) * DRAWS)
    return philox.words_of_steps(words, steps, seed=seed, purpose=purpose).astype("<u4").view(np.uint8)


def rows(tensor: str, x: NDArray[Any]) -> NDArray[Any]:
    """Return x as (rows, elements): a tensor that has no rows is one of single elements."""
    shape = x.shape if has_rows(tensor, x) else (*x.shape, 1)
    return x.reshape(math.prod(shape[:-1]), shape[-1])  # -1 would not do where there are rows of no elements


def has_rows(tensor: str, x: NDArray[Any]) -> bool:
    """Tell whether a tensor is of rows, along its last axis: `out`, gradients and equations that have axes."""
    return x.ndim > 0 and (tensor in ("out", "t_out") or tensor.startswith(("d_", "h_")) or "." in tensor)


def ratio(error: NDArray[Any], granted: NDArray[Any]) -> Any:
    """error / granted, with 0 / 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(error == 0.0, 0.0, error / granted)


def bias_of(tensor: str, error: Floats, variance: Floats, target: Floats) -> float:
    """Return the mean over rows of their mean error in the direction of the target, in units of what they are granted.

    Truncation makes it negative, a factor that is too large positive; honest roundings nearly cancel.
    """
    if not error.size:
        return 0.0
    drift = np.mean(rows(tensor, np.sign(np.where(np.isfinite(target), target, 0.0)) * error), axis=-1)
    granted = np.sqrt(np.mean(rows(tensor, variance), axis=-1))
    return float(np.mean(np.sign(drift) * ratio(np.abs(drift), granted)))


def rounded(truth: Truth, name: str) -> Floats:
    """Return the true result as the storage type holds it."""
    return round_to(truth.values[name], truth.stored[name])
