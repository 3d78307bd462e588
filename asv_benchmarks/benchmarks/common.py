"""What all benchmarks share: what there is to be measured, and the calls that are.

A mechanism is known by its record alone. A combination that does not exist (a library that is not installed, a dtype
that it has not, a mechanism without a core) raises NotImplementedError in `setup`, which asv shows as n/a.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refattn import backends, philox
from refattn.golden.inputs import make, make_upstream
from refattn.mechanisms.context import Context
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.mechanisms.registry import list_mechanisms, mechanism

from . import BY_ASV

if TYPE_CHECKING:
    from refattn.instruments.counting import Tally

MECHANISMS = list(list_mechanisms())


def _implementations(record: Mechanism) -> Iterable[str]:
    """Return the names of a core's implementations; earlier versions call them forms."""
    return record.implementations if hasattr(record, "implementations") else vars(record)["forms"]


FORMS = [f"{name}.{x}" for name in MECHANISMS for x in _implementations(mechanism(name)) if mechanism(name).core]
"""Each form of each core, as "mechanism.form"."""

EVERY = [name for name in backends.names() if name != "strict"]
"""The libraries; array-api-strict checks what is called, and nobody uses it for its speed."""

LIBRARIES = "REFATTN_BENCHMARKS"
"""The environment variable that names the libraries for asv."""


def _asked() -> list[str]:
    """Return the libraries that asv sees: the same on every machine, whatever is installed there, for its history."""
    asked = os.environ.get(LIBRARIES, "numpy").split(",") if BY_ASV else EVERY
    if not set(asked) <= set(EVERY):
        raise ValueError(f"{LIBRARIES}: got {','.join(asked)!r}, needs some of {','.join(EVERY)}")
    return asked


BACKENDS = _asked()
OTHERS = [name for name in BACKENDS if name != "numpy"]

HEADS = 4
"""Heads of a block."""


class Timed:
    """What timed benchmarks have in common. Times are CPU seconds where the work is done on CPUs, else wall time.

    CPU time hardly depends on what else the machine does. It counts all threads, so libraries are held to one (see
    `asv_benchmarks/sides.py`): it then is what a call costs, and `parallel` tells what several workers make of it.
    """

    version = "1"  # by hand: raised where a change of the benchmark makes old numbers incomparable
    timer: Callable[[], float] = time.process_time
    rounds = 2  # processes, since each has its own luck with memory
    repeat = (5, 100, 0.15)
    warmup_time = 0.05
    timeout = 120.0


@dataclass(frozen=True)
class Call:
    """The calls of one combination; each waits until its work is done.

    `counts` tells what forward and backward of a core on the host do: operations, and bytes that are written.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    both: Callable[[], Any]
    timer: Callable[[], float]
    counts: Callable[[], tuple[Tally, Tally]] | None = None


def usable(name: str) -> backends.Backend:
    """Return a backend that can be used here, set to compute in float64 where it is asked to."""
    owner = backends.get(name)
    reason = owner.why_unavailable()
    if reason is not None:
        raise NotImplementedError(reason)
    owner.enable_float64()
    return owner


def array(owner: backends.Backend, x: Any, dtype: str) -> Any:
    """Return a host array as one of the backend, in the dtype of this name; masks and integers as they are."""
    if x.dtype.kind != "f" or dtype != "bfloat16":
        return owner.from_numpy(x)
    if not hasattr(owner.namespace(), dtype):
        raise NotImplementedError(f"{owner.name} has no {dtype}")
    made = owner.from_numpy(x)
    return owner.namespace().asarray(made, dtype=getattr(owner.namespace(), dtype))


def split(form: str) -> tuple[Mechanism, str]:
    """Return the record and the form that an entry of `FORMS` names."""
    name, _, chosen = form.partition(".")
    return mechanism(name), chosen


def scaled(case: Case, n: int, d: int) -> Case:
    """Return the case with n tokens of width d; its batch and its heads stay."""

    def resized(given: Input) -> Input:
        if len(given.shape) < 2:
            return given
        full = (n, d) if given.design == "normal" else (n, n)
        last = tuple(1 if size == 1 else new for size, new in zip(given.shape[-2:], full, strict=True))
        return replace(given, shape=(*given.shape[:-2], *last))

    return replace(case, name=f"{case.name}-{n}-{d}", inputs={name: resized(x) for name, x in case.inputs.items()})


@functools.lru_cache(maxsize=1)  # setup runs before every sample
def core_call(form: str, n: int, d: int, dtype: str, backend: str, causal: bool = False) -> Call:
    """Return the calls of a form of a core: the case "tiny", at another size; causal where the form is always."""
    record, chosen = split(form)
    core, owner = record.core, usable(backend)
    assert core is not None
    if causal and "causal" not in record.defaults:
        raise NotImplementedError(f"{record.name} has no option causal")
    case = scaled(record.case("tiny"), n, d)
    inputs = {name: array(owner, x, dtype) for name, x in make(record.name, case, dtype).items()}
    options = {**case.options, **({"causal": True} if causal else {})}
    options["implementation" if "implementation" in record.defaults else "form"] = chosen  # "form": in earlier versions
    try:
        out, saved = core.forward(**inputs, **options)
    except NotImplementedError:
        if causal:
            raise
        options["causal"] = True  # a form that is nothing else
        out, saved = core.forward(**inputs, **options)
    upstream = array(owner, make_upstream(record.name, case, "out", tuple(out.shape), dtype), dtype)

    def forward() -> Any:
        result = core.forward(**inputs, **options)
        owner.synchronize()
        return result

    def backward() -> Any:
        result = core.backward(saved, upstream)
        owner.synchronize()
        return result

    def both() -> Any:
        result = core.backward(core.forward(**inputs, **options)[1], upstream)
        owner.synchronize()
        return result

    def counts() -> tuple[Tally, Tally]:
        from refattn.instruments.counting import counting  # which a version from before it has not

        with counting() as count:
            given = {name: count.array(x) for name, x in inputs.items()}
            first = count.start()
            saved = core.forward(**given, **options)[1]
            second = count.start()
            core.backward(saved, count.array(upstream))
        return first, second

    return Call(forward, backward, both, timer(owner), counts)


def block_of(record: Mechanism, width: int, like: Any) -> tuple[Any, Context]:
    """Return parameters of a block of the mechanism, and a context: causal where it can be."""
    known = {field.name for field in dataclasses.fields(record.block.Config)}
    given = {"width": width, "heads": HEADS, "layer": 0, "layers": 1}
    config = record.block.Config(**{field: value for field, value in given.items() if field in known})
    return record.block.init(config, seed=0, like=like), Context(causal="causal" in record.context_fields)


def tokens(name: str, owner: backends.Backend, n: int, width: int, dtype: str) -> Any:
    """Return an array (1, n, width) of normal numbers."""
    return array(owner, philox.normal((1, n, width), seed=0, purpose=f"benchmarks.{name}").astype(dtype), dtype)


@functools.lru_cache(maxsize=1)
def block_call(name: str, n: int, width: int, dtype: str, backend: str) -> Call:
    """Return the calls of a block of the mechanism."""
    record, owner = mechanism(name), usable(backend)
    block = record.block
    x, d_x = (tokens(what, owner, n, width, dtype) for what in ("x", "d_x"))
    params, context = block_of(record, width, x)
    state = block.start(params, x, context)
    last, saved = block.forward(params, state, context)
    d_state, _ = block.read_backward(params, last, d_x)

    def forward() -> Any:
        result = block.forward(params, state, context)
        owner.synchronize()
        return result

    def backward() -> Any:
        result = block.backward(params, saved, d_state)
        owner.synchronize()
        return result

    def both() -> Any:
        result = block.backward(params, block.forward(params, state, context)[1], d_state)
        owner.synchronize()
        return result

    return Call(forward, backward, both, timer(owner))


@functools.lru_cache(maxsize=1)
def stream_call(
    name: str, n: int, width: int, dtype: str, backend: str
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], float]]:
    """Return a step after n tokens, the prefill of these, and the clock."""
    record, owner = mechanism(name), usable(backend)
    stream = record.stream
    if stream is None:
        raise NotImplementedError(f"{name} is not given its tokens one by one")
    x, new = tokens("x", owner, n, width, dtype), tokens("new", owner, 1, width, dtype)
    params, context = block_of(record, width, x)
    before, after = (record.block.start(params, some, context) for some in (x, new))
    empty = stream.start(params, 1)
    _, full = stream.prefill(params, empty, before, context)

    def step() -> Any:
        result = stream.step(params, full, after, context)
        owner.synchronize()
        return result

    def prefill() -> Any:
        result = stream.prefill(params, empty, before, context)
        owner.synchronize()
        return result

    return step, prefill, timer(owner)


def timer(owner: backends.Backend) -> Callable[[], float]:
    """Return the clock for work on the backend's default device: see `Timed`."""
    return time.process_time if owner.devices()[0].startswith("cpu") else time.perf_counter
