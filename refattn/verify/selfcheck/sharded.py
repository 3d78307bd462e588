"""The implementations of a mechanism on arrays that lie on a mesh of devices of JAX, and what each device then holds.

Every implementation is compiled for sharded arrays as it is, forward and backward, and its results are compared with
those of the definition on one device, within the errors that `refattn.verify.selfcheck.probe` allows. So are the
implementations that are written for devices, `refattn.shards`: a ring of keys, or a scan of states.

Memory is counted by XLA, of a longer sequence, on 2 devices that share its tokens and on all of them. What falls as
1/devices is shared out; what does not was gathered, or belongs to every device. Of the implementations that are written
for devices this is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from refattn import backends, shards
from refattn.mechanisms.record import Case, Mechanism, Unsupported
from refattn.shards import measure, mesh
from refattn.verify.selfcheck.probe import Values, host, used_share
from refattn.verify.selfcheck.samples import Sample, fitted, resized, resized_by, sample, sizes_of
from refattn.verify.selfcheck.sections import Found, NotRun, Scope, Task, worst_of

KINDS = 3
"""Of how many kinds of designed cases a sample has the first: plain, causal and masked ones for most mechanisms."""

LONG, SHORT = 256, 32
"""Tokens of the sequence whose memory is counted: of implementations as they are, of those that run token by token,
which takes XLA long to compile."""

WRITTEN: dict[Any, tuple[str, int, dict[str, Any]]] = {
    shards.Keys: ("ring", 4096, {}),
    shards.States: ("scan", 32768, {"piece": 64}),
}
"""The implementations that are written for devices: the name of each, its tokens and how it is counted.

So many tokens that what does not grow with them is small beside the rest: with jax 0.10 a scan holds 4 MiB of it.
"""

WITHIN = 1.25
"""How much more memory than its part a device may hold."""


CoreOn = Callable[[Any], tuple[Any, dict[str, Any]]]
"""What gives the forward and the backward of an implementation on a mesh, with the options that choose it."""


def tasks(mechanism: Mechanism, sizes: Mapping[str, int], full: bool = False) -> Iterator[Task]:
    """Yield what is run on a mesh of these sizes by axis."""
    count = math.prod(sizes.values())
    implementations: dict[str, CoreOn] = {
        implementation: partial(_as_it_is, mechanism, implementation) for implementation in mechanism.implementations
    }
    written = shards.kind_of(mechanism)
    if written:
        implementations[WRITTEN[written][0]] = partial(_written, mechanism, {})
    for implementation, core_on in implementations.items():
        yield Task("sharded", implementation, partial(_agrees, mechanism, core_on, sizes, full))
    if count > 2:
        for implementation in mechanism.implementations:
            yield Task("memory", implementation, partial(_held, mechanism, implementations[implementation], count))
    if written and count > 2:
        name, tokens, how = WRITTEN[written]
        yield Task("memory", name, partial(_falls, mechanism, partial(_written, mechanism, how), count, tokens))


def _as_it_is(mechanism: Mechanism, implementation: str, on: Any) -> tuple[Any, dict[str, Any]]:
    return mechanism.core, {"implementation": implementation}


def _written(mechanism: Mechanism, how: Mapping[str, Any], on: Any) -> tuple[Any, dict[str, Any]]:
    return shards.parallel(mechanism, on, **how), {}


def _agrees(mechanism: Mechanism, core_on: CoreOn, sizes: Mapping[str, int], full: bool) -> Found:
    """Compare an implementation on the mesh with the definition on one device."""
    owner = backends.get("jax")
    scope, on = Scope(mechanism, owner), mesh.make(sizes)
    core, options = core_on(on)
    cases = (fitted(case, sizes) for case in (scope.cases if full else scope.cases[:KINDS]))

    def compare(case: Case) -> Found:
        s = sample(mechanism, case)
        got = _run(mechanism, core, {**s.options, **options}, s, on)
        if missing := {"out", "d_q", "d_k", "d_v"} - set(got):
            return math.inf, f"no {', '.join(sorted(missing))}"
        expected = host(mechanism)(s.inputs, s.options, s.upstream)
        noise = scope.core(mechanism.implementations[0]).noise(s.inputs, s.options, s.upstream)
        return max((used_share(got, {name: x}, noise), name) for name, x in expected.items() if name in got)

    return worst_of((case.name, partial(compare, case)) for case in cases if case is not None)


def _run(mechanism: Mechanism, core: Any, options: Mapping[str, Any], s: Sample, on: Any) -> Values:
    """Return outputs and gradients of a call whose arrays lie on the devices of a mesh."""
    import jax

    owner = backends.get("jax")
    still = (*mechanism.tokenless, *(f"d_{name}" for name in mechanism.tokenless))

    def both(inputs: Mapping[str, Any], upstream: Mapping[str, Any]) -> dict[str, Any]:
        out, saved = core.forward(**inputs, **options)
        found = {"out": out, **{n: getattr(saved, n) for n in mechanism.outputs if hasattr(saved, n)}}
        return found | {f"d_{n}": x for n, x in core.backward(saved, **upstream).items() if not hasattr(x, "settings")}

    placed = (
        {n: mesh.place(on, n, owner.from_numpy(x), still) for n, x in xs.items()} for xs in (s.inputs, s.upstream)
    )
    return {name: owner.to_numpy(x) for name, x in jax.jit(both)(*placed).items()}


def _held(mechanism: Mechanism, core_on: CoreOn, count: int) -> Found:
    """Tell what a device holds of an implementation as it is."""
    reason: Exception = NotRun("the record has nothing to run")
    for case in _long_cases(mechanism):
        try:
            tokens = _tokens(core_on, case)
            few, many = (_compiled(core_on, case, n, tokens) for n in (2, count))
        except Unsupported as error:
            reason = error
            continue
        return 0.0, _told(few, many, count)
    raise NotRun(str(reason))


def _falls(mechanism: Mechanism, core_on: CoreOn, count: int, tokens: int) -> Found:
    """Judge what a device holds of an implementation that is written for devices."""
    few, many = (_compiled(core_on, _long_cases(mechanism)[0], n, tokens) for n in (2, count))
    share = many.bytes / few.bytes * count / 2.0 / WITHIN
    return math.inf if many.pairs else share, _told(few, many, count)


def _told(few: measure.Held, many: measure.Held, count: int) -> str:
    kib = f"{few.bytes / 1024:.0f} KiB on one of 2 devices, {many.bytes / 1024:.0f} on one of {count}"
    pairs = f"; arrays of two full axes: {many.pairs}" if many.pairs else ""
    return f"{kib}: {many.bytes / few.bytes:.2f} for {2 / count:.2f}{pairs}"


def _long_cases(mechanism: Mechanism) -> list[Case]:
    """Return the first designed case that is causal, and the first of all."""
    return [
        next((case for case in mechanism.cases if case.options.get("causal")), mechanism.cases[0]),
        mechanism.cases[0],
    ]


def _tokens(core_on: CoreOn, case: Case) -> int:
    """Return a length at which an implementation is compiled in seconds: short for one that runs token by token."""
    import jax

    calls = (_call(core_on, case, 1, tokens) for tokens in (8, 16))
    few, many = (len(jax.make_jaxpr(function)(*arrays).eqns) for function, arrays in calls)
    return SHORT if many > 1.5 * few else LONG


def _compiled(core_on: CoreOn, case: Case, count: int, tokens: int) -> measure.Held:
    import jax

    function, arrays = _call(core_on, case, count, tokens)
    return measure.held(jax.jit(function).lower(*arrays).compile(), tokens)


def _call(core_on: CoreOn, case: Case, count: int, tokens: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return forward and backward of a case with so many tokens on so many devices, and what its arrays are."""
    import jax

    on = mesh.make({"tokens": count})
    core, options = core_on(on)
    axes = bool(case.inputs["q"].axes)
    sizes = dict.fromkeys(sizes_of(case) if axes else (), 2) | {"b": 1, "n": tokens, "d": 8, "e": 8}
    # Whether another array has one head because q has one, or is for all, is not said: one stays one.
    heads = min(2, case.inputs["k"].shape[1])
    case = resized_by(case, sizes) if axes else resized(case, 1, heads, 1, tokens, tokens, 8, 8)
    shapes = {name: x.shape for name, x in case.inputs.items()}
    given = {name: jax.ShapeDtypeStruct(shape, "float64") for name, shape in (shapes | {"d_out": shapes["v"]}).items()}
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh.sharding(on, mesh.axes_of(name, x)))
        for name, x in given.items()
    ]

    def both(*values: Any) -> tuple[Any, ...]:
        *inputs, d_out = values
        out, saved = core.forward(**dict(zip(shapes, inputs, strict=True)), **case.options, **options)
        found = core.backward(saved, d_out)
        return out, *(found[name] for name in shapes if name in found)

    return both, arrays
