"""The definitions: the paper alone, equal to the general code, and what a reader is shown is what ran."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import backends, equations
from refattn.cli.show import standalone
from refattn.golden.inputs import make
from refattn.mechanisms import use_definition
from refattn.mechanisms.record import Mechanism
from refattn.verify import traced

ROOT = Path(__file__).parents[1]
NUMPY = backends.get("numpy")
MAPS = ("softmax", "higher_order", "graph_energy", "koopman", "delta")
"""Mechanisms whose definition is a map of q, k and v; the rooms of the others compare theirs."""

LINES = 40
"""Lines that a debugger may pass before the first of the definition."""


def definition_of(name: str) -> ModuleType:
    found = ra.mechanism(name).definition
    assert found is not None
    return found


# --- a file that stands alone


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_ids_are_consecutive_and_each_is_one_line(name: str) -> None:
    claimed = [tag.id for tag in equations.tags(definition_of(name)) if tag.claims]
    assert len(claimed) == len(set(claimed))
    numbers = [int(id.split(".")[1]) for id in claimed if not id.startswith("d") and id.split(".")[1].isdigit()]
    assert numbers == list(range(1, len(numbers) + 1))
    declared = equations.declared(definition_of(name))
    assert set(declared) <= set(claimed)
    assert [id for id in declared if not id.startswith("d")] == [id for id in claimed if not id.startswith("d")]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_adjoint_has_a_formula_or_quotes_its_line(name: str) -> None:
    for id, place in traced.places_in(definition_of(name)).items():
        assert place.formula, id
        if not place.formula.startswith("forward: "):
            left, equals, right = place.formula.partition(" = ")
            assert left and equals and right.strip(), id


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_equation_has_a_right_hand_side(name: str) -> None:
    for id, text in ra.mechanism(name).equations.items():
        left, equals, right = text.split("   ")[0].partition(" = ")
        assert left and equals and right.strip(), (id, text)
        assert not re.search(r"\b(through|every|likewise|the same way|and so on)\b", right), (id, text)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_definition_imports_arrays_and_plain_functions_alone(name: str) -> None:
    tree = ast.parse(inspect.getsource(definition_of(name)))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    known = {"__future__", "math", "collections.abc", "typing", "refattn.xp", "refattn.ops.plain"}
    if definition_of(name) in ra.mechanism(name).equation_modules:  # it is the general code, too: simple.py
        known |= {"refattn.ops.heads", "refattn.ops.masks"}
    assert modules <= known


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_what_show_prints_is_the_definition_on_numpy_alone(name: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.py"
    file.write_text(standalone(definition_of(name)), encoding="utf-8")
    code = f"import sys; sys.modules['refattn'] = None; sys.path.insert(0, {str(tmp_path)!r}); import shown"
    subprocess.run([sys.executable, "-c", code], check=True)
    printed = set(file.read_text().splitlines())
    source = inspect.getsource(definition_of(name)).splitlines()
    missing = [line for line in source if line not in printed]
    told = ("@paper_alone", ")", "(")  # and the imports of refattn, with what is said of them
    about = ("# namespace(x)", "# normalise(x")
    assert all("refattn" in line or line.startswith(about) or line in told for line in missing), missing
    if name in MAPS:
        own: dict[str, Any] = {}
        exec(compile(file.read_text(), str(file), "exec"), own)
        inputs, options = paper_call(ra.mechanism(name))
        out, saved = own["forward"](**inputs, **options)
        expected, kept = definition_of(name).forward(**inputs, **options)
        assert out.tobytes() == expected.tobytes()
        gradients, wanted = own["backward"](saved, out), definition_of(name).backward(kept, out)
        assert {n: np.asarray(x).tobytes() for n, x in gradients.items()} == {
            n: np.asarray(x).tobytes() for n, x in wanted.items()
        }


def paper_call(mechanism: Mechanism) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of the case that a reader meets first, and the options that the definition takes of it."""
    assert mechanism.core is not None
    case = mechanism.case(traced.first_case(mechanism))
    inputs = make(mechanism.name, case, "float64")
    said = use_definition.own_call(mechanism.core, {**inputs, **case.options})
    assert not isinstance(said, str), said
    return {name: inputs[name] for name in ("q", "k", "v")}, dict(said)


@pytest.mark.parametrize("name", ["softmax", "delta", "higher_order", "koopman", "graph_energy"])
def test_the_docstring_of_forward_leads_to_the_definition(name: str) -> None:
    core = ra.mechanism(name).core
    text = " ".join((inspect.getdoc(core and core.forward) or "").split())
    assert f"`refattn show {name} > " in text and "with ra.reading():" in text


# --- the general code is the definition and more


@st.composite
def calls(draw: st.DrawFn, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Arrays of any small sizes, and options that the paper of a mechanism has."""
    b, h, i, d, e = (draw(st.integers(1, most)) for most in (2, 3, 7, 5, 5))
    j = i if name in ("graph_energy", "delta") else i + draw(st.integers(0, 3))
    if name == "koopman":
        i, j, d = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
        e = d
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrays = [r.standard_normal(shape) for shape in ((b, h, i, d), (b, h, j, d), (b, h, j, e))]
    options: dict[str, Any] = {}
    if name in ("softmax", "higher_order"):
        options["causal"] = draw(st.booleans())
    if name == "higher_order":
        options |= {"order": 2, "alpha": draw(st.sampled_from((1.0, 3.0)))}
    if name == "graph_energy":
        options |= {
            "steps": draw(st.integers(0, 8)),
            "mu": draw(st.floats(0.1, 1.5)),
            "kappa": draw(st.floats(0.1, 1.5)),
        }
    if name == "koopman":
        options |= {"updates": draw(st.integers(1, 3)), "jitter": 1e-2}
    if name == "delta":
        options |= {"beta": r.uniform(0.0, 1.0, (b, h, i)), "log_decay": -r.uniform(0.0, 1.0, (b, h, i))}
    return arrays, options


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_definition_is_the_general_code_at_the_paper_s_values(name: str, data: st.DataObject) -> None:
    arrays, options = data.draw(calls(name))
    core, implementation = getattr(ra, name), ra.mechanism(name).implementations[0]
    expected, saved = core.forward(*arrays, **options, implementation=implementation)
    d_out = np.cos(np.arange(expected.size, dtype=np.float64)).reshape(expected.shape)
    wanted = core.backward(saved, d_out)

    said = use_definition.own_call(core, {**dict(zip(use_definition.ARRAYS, arrays, strict=True)), **options})
    assert not isinstance(said, str), said
    out, kept = definition_of(name).forward(*arrays, **said)
    gradients = definition_of(name).backward(kept, d_out)
    with ra.reading():
        read_out, read_saved = core.forward(*arrays, **options)
        read_gradients = core.backward(read_saved, d_out)
    assert read_saved.definition is definition_of(name)

    near(out, expected, "out")
    assert read_out.tobytes() == out.tobytes()
    assert {"q", "k", "v"} <= set(gradients) and set(read_gradients) == set(wanted)
    for gradient, x in wanted.items():
        if gradient in gradients:
            near(np.reshape(gradients[gradient], np.shape(x)), x, gradient)
            assert np.asarray(read_gradients[gradient]).tobytes() == np.asarray(gradients[gradient]).tobytes()


@pytest.mark.parametrize("name", MAPS)
def test_equal_ids_mean_equal_values(name: str) -> None:
    inputs, options = paper_call(ra.mechanism(name))
    core = getattr(ra, name)
    found = []
    for chosen in ({}, {"implementation": ra.mechanism(name).implementations[0]}):
        with ra.trace() as traced:
            out, saved = core.forward(**inputs, **options, **chosen)
            core.backward(saved, np.cos(np.arange(out.size, dtype=np.float64)).reshape(out.shape))
        found.append(dict(traced))
    both = [id for id in found[0] if id in found[1]]
    assert any(id.startswith("d") for id in both) and any(not id.startswith("d") for id in both)
    for id in both:
        read, general = np.asarray(found[0][id]), np.asarray(found[1][id])
        if id.partition(".")[2] in ("ridge", "epsilon"):  # the general code has one for each update
            general = np.sum(general)
        near(np.where(np.isfinite(read), read, 0.0), np.where(np.isfinite(general), general, 0.0), id)


def near(x: Any, expected: Any, what: str) -> None:
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    assert np.shape(x) == np.shape(expected), what
    np.testing.assert_allclose(x, expected, rtol=0.0, atol=1e-12 * size, err_msg=what)


@pytest.mark.parametrize("name", MAPS)
def test_other_libraries_give_the_same(name: str) -> None:
    inputs, options = paper_call(ra.mechanism(name))
    expected, kept = definition_of(name).forward(**inputs, **options)
    wanted = definition_of(name).backward(kept, np.ones_like(expected))
    for backend in ("strict", "torch", "jax"):
        library = backends.get(backend)
        if library.why_unavailable() is not None:
            continue
        library.enable_float64()
        arrays = {n: library.from_numpy(x) for n, x in inputs.items()}
        chosen = {n: library.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        out, saved = definition_of(name).forward(**arrays, **chosen)
        gradients = definition_of(name).backward(saved, library.from_numpy(np.ones_like(expected)))
        near(library.to_numpy(out), expected, backend)
        for gradient, x in wanted.items():
            near(library.to_numpy(gradients[gradient]), x, f"{backend} {gradient}")


# --- what is shown is what ran


@contextmanager
def lines_that_run() -> Iterator[set[tuple[str, int]]]:
    """The lines of refattn's files that run in the block."""
    ran: set[tuple[str, int]] = set()
    root = str(ROOT / "refattn" / "mechanisms")

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            ran.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(root) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield ran
    finally:
        sys.settrace(before)


def default_runs(mechanism: Mechanism) -> Iterator[traced.Run]:
    """What a reader may see without naming an option: the example, every case that is small, a step of the block."""
    if mechanism.example is not None:
        yield traced.example_run(mechanism, "float64", NUMPY)
    for case in mechanism.cases:
        if sum(np.prod(x.shape) for x in case.inputs.values()) <= 500:
            yield traced.read_run(mechanism, case.name, "float64", NUMPY)
    yield traced.block_run(mechanism, "float64", NUMPY)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_line_that_is_told_ran(name: str) -> None:
    mechanism = ra.mechanism(name)
    for run in default_runs(mechanism):
        with lines_that_run() as ran:
            found = traced.record(mechanism, run, NUMPY)
        for step in found.steps:
            length = len(step.place.code.splitlines())
            told = {(str(ROOT / step.place.file), step.place.line + n) for n in range(length)}
            assert told & ran, (run.about, step.id, step.place.file, step.place.line)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_line_of_the_definition_runs_in_what_a_reader_sees_first(name: str) -> None:
    mechanism = ra.mechanism(name)
    if mechanism.example is not None:
        run = traced.example_run(mechanism, "float64", NUMPY)
    else:
        run = traced.read_run(mechanism, traced.first_case(mechanism), "float64", NUMPY)
    assert run.about[1] == "definition"
    found = traced.record(mechanism, run, NUMPY)
    claimed = {tag.id for tag in equations.tags(definition_of(name)) if tag.claims}
    assert {step.id.partition("[")[0] for step in found.steps} == claimed


@pytest.mark.parametrize("name", MAPS)
def test_a_debugger_soon_reaches_the_definition(name: str) -> None:
    inputs, options = paper_call(ra.mechanism(name))
    case = ra.mechanism(name).case(traced.first_case(ra.mechanism(name)))
    inputs = make(name, case, "float64")
    arrays = [inputs.pop(each) for each in use_definition.ARRAYS]
    core, own, passed, reached = getattr(ra, name), definition_of(name).__file__, 0, []

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal passed
        if frame.f_code.co_filename == own:
            reached.append(passed)
            return None
        if event == "line" and not reached:
            passed += 1
        return enter

    with ra.reading():
        before = sys.gettrace()
        sys.settrace(enter)
        try:
            core.forward(*arrays, **inputs, **case.options)
        finally:
            sys.settrace(before)
    assert reached and reached[0] <= LINES


# --- what the paper does not have


@pytest.mark.parametrize("name", MAPS)
def test_an_option_that_the_paper_does_not_have_is_refused_by_name(name: str) -> None:
    inputs, options = paper_call(ra.mechanism(name))
    n = inputs["q"].shape[2]
    for option, value in {"mask": np.ones((n, n), dtype=bool), "softcap": 2.0}.items():
        with pytest.raises(TypeError, match=rf"^{option}: .*refattn\.{name}\.forward"):
            definition_of(name).forward(**inputs, **options, **{option: value})


GENERAL: dict[str, Callable[[int], dict[str, Any]]] = {
    "softmax": lambda n: {"softcap": 2.0},
    "higher_order": lambda n: {"mask": np.ones((n, n), dtype=bool)},
    "graph_energy": lambda n: {"threshold": "soft"},
    "koopman": lambda n: {"causal": True},
    "delta": lambda n: {"qk_norm": True},
}


@pytest.mark.parametrize("name", MAPS)
def test_with_it_the_general_code_runs_for_a_reader_too(name: str) -> None:
    case = ra.mechanism(name).case(traced.first_case(ra.mechanism(name)))
    inputs = make(name, case, "float64")
    options = {**case.options, **GENERAL[name](inputs["q"].shape[2])}
    core = getattr(ra, name)
    expected, _ = core.forward(**inputs, **options, implementation=ra.mechanism(name).implementations[0])
    with ra.reading():
        out, saved = core.forward(**inputs, **options)
    assert not hasattr(saved, "definition") and out.tobytes() == expected.tobytes()


def test_what_is_wrong_is_told_as_it_is_outside() -> None:
    x = np.ones((1, 1, 2, 4))
    for arrays, options in (
        ((x, x, np.ones((1, 1, 3, 4))), {}),
        ((x.astype(np.int64),) * 3, {}),
        ((x, x[..., :3], x), {}),
        ((x, x, x), {"causal": "banana"}),
        ((x, x), {}),
        ((x, x, x), {"softcop": 1.0}),
    ):
        told = []
        for reading in (False, True):
            with pytest.raises((TypeError, ValueError)) as caught:
                if reading:
                    with ra.reading():
                        ra.softmax.forward(*arrays, **options)
                else:
                    ra.softmax.forward(*arrays, **options)
            told.append((caught.type, str(caught.value)))
        assert told[0] == told[1]


def test_a_reader_may_ask_for_what_only_the_general_code_has() -> None:
    x = np.eye(4).reshape(1, 1, 4, 4)
    with ra.reading():
        out, saved = ra.softmax.forward(x, x, x)
        both = ra.softmax.backward(saved, out, saved.lse)
    expected, kept = ra.softmax.forward(x, x, x)
    wanted = ra.softmax.backward(kept, expected, kept.lse)
    near(saved.lse, kept.lse, "lse")
    for name, gradient in wanted.items():
        near(both[name], gradient, name)


def test_a_call_of_low_precision_is_computed_as_the_core_does() -> None:
    x = np.eye(4, dtype=np.float16).reshape(1, 1, 4, 4)
    with ra.reading():
        out, saved = ra.softmax.forward(x, x, x)
        gradients = ra.softmax.backward(saved, out)
    assert out.dtype == np.float16 and {g.dtype for g in gradients.values()} == {np.dtype(np.float16)}


def test_reading_is_told() -> None:
    assert not use_definition.is_reading()
    with ra.trace():
        assert use_definition.is_reading()
    assert not use_definition.is_reading()
