"""Gradients three ways: by the hand-written backward, by differences, and by the autograd of torch.

A `Subject` is a differentiable map of named arrays, its leaves, with its backward: a core on a designed case, or a
block with its parameters, tokens and memory. The loss is the inner product of all its outputs with fixed upstream
gradients. Differences are central, of eighth order, along every element of every leaf, on NumPy in float64::

    f'(x) = sum_n c_n (f(x + n h) - f(x - n h)) / h + O(h^8 f^(9) / 630),  c = 4/5, -1/5, 4/105, -1/280

With h = 2^-12 the first error is 2e-32 f^(9). In two layers with an operator that is fitted f^(9) reached 10^19 f',
elsewhere it is far below. The rounding of f costs about 2^-53 f / h = 5e-13 f, which is why h must not be much smaller:
a leaf of several elements that are small has half the step. Autograd has the rounding of float64 alone, as the
hand-written backward has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends, counter, tree
from refattn.golden.inputs import make
from refattn.mechanisms.context import Context
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.verify.probe import on_backend
from refattn.xp import Array, backend, namespace

Floats = NDArray[np.float64]
Arrays = Mapping[str, Array]

TOLERANCES = {"differences": 1e-9, "autograd": 1e-12}
"""Allowed difference from the hand-written backward, relative to the largest element of the gradient of a leaf.

2^-53 times some 10 roundings and a conditioning of some 100 is 1e-13; that of differences is derived above."""

FLOOR = 1e-2
"""A leaf whose gradient is below this share of the largest of all leaves is judged relative to that share."""

STEP = 2.0**-12
STENCIL = (4.0 / 5.0, -1.0 / 5.0, 4.0 / 105.0, -1.0 / 280.0)

CONFIGS: tuple[dict[str, Any], ...] = (
    {"width": 4, "heads": 2},
    {"width": 4, "heads": 2, "kv_heads": 1, "head_width": 2, "value_width": 3}
    | {"bias": True, "residual": False, "scale": 0.5, "softcap": 2.0},
)
"""Configurations of blocks; of each, the fields that a block has."""

CONTEXTS = (("tokens",), ("tokens", "mask", "key_mask", "causal"), ("tokens", "memory", "memory_mask", "mask"))
"""Contexts of blocks by the fields that are given; of each, the fields that a mechanism reads."""


@dataclass(frozen=True)
class Subject:
    """A differentiable map with its hand-written backward.

    Attributes
    ----------
    name
        What it is, in words.
    leaves
        Where it is evaluated: float64 on the host, by name.
    forward
        Outputs by name, for leaves of any array library, in the form that is the definition.
    backward
        Gradients by leaf, for leaves, upstream gradients by output, and a form.
    forms
        The forms that `backward` takes.
    """

    name: str
    leaves: dict[str, Floats]
    forward: Callable[[Arrays], dict[str, Array]]
    backward: Callable[[Arrays, Arrays, str], dict[str, Array]]
    forms: tuple[str, ...]

    def upstream(self) -> dict[str, Floats]:
        """Return the upstream gradient of each output."""
        outputs = self.forward(self.leaves)
        return {n: counter.normal(x.shape, seed=0, purpose=f"gradients.{n}") for n, x in outputs.items()}


def by_hand(subject: Subject, where: backends.Backend, form: str) -> dict[str, Floats]:
    """Return the gradients that the backward of a form gives on a backend."""
    leaves = {n: on_backend(where, x) for n, x in subject.leaves.items()}
    upstream = {n: on_backend(where, x) for n, x in subject.upstream().items()}
    return {n: where.to_numpy(x) for n, x in subject.backward(leaves, upstream, form).items()}


def by_differences(subject: Subject, step: float = STEP) -> dict[str, Floats]:
    """Return the gradients by central differences, with this step for leaves of the size of 1."""
    upstream = subject.upstream()

    def outputs(name: str, at: int, by: float) -> dict[str, Array]:
        moved = subject.leaves[name].copy()
        moved.reshape(-1)[at] += by
        return subject.forward({**subject.leaves, name: moved})

    gradients = {}
    for name, leaf in subject.leaves.items():
        slopes = np.zeros(leaf.size)
        small = leaf.size > 1 and float(np.mean(leaf * leaf)) < 1.0  # how large a single number is says nothing
        width = 0.5 * step if small else step
        for at in range(leaf.size):
            for n, weight in enumerate(STENCIL, start=1):
                above, below = outputs(name, at, n * width), outputs(name, at, -n * width)
                change = sum(float(np.sum(d * (_finite(above[o]) - _finite(below[o])))) for o, d in upstream.items())
                slopes[at] += weight * change / width
        gradients[name] = slopes.reshape(leaf.shape)
    return gradients


def by_autograd(subject: Subject) -> dict[str, Floats]:
    """Return the gradients by the autograd of torch."""
    import torch

    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in subject.leaves.items()}
    outputs = subject.forward(leaves)
    loss = sum(torch.sum(torch.tensor(d) * _finite(outputs[n])) for n, d in subject.upstream().items())
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {n: x.numpy() for n, x in zip(leaves, found, strict=True)}


def _finite(x: Array) -> Array:
    """An lse of -inf is a constant: 0 stands for it in the loss."""
    xp = namespace(x)
    return xp.where(xp.isfinite(x), x, 0.0)


def largest_error(got: Mapping[str, Floats], expected: Mapping[str, Floats]) -> tuple[float, str]:
    """Return the largest relative error and its leaf; infinite where one is missing, misshapen or not finite."""
    overall = max((float(np.max(np.abs(x), initial=0.0)) for x in expected.values()), default=0.0)
    worst = (0.0, "")
    for name, wanted in expected.items():
        if name not in got or got[name].shape != wanted.shape or not np.all(np.isfinite(got[name])):
            return math.inf, name
        error = float(np.max(np.abs(got[name] - wanted), initial=0.0))
        size = max(float(np.max(np.abs(wanted), initial=0.0)), FLOOR * overall)
        worst = max(worst, (0.0 if error == 0.0 else error / size if size else math.inf, name))
    return worst


def beside(subject: Subject, way: str) -> Callable[[Mapping[str, Floats]], tuple[float, str]]:
    """Return what tells the largest relative error of gradients and its leaf, beside "differences" or "autograd".

    Differences that disagree are taken again with a longer step, which rounds less and truncates more, and with a
    shorter one, which does not reach a kink that is near, such as a threshold. A wrong gradient is wrong beside all.
    """
    expected = by_autograd(subject) if way == "autograd" else by_differences(subject)
    again = functools.cache(lambda step: by_differences(subject, step))

    def judge(found: Mapping[str, Floats]) -> tuple[float, str]:
        error = largest_error(found, expected)
        for step in () if way == "autograd" else (4.0 * STEP, STEP / 4.0):
            if error[0] > TOLERANCES[way]:
                error = min(error, largest_error(found, again(step)))
        return error

    return judge


def shrunk(case: Case) -> Case:
    """Return the case with at most 2 x 2 heads, 5 tokens and width 5; what was equal, less or more stays so."""
    (b, h, queries, d), (_, g, keys, _) = case.inputs["q"].shape, case.inputs["k"].shape
    e = case.inputs["v"].shape[3]
    rows, columns = _smaller(queries, keys, 3)
    d, e = _smaller(d, e, 3)
    return resized(case, min(b, 1), min(g, 2), min(h // max(g, 1), 2), rows, columns, d, e)


def resized(case: Case, b: int, groups: int, shared: int, rows: int, columns: int, d: int, e: int) -> Case:
    """Return the case with other sizes: `shared` is how many query heads a key head serves."""
    plane = (b, groups * shared, rows, columns)
    shapes: dict[str, tuple[int, ...]] = {"q": (*plane[:3], d), "key_mask": (b, columns)}
    shapes |= {"k": (b, groups, columns, d), "v": (b, groups, columns, e)}
    inputs = {}
    for name, given in case.inputs.items():
        # What has no shape of its own belongs to the scores, and is broadcast to their shape from the right.
        own = [1 if n == 1 else size for n, size in zip(given.shape, plane[4 - len(given.shape) :], strict=True)]
        inputs[name] = replace(given, shape=shapes.get(name, tuple(own)), numbers=_denser(given, columns))
    return replace(case, inputs=inputs)


def _smaller(a: int, b: int, size: int) -> tuple[int, int]:
    """Bound two sizes: by `size + 1` where they are equal, otherwise by `size` and `size + 2`."""
    if a == b:
        return min(a, size + 1), min(b, size + 1)
    small, large = min(a, b, size), min(max(a, b), size + 2)
    return (small, large) if a < b else (large, small)


def _denser(given: Input, keys: int) -> Mapping[str, float]:
    """Keep so much of a mask that on average a row may attend one of its fewer keys."""
    if "keep" not in given.numbers or not keys:
        return given.numbers
    return {**given.numbers, "keep": max(given.numbers["keep"], 1.0 / keys)}


def core_subjects(mechanism: Mechanism, cases: Iterable[Case]) -> Iterator[Subject]:
    """Yield the core on cases, shrunk: as they are, and with every differentiable number that some case gives."""
    numbers = {n: x for case in mechanism.cases for n, x in numbers_of(mechanism, case.options).items()}
    for case in map(shrunk, cases):
        yield _core_subject(mechanism, case, case.name)
        own = numbers_of(mechanism, case.options)
        every = with_numbers(mechanism, case.options, numbers | own)
        if not set(numbers_of(mechanism, every)) <= set(own):
            names = ", ".join(n.rpartition(".")[2] for n in numbers)
            yield _core_subject(mechanism, replace(case, options=every), f"{case.name} with {names}")


def numbers_of(mechanism: Mechanism, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differentiable numbers that options give, by the names that the record has for them."""
    found = {}
    for name in mechanism.differentiable:
        option, _, field = name.partition(".")
        value = options.get(option)
        if field and value is not None:
            value = getattr(mechanism.families[option](value), field, None)
        if value is not None:
            found[name] = value
    return found


def with_numbers(mechanism: Mechanism, options: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with these numbers, by the names that the record has for them; kinds without one keep none."""
    found = dict(options)
    for name, x in numbers.items():
        option, _, field = name.partition(".")
        if not field:
            found[option] = x
            continue
        given = found.get(option, mechanism.defaults[option])
        kind: Any = None if given is None else mechanism.families[option](given)
        if kind is not None and hasattr(kind, field):
            found[option] = replace(kind, **{field: x})
    return found


def _core_subject(mechanism: Mechanism, case: Case, name: str) -> Subject:
    core = mechanism.core
    assert core is not None
    inputs = make(mechanism.name, case, "float64")
    masks = {n: x for n, x in inputs.items() if x.dtype == np.bool_}
    given = {n: np.asarray(x) for n, x in numbers_of(mechanism, case.options).items()}
    numbers = {n.rpartition(".")[2]: x for n, x in given.items()}

    def call(leaves: Arrays, form: str) -> tuple[Array, Any]:
        placed = {n: backend(leaves["q"]).from_numpy(x) for n, x in masks.items()}
        arrays = {n: x for n, x in leaves.items() if n not in numbers}
        options = with_numbers(mechanism, case.options, {n: leaves[n.rpartition(".")[2]] for n in given})
        return core.forward(**arrays, **placed, **options, form=form)

    def forward(leaves: Arrays) -> dict[str, Array]:
        out, saved = call(leaves, mechanism.forms[0])
        return {"out": out, **{n: getattr(saved, n) for n in mechanism.outputs}}

    def backward(leaves: Arrays, upstream: Arrays, form: str) -> dict[str, Array]:
        return core.backward(call(leaves, form)[1], **{f"d_{n}": x for n, x in upstream.items()})

    leaves = {n: x for n, x in inputs.items() if n not in masks} | numbers
    return Subject(name, leaves, forward, backward, mechanism.forms)


def block_subjects(mechanism: Mechanism) -> Iterator[Subject]:
    """Yield one step of the block for each configuration and context."""
    known = {field.name for field in dataclasses.fields(mechanism.block.Config)}
    seen: list[Any] = []
    for n, given in enumerate((*CONFIGS, *({**CONFIGS[0], **more} for more in mechanism.configs))):
        config = mechanism.block.Config(**{name: x for name, x in given.items() if name in known})
        # A mechanism that reads little has few different contexts, and one without these fields few configurations.
        if config in seen:
            continue
        seen.append(config)
        reads = getattr(config, "reads", mechanism.reads)
        read = [tuple(name for name in fields if name in reads) for fields in CONTEXTS]
        if n >= len(CONFIGS):
            read = read[1:3] if "memory" in reads else read[1:2]
        for context in dict.fromkeys(read):
            yield _block_subject(mechanism, config, [*context], f"block {n} with {', '.join(context) or 'no context'}")


def _block_subject(mechanism: Mechanism, config: Any, context: list[str], name: str) -> Subject:
    block = mechanism.block
    b, n, keys = 2, 3, 2 if "memory" in context else 3
    normal = {"x": (b, n, config.width), "memory": (b, keys, config.width)}
    x, memory = (counter.normal(shape, seed=0, purpose=f"gradients.{what}") for what, shape in normal.items())
    shapes = {"mask": (n, keys), "key_mask": (b, n), "memory_mask": (b, keys)}
    fixed: dict[str, NDArray[Any]] = {
        what: counter.uniform(shape, seed=0, purpose=f"gradients.{what}") < 0.7
        for what, shape in shapes.items()
        if what in context
    }
    if "tokens" in context:
        fixed["tokens"] = counter.integers((b, n), 0, config.vocabulary, seed=0, purpose="gradients.tokens")
    if "positions" in getattr(config, "reads", ()):
        fixed["positions"] = np.arange(keys) % 2
    params = block.init(config, seed=0, like=x)
    # Biases start at 0, where an error could hide.
    params = tree.map_leaves(lambda w: w + 0.25 * counter.normal(w.shape, seed=0, purpose="gradients.params"), params)
    whole = {"x": x, "params": params, "context": {"memory": memory} if "memory" in context else {}}

    def step(leaves: Arrays) -> tuple[Any, Any, Any]:
        given = tree.unflatten(whole, leaves)
        placed = {what: backend(given["x"]).from_numpy(value) for what, value in fixed.items()}
        at = Context(**placed, **given["context"], causal="causal" in context)
        state, saved = block.forward(given["params"], block.start(given["params"], given["x"], at), at)
        return given["params"], state, saved

    def forward(leaves: Arrays) -> dict[str, Array]:
        params, state, _ = step(leaves)
        return {"x": block.read(params, state)}

    def backward(leaves: Arrays, upstream: Arrays, form: str) -> dict[str, Array]:
        params, state, saved = step(leaves)
        d_state, d_read = block.read_backward(params, state, upstream["x"])
        d_state, d_params, d_context = block.backward(params, saved, d_state)
        d_x, d_start = block.start_backward(params, d_state)
        gradients = tree.flatten({"x": d_x, "context": d_context, "params": d_params})
        for extra in (d_read, d_start):
            for leaf, value in tree.flatten({"params": extra}).items():
                gradients[leaf] = gradients[leaf] + value
        return gradients

    return Subject(name, tree.flatten(whole), forward, backward, ("auto",))
