"""Gradients four ways: by the hand-written backward, by differences, by the autograd of torch, and by tangents.

A `Subject` is a differentiable map of named arrays, its leaves, with its backward: a core on a designed case, or a
block with its parameters, tokens and memory. The loss is the inner product of all its outputs with fixed upstream
gradients. Differences are central, of eighth order, along every element of every leaf, on NumPy in float64::

    f'(x) = sum_n c_n (f(x + n h) - f(x - n h)) / h + O(h^8 f^(9) / 630),  c = 4/5, -1/5, 4/105, -1/280

With h = 2^-12 the first error is 2e-32 f^(9). In two layers with an operator that is fitted f^(9) reached 10^19 f',
elsewhere it is far below. The rounding of f costs about 2^-53 f / h = 5e-13 f, which is why h must not be much smaller:
a leaf of several elements that are small has half the step. Where a sample is enough, differences are taken along a few
random directions of each leaf, of length 1, so that the same holds. Autograd has the rounding of float64 alone, as the
hand-written backward has.

Tangents are those of the forward on arrays that carry a derivative, and of the backward too. For a map with the
Jacobian J, a direction t of its leaves and upstream gradients d of its outputs::

    <d, J t> = <J^T d, t>        J t by the forward on dual arrays, J^T d by the hand-written backward
    <u, H t> = <H u, t>          H t by the backward on dual arrays: the derivative of a gradient is symmetric

The first compares a backward with the forward itself, in one call whatever the number of leaves; directions are random,
so that an error of any element shows as its share of the sum. The second fails where a backward is no gradient of
anything, and knows nothing of the forward. Both have the rounding of float64 alone, and need no other library.
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

from refattn import backends, philox, tree
from refattn.golden.inputs import make
from refattn.golden.storage_types import has_gradient
from refattn.instruments.dual import Tangents, tangents
from refattn.mechanisms.context import Context
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.outcome import Floats
from refattn.verify.selfcheck.probe import on_backend
from refattn.verify.selfcheck.samples import shrunk
from refattn.verify.traced import block_gradients
from refattn.xp import Array, backend, device, namespace

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
        Outputs by name, for leaves of any array library and an implementation; without one in that which is the
        definition.
    backward
        Gradients by leaf, for leaves, upstream gradients by output, and an implementation.
    implementations
        The implementations that `backward` takes.
    """

    name: str
    leaves: dict[str, Floats]
    forward: Callable[..., dict[str, Array]]
    backward: Callable[[Arrays, Arrays, str], dict[str, Array]]
    implementations: tuple[str, ...]

    def upstream(self) -> dict[str, Floats]:
        """Return the upstream gradient of each output."""
        outputs = self.forward(self.leaves)
        return {n: philox.normal(x.shape, seed=0, purpose=f"gradients.{n}") for n, x in outputs.items()}


def by_hand(subject: Subject, where: backends.Backend, implementation: str) -> dict[str, Floats]:
    """Return the gradients that the backward of an implementation gives on a backend."""
    leaves = {n: on_backend(where, x) for n, x in subject.leaves.items()}
    upstream = {n: on_backend(where, x) for n, x in subject.upstream().items()}
    return {n: where.to_numpy(x) for n, x in subject.backward(leaves, upstream, implementation).items()}


def directions_of(subject: Subject, count: int | None) -> dict[str, Floats]:
    """Return the directions, rows of length 1, along which each leaf is moved: `count` random ones, or all axes.

    A direction that weighs all elements alike shows an error of any of them, as the part 1/sqrt(size) of it.
    """
    found = {}
    for name, leaf in subject.leaves.items():
        if count is None or leaf.size <= count:
            found[name] = np.eye(leaf.size)
        else:
            signs = philox.uniform((count, leaf.size), seed=0, purpose=f"gradients.directions.{name}") < 0.5
            found[name] = np.where(signs, 1.0, -1.0) / math.sqrt(leaf.size)
    return found


def by_differences(subject: Subject, step: float = STEP, directions: Arrays | None = None) -> dict[str, Floats]:
    """Return the slopes along directions, without them the gradients, by central differences.

    `step` is that of leaves of the size of 1.
    """
    upstream = subject.upstream()
    rows = directions_of(subject, None) if directions is None else directions

    def outputs(name: str, by: Floats) -> dict[str, Array]:
        return subject.forward({**subject.leaves, name: subject.leaves[name] + by.reshape(subject.leaves[name].shape)})

    found = {}
    for name, leaf in subject.leaves.items():
        slopes = np.zeros(len(rows[name]))
        # How large a single number is says nothing.
        small = leaf.size > 1 and math.hypot(*leaf.reshape(-1)) < math.sqrt(leaf.size)
        width = 0.5 * step if small else step
        for at, direction in enumerate(rows[name]):
            for n, weight in enumerate(STENCIL, start=1):
                above, below = outputs(name, n * width * direction), outputs(name, -n * width * direction)
                change = sum(float(np.sum(d * (_finite(above[o]) - _finite(below[o])))) for o, d in upstream.items())
                slopes[at] += weight * change / width
        found[name] = slopes.reshape(leaf.shape) if directions is None else slopes
    return found


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


def largest_error(
    got: Mapping[str, Floats], expected: Mapping[str, Floats], rows: Arrays | None = None
) -> tuple[float, str]:
    """Return the largest relative error and its leaf; infinite where one is missing, misshapen or not finite.

    It is relative to the largest element of a leaf's gradient. With `rows`, directions of each leaf, what is expected
    are slopes along them, which are smaller than that.
    """
    errors, sizes = {}, {}
    for name, wanted in expected.items():
        shape = wanted.shape if rows is None else rows[name].shape[1:]
        found = got.get(name, np.zeros(0))
        found = found if rows is None else found.reshape(-1)
        if name not in got or found.shape != shape or not np.all(np.isfinite(found)):
            return math.inf, name
        errors[name] = _largest((found if rows is None else rows[name] @ found) - wanted)
        sizes[name] = max(_largest(wanted), 0.0 if rows is None else _largest(found))
    least, worst = FLOOR * max(sizes.values(), default=0.0), (0.0, "")
    for name, error in errors.items():
        size = max(sizes[name], least)
        worst = max(worst, (0.0 if error == 0.0 else error / size if size else math.inf, name))
    return worst


def _largest(x: Floats) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def beside(
    subject: Subject, way: str, directions: int | None = None
) -> Callable[[Mapping[str, Floats]], tuple[float, str]]:
    """Return what tells the largest relative error of gradients and its leaf, beside "differences" or "autograd".

    With a number of `directions` differences are taken along so many of each leaf, in place of every element.

    Differences that disagree are taken again with a longer step, which rounds less and truncates more, and with shorter
    ones, which do not reach a kink that is near, such as a threshold, and truncate less where a number multiplies large
    ones, as a scale does. A wrong gradient is wrong beside all.
    """
    rows = None if directions is None else directions_of(subject, directions)
    differences = functools.cache(lambda step: by_differences(subject, step, rows))
    expected = by_autograd(subject) if way == "autograd" else differences(STEP)

    def error_of(found: Mapping[str, Floats], wanted: Mapping[str, Floats]) -> tuple[float, str]:
        return largest_error(found, wanted, None if way == "autograd" else rows)

    def judge(found: Mapping[str, Floats]) -> tuple[float, str]:
        error = error_of(found, expected)
        for step in () if way == "autograd" else (4.0 * STEP, STEP / 4.0, STEP / 16.0):
            if error[0] > TOLERANCES[way]:
                error = min(error, error_of(found, differences(step)))
        return error

    return judge


def core_subjects(mechanism: Mechanism, cases: Iterable[Case], *, full: bool = True) -> Iterator[Subject]:
    """Yield the core on cases, shrunk: as they are, and with every differentiable number that some case gives.

    Without `full` after the first case one or the other, in turn.
    """
    # 0 would take away what is to be seen: no score depends on q and k where the scale is 0.
    numbers = {n: x for case in mechanism.cases for n, x in mechanism.numbers(case.options).items() if np.any(x)}
    for n, case in enumerate(map(shrunk, cases)):
        given = mechanism.numbers(case.options)
        complete = set(numbers) <= set(given)
        if full or not n or n % 2 or complete:
            yield _core_subject(mechanism, case, case.name)
        if not complete and (full or n % 2 == 0):
            every = replace(case, options=mechanism.with_numbers(case.options, {**numbers, **given}))
            yield _core_subject(mechanism, every, f"{case.name} with {', '.join(numbers)}")


def _core_subject(mechanism: Mechanism, case: Case, name: str) -> Subject:
    core = mechanism.core
    assert core is not None
    inputs = make(mechanism.name, case, "float64")
    masks = {n: x for n, x in inputs.items() if not has_gradient(x)}
    numbers = {n: np.asarray(x) for n, x in mechanism.numbers(case.options).items()}
    options = {n: x for n, x in case.options.items() if n not in numbers}

    def call(leaves: Arrays, implementation: str) -> tuple[Array, Any]:
        q = leaves["q"]
        given = {n: backend(q).from_numpy(x, device=device(q)) for n, x in masks.items()}
        arrays = {n: x for n, x in leaves.items() if n not in numbers}
        moved = mechanism.with_numbers(options, {n: leaves[n] for n in numbers})
        return core.forward(**arrays, **given, **moved, implementation=implementation)

    def forward(leaves: Arrays, implementation: str = mechanism.implementations[0]) -> dict[str, Array]:
        out, saved = call(leaves, implementation)
        return {"out": out, **{n: getattr(saved, n) for n in mechanism.pulled}}

    def backward(leaves: Arrays, upstream: Arrays, implementation: str) -> dict[str, Array]:
        return core.backward(call(leaves, implementation)[1], **{f"d_{n}": x for n, x in upstream.items()})

    leaves = {n: x for n, x in inputs.items() if n not in masks} | numbers
    return Subject(name, leaves, forward, backward, mechanism.implementations)


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
        context_fields = getattr(config, "context_fields", mechanism.context_fields)
        read = [tuple(name for name in fields if name in context_fields) for fields in CONTEXTS]
        if n >= len(CONFIGS):
            read = read[1:3] if "memory" in context_fields else read[1:2]
        for context in dict.fromkeys(read):
            yield _block_subject(mechanism, config, [*context], f"block {n} with {', '.join(context) or 'no context'}")


def _block_subject(mechanism: Mechanism, config: Any, context: list[str], name: str) -> Subject:
    block = mechanism.block
    b, n, keys = 2, 3, 2 if "memory" in context else 3
    normal = {"x": (b, n, config.width), "memory": (b, keys, config.width)}
    x, memory = (philox.normal(shape, seed=0, purpose=f"gradients.{what}") for what, shape in normal.items())
    shapes = {"mask": (n, keys), "key_mask": (b, n), "memory_mask": (b, keys)}
    fixed: dict[str, NDArray[Any]] = {
        what: philox.uniform(shape, seed=0, purpose=f"gradients.{what}") < 0.7
        for what, shape in shapes.items()
        if what in context
    }
    if "tokens" in context:
        fixed["tokens"] = philox.integers((b, n), 0, config.vocabulary, seed=0, purpose="gradients.tokens")
    if "positions" in getattr(config, "context_fields", ()):
        fixed["positions"] = np.arange(keys) % 2
    params = block.init(config, seed=0, like=x)
    # Biases start at 0, where an error could hide.
    params = tree.map_leaves(lambda w: w + 0.25 * philox.normal(w.shape, seed=0, purpose="gradients.params"), params)
    whole = {"x": x, "params": params, "context": {"memory": memory} if "memory" in context else {}}

    def step(leaves: Arrays) -> tuple[Any, Any, Any]:
        given = tree.unflatten(whole, leaves)
        near = given["x"]
        placed = {what: backend(near).from_numpy(value, device=device(near)) for what, value in fixed.items()}
        at = Context(**placed, **given["context"], causal="causal" in context)
        state, saved = block.forward(given["params"], block.start(given["params"], given["x"], at), at)
        return given["params"], state, saved

    def forward(leaves: Arrays, implementation: str = "auto") -> dict[str, Array]:
        params, state, _ = step(leaves)
        return {"x": block.read(params, state)}

    def backward(leaves: Arrays, upstream: Arrays, implementation: str) -> dict[str, Array]:
        params, state, saved = step(leaves)
        return block_gradients(block, params, state, saved, upstream["x"])

    return Subject(name, tree.flatten(whole), forward, backward, ("auto",))


# --- tangents

OF_TANGENTS = 1e-12
"""Allowed difference of the two sides, relative to the sum of the sizes of their terms; derived as that of autograd."""


def direction(subject: Subject, number: int) -> dict[str, Floats]:
    """Return a random direction of all leaves."""
    return {n: philox.normal(x.shape, seed=number, purpose=f"tangents.{n}") for n, x in subject.leaves.items()}


def push(function: Callable[[Any, Tangents], Mapping[str, Any]], subject: Subject, along: Mapping[str, Floats]) -> Any:
    """Return the values and the derivatives of named arrays that a function makes of the leaves."""
    with tangents() as instrument:
        found = function({n: instrument.array(x, along[n]) for n, x in subject.leaves.items()}, instrument)
    return {n: x.value for n, x in found.items()}, {n: x.tangent for n, x in found.items()}


def duality(subject: Subject, implementation: str) -> float:
    """Return how far a backward is from the derivative of its forward, as a share of what is compared."""
    upstream, along = subject.upstream(), direction(subject, 0)
    values, moved = push(lambda leaves, _: subject.forward(leaves, implementation), subject, along)
    gradients = subject.backward(subject.leaves, upstream, implementation)
    left = [d * np.where(np.isfinite(values[n]), moved[n], 0.0) for n, d in upstream.items()]
    return _apart(left, [gradients[n] * t for n, t in along.items()])


def symmetry(subject: Subject, implementation: str) -> float:
    """Return how far the derivative of a backward is from symmetric."""
    upstream = subject.upstream()

    def gradients(leaves: Any, instrument: Tangents) -> Mapping[str, Any]:
        return subject.backward(leaves, {n: instrument.array(d) for n, d in upstream.items()}, implementation)

    t, u = direction(subject, 0), direction(subject, 1)
    values, by_t = push(gradients, subject, t)
    _, by_u = push(gradients, subject, u)
    # A second derivative that is 0 but for its rounding is judged beside the gradient.
    least = FLOOR * sum(float(np.sum(np.abs(values[n] * t[n]))) for n in t)
    return _apart([by_t[n] * u[n] for n in t], [by_u[n] * t[n] for n in t], least)


WAYS: dict[str, Callable[[Subject, str], float]] = {"duality": duality, "symmetry": symmetry}


def _apart(left: list[Any], right: list[Any], least: float = 0.0) -> float:
    """Return the difference of two sums of products, as a share of the sizes of their terms."""
    apart = abs(sum(float(np.sum(x)) for x in left) - sum(float(np.sum(x)) for x in right))
    sizes = (sum(float(np.sum(np.abs(x))) for x in side) for side in (left, right))
    return 0.0 if apart == 0.0 else apart / max(*sizes, least)
