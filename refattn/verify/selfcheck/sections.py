"""The sections of the check of a mechanism by itself: what is run, and the share of the allowed error that it uses."""

from __future__ import annotations

import inspect
import itertools
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from refattn import backends, equations
from refattn.golden import vectors
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.mechanisms.use_definition import own_call, reading
from refattn.messages import meant
from refattn.verify.freeze import recompute
from refattn.verify.outcome import Row, Truth
from refattn.verify.selfcheck import gradients
from refattn.verify.selfcheck.probe import Core, first_beyond, on_backend, on_device, same_bits, used_share
from refattn.verify.selfcheck.properties import PROPERTIES
from refattn.verify.selfcheck.samples import Sample, property_samples, sample, shrunk
from refattn.verify.tolerance.budget import evaluate, truth
from refattn.verify.tolerance.compare import compare
from refattn.xp import dtype_name

DTYPES = ("float64", "float32")

MOST = 40
"""Designed cases up to which a sample has all; of more it has every second, third, ..., and the first of each kind."""

DIRECTIONS = (1, 4)
"""Along how many directions of each leaf differences are taken, in a sample and in full.

They are not the proof to the last digit: tangents, and autograd where torch is, take the same gradients exactly. On
NumPy, which has tangents, a sample takes every second subject, and the first with a leaf of its own.
"""

BESIDE = 1e-9
"""How far two derivations with factorisations may be apart: their rounding, times what a condition makes of it."""

Found = tuple[float, str]
"""The largest used share of the allowed error, and where that was or what went wrong."""


class NotRun(Exception):  # noqa: N818 (it is no error)
    """Raised by a task that cannot run here; the message says why and what to do about it."""


@dataclass(frozen=True)
class Task:
    """A part of the check: one row of the report."""

    section: str
    name: str
    run: Callable[[], Found]

    def row(self) -> Row:
        """Run it; whatever a broken mechanism or kernel raises is a finding, not the end of the check."""
        try:
            share, detail = self.run()
        except NotRun as reason:
            return Row(self.section, self.name, "not run", None, str(reason))
        except Exception as error:
            return Row(self.section, self.name, "disagrees", math.inf, one_line(error))
        return Row(self.section, self.name, "agrees" if share <= 1.0 else "disagrees", share, detail)


@dataclass(frozen=True)
class Scope:
    """What is checked where, and what several tasks need and is slow to compute.

    Without `full` it is a sample: up to `MOST` cases, each kind among them, in one of the dtypes, in turn; of each
    property every sample in every implementation, in one of the dtypes, in float64 if it is long; differences along one
    direction. In the definition, which has no tiles, no sample is long.
    """

    mechanism: Mechanism
    owner: backends.Backend
    full: bool = False
    truths: dict[str, Truth] = field(default_factory=dict)
    noises: dict[bytes, dict[str, float]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """What is differentiated: the core, if the mechanism has one, and the block."""
        return ("block",) if self.mechanism.core is None else ("core", "block")

    @property
    def compiles(self) -> bool:
        """Whether the library compiles every operation for every new shape, which then takes most of the time."""
        return self.owner.name == "jax"

    @property
    def kinds(self) -> tuple[Case, ...]:
        """The first designed case of each kind."""
        return tuple({case.kind: case for case in reversed(self.mechanism.cases)}.values())[::-1]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The designed cases; of a library that compiles, the first of each kind, shrunk to few different shapes."""
        return tuple(map(shrunk, self.kinds)) if self.compiles else self.mechanism.cases

    def subjects(self, what: str) -> Iterator[gradients.Subject]:
        """Return what is differentiated: the "core" or the "block"."""
        if what == "block":
            return gradients.block_subjects(self.mechanism)
        return gradients.core_subjects(self.mechanism, self.cases, full=self.full)

    @property
    def directions(self) -> int:
        """Along how many directions of each leaf differences are taken."""
        return DIRECTIONS[self.full]

    def cases_of(self, dtype: str) -> tuple[Case, ...]:
        """The designed cases that implementations are compared on in a dtype."""
        if self.full:
            return self.cases
        every = -(-len(self.cases) // MOST)
        sampled = [c for n, c in enumerate(self.cases) if n % every == 0 or c in self.kinds]
        dtypes = self.dtypes
        return tuple(c for n, c in enumerate(sampled) if dtypes[n % len(dtypes)] == dtype)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes to run in; of a library that compiles float64 alone, for `_jit` runs both."""
        return DTYPES[:1] if self.compiles else DTYPES

    @property
    def long(self) -> tuple[int, int] | None:
        """Numbers of queries and keys that take several tiles; None where that takes too long.

        NumPy's tiles have up to 256 rows and 512 keys, 256 in float64, which a long sample of properties takes;
        `small_tiles` are of 32 and 32.
        """
        if self.owner.pools:
            return (300, 530) if self.full else (260, 290)
        return None if self.compiles else (40, 70)

    def core(self, implementation: str, dtype: str = "float64") -> Core:
        """Return an implementation as a function of host arrays."""
        return Core(self.mechanism, implementation, self.owner, dtype, self.noises)

    def truth(self, case: Case, dtype: str) -> Truth:
        """Return the true results of a case and their error budget."""
        key = f"{dtype} {case!r}"
        if key not in self.truths:
            self.truths[key] = truth(self.mechanism, case, dtype, grad=True)
        return self.truths[key]


@contextmanager
def small_tiles(owner: backends.Backend) -> Iterator[None]:
    """Cut tiles as small as they get, so that small arrays have several; those of a backend that pools are small."""
    usual = owner.tile_bytes
    owner.tile_bytes = usual if owner.pools else 1
    try:
        yield
    finally:
        owner.tile_bytes = usual


def tasks(scope: Scope) -> Iterator[Task]:
    """Yield all tasks of a check; a mechanism without a core has those of its block and its equations."""
    mechanism = scope.mechanism
    if mechanism.core is not None:
        for dtype, implementation in itertools.product(scope.dtypes, mechanism.implementations):
            yield Task(
                "implementations", f"{implementation}, {dtype}", partial(_implementation, scope, implementation, dtype)
            )
        for dtype in scope.dtypes:
            if own_cases(scope, dtype):
                yield Task("definition", dtype, partial(_definition, scope, dtype))
        if scope.owner.name == "jax":
            for implementation in mechanism.implementations:
                yield Task("implementations", f"{implementation} under jit", partial(_jit, scope, implementation))
        yield Task("loops", "every equation", partial(_loops, scope))
        yield Task("equations", "hooked copies", partial(_hooked, scope))
    if mechanism.block_derived_twice is not None and scope.owner.name == "numpy":
        yield Task("loops", "block and growth", partial(_beside, scope))
    yield Task("equations", "docstrings, tags and trace", partial(_ids, scope))
    if mechanism.core is not None:
        for invariant in mechanism.properties:
            yield Task("properties", invariant, partial(_property, scope, invariant))
    if mechanism.core is not None and scope.owner.name == "numpy":
        yield Task("vectors", "every stored case", partial(_vectors, scope))
    for what, way in itertools.product(scope.parts, gradients.TOLERANCES):
        yield Task("gradients", f"{what}, {way}", partial(_gradients, scope, what, way))
    for layer, way in itertools.product(mechanism.layers, gradients.TOLERANCES):
        own = replace(scope, mechanism=layer)
        yield Task("gradients", f"{layer.title}, {way}", partial(_gradients, own, "core", way))
    for what in scope.parts if len(scope.owner.devices()) > 1 else ():
        yield Task("devices", f"{what}, {scope.owner.devices()[1]}", partial(_second_device, scope, what))
    for what, way in itertools.product(scope.parts, gradients.WAYS if scope.owner.name == "numpy" else ()):
        yield Task("tangents", f"{what}, {way}", partial(_tangents, scope, what, way))


def _implementation(scope: Scope, implementation: str, dtype: str) -> Found:
    """An implementation against the dense one in float64 on the host, forward and backward."""
    cases = scope.cases_of(dtype)
    return worst_of((case.name, partial(_compare, scope, case, implementation, dtype, evaluate)) for case in cases)


def own_cases(scope: Scope, dtype: str) -> list[Case]:
    """Return the designed cases that the paper itself has; none if its definition is the general code."""
    if scope.mechanism.definition in scope.mechanism.equation_modules:
        return []
    core = scope.mechanism.core
    cases = scope.cases_of(dtype)
    return [case for case in cases if not isinstance(own_call(core, {**case.inputs, **case.options}), str)]


def _definition(scope: Scope, dtype: str) -> Found:
    """The definition against the general code, forward and backward, on the cases that the paper itself has."""

    def run(mechanism: Mechanism, inputs: Any, options: Mapping[str, Any], upstream: Any, implementation: str) -> Any:
        with reading():
            return evaluate(mechanism, inputs, options, upstream, implementation)

    cases = own_cases(scope, dtype)
    return worst_of((case.name, partial(_compare, scope, case, "auto", dtype, run)) for case in cases)


def _jit(scope: Scope, implementation: str) -> Found:
    """The same under jax.jit, forward and backward in one function, over a case of each kind in its full size."""
    import jax

    def run(mechanism: Mechanism, inputs: Any, options: Mapping[str, Any], upstream: Any, implementation: str) -> Any:
        return jax.jit(lambda x, d: evaluate(mechanism, x, options, d, implementation))(inputs, upstream)

    parts = itertools.product(scope.kinds, DTYPES)
    return worst_of(
        (f"{case.name}, {dtype}", partial(_compare, scope, case, implementation, dtype, run)) for case, dtype in parts
    )


def _compare(scope: Scope, case: Case, implementation: str, dtype: str, run: Callable[..., Mapping[str, Any]]) -> Found:
    wanted = scope.truth(case, dtype)
    inputs = {name: on_backend(scope.owner, x) for name, x in wanted.inputs.items()}
    assert wanted.upstream is not None
    found = run(scope.mechanism, inputs, case.options, on_backend(scope.owner, wanted.upstream), implementation)
    if missing := set(wanted.values) - set(found):
        return math.inf, f"no {', '.join(sorted(missing))}"
    verdicts = [compare(name, scope.owner.to_numpy(x), dtype_name(x), wanted) for name, x in found.items()]
    worst = max(verdicts, key=lambda verdict: verdict.share)
    return worst.share, f"{worst.tensor} ({worst.statistic})"


def _loops(scope: Scope) -> Found:
    """The second derivation against the trace of the dense implementation, id by id of the record, on shrunk cases."""
    mechanism = scope.mechanism
    core, known = scope.core(mechanism.implementations[0]), mechanism.equations

    def compare_ids(case: Case) -> Found:
        s = sample(mechanism, case)
        with equations.trace() as traced:
            core(s.inputs, s.options, s.upstream)
        found = {id: x for id, x in traced.items() if id.partition("[")[0] in known}
        expected = mechanism.loops.forward(**s.inputs, **s.options)
        expected |= mechanism.loops.backward(**s.inputs, **s.upstream, **s.options)
        if differ := set(found) ^ set(expected):
            return math.inf, f"not in both derivations: {', '.join(sorted(differ))}"
        noise = core.noise(s.inputs, s.options, s.upstream)
        values = {id: scope.owner.to_numpy(x) for id, x in found.items()}
        shares = {id: used_share({id: x}, {id: expected[id]}, noise) for id, x in values.items()}
        return first_beyond(shares) if shares else (0.0, "no equation ran")

    return worst_of((case.name, partial(compare_ids, shrunk(case))) for case in scope.cases)


def _beside(scope: Scope) -> Found:
    """The second derivation of what stands beside the core, in units of `BESIDE` of the largest element."""
    assert scope.mechanism.block_derived_twice is not None
    found, expected = scope.mechanism.block_derived_twice()
    if differ := set(found) ^ set(expected):
        return math.inf, f"not in both derivations: {', '.join(sorted(differ))}"
    return first_beyond({id: _distance(x, expected[id]) / BESIDE for id, x in found.items()})


def _distance(x: Any, y: Any) -> float:
    """Return the largest difference as a part of the largest element of y."""
    return float(np.max(np.abs(x - y)) / np.max(np.abs(y))) if x.shape == y.shape else math.inf


def _hooked(scope: Scope) -> Found:
    """Every implementation gives the same bits with a hook that changes nothing."""

    def compare_bits(case: Case, implementation: str) -> Found:
        s = sample(scope.mechanism, case)
        plain = scope.core(implementation)(s.inputs, s.options, s.upstream)
        with equations.apply(lambda id, name, value: value):
            return same_bits(plain, scope.core(implementation)(s.inputs, s.options, s.upstream)), implementation

    parts = itertools.product(scope.cases, scope.mechanism.implementations)
    return worst_of((case.name, partial(compare_bits, case, implementation)) for case, implementation in parts)


def _ids(scope: Scope) -> Found:
    """The ids of the docstrings, of the tags, and of a trace of core and block are the same.

    Where only a sample of the cases runs, its trace may lack some.
    """
    mechanism = scope.mechanism
    with equations.trace() as traced:
        for what in scope.parts:
            for subject in scope.subjects(what):
                for implementation in subject.implementations:  # some have equations of their own
                    with suppress(Unsupported):
                        gradients.by_hand(subject, scope.owner, implementation)
    named = set(mechanism.equations)
    own = {equations.family(id) for id in named}
    computed = {id for id in traced.variables if equations.family(id) in own}  # another core that it calls has its own
    odd = computed - named if scope.compiles else computed ^ named
    problems = [_odd(mechanism, traced, id) for id in odd]
    for module in mechanism.equation_modules:
        differ = {tag.id for tag in equations.tags(module) if tag.id} ^ set(equations.declared(module))
        problems += [f"{id} is not both declared and tagged in {module.__name__}" for id in differ]
    if mechanism.core is not None and mechanism.definition in mechanism.equation_modules:
        problems += _other_axes(scope)
    return (math.inf, "; ".join(sorted(problems))) if problems else (0.0, f"{len(computed)} equations")


def _other_axes(scope: Scope) -> Iterator[str]:
    """Yield which axes the comments of a definition of three files have and a call does not: its sizes differ."""
    assert scope.mechanism.definition is not None
    core, s = scope.core(scope.mechanism.implementations[0]), property_samples(scope.mechanism, None)[0]
    with equations.trace() as traced:
        core(s.inputs, s.options, s.upstream)
    (b, h, i, d), (_, g, j, e) = s.inputs["q"].shape, s.inputs["v"].shape
    sizes = {"b": b, "h": h, "g": g, "i": i, "j": j, "d": d, "e": e, "1": 1}
    for tag in equations.tags(scope.mechanism.definition):
        if tag.claims and tag.axes is not None and tag.id in traced and {*tag.axes} <= {*sizes}:
            needs, has = tuple(sizes[axis] for axis in tag.axes), tuple(traced[tag.id].shape)
            if has != needs:
                yield f"{tag.id} has shape {has}, its comment ({', '.join(tag.axes)}) is {needs}"


def _odd(mechanism: Mechanism, traced: equations.Trace, id: str) -> str:
    """Return what is wrong with an id that is declared or computed, but not both."""
    if id not in traced.variables:
        return f"{id} is declared, but no case computes it"
    file, line = traced.lines[id]
    if any(inspect.getsourcefile(module) == file for module in mechanism.equation_modules):
        return f"{id} is computed in line {line} of {file}, but the docstring there does not declare it"
    return f"{id} is computed in line {line} of {file}, a module that is missing in equation_modules"


def _vectors(scope: Scope) -> Found:
    """The golden vectors that come with its package: the reference computes what it did when they were written."""
    try:
        golden = vectors.read(vectors.shipped(scope.mechanism))
    except vectors.SetError as error:
        if not error.empty:
            return math.inf, str(error)
        golden = None
    known = {case.name for case in scope.mechanism.cases}
    entries = [entry for entry in golden.cases if entry["mechanism"] == scope.mechanism.name] if golden else []
    if golden is None or not entries:
        raise NotRun("there are no golden vectors of it: refattn golden write")
    parts = ((e["case"], partial(recompute, scope.mechanism, golden, e)) for e in entries if e["case"] in known)
    share, detail = worst_of(parts)
    return share, "; ".join(filter(None, (detail, vectors.without_vector(golden, scope.mechanism))))


def _property(scope: Scope, name: str) -> Found:
    """A property for every implementation, dtype and sample."""
    if name not in PROPERTIES:
        return math.inf, f"no property is called {name}{meant(name, PROPERTIES)}, needs one of {', '.join(PROPERTIES)}"

    def hold(implementation: str, dtype: str, s: Sample) -> Found:
        return PROPERTIES[name](scope.core(implementation, dtype), s), f"{implementation}, {dtype}"

    samples, implementations = property_samples(scope.mechanism, scope.long), scope.mechanism.implementations
    parts = []
    for (n, s), (m, implementation) in itertools.product(enumerate(samples), enumerate(implementations)):
        if not (s.long and implementation == implementations[0]):
            one = scope.dtypes[0 if s.long else (n + m) % len(scope.dtypes)]
            parts += [(s, implementation, dtype) for dtype in (scope.dtypes if scope.full else (one,))]
    return worst_of((f"sample {s.name}", partial(hold, implementation, dtype, s)) for s, implementation, dtype in parts)


def _gradients(scope: Scope, what: str, way: str) -> Found:
    """The hand-written backward of every implementation against another way."""
    if way == "autograd" and (reason := backends.get("torch").why_unavailable()) is not None:
        raise NotRun(reason)

    def compare_ways(subject: gradients.Subject) -> Found:
        errors = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of numbers that were drawn: their gradients are no worse
            judge = gradients.beside(subject, way, scope.directions)
            for implementation in subject.implementations:
                with suppress(Unsupported):
                    errors.append((*judge(gradients.by_hand(subject, scope.owner, implementation)), implementation))
        error, leaf, implementation = max(errors)
        return error / gradients.TOLERANCES[way], f"gradient of {leaf}, implementation {implementation}"

    subjects = list(scope.subjects(what))
    leaves = {name for subject in subjects for name in subject.leaves}
    if way == "differences" and scope.owner.name == "numpy" and not scope.full:
        subjects = _every_other(subjects)  # all of them are in the section "tangents"
    found = worst_of((subject.name, partial(compare_ways, subject)) for subject in subjects)
    if what == "core" and found[0] <= 1.0 and (unseen := {*scope.mechanism.differentiable} - leaves):
        return math.inf, f"gradient of {min(unseen)}: no case gives this option a number"
    return found


def _every_other(subjects: Sequence[gradients.Subject]) -> list[gradients.Subject]:
    """Return every other subject, and those that have a leaf which none before them has: an option's, for instance."""
    found, seen = list[gradients.Subject](), set[str]()
    for n, subject in enumerate(subjects):
        if n % 2 == 0 or not subject.leaves.keys() <= seen:
            found.append(subject)
            seen |= subject.leaves.keys()
    return found


def _second_device(scope: Scope, what: str) -> Found:
    """The backward of every implementation gives the same bits on the second device of a library as on the first."""
    first, second = (on_device(scope.owner, name) for name in scope.owner.devices()[:2])

    def compare_bits(subject: gradients.Subject) -> Found:
        found = []
        for implementation in subject.implementations:
            with suppress(Unsupported):
                here, there = (gradients.by_hand(subject, owner, implementation) for owner in (first, second))
                found.append((same_bits(there, here), f"implementation {implementation}"))
        if not found:
            raise Unsupported
        return max(found)

    return worst_of((subject.name, partial(compare_bits, subject)) for subject in scope.subjects(what))


def _tangents(scope: Scope, what: str, way: str) -> Found:
    """Forward and backward on arrays that carry a derivative; in a sample one implementation each, in turn."""

    def compare(subject: gradients.Subject, implementation: str) -> Found:
        return gradients.WAYS[way](subject, implementation) / gradients.OF_TANGENTS, f"implementation {implementation}"

    parts = []
    for n, subject in enumerate(scope.subjects(what)):
        implementations = (
            subject.implementations if scope.full else subject.implementations[n % len(subject.implementations) :][:1]
        )
        parts += [(subject.name, partial(compare, subject, implementation)) for implementation in implementations]
    return worst_of(parts)


def worst_of(parts: Iterable[tuple[str, Callable[[], Found]]]) -> Found:
    """Run all parts; return the largest share and where it was. A part that raises has an infinite share.

    Parts that ask an implementation for what it does not compute are passed over.
    """
    worst, where, count = 0.0, "", 0
    for name, run in parts:
        try:
            share, place = run()
        except Unsupported:
            continue
        except Exception as error:  # a broken mechanism may raise anything
            share, place = math.inf, one_line(error)
        count += 1
        if not share <= worst:  # true for NaN
            worst, where = share, f"{name}: {place}"
    if not count:
        raise NotRun("the record has nothing to run")
    return worst, where or f"{count} times"


def one_line(error: Exception) -> str:
    """Return what an exception says, in one line; of a key that is missing, which says little, also the place."""
    words = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    places = traceback.extract_tb(error.__traceback__) if isinstance(error, KeyError) else []
    return f"{words} in line {places[-1].lineno} of {places[-1].filename}" if places else words
