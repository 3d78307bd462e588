"""A designed case run once under the engine: every equation in the order that it ran, the line that ran, and its value.

The definition runs, forward and backward, if the call is the paper's own, otherwise the general code; on NumPy or
another backend. Upstream gradients are random numbers of `refattn.philox`. If it is asked for, or if a mechanism is no
map of q, k and v, one step of its block runs on a few tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends, equations, philox, tree
from refattn.args import One, checked
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import DTYPES, has_gradient, stored
from refattn.mechanisms.context import Context
from refattn.mechanisms.record import Case, Mechanism
from refattn.mechanisms.use_definition import own_call, reading
from refattn.xp import Array

BLOCK = {"width": 4, "heads": 2, "tokens": 4}
"""Sizes of a block that is traced, where its configuration has them, and the number of its tokens."""


@dataclass(frozen=True)
class Place:
    """Where an equation stands.

    Attributes
    ----------
    formula
        As the docstring has it.
    axes
        The letters of `docs/notation.md`, one entry per axis; None where the line names none.
    file, line
        The line that computes it; the path begins with ``refattn/``, or with the first package of another library.
    variable
        The name that the line assigns.
    code
        The assignment, without its comment.

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.backends import get
    >>> from refattn.verify import traced
    >>> run = traced.trace_core(ra.mechanism("softmax"), "tiny", "float64", get("numpy"))
    >>> place = run.steps[0].place
    >>> place.formula, place.axes, place.variable
    ('s_ij = scale q_i . k_j', ('b', 'h', 'i', 'j'), 'scores')
    """

    formula: str
    axes: tuple[str, ...] | None
    file: str
    line: int
    variable: str
    code: str


@dataclass(frozen=True)
class Step:
    """One equation as it ran: its id, with the pass where it is not the first, and its value.

    >>> import refattn as ra
    >>> from refattn.backends import get
    >>> from refattn.verify import traced
    >>> run = traced.trace_core(ra.mechanism("softmax"), "tiny", "float64", get("numpy"))
    >>> step = run.backward[0]
    >>> step.id, step.place.formula
    ('dSM.v', 'dv_j = sum_i y_ij do_i')
    """

    id: str
    place: Place
    value: NDArray[Any]


@dataclass(frozen=True)
class Traced:
    """One run: what went in, each equation in order, and what came out.

    Attributes
    ----------
    case
        The name of the designed case; "" for a block.
    arguments
        Arrays by name, upstream gradients among them.
    options
        The other arguments, as they were given.
    results
        Outputs ("out", ...) and gradients ("d_q", ...).
    why
        If the general code ran: why the definition did not, "the paper has no mask".
    title
        The mechanism in words.

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.backends import get
    >>> from refattn.verify import traced
    >>> run = traced.trace_core(ra.mechanism("softmax"), "tiny", "float64", get("numpy"))
    >>> len(run.steps) == len(run.forward) + len(run.backward), run.tensors()["SM.1"].shape
    (True, (1, 2, 4, 4))
    >>> run.to_json()["mechanism"]
    'softmax'
    """

    mechanism: str
    part: str  # "definition", "core" or "block"
    case: str
    dtype: str
    backend: str
    arguments: dict[str, NDArray[Any]]
    options: dict[str, Any]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    results: dict[str, NDArray[Any]]
    why: str = ""
    title: str = ""

    @property
    def steps(self) -> tuple[Step, ...]:
        """All equations, forward and then backward."""
        return self.forward + self.backward

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return every array: arguments and results by name, equations by id."""
        return {**self.arguments, **{step.id: step.value for step in self.steps}, **self.results}

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data for JSON; numbers that are not finite are "NaN", "Infinity", "-Infinity"."""

        def step(one: Step) -> dict[str, Any]:
            place = dataclasses.asdict(one.place)
            return {"id": one.id, **place, **_plain(one.value)}

        return {
            **{name: getattr(self, name) for name in ("mechanism", "part", "case", "dtype", "backend", "options")},
            "arguments": {name: _plain(x) for name, x in self.arguments.items()},
            "forward": [step(one) for one in self.forward],
            "backward": [step(one) for one in self.backward],
            "results": {name: _plain(x) for name, x in self.results.items()},
        }


def file_of(module: ModuleType) -> str:
    """Return the file of a module as a path that begins with its first package: ``refattn/...``."""
    path = Path(inspect.getsourcefile(module) or "")
    names = module.__name__.split(".")
    parts = len(names) + (path.stem == "__init__")
    return Path(*path.parts[-parts:]).as_posix()


def places(mechanism: Mechanism) -> dict[str, Place]:
    """Return where the general code computes each equation, by id; the first of several branches."""
    return {id: place for module in mechanism.equation_modules for id, place in places_in(module).items()}


def places_to_read(mechanism: Mechanism) -> dict[str, Place]:
    """Return where a reader finds each equation: in the definition if it is there, else in the general code."""
    general = places(mechanism)
    own = {} if mechanism.definition is None else places_in(mechanism.definition)
    quoted = {id for id, place in own.items() if place.formula.startswith("forward: ") and id in general}
    return general | {
        id: replace(place, formula=general[id].formula) if id in quoted else place for id, place in own.items()
    }


def places_in(module: ModuleType) -> dict[str, Place]:
    """Return where a module computes each equation, by id, in the order of its docstring, then of its lines."""
    tags = {tag.id: tag for tag in reversed(equations.tags(module)) if tag.claims}  # the first of branches
    order = [*equations.declared(module), *(tag.id for tag in equations.tags(module) if tag.id in tags)]
    return {id: _place(module, tags[id], {}) for id in dict.fromkeys(order) if id in tags}


def _place(module: ModuleType, tag: equations.Tag, formulas: Mapping[str, str]) -> Place:
    """Return the place of a tag; its formula is the docstring's, that of `formulas`, or the forward line it quotes."""
    lines = inspect.getsource(module).splitlines()
    formula = {**formulas, **equations.declared(module)}.get(tag.id) or _quoted(lines, tag.line - 1)
    return Place(formula, tag.axes, file_of(module), tag.line, tag.name, _statement(lines, tag.line - 1, tag.id))


def _quoted(lines: list[str], start: int) -> str:
    """Return the last forward line that is quoted above a line."""
    above = (line.strip() for line in reversed(lines[:start]))
    return next((line.removeprefix("# ") for line in above if line.startswith("# forward: ")), "")


def _statement(lines: list[str], start: int, id: str) -> str:
    """Return the lines of an assignment up to its tag, without indentation and comment."""
    end = next(n for n in range(start, len(lines)) if f"[{id}]" in lines[n])
    code = [*lines[start:end], lines[end].rpartition("#")[0]]
    indent = len(code[0]) - len(code[0].lstrip())
    return "\n".join(line[indent:].rstrip() for line in code)


@dataclass(frozen=True)
class Run:
    """A computation that can be repeated, with these arguments or others of their shapes.

    Attributes
    ----------
    about
        What `Traced` begins with: mechanism, part, case, dtype, backend.
    arguments, options
        As in `Traced`.
    run
        Takes the arguments, and what is called between forward and backward; returns the results by name.
    why
        As in `Traced`.
    again
        Makes the same run with other numbers among the options.
    """

    about: tuple[str, str, str, str, str]
    arguments: dict[str, NDArray[Any]]
    options: dict[str, Any]
    run: Callable[[Mapping[str, NDArray[Any]], Callable[[], None]], dict[str, Array]]
    why: str = ""
    again: Callable[..., Run] | None = None


@checked(mechanism=Mechanism, case_name=str, dtype=One(tuple(DTYPES)), backend=backends.Backend)
def trace_core(mechanism: Mechanism, case_name: str, dtype: str, backend: backends.Backend) -> Traced:
    """Run the dense implementation of a core, forward and backward, on a designed case.

    >>> import refattn as ra
    >>> from refattn.backends import get
    >>> from refattn.verify import traced
    >>> run = traced.trace_core(ra.mechanism("softmax"), "tiny", "float64", get("numpy"))
    >>> step = run.steps[0]
    >>> step.id, step.value.shape, step.place.code
    ('SM.1', (1, 2, 4, 4), 'scores = q @ xp.matrix_transpose(k_heads) * scale')
    """
    return record(mechanism, core_run(mechanism, case_name, dtype, backend), backend)


@checked(mechanism=Mechanism, dtype=One(tuple(DTYPES)), backend=backends.Backend)
def trace_block(mechanism: Mechanism, dtype: str, backend: backends.Backend, **choices: Any) -> Traced:
    """Run one step of a block, forward and backward, from tokens to tokens; `choices` are fields of its configuration.

    >>> import refattn as ra
    >>> from refattn.backends import get
    >>> from refattn.verify import traced
    >>> run = traced.trace_block(ra.mechanism("softmax"), "float64", get("numpy"))
    >>> [step.id for step in run.forward][:3]
    ['SM.keys', 'SM.values', 'SM.queries']
    """
    return record(mechanism, block_run(mechanism, dtype, backend, **choices), backend)


def read_run(mechanism: Mechanism, case_name: str, dtype: str, backend: backends.Backend, **more: Any) -> Run:
    """Return a designed case as what a reader sees: the definition if the call is the paper's own, else the core."""
    case = mechanism.case(case_name)
    why = own_call(mechanism.core, {**make(mechanism.name, case, dtype), **case.options, **more})
    run = _run(mechanism, case, dtype, backend, not isinstance(why, str), more)
    again = functools.partial(read_run, mechanism, case_name, dtype, backend)
    return replace(run, why=why if isinstance(why, str) else "", again=again)


def first_case(mechanism: Mechanism) -> str:
    """Return the name of the designed case that a reader meets first: the first that the paper has, or "tiny"."""
    for case in mechanism.cases:
        if not isinstance(own_call(mechanism.core, {**case.inputs, **case.options}), str):
            return case.name
    return "tiny"


def example_run(mechanism: Mechanism, dtype: str, backend: backends.Backend) -> Run:
    """Return the example of a definition that is no map of q, k and v, as what can be run."""
    module, example = mechanism.definition, mechanism.example
    assert module is not None and example is not None
    inputs = make(mechanism.name, Case("example", "definition", example.inputs), dtype)
    upstream: dict[str, NDArray[Any]] = {}
    if example.run is None:
        outputs, _ = module.forward(**inputs)
        names = [name for name in inspect.signature(module.backward).parameters if name.startswith("d_")]
        for name, out in zip(names, outputs, strict=True):
            upstream[name] = _normal(f"{mechanism.name}.example.{name}", out.shape, dtype)

    def run(arguments: Mapping[str, NDArray[Any]], between: Callable[[], None]) -> dict[str, Array]:
        own, given = equations.active(module), {name: _placed(backend, x, dtype) for name, x in arguments.items()}
        if example.run is not None:
            results = dict(example.run(own, given))
            between()
            return results
        d_outputs = {name: given.pop(name) for name in upstream}
        outputs, saved = own.forward(**given)
        between()
        found = {name.removeprefix("d_"): out for name, out in zip(upstream, outputs, strict=True)}
        return found | {f"d_{name}": x for name, x in own.backward(saved, **d_outputs).items()}

    about = (mechanism.name, "definition", "example", dtype, backend.name)
    return Run(about, {**inputs, **upstream}, {}, run)


def core_run(mechanism: Mechanism, case_name: str, dtype: str, backend: backends.Backend, **more: Any) -> Run:
    """Return the general code of a core on a designed case, with `more` options, dense by default."""
    again = functools.partial(core_run, mechanism, case_name, dtype, backend)
    return replace(_run(mechanism, mechanism.case(case_name), dtype, backend, False, more), again=again)


def _run(
    mechanism: Mechanism, case: Case, dtype: str, backend: backends.Backend, own: bool, more: Mapping[str, Any]
) -> Run:
    """Return a case of a core, which the definition runs if it is its own; otherwise all outputs have a gradient."""
    core = mechanism.core
    assert core is not None
    inputs, options = make(mechanism.name, case, dtype), {**case.options, **more}
    if not own:
        options = {"implementation": mechanism.implementations[0], **options}
    shapes = _shapes(mechanism, inputs, options)
    shapes = {"out": shapes["out"]} if own else shapes
    upstream = {f"d_{name}": make_upstream(mechanism.name, case, name, shape, dtype) for name, shape in shapes.items()}
    outputs = () if own else mechanism.outputs

    def run(arguments: Mapping[str, NDArray[Any]], between: Callable[[], None]) -> dict[str, Array]:
        given = {name: _placed(backend, x, dtype) for name, x in arguments.items()}
        d_outputs = {name: given.pop(name) for name in upstream}
        with reading() if own else nullcontext():
            out, saved = core.forward(**given, **options)
            between()
            found = {"out": out, **{name: getattr(saved, name) for name in outputs}}
            gradients = core.backward(saved, **d_outputs)
        return {**found, **{f"d_{name}": x for name, x in gradients.items()}}

    about = (mechanism.name, "definition" if own else "core", case.name, dtype, backend.name)
    return Run(about, {**inputs, **upstream}, {**case.options, **more}, run)


def _shapes(mechanism: Mechanism, inputs: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of the outputs by name."""
    core = mechanism.core
    assert core is not None
    floats = {n: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x for n, x in inputs.items()}
    out, saved = core.forward(**floats, **options)
    return {"out": out.shape, **{name: getattr(saved, name).shape for name in mechanism.pulled}}


def block_run(mechanism: Mechanism, dtype: str, backend: backends.Backend, **choices: Any) -> Run:
    """Return one step of a block, from tokens to tokens, as what can be run; `choices` are of its configuration."""
    block = mechanism.block
    known = {field.name for field in dataclasses.fields(block.Config)}
    config = block.Config(**{name: size for name, size in BLOCK.items() if name in known} | choices)
    shape = (1, BLOCK["tokens"], config.width)
    x, d_out = (_normal(f"{mechanism.name}.trace.{name}", shape, dtype) for name in ("x", "d_out"))
    template = {"params": block.init(config, seed=0, like=_placed(backend, x, dtype))}
    # A recurrence is causal, and its core has no option for that.
    context = Context(causal="causal" in mechanism.context_fields and "causal" not in mechanism.defaults)
    context_fields, numbers = getattr(config, "context_fields", ()), np.arange(BLOCK["tokens"])[None]
    if "tokens" in context_fields:
        context = replace(context, tokens=_placed(backend, numbers % config.vocabulary, dtype))
    if "positions" in context_fields:
        context = replace(context, positions=_placed(backend, numbers[0] % config.classes, dtype))
    names = tuple(tree.flatten(template))

    def run(arguments: Mapping[str, NDArray[Any]], between: Callable[[], None]) -> dict[str, Array]:
        given = {name: _placed(backend, x, dtype) for name, x in arguments.items()}
        params = tree.unflatten(template, {name: given[name] for name in names})["params"]
        with reading():
            state, saved = block.forward(params, block.start(params, given["x"], context), context)
            out = block.read(params, state)
            between()
            gradients = block_gradients(block, params, state, saved, given["d_out"])
        return {"out": out, **{f"d_{n}": x for n, x in gradients.items() if n in given}}

    weights = {name: backend.to_numpy(w) for name, w in tree.flatten(template).items()}
    about = (mechanism.name, "block", "", dtype, backend.name)
    return Run(about, {"x": x, **weights, "d_out": d_out}, {"config": str(config)}, run)


def block_gradients(block: Any, params: Any, state: Any, saved: Any, d_out: Array) -> dict[str, Array]:
    """Return the gradients of one step of a block, from tokens to tokens, by "x", "context.NAME" and "params.NAME"."""
    d_state, d_read = block.read_backward(params, state, d_out)
    d_state, d_params, d_context = block.backward(params, saved, d_state)
    d_x, d_start = block.start_backward(params, d_state)
    gradients = tree.flatten({"x": d_x, "context": d_context, "params": d_params})
    for extra in (d_read, d_start):
        for name, more in tree.flatten({"params": extra}).items():
            gradients[name] = gradients[name] + more
    return gradients


def record(
    mechanism: Mechanism, run: Run, backend: backends.Backend, arguments: Mapping[str, NDArray[Any]] | None = None
) -> Traced:
    """Run once, with its own arguments or others, and record every equation."""
    given = dict(run.arguments if arguments is None else arguments)
    counts = []
    with equations.trace() as traced:
        results = run.run(given, lambda: counts.append(len(traced)))
    formulas = mechanism.equations
    steps = tuple(Step(key, _ran(traced, key, formulas), _host(backend, x)) for key, x in traced.items())
    outcome = {name: _host(backend, x) for name, x in results.items()}
    forward, backward = steps[: counts[0]], steps[counts[0] :]
    return Traced(*run.about, given, run.options, forward, backward, outcome, run.why, mechanism.title)


def _ran(traced: equations.Trace, key: str, formulas: Mapping[str, str]) -> Place:
    """Return the line that computed an equation in a pass."""
    module, tag = equations.tag_at(*traced.lines[key], key.partition("[")[0])
    return _place(module, tag, formulas)


def _normal(purpose: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return stored(philox.normal(shape, seed=0, purpose=purpose), dtype)


def _placed(backend: backends.Backend, x: NDArray[Any], dtype: str) -> Array:
    """Return a host array as one of the backend; bfloat16 stays in float32 where the library has none."""
    made, xp = backend.from_numpy(x), backend.namespace()
    if dtype == "bfloat16" and has_gradient(x) and hasattr(xp, "bfloat16"):
        return xp.asarray(made, dtype=xp.bfloat16)
    return made


def _host(backend: backends.Backend, x: Array) -> NDArray[Any]:
    return np.asarray(backend.to_numpy(x), order="C")


def _plain(x: NDArray[Any]) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": x.dtype.name, "value": _numbers(x.tolist())}


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0.0 else "-Infinity"
    return value
