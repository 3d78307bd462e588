"""The engine: a hooked copy computes the same bits, points at the real lines, and touches nothing outside its block."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import re
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations, philox
from refattn.mechanisms.koopman import dense as _koopman  # noqa: F401  its equations are declared
from refattn.mechanisms.softmax import dense
from refattn.mechanisms.softmax.implementations import tiled
from refattn.model import network as _network  # noqa: F401
from refattn.ops import tiles

SHAPES = {"q": (2, 4, 9, 3), "k": (2, 2, 14, 3), "v": (2, 2, 14, 5), "d_out": (2, 4, 9, 5), "d_lse": (2, 4, 9)}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "masks": {"mask": np.arange(14) % 5 != 2, "causal": True},
    "all": {"mask": np.arange(14) % 5 != 2, "causal": True, "scale": 0.7, "softcap": 1.5}
    | {"bias": np.sin(np.arange(14.0)), "sink": np.arange(4.0)[:, None], "keep": 1.0 + np.arange(14.0) % 2.0},
}

LARGE = 3000.0  # with queries of this size no bound is small enough to do without the maximum


def draw(name: str, dtype: str = "float64", scale: float = 1.0) -> Any:
    return (philox.normal(SHAPES[name], seed=3, purpose=name) * scale).astype(dtype)


def attend(implementation: str, options: str = "all", dtype: str = "float64", scale: float = 1.0) -> dict[str, Any]:
    """One forward and backward; results by name."""
    inputs = draw("q", dtype, scale), draw("k", dtype), draw("v", dtype)
    given = dict(OPTIONS[options])
    given |= {n: x.reshape(1, 1, 1, 14) for n, x in given.items() if n in ("mask", "bias", "keep")}
    given |= {n: x.astype(dtype) for n, x in given.items() if n in ("bias", "sink", "keep")}
    out, saved = ra.softmax.forward(*inputs, **given, implementation=implementation)
    return {
        "out": out,
        "lse": saved.lse,
        **ra.softmax.backward(saved, draw("d_out", dtype), draw("d_lse", dtype)),
    }


def assert_same_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        a, b = np.asarray(first[name]), np.asarray(second[name])
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), name


def same(id: str, name: str, value: Any) -> Any:
    return value


@pytest.fixture
def small(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Make a module of a text."""

    def make(text: str) -> ModuleType:
        path = tmp_path / "small.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("small", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even small planes into several blocks of rows and columns."""
    whole = tiles.plan

    def plan(q: Any, k: Any, most: int) -> Any:
        cut = whole(q, k, most)
        rows = tuple(
            tiles.Tile(tile.batch, tile.heads, (start, min(start + 4, q.shape[2])))
            for tile in cut.heads
            for start in range(0, q.shape[2], 4)
        )
        return tiles.Plan(cut.heads, rows, 5)

    monkeypatch.setattr(tiled, "plan", plan)


# --- the same bits, and the real lines


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_an_identity_hook_changes_no_bit(implementation: str, options: str, dtype: str) -> None:
    for scale in (1.0, LARGE):  # with and without rows that need their maximum
        plain = attend(implementation, options, dtype, scale)
        with equations.apply(same):
            assert_same_bits(attend(implementation, options, dtype, scale), plain)
        with equations.trace() as t:
            assert_same_bits(attend(implementation, options, dtype, scale), plain)
        assert t["SM.1"].shape[-1] == (14 if implementation == "dense" else 5)


@pytest.mark.parametrize("module", [dense, tiled])
def test_a_copy_points_at_the_real_file_and_lines(module: ModuleType) -> None:
    copy = equations.hooked(module, same)
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ != module.__name__:
            assert getattr(copy, name) is function
            continue
        twin = getattr(copy, name)
        assert twin is not function
        assert twin.__code__.co_filename == module.__file__ == inspect.getsourcefile(twin)
        assert inspect.getsource(twin) == inspect.getsource(function)
        assert inspect.getdoc(twin) == inspect.getdoc(function)
        assert inspect.signature(twin) == inspect.signature(function)
        lines = {line for _, _, line in function.__code__.co_lines() if line}
        assert {line for _, _, line in twin.__code__.co_lines() if line} == lines


def test_equations_are_read_without_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -OO` leaves them out."""
    declared = equations.declared(dense)
    monkeypatch.setattr(dense, "__doc__", None)
    assert equations.declared(dense) == declared and declared["SM.1"].startswith("s_ij")


@pytest.mark.parametrize("implementation", [dense, tiled])
def test_tracebacks_show_the_line_that_failed(implementation: ModuleType) -> None:
    name = implementation.__name__.rpartition(".")[2]
    for tag in [tag for tag in equations.tags(implementation) if tag.claims]:

        def fail(id: str, variable: str, value: Any, tag: equations.Tag = tag) -> Any:
            if (id, variable) == (tag.id, tag.name):
                raise ZeroDivisionError(id)
            return value

        with pytest.raises(ZeroDivisionError) as caught, equations.apply(fail):
            attend(name)
            attend(name, "masks", scale=LARGE)
        frames = [frame for frame in traceback.extract_tb(caught.tb) if frame.filename == implementation.__file__]
        twins = {t.line for t in equations.tags(implementation) if (t.id, t.name) == (tag.id, tag.name)}
        assert frames[-1].lineno is not None
        first = linecache.getline(str(implementation.__file__), frames[-1].lineno)
        assert frames[-1].lineno in twins
        assert first.strip().startswith(f"{tag.name} = ") and tag.id in first
        assert frames[-1].line == first.strip()


# --- what is hooked


def test_only_claims_are_hooked(small: Callable[[str], ModuleType]) -> None:
    module = small(
        "def f(x, deep=True):\n"
        "    a = x + 1.0  # (b) [T.1]\n"
        "    b: object = a * (\n        2.0\n    )  # (b) [T.2]\n"
        "    c = b - 1.0  # (b) [T.3-T.5]\n"
        "    c += 1.0  # (b) [T.3]\n"
        "    d = c  # (b): the same\n"
        "    if deep:\n        for _ in range(2):\n            d = d / 2.0  # (b) [dT.x]\n"
        "    return d\n"
        "class Other:\n    pass\n"
    )
    seen: list[tuple[str, str]] = []

    def note(id: str, name: str, value: Any) -> Any:
        seen.append((id, name))
        return value

    x = np.asarray([1.0, 2.0])
    copy = equations.hooked(module, note)
    assert copy.f(x).tolist() == module.f(x).tolist()
    assert seen == [("T.1", "a"), ("T.2", "b"), ("dT.x", "d"), ("dT.x", "d")]
    assert copy.Other is module.Other
    found = [(t.id, t.last, t.name, t.axes, t.line, t.claims) for t in equations.tags(module)]
    assert found == [
        ("T.1", "", "a", ("b",), 2, True),
        ("T.2", "", "b", ("b",), 3, True),
        ("T.3", "T.5", "c", ("b",), 6, False),
        ("T.3", "", "c", ("b",), 7, False),
        ("", "", "d", ("b",), 8, False),
        ("dT.x", "", "d", ("b",), 11, True),
    ]


def test_the_declared_equations() -> None:
    found = equations.declared(dense)
    assert list(found)[:3] == ["SM.1", "SM.capped", "SM.biased"]
    assert found["SM.1"] == "s_ij = scale q_i . k_j"
    assert found["dSM.q"] == "dq_i = scale sum_j ds_ij k_j"
    assert equations.declared(ModuleType("empty")) == {}


def test_a_formula_that_the_definition_has_is_read_there() -> None:
    from refattn.mechanisms.sympformer import definition, dense

    assert "[dSYMP.11]  as in the definition" in equations.docstring(dense)
    assert equations.declared(dense)["dSYMP.11"] == equations.declared(definition)["dSYMP.11"]
    more = ModuleType("refattn.mechanisms.sympformer.more", "[SYMP.999]  as in the definition")
    with pytest.raises(ValueError, match=r"of SYMP.999, and that of .*sympformer.definition does not declare it"):
        equations.declared(more)
    alone = ModuleType("alone", "[SYMP.1]  as in the definition")
    with pytest.raises(ValueError, match="alone: its docstring says 'as in the definition', but there is none"):
        equations.declared(alone)


# --- nesting, leaving, and other threads


def test_the_inner_hook_acts_first() -> None:
    order = []

    def named(name: str) -> equations.Hook:
        def hook(id: str, variable: str, value: Any) -> Any:
            order.append((name, id))
            return value

        return hook

    with equations.apply(named("outer")), equations.apply(named("middle")), equations.apply(named("inner")):
        attend("dense", "none")
    assert order[:4] == [("inner", "SM.1"), ("middle", "SM.1"), ("outer", "SM.1"), ("inner", "SM.largest")]


def test_leaving_a_block_puts_the_outer_hook_back() -> None:
    assert not equations.is_active()
    with ra.trace() as t:
        with pytest.raises(ZeroDivisionError), equations.mutate("SM.5", lambda o: 1 / 0):
            attend("dense")
        assert equations.is_active()
        before = len(t)
        attend("dense")
        assert len(t) > before
    assert not equations.is_active()
    assert equations.active(dense) is dense
    ran = len(t)
    attend("dense")
    assert len(t) == ran


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_threads_trace_at_the_same_time(implementation: str) -> None:
    alone = {}
    for factor in range(1, 5):
        with ra.trace() as t:
            attend(implementation, scale=float(factor))
        alone[factor] = {key: value.copy() for key, value in t.items()}
    start, found, errors = threading.Barrier(4), {}, []

    def work(factor: int) -> None:
        try:
            start.wait(timeout=30)
            for _ in range(3):
                with ra.trace() as t:
                    attend(implementation, scale=float(factor))
                found[factor] = dict(t)
        except BaseException as error:  # shown below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for factor, expected in alone.items():
        assert_same_bits(found[factor], expected)


# --- the trace


def test_a_trace_numbers_the_passes() -> None:
    with ra.trace() as t:
        first = attend("dense", "none")["out"]
        second = attend("dense", "none", scale=2.0)["out"]
        attend("dense", "none", scale=3.0)
    assert np.array_equal(t["SM.5"], first)
    assert np.array_equal(t["SM.5[0]"], first)
    assert np.array_equal(t["SM.5[1]"], second)
    assert len(t.passes("SM.5")) == 3
    assert np.array_equal(t.passes("SM.5")[2], t["SM.5[2]"])
    assert t.passes("SM.capped") == ()
    assert t.variables["SM.5"] == "out"
    assert t.variables["dSM.q"] == "d_q"


def test_a_trace_is_told_as_a_table() -> None:
    x = np.eye(4).reshape(1, 1, 4, 4)
    with equations.trace() as t:
        _, saved = ra.softmax.forward(x, x, x, implementation="dense")
        ra.softmax.backward(saved, x)
    lines = repr(t).splitlines()
    assert lines[0] == f"Trace of {len(t)} values" and len(lines) == 1 + len(t)
    assert lines[1].split() == ["SM.1", "scores", "(1,", "1,", "4,", "4)", "0", "0.5"]
    assert "<td>dSM.scale</td><td>d_scale</td><td>()</td>" in t._repr_html_()
    assert t._repr_html_().count("<tr>") == 1 + len(t)


def test_a_trace_is_a_mapping() -> None:
    with ra.trace() as t:
        out, _ = ra.softmax.forward(draw("q"), draw("k"), draw("v"))
    assert list(t) == ["SM.1", "SM.largest", "SM.top", "SM.3", "SM.total", "SM.4", "SM.5", "SM.lse"]
    assert len(t) == 8
    assert "SM.5" in t and "SM.5[0]" in t and "SM.5[1]" not in t and "SM.capped" not in t
    assert dict(t)["SM.5"] is t["SM.5"]
    assert t.get("SM.capped") is None
    with pytest.raises(KeyError) as caught:
        t["SM.capped"]
    assert (
        "SM.capped: no such equation ran; these did: SM.1, SM.largest, SM.top, SM.3, SM.total, SM.4, SM.5, SM.lse"
        in str(caught.value)
    )
    with ra.trace() as empty:
        pass
    with pytest.raises(KeyError, match="SM.1: no such equation ran; these did: none"):
        empty["SM.1"]


def test_a_trace_holds_copies() -> None:
    saved: Any
    with ra.trace() as t:
        out, saved = ra.softmax.forward(draw("q"), draw("k"), draw("v"), implementation="dense")
    kept = t["SM.5"].copy()
    assert not np.shares_memory(t["SM.5"], out)
    assert not np.shares_memory(t["SM.4"], saved.inner.weights)
    out[...] = 7.0
    assert np.array_equal(t["SM.5"], kept)
    t["SM.4"][...] = 7.0
    assert not np.any(saved.inner.weights == 7.0)


def test_a_trace_works_over_libraries(backend: Any) -> None:
    arrays = [backend.array(draw(name)) for name in ("q", "k", "v")]
    with ra.trace() as t:
        out, saved = ra.softmax.forward(*arrays, implementation="dense")
        ra.softmax.backward(saved, backend.array(draw("d_out")))
    assert backend.owner.owns(t["SM.1"])
    assert np.array_equal(backend.host(t["SM.5"]), backend.host(out))
    assert tuple(t["dSM.q"].shape) == SHAPES["q"]


# --- substitution, mutation, rounding


def test_a_substituted_tensor_is_used() -> None:
    weights = np.abs(philox.normal((2, 4, 9, 14), seed=5, purpose="weights"))
    with equations.substitute({"SM.4": weights}):
        found = attend("dense", "none")
    v = np.repeat(draw("v"), 2, axis=1)
    assert np.array_equal(found["out"], weights @ v)
    d_v = (np.swapaxes(weights, 2, 3) @ draw("d_out")).reshape(2, 2, 2, 14, 5).sum(axis=2)
    np.testing.assert_allclose(found["v"], d_v, rtol=1e-13, atol=1e-15)


def test_a_substituted_tensor_of_another_shape_is_named() -> None:
    text = r"SM\.total \(total\): got shape \(2, 4, 9\), needs \(2, 4, 9, 1\)"
    with pytest.raises(ValueError, match=text), equations.substitute({"SM.total": np.ones((2, 4, 9))}):
        attend("dense")


@pytest.mark.parametrize("id", [tag.id for tag in equations.tags(dense) if tag.claims])
def test_every_equation_can_be_mutated(id: str) -> None:
    plain = attend("dense")
    with ra.trace() as t, equations.mutate(id, lambda x: x * 1.02):
        found = attend("dense")
    with ra.trace() as before:
        attend("dense")
    np.testing.assert_array_equal(t[id], before[id] * 1.02)
    changed = [name for name in plain if not np.allclose(found[name], plain[name], rtol=1e-6, atol=1e-9)]
    # The maximum cancels in exact arithmetic; everything else shows.
    assert bool(changed) == (id not in ("SM.top", "SM.largest"))
    if id.startswith("d"):
        assert not {"out", "lse"} & set(changed)


def test_rounding_acts_on_the_named_equations_alone() -> None:
    calls = []

    def round_to(value: Any, dtype: str) -> Any:
        calls.append(dtype)
        return value.astype(dtype).astype(value.dtype)

    with ra.trace() as t, equations.rounding({"SM.4": "float32", "dSM.1": "float16"}, round_to):
        attend("dense")
    assert calls == ["float32", "float16"]
    for id, dtype in (("SM.4", "float32"), ("dSM.1", "float16")):
        assert np.array_equal(t[id], t[id].astype(dtype).astype("float64"))
    assert not np.array_equal(t["SM.3"], t["SM.3"].astype("float32").astype("float64"))


# --- ids that there are not


def nothing(*given: Any) -> Any:
    return given[0]


@pytest.mark.parametrize(
    "hook",
    [
        lambda id: equations.substitute({id: np.ones(1)}),
        lambda id: equations.mutate(id, nothing),
        lambda id: equations.rounding({"SM.1": "float64", id: "float32"}, nothing),
    ],
)
@pytest.mark.parametrize("id", ["SM.99", "sm.1", "SM.1 ", "", "scores"])
def test_an_equation_that_there_is_not_is_told(hook: Any, id: str) -> None:
    told = (
        rf"^{re.escape(id)}: got no such equation, needs one that there is; these ran: SM.1, SM.largest, SM.top, SM.3, "
    )
    with pytest.raises(ValueError, match=told), hook(id):
        attend("dense", "none")
    with hook("SM.capped"), pytest.raises(ZeroDivisionError), hook(id):  # an error of the block's own comes first
        raise ZeroDivisionError
    for there in ("SM.capped", "KOOP.2", "LM.1"):  # did not run, and yet there is one
        with hook(there):
            attend("dense", "none")


# --- pooled work


@pytest.mark.parametrize("mechanism", ["softmax", "koopman"])
def test_a_trace_of_a_training_step_does_not_depend_on_the_workers(mechanism: str) -> None:
    """Shards are traced one after the other: no pass holds another shard's value, and none is lost."""
    from refattn import backends, model
    from refattn.train import step

    params = model.init(model.Config(mechanism, 16, 8, 8, 2, 2), like=np.zeros(1, np.float64))
    draw = np.random.default_rng(0)
    inputs, targets = draw.integers(0, 16, (2, 600, 8))
    found = []
    for workers in (1, 4):
        with equations.trace() as t, backends.use_workers(workers):
            loss, gradients = step.loss_and_gradients(params, inputs, targets)
        found.append({id: x.tobytes() for id, x in t.items()})
    with backends.use_workers(4):
        plain, expected = step.loss_and_gradients(params, inputs, targets)
    assert list(found[0]) == list(found[1]) and found[0] == found[1]
    if mechanism == "softmax":
        assert plain == loss and gradients.token_embedding.tobytes() == expected.token_embedding.tobytes()
    else:
        # Without a hook another implementation, with other roundings. Eigenvalues of the kernel matrices of 8 tokens
        # are at most 8, so that with the default ridge of 0.1 the systems have a condition of at most (8 * 8 + 0.1) /
        # 0.1 = 641.
        rtol = 641 * 8 * np.finfo(np.float64).eps
        np.testing.assert_allclose(plain, loss, rtol=rtol)
        difference = np.linalg.norm(gradients.token_embedding - expected.token_embedding)
        assert difference <= rtol * np.linalg.norm(expected.token_embedding)


def test_passes_of_an_equation_that_there_is_not() -> None:
    with ra.trace() as t:
        attend("dense", "none")
    assert t.passes("SM.capped") == () and len(t.passes("SM.1")) == 1
    with pytest.raises(KeyError, match="id: got 'SM.99': no such equation; these ran: SM.1, "):
        t.passes("SM.99")
