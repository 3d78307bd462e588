"""The laws: what holds of every mechanism in every implementation, whatever the numbers are.

One test a law. The mechanisms are those of the registry; what they are called with comes from their records: the
designed cases, and by Hypothesis their options put together anew, in other sizes, cut in the smallest parts
(`drawn_cases`). Allowed errors are those of `refattn.verify.selfcheck`, whose properties are laws, too. The folder of a
mechanism tests what is its own: the claims of its sources, what stands beside core and block, what was once wrong. What
no option may be is in `test_wrong_options`, and what no array may be in `test_bad_input`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, reject, settings

import refattn as ra
from refattn import Context, backends, philox, tree
from refattn.golden.storage_types import has_gradient
from refattn.mechanisms.koopman.options.kernel import Polynomial
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.verify.selfcheck.probe import Core, Values, used_share
from refattn.verify.selfcheck.properties import PROPERTIES
from refattn.verify.selfcheck.samples import Sample, property_samples, resized, sample, shrunk
from refattn.verify.selfcheck.sections import NotRun, Scope, Task, tasks
from refattn.verify.tolerance.budget import evaluate, truth
from refattn.verify.tolerance.compare import compare
from refattn.xp import dtype_name
from tests.mechanisms.drawn_cases import CORES, REFUSED, cases, small_parts

NUMPY = backends.get("numpy")
RECORDS = [ra.mechanism(name) for name in CORES]
STREAMS = [name for name in ra.list_mechanisms() if ra.mechanism(name).stream is not None]


# --- sections of `refattn check`

SECTIONS = ("definition, float64", "loops, every equation", "tangents, block, duality")
"""Of each the first case of each kind. `make check` runs every section on all of them; the laws below are of others."""


def checked(record: Mechanism) -> Iterator[Any]:
    for task in tasks(Scope(record.changed(cases=Scope(record, NUMPY).kinds), NUMPY)):
        if f"{task.section}, {task.name}" in SECTIONS:
            yield pytest.param(task, id=f"{record.name}, {task.section}, {task.name}")


@pytest.mark.parametrize("task", [task for name in ra.list_mechanisms() for task in checked(ra.mechanism(name))])
def test_the_check_holds(task: Task) -> None:
    """The definition is the general code, the second derivation the first, and gradients of blocks are tangents."""
    try:
        share, where = task.run()
    except NotRun as reason:
        pytest.skip(str(reason))
    assert share <= 1.0, where


@functools.cache
def small_samples(name: str) -> tuple[dict[bytes, dict[str, float]], tuple[Sample, ...]]:
    """Samples without and with masks and numbers, and a place for what rounding does to them."""
    return {}, property_samples(ra.mechanism(name), None)


@pytest.mark.parametrize(("name", "law"), [(record.name, law) for record in RECORDS for law in record.properties])
def test_a_property_holds(name: str, law: str) -> None:
    """Masks, padding, permutations, batch and heads apart, causality, workers; in parts of 3 tokens.

    Each implementation has one of the samples, in turn; in the check it has both, and long ones.
    """
    record, (known, samples) = ra.mechanism(name), small_samples(name)
    for n, implementation in enumerate(record.implementations, record.properties.index(law)):
        s = samples[n % len(samples)]
        with small_parts(name), contextlib.suppress(Unsupported):
            share = PROPERTIES[law](Core(record, implementation, NUMPY, "float64", known), s)
            assert share <= 1.0, (s.name, implementation)


# --- implementations, loops and gradients, whatever options and sizes are


Reference = tuple[Sample, Values, dict[str, float]]
"""A call, what the dense implementation gives for it, and its noise."""


def reference(record: Mechanism, case: Case) -> Reference:
    s, dense = sample(record, case), Core(record, record.implementations[0], NUMPY, "float64")
    return s, dense(s.inputs, s.options, s.upstream), dense.noise(s.inputs, s.options, s.upstream)


@functools.cache
def references(name: str) -> dict[str, Reference]:
    """Every case, shrunk, by name."""
    record = ra.mechanism(name)
    return {case.name: reference(record, shrunk(case)) for case in record.cases}


def assert_agreement(name: str, known: Reference) -> None:
    """Every implementation, cut small, gives what the dense one gives, forward and backward."""
    record, (s, expected, noise) = ra.mechanism(name), known
    for implementation in (*record.implementations[1:], "auto"):
        with small_parts(name), contextlib.suppress(Unsupported):
            found = Core(record, implementation, NUMPY, "float64")(s.inputs, s.options, s.upstream)
            share = used_share(found, expected, noise)
            assert share <= 1.0, (implementation, share, {n: x.shape for n, x in s.inputs.items()}, s.options)


def assert_sections(name: str, case: Case, *wanted: str) -> None:
    """Some sections of the check hold of one case."""
    scope = Scope(ra.mechanism(name).changed(cases=(case,), layers=()), NUMPY, full=True)
    for task in tasks(scope):
        if f"{task.section}, {task.name}" in wanted:
            with contextlib.suppress(NotRun):
                share, where = task.run()
                assert share <= 1.0, (task.section, task.name, where, case.inputs["q"].shape, case.options)


def test_tangents_where_the_gram_matrix_has_equal_eigenvalues() -> None:
    """Of one key in the space of coordinates, too: of four eigenvectors three are any basis of their space."""
    record = ra.mechanism("koopman")
    plain = next(case for case in record.cases if {*case.inputs} == {*"qkv"})
    kernel = Polynomial(weight=0.3, degree=3, constant=0.5)
    options = {"space": "augmented", "kernel": kernel, "fit": "stein", "jitter": 0.01}
    case = resized(dataclasses.replace(plain, options=options), 1, 1, 1, 2, 1, 4, 4)
    assert_sections("koopman", case, "tangents, core, duality", "tangents, core, symmetry")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of numbers that were drawn: their gradients are no worse
@pytest.mark.parametrize("name", CORES)
def test_any_options_in_any_sizes(name: str) -> None:
    """Implementations and loops are the dense map, and the gradients of each are tangents."""

    # By what a call costs. What fails is small, and says what it is; to look for a smaller one takes minutes. The calls
    # are the same in every run: of others, one run in ten meets a call that compares rounding alone, which is no fault.
    examples = {"koopman": 10, "graph_energy": 20, "sympformer": 12}.get(name, 30)

    @settings(max_examples=examples, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
    @given(cases(name))
    def holds(case: Case) -> None:
        try:
            known = reference(ra.mechanism(name), case)
        except ArithmeticError:  # there is no result near that of these numbers
            reject()
        assert_agreement(name, known)
        assert_sections(name, case, "tangents, core, duality", "loops, every equation")

    holds()


@pytest.mark.filterwarnings("ignore:step. got more than")
@pytest.mark.parametrize("name", CORES)
def test_cases_in_small_parts(name: str) -> None:
    for known in references(name).values():
        assert_agreement(name, known)


@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see tests/verify/selfcheck")
@pytest.mark.skip_xp_backend("numpy", "numpy-readonly", reason="what is compared is of NumPy, with read-only arrays")
@pytest.mark.skip_xp_backend("strict", reason="what holds on the strictest holds on it")
@pytest.mark.filterwarnings("ignore:step. got more than")
@pytest.mark.parametrize("name", CORES)
def test_every_library_gives_the_same(name: str, backend: Any) -> None:
    """The first case of each kind, in every implementation."""
    record = ra.mechanism(name)
    for case in Scope(record, NUMPY).kinds:
        s, expected, noise = references(name)[case.name]
        for implementation in record.implementations:
            with contextlib.suppress(Unsupported):
                found = Core(record, implementation, backend.owner, "float64")(s.inputs, s.options, s.upstream)
                assert used_share(found, expected, noise) <= 1.0, (case.name, implementation)


# --- storage


@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape")
@pytest.mark.skip_xp_backend("numpy-readonly", "cupy", reason="their numbers are NumPy's")
@pytest.mark.filterwarnings("ignore:step. got more than")
@pytest.mark.parametrize("name", CORES)
def test_half_types_are_within_their_budget(name: str, backend: Any) -> None:
    """They are computed in float32: the error is that of storing. A state stays in float32."""
    record, dtypes = ra.mechanism(name), [dtype for dtype in ("float16", "bfloat16") if backend.has(dtype)]
    if not dtypes:
        pytest.skip("no half types here")
    for dtype, case in itertools.product(dtypes, map(shrunk, Scope(record, NUMPY).kinds)):
        right = truth(record, case, dtype, grad=True)
        given = {n: backend.array(x, dtype if has_gradient(x) else None) for n, x in right.inputs.items()}
        for implementation in record.implementations:
            with contextlib.suppress(Unsupported):
                upstream = backend.array(right.upstream, dtype)
                found = evaluate(record, given, case.options, upstream, implementation)
                for tensor, x in found.items():
                    if tensor.removeprefix("d_") not in record.tokenless:
                        share = compare(tensor, backend.host(x), dtype_name(x), right).share
                        assert share <= 1.0, (dtype, case.name, implementation, tensor)


def calls(record: Mechanism, *names: str) -> Iterator[tuple[str, Core, Sample]]:
    """Yield a small call of every case and every implementation; `names` are all that a case may be given."""
    for case in record.cases:
        if names and ({*case.inputs} - {*names} or case.given or 0 in case.inputs["k"].shape):
            continue
        small = sample(record, shrunk(case))
        for implementation in record.implementations:
            yield f"{case.name}, {implementation}", Core(record, implementation, NUMPY, "float64"), small


@pytest.mark.filterwarnings("ignore:step. got more than")
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_what_forward_saved_can_be_copied_and_pickled(record: Mechanism) -> None:
    """A copy has the same gradients, to the bit; a pickle to rounding, as it stores strided arrays row by row."""
    count = 0
    for where, core, small in calls(record):
        with contextlib.suppress(Unsupported):
            saved = core.forward(small.inputs, small.options)[1]
            expected = core.backward(saved, small.upstream)
            found = core.backward(copy.deepcopy(saved), small.upstream)
            assert all(found[name].tobytes() == x.tobytes() for name, x in expected.items()), where
            found = core.backward(pickle.loads(pickle.dumps(saved)), small.upstream)
            for name, x in expected.items():
                scale = max(np.max(np.abs(x), initial=0.0), 1.0)
                np.testing.assert_allclose(found[name], x, rtol=0.0, atol=1e-11 * scale)
            count += 1
    assert count >= len(record.cases)


BAD = [np.nan, np.inf, pytest.param(-np.inf, marks=pytest.mark.slow(sampled=False))]


def hides(record: Mechanism, name: str) -> bool:
    return name in record.defaults


def masked(record: Mechanism, small: Sample, name: str, hidden: Any, value: float) -> Values:
    """The arguments with a mask that hides some tokens from all, as keys and as queries, which hold `value`."""
    arrays = {n: x.copy() for n, x in small.inputs.items()}
    keys, queries = arrays["k"].shape[2], arrays["q"].shape[2]
    for n in "qkv":
        if n != "q" or record.one_sequence or queries == keys:
            arrays[n][:, :, hidden[: arrays[n].shape[2]]] = value
    if name == "key_mask":
        return {**arrays, "key_mask": np.broadcast_to(~hidden, (len(arrays["k"]), keys))}
    pairs = np.broadcast_to(~hidden, (1, 1, queries, keys))
    both = pairs & ~hidden[:, None] if queries == keys else pairs
    return {**arrays, "mask": both & arrays.get("mask", True)}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("record", [r for r in RECORDS if hides(r, "key_mask")], ids=lambda record: record.name)
def test_behind_a_key_mask_nothing_is_read(record: Mechanism, value: float) -> None:
    """What a token holds that a key_mask hides changes no bit of any result, forward or backward."""
    for where, core, small in calls(record, *"qkv"):
        hidden = np.arange(small.inputs["k"].shape[2]) == 1
        with contextlib.suppress(Unsupported):
            given = [masked(record, small, "key_mask", hidden, x) for x in (0.0, value)]
            for x in given:
                x["q"] = small.inputs["q"]
            right, found = (core(x, small.options, small.upstream) for x in given)
            assert all(found[name].tobytes() == x.tobytes() for name, x in right.items()), where


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:step. got more than")
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("record", [r for r in RECORDS if hides(r, "mask")], ids=lambda record: record.name)
def test_behind_a_mask_of_pairs_a_number_that_is_not_finite_makes_no_wrong_one(record: Mechanism, value: float) -> None:
    """It may reach results, since 0 times NaN is NaN; what is finite is what it is without it."""
    for where, core, small in calls(record, *"qkv", "mask"):
        hidden = np.arange(small.inputs["k"].shape[2]) == 1
        with contextlib.suppress(Unsupported):
            right, found = (
                core(masked(record, small, "mask", hidden, x), small.options, small.upstream) for x in (0.0, value)
            )
            for name, x in right.items():
                finite = np.isfinite(found[name])
                scale = max(np.max(np.abs(x), initial=0.0), 1.0)
                assert np.all(np.abs(np.where(finite, found[name] - x, 0.0)) <= 1e-12 * scale), (where, name)


@pytest.mark.parametrize("record", [r for r in RECORDS if not r.one_sequence], ids=lambda record: record.name)
def test_nothing_to_attend_gives_0(record: Mechanism) -> None:
    """Output and gradients of a batch element, exactly, with the options of every case; another one is as without."""
    allowed = np.ones((2, 5), bool)
    allowed[0] = False
    mask = {"key_mask": allowed} if hides(record, "key_mask") else {"mask": allowed[:, None, None, :]}
    for case in record.cases:
        if {*case.inputs} - {*"qkv"} or case.given or 0 in (*case.inputs["q"].shape, *case.inputs["k"].shape):
            continue
        s = sample(record, resized(case, 2, 1, 2, 4, 5, 4, 4))
        for implementation in record.implementations:
            with contextlib.suppress(Unsupported):
                core, where = Core(record, implementation, NUMPY, "float64"), (case.name, implementation)
                found = core({**s.inputs, **mask}, s.options, s.upstream)
                assert not any(np.any(found[n][0]) for n in ("out", "d_q", "d_k", "d_v")), where
                other = core(s.inputs, s.options, s.upstream)
                assert all(np.any(found[n][1]) == np.any(other[n][1]) for n in ("out", "d_v")), where


# --- streams


def configs(name: str) -> Iterator[Any]:
    """Blocks of all configurations of the record, and of the options of each case that a block takes."""
    record = ra.mechanism(name)
    known = {field.name for field in dataclasses.fields(record.block.Config)}
    usual = {n: x for n, x in {"width": 8, "heads": 2, "kv_heads": 1, "bias": True}.items() if n in known}
    presets = (preset.get("block", {}) for preset in record.presets.values())
    found = [{}, *record.configs, *presets, *(case.options for case in record.cases)]
    given = [{n: x for n, x in one.items() if n in known and isinstance(x, str | int | float | tuple)} for one in found]
    seen = set()
    for one in given:
        with contextlib.suppress(*REFUSED):
            config = record.block.Config(**{**usual, **one})
            if repr(config) not in seen:
                seen.add(repr(config))
                yield pytest.param(name, config, id=f"{name}, {one}")


def context_of(config: Any, first: int, stop: int, mask: Any) -> Context:
    """Return the context of tokens from `first` up to `stop`: the mask and the positions also of those before them."""
    reads = getattr(config, "context_fields", ())
    tokens = np.arange(24).reshape(2, 12)[:, first:stop] % 3 if "tokens" in reads else None
    positions = np.arange(stop) % 2 if "positions" in reads else None
    padding = None if mask is None else mask[:, :stop]
    return Context(causal=True, key_mask=padding, tokens=tokens, positions=positions)


def in_parts(record: Mechanism, params: Any, x: Any, cuts: list[int], mask: Any) -> Any:
    """Return the block over x[:, :cuts[0]], x[:, cuts[0]:cuts[1]], ..., through a cache that is saved by its names."""
    stream: Any = record.stream
    cache, found = stream.start(params, x.shape[0]), []
    for first, stop in itertools.pairwise([0, *cuts, x.shape[1]]):
        context = context_of(params.config, first, stop, mask)
        advance = stream.step if stop - first == 1 else stream.prefill
        state, cache = advance(params, cache, record.block.start(params, x[:, first:stop], context), context)
        found.append(record.block.read(params, state))
        cache = tree.unflatten(cache, {n: np.array(leaf) for n, leaf in tree.flatten(cache).items()})
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize(("name", "config"), [param for name in STREAMS for param in configs(name)])
def test_a_stream_is_the_whole(name: str, config: Any) -> None:
    """With and without a mask of tokens; where the block itself refuses a configuration, so does the stream."""
    record, x = ra.mechanism(name), philox.normal((2, 12, 8), seed=5, purpose="laws.stream")
    fresh = record.block.init(config, seed=3, like=np.zeros(1))
    moved = {n: w + 0.1 * philox.normal(w.shape, seed=3, purpose=n) for n, w in tree.flatten(fresh).items()}
    params = tree.unflatten(fresh, moved)
    masks = [None, philox.uniform((2, 12), seed=1, purpose="mask") < 0.7]
    for mask in masks if "key_mask" in record.context_fields else masks[:1]:
        context = context_of(config, 0, 12, mask)
        try:
            state, _ = record.block.forward(params, record.block.start(params, x, context), context)
        except REFUSED as refused:
            with pytest.raises(type(refused)):
                in_parts(record, params, x, [4, 5, 6], mask)
            continue
        expected = record.block.read(params, state)
        shown: Any = np.ones((2, 12), bool) if mask is None else mask
        with small_parts(name):
            found = in_parts(record, params, x, [4, 5, 6, 7, 8, 9, 11] if mask is None else [*range(1, 12)], mask)
        error = np.max(np.abs(found - expected)[shown])
        assert error <= 1e-10 * np.max(np.abs(expected)), mask is not None


def test_every_law_has_mechanisms() -> None:
    """What is passed over is passed over by name: no law holds of nothing."""
    assert len(CORES) >= 7 and len(STREAMS) >= 6 and sum(hides(record, "key_mask") for record in RECORDS) >= 2
    assert used_share({"x": np.ones(1)}, {"x": np.zeros(1)}, {"x": 1e-3}) > 1.0
