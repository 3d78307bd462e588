"""Wrong kernels on purpose: verification is worth what it catches of these.

A mutant is the dense implementation with one equation disturbed, forward or backward, run as a kernel in a storage type
would run it (float32 inside, the record's roundings on the way, a last rounding at the end). They come from the
equation engine: no mechanism has to write one. Conventions, which are wrong in more than one line, come from the
record, as wrong backward passes do, and a few faults of storing a result (truncation, a NaN) belong to every kernel.

A mutant that changes nothing (a scaled maximum of a softmax, say) is equivalent: no test can catch it, and none should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations
from refattn.golden.storage_types import LOWER, chop_to, has_gradient, round_to
from refattn.mechanisms.record import Case, Mechanism
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.diagnose.changes import KINDS, applies, changed_by
from refattn.verify.outcome import Result, Truth
from refattn.verify.tolerance.budget import evaluate

Tensors = dict[str, NDArray[Any]]

SHORT = ("float16", "bfloat16")


def mutants(mechanism: Mechanism) -> tuple[WrongKernel, ...]:
    """Return all mutants of a mechanism's core: equations times kinds, faults of storing, and the record's own."""
    engine = (
        mutant(mechanism, tag, kind) for tag in core_tags(mechanism) for kind in KINDS if applies(kind, tag.axes or ())
    )
    return (*engine, *storing(mechanism), *mechanism.wrong.values())


def mutant(mechanism: Mechanism, tag: equations.Tag, kind: str) -> WrongKernel:
    """Return the kernel in which an equation is disturbed."""

    def run(call: Call) -> Tensors:
        with equations.mutate(tag.id, changed_by(kind, tag.axes or (), lower_type(mechanism, tag.id, call.dtype))):
            return right(mechanism, call)

    return WrongKernel(f"{tag.id} {kind}", "equation", run, kind, (tag.id,))


def lower_type(mechanism: Mechanism, id: str, dtype: str) -> str:
    """Return the type that the value of an equation may be rounded to: the one below that which a kernel declares.

    Declared is the storage type where a kernel rounds to it, otherwise the type that it computes in.
    """
    return dtype if dtype in SHORT and id not in mechanism.stored else LOWER[dtype]


def storing(mechanism: Mechanism) -> tuple[WrongKernel, ...]:
    """Return the faults of storing a result."""

    def run(change: Callable[[Call, NDArray[np.float64]], NDArray[Any]], call: Call) -> Tensors:
        found = right(mechanism, call)
        return found | {"out": change(call, found["out"].astype(np.float64))}

    def truncated(call: Call, out: NDArray[np.float64]) -> NDArray[Any]:
        return chop_to(out, call.dtype)

    def one_nan(call: Call, out: NDArray[np.float64]) -> NDArray[Any]:
        return np.where(np.arange(out.size).reshape(out.shape) == out.size // 2, np.nan, out)

    kinds = {"output truncated": truncated, "one NaN": one_nan}
    return tuple(WrongKernel(n, "storing", partial(run, change), n, (n,)) for n, change in kinds.items())


def core_tags(mechanism: Mechanism) -> Iterator[equations.Tag]:
    """Yield the tags of the core, one for each equation, though exclusive branches may have several."""
    around = (mechanism.block.module, *mechanism.block_modules)
    core = (module for module in mechanism.equation_modules if module not in around)
    found: dict[str, equations.Tag] = {}
    for module in core:
        for tag in equations.tags(module):
            if tag.claims:
                found.setdefault(tag.id, tag)
    return iter(found.values())


def kernel(
    mechanism: Mechanism, case: Case, truth: Truth, dtype: str, wrong: WrongKernel | None = None, **how: Any
) -> Result:
    """Return what an honest kernel, or a wrong one, gives for a case in a storage type; see `before_storing`."""
    return stored(before_storing(mechanism, case, truth, dtype, wrong, **how), truth)


def right(mechanism: Mechanism, call: Call) -> Tensors:
    """Return what an honest kernel computes."""
    with ExitStack() as stack:
        if call.dtype in SHORT and not call.exact:
            stack.enter_context(equations.rounding(dict.fromkeys(mechanism.stored, call.dtype), _round_here))
        return evaluate(mechanism, call.inputs, call.options, call.d_out, further=call.further)


@np.errstate(all="ignore")  # a wrong kernel may overflow or divide by zero
def before_storing(
    mechanism: Mechanism,
    case: Case,
    truth: Truth,
    dtype: str,
    wrong: WrongKernel | None,
    *,
    size: str = "",
    exact: bool = False,
) -> Tensors:
    """Return the results of a kernel before they are stored.

    With `exact` it computes in float64 and rounds nothing: what remains is what is wrong.
    """
    working = np.float64 if exact or dtype == "float64" else np.float32
    inputs = {name: x.astype(working) if has_gradient(x) else x for name, x in truth.inputs.items()}
    upstream = None if truth.upstream is None else truth.upstream.astype(working)
    outputs = evaluate(mechanism, inputs, case.options, None) if wrong and wrong.backward else {}
    further = {name: x.astype(working) for name, x in truth.further.items()}
    call = Call(inputs, case.options, upstream, dtype, exact, outputs, further=further)
    return {**outputs, **wrong.results(call, size)} if wrong else right(mechanism, call)


def _round_here(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    return round_to(x.astype(np.float64), dtype).astype(x.dtype)


def stored(tensors: Tensors, truth: Truth) -> Result:
    """Round results to their storage types."""
    types = {name: truth.stored[name] for name in tensors}
    held = {name: round_to(x.astype(np.float64), types[name]) for name, x in tensors.items()}
    kept = {name: x.astype(np.float32 if types[name] == "bfloat16" else types[name]) for name, x in held.items()}
    return Result(kept, types)
