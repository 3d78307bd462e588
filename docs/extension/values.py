"""A value of every equation, and the line that computed it, from small runs: what a reader sees, and general code."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refattn import equations, philox
from refattn.backends import get
from refattn.mechanisms import registry
from refattn.mechanisms.context import Context
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.verify import traced

SIZES = {"b": 1, "h": 2, "g": 1, "r": 2, "i": 3, "j": 5, "d": 2, "e": 4, "p": 4, "m": 6, "n": 5, "t": 7}
"""Of the calls of what neither the core nor a configuration of the block computes."""


class Ran(NamedTuple):
    """An equation as it ran: in which run, by which line, and its value."""

    where: str
    place: traced.Place
    value: NDArray[Any]


def reader_run(mechanism: Mechanism) -> traced.Run:
    """Return what a reader sees first of a mechanism: its definition, or a step of its block if it has none."""
    if mechanism.example is not None:
        return traced.example_run(mechanism, "float64", get("numpy"))
    if mechanism.core is not None:
        return traced.read_run(mechanism, traced.first_case(mechanism), "float64", get("numpy"))
    return traced.block_run(mechanism, "float64", get("numpy"))


@functools.cache
def read_of(name: str) -> dict[str, Ran]:
    """Return by equation what a reader sees first of a mechanism: the first pass of each, in their order."""
    mechanism = registry.mechanism(name)
    run = reader_run(mechanism)
    case = run.about[2]
    where = "the example" if case == "example" else f"the case {case}" if case else "a step of the block"
    steps = [step for step in traced.record(mechanism, run, get("numpy")).steps if "[" not in step.id]
    own = traced.places_in(mechanism.definition) if mechanism.definition is not None else {}
    formulas = {step.id: own.get(step.id, step.place).formula for step in steps}  # not those of the general code
    return {step.id: Ran(where, replace(step.place, formula=formulas[step.id]), step.value) for step in steps}


@functools.cache
def values_of(name: str) -> dict[str, Ran]:
    """Return by equation of the general code where it runs first, rather with other numbers than 0."""
    mechanism = registry.mechanism(name)
    modules = (*mechanism.equation_modules, *mechanism.extra_modules)
    wanted = {id: traced.file_of(module) for module in reversed(modules) for id in equations.declared(module)}
    found: dict[str, Ran] = {}

    def worth(id: str, ran: Ran) -> tuple[bool, bool]:
        return ran.place.file == wanted[id], bool(np.any(ran.value))

    for where, run in _runs(mechanism):
        lacking = {id for id in wanted if id not in found or worth(id, found[id]) != (True, True)}
        if lacking:
            for step in run():
                ran = Ran(where, step.place, step.value)
                if step.id in lacking and (
                    step.id not in found or worth(step.id, ran) > worth(step.id, found[step.id])
                ):
                    found[step.id] = ran
    return found


Steps = tuple[traced.Step, ...]


def _runs(mechanism: Mechanism) -> Iterator[tuple[str, Callable[[], Steps]]]:
    """Yield small runs, those first that say most: each in words, with what gives its equations."""
    backend = get("numpy")

    def steps(of: Callable[..., traced.Run], *given: Any, **more: Any) -> Steps:
        with suppress(Unsupported):  # an implementation that does not do this case
            return traced.record(mechanism, of(*given, **more), backend).steps
        return ()

    core = functools.partial(steps, traced.core_run, mechanism, dtype="float64", backend=backend)
    block = functools.partial(steps, traced.block_run, mechanism, dtype="float64", backend=backend)
    called = functools.partial(steps, _run_of, mechanism)
    cases = sorted(mechanism.cases, key=_size) if mechanism.core else []
    if mechanism.core is not None:
        yield "the case tiny", functools.partial(core, case_name="tiny")
    yield "a step of the block", block
    if mechanism.grow is not None:
        for words, keep in (("", False), (", sequences kept", True)):
            yield f"a step of growth{words}", functools.partial(called, functools.partial(_grow, mechanism, keep=keep))
    if mechanism.pointer is not None:
        yield "a pointer", functools.partial(called, functools.partial(_point, mechanism))
    for choices in mechanism.configs:
        yield f"a step of the block, {_listed(choices)}", functools.partial(block, **choices)
    yield from ((f"the case {case.name}", functools.partial(core, case_name=case.name)) for case in cases)
    for implementation, case in itertools.product(mechanism.implementations[1:], cases):
        yield (
            f"the case {case.name}, implementation={implementation}",
            functools.partial(core, case_name=case.name, implementation=implementation),
        )
    if mechanism.further_modules:
        exercise = importlib.import_module(f"tests.mechanisms.{mechanism.name}.exercise")
        for _, call in exercise.runs(SIZES, np.asarray, mechanism.implementations[0]):
            yield f"a call of tests/mechanisms/{mechanism.name}/exercise.py", functools.partial(called, call)


def _listed(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={x if isinstance(x, str) else json.dumps(x)}" for name, x in choices.items())


def _run_of(mechanism: Mechanism, call: Callable[[], None]) -> traced.Run:
    def run(arguments: Mapping[str, NDArray[Any]], between: Callable[[], None]) -> dict[str, Any]:
        between()
        call()
        return {}

    return traced.Run((mechanism.name, "call", "", "float64", "numpy"), {}, {}, run)


def _grow(mechanism: Mechanism, keep: bool) -> None:
    """Take a small step of growth: one column more for each of two heads."""
    block, growth, x = mechanism.block, mechanism.grow, philox.normal((2, 3, 4), seed=0, purpose="docs.growth")
    assert growth is not None
    params = block.init(block.Config(width=4, heads=2, head_width=1), like=x)
    state, saved = block.forward(params, block.start(params, x, Context()), Context())
    growth.apply(growth.plan(params, growth.observe(params, saved, state, keep=keep), columns=1), 0.5)


def _point(mechanism: Mechanism) -> None:
    """Let the queries of a small block point at tokens, forward and backward."""
    x, d_x = (philox.normal((1, 3, 4), seed=0, purpose=f"docs.pointer.{name}") for name in ("x", "d_x"))
    params = mechanism.pointer.init(mechanism.block.Config(width=4, heads=2), seed=0, like=x, layer=0)
    pointer = equations.active(mechanism.pointer)
    weights, _, saved = pointer.forward(params, x, Context(causal=True))
    pointer.backward(params, saved, philox.normal(weights.shape, seed=0, purpose="docs.pointer.d_log_weights"), d_x)


def _size(case: Case) -> int:
    return sum(math.prod(given.shape) for given in case.inputs.values())
