"""A value of every equation, from small runs: a case, a step of the block, and what a block does beside."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import counter, equations
from refattn.backends import get
from refattn.mechanisms import registry
from refattn.mechanisms.context import Context
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.verify import traced

SIZES = {"b": 1, "h": 2, "g": 1, "r": 2, "i": 3, "j": 5, "d": 2, "e": 4, "p": 4, "m": 6, "n": 5, "t": 7}
"""Of the calls of what neither the core nor a configuration of the block computes."""

Values = Mapping[str, NDArray[Any]]


@functools.cache
def values_of(name: str) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return by equation where it runs first, rather with other numbers than 0, and its value there."""
    mechanism = registry.mechanism(name)
    wanted = {id for module in (*mechanism.tagged, *mechanism.beside) for id in equations.declared(module)}
    found: dict[str, tuple[str, NDArray[Any]]] = {}
    for where, run in _runs(mechanism):
        lacking = {id for id in wanted if id not in found or not np.any(found[id][1])}
        if lacking:
            new = {id: (where, x) for id, x in run().items() if id in lacking and (id not in found or np.any(x))}
            found |= new
    return found


def _runs(mechanism: Mechanism) -> Iterator[tuple[str, Callable[[], Values]]]:
    """Yield small runs, those first that say most: each in words, with what gives its values."""
    backend = get("numpy")

    def steps(of: Callable[..., traced.Run], *given: Any, **more: Any) -> Values:
        with suppress(Unsupported):  # a form that does not do this case
            return {step.id: step.value for step in traced.record(mechanism, of(*given, **more), backend).steps}
        return {}

    core = functools.partial(steps, traced.core_run, mechanism, dtype="float64", backend=backend)
    block = functools.partial(steps, traced.block_run, mechanism, dtype="float64", backend=backend)
    cases = sorted(mechanism.cases, key=_size) if mechanism.core else []
    if mechanism.core is not None:
        yield "the case tiny", functools.partial(core, case_name="tiny")
    yield "a step of the block", block
    if mechanism.grow is not None:
        yield "a step of growth", functools.partial(_grown, mechanism)
    if mechanism.pointer is not None:
        yield "a pointer", functools.partial(_pointed, mechanism)
    for choices in mechanism.configs:
        yield f"a step of the block, {_listed(choices)}", functools.partial(block, **choices)
    yield from ((f"the case {case.name}", functools.partial(core, case_name=case.name)) for case in cases)
    for form, case in itertools.product(mechanism.forms[1:], cases):
        yield f"the case {case.name}, form={form}", functools.partial(core, case_name=case.name, form=form)
    if mechanism.further:
        exercise = importlib.import_module(f"tests.mechanisms.{mechanism.name}.exercise")
        for _, call in exercise.runs(SIZES, np.asarray, mechanism.forms[0]):
            yield f"a call of tests/mechanisms/{mechanism.name}/exercise.py", functools.partial(_called, call)


def _listed(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={x if isinstance(x, str) else json.dumps(x)}" for name, x in choices.items())


def _grown(mechanism: Mechanism) -> Values:
    """Return the values of a small step of growth: one column more for each of two heads."""
    block, growth, x = mechanism.block, mechanism.grow, counter.normal((2, 3, 4), seed=0, purpose="docs.growth")
    assert growth is not None
    with equations.trace() as found:
        params = block.init(block.Config(width=4, heads=2, head_width=1), like=x)
        state, saved = block.forward(params, block.start(params, x, Context()), Context())
        growth.apply(growth.plan(params, growth.observe(params, saved, state, keep=True), columns=1), 0.5)
    return {id: np.asarray(value) for id, value in found.items()}


def _pointed(mechanism: Mechanism) -> Values:
    """Return the values of a small block whose queries point at tokens, forward and backward."""
    x, d_x = (counter.normal((1, 3, 4), seed=0, purpose=f"docs.pointer.{name}") for name in ("x", "d_x"))
    params = mechanism.pointer.init(mechanism.block.Config(width=4, heads=2), seed=0, like=x, layer=0)
    with equations.trace() as found:
        pointer = equations.active(mechanism.pointer)
        weights, _, saved = pointer.forward(params, x, Context(causal=True))
        pointer.backward(
            params, saved, counter.normal(weights.shape, seed=0, purpose="docs.pointer.d_log_weights"), d_x
        )
    return {id: np.asarray(value) for id, value in found.items()}


def _called(call: Callable[[], None]) -> Values:
    with equations.trace() as found:
        call()
    return {id: np.asarray(value) for id, value in found.items()}


def _size(case: Case) -> int:
    return sum(math.prod(given.shape) for given in case.inputs.values())
