"""Layouts and memory: whether a kernel gives the same wherever its arrays lie and whatever is called around.

Each row calls it on a few designed cases in one manner (`refattn.verify.adapters.manners`) and judges what comes back
by the error budget, as it is in C order by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from refattn.args import checked
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.verify.adapters.adapter import CallError, call
from refattn.verify.adapters.manners import TIMES
from refattn.verify.outcome import CheckReport, Decline, Result, Row, Truth
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge
from refattn.verify.user_cases import qkv

LARGE = 1e4
"""What stands in masked keys and values, where it must not matter."""

MEANING = {
    "transposed": "memory is (b, n, h, d)",
    "columns": "memory is (b, h, d, n)",
    "sliced": "a slice of a larger array, NaN around it",
    "strided": "every other element, NaN between them",
    "expanded": "one head of memory for all heads",
    "reversed": "negative strides",
    "guarded": "in C order, NaN before and behind it",
    "poisoned": "what empty() gives and what was freed holds NaN",
    "held": "looked at after another call",
    "interleaved": "another forward between a forward and its backward",
    "repeated": f"the same call {TIMES} times",
}


def memory_cases(mechanism: Mechanism) -> list[Case]:
    """Return the cases that are called: a plain one, one that is causal if there is such, and one of several tiles."""
    plain = [case for case in mechanism.cases if not case.exact and not case.slack and 0 not in case.inputs["q"].shape]
    chosen = [case for case in plain if case.kind == "plain" and case.inputs["q"].shape[0] > 1][:1] or plain[:1]
    chosen += [case for case in plain if {*case.options} == {"causal"} and len(case.inputs) == 3][:1]
    if mechanism.parts is not None:
        chosen.append(qkv("memory", "memory", "several tiles", {"b": 2, "h": 4, "g": 2, "n_q": 65, "n_k": 97, "d": 24}))
    return list({case.name: case for case in chosen}.values())


@checked(mechanism=Mechanism)
def verify_memory(
    mechanism: Mechanism,
    kernel: Any,
    *,
    label: str = "",
    dtype: str = "float32",
    grad: bool = False,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> CheckReport:
    """Call a kernel in every manner; arguments as those of `refattn.verify.verify`.

    Returns
    -------
    CheckReport
        One row for each manner; what it declines, or fails without a manner, too, is "not run".

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import verify_memory
    >>> def attend(q, k, v, **options):
    ...     q *= 1.0  # writes to what it was given
    ...     return ra.softmax.forward(q, k, v, **options)[0]
    >>> report = verify_memory(ra.mechanism("softmax"), attend)
    >>> report.exit_code, report.rows[0].status
    (1, 'disagrees')
    """
    known = [(case, truth(mechanism, case, dtype, grad=grad, seed=seed)) for case in memory_cases(mechanism)]
    tasks: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        (manner, partial(_manner, mechanism, kernel, known, manner, dtype, grad)) for manner in MEANING
    ]
    if "mask" in mechanism.defaults or "k_lengths" in mechanism.defaults:
        tasks.append(("masked", partial(_masked, mechanism, kernel, dtype, grad, seed)))
    rows = [row for _, run in progress(tasks) for row in run()]
    return CheckReport(mechanism.name, label or repr(kernel), False, tuple(rows), full=True)


def _expanded(mechanism: Mechanism, case: Case, known: Truth, dtype: str, grad: bool) -> Truth:
    """Return the truth where all heads are the first one."""
    given = {
        name: np.broadcast_to(x[:, :1], x.shape).copy() if x.ndim == 4 and x.shape[1] else x
        for name, x in {**known.inputs, **({"d_out": known.upstream} if grad else {})}.items()
        if x is not None
    }
    return truth(mechanism, replace(case, given=given), dtype, grad=grad)


def _manner(
    mechanism: Mechanism,
    kernel: Any,
    known: Sequence[tuple[Case, Truth]],
    manner: str,
    dtype: str,
    grad: bool,
) -> Iterator[Row]:
    worst, told, reason = -1.0, MEANING[manner], "nothing was run"
    if manner == "interleaved" and not grad:
        yield Row("memory", manner, "not run", None, "needs gradients: --grad")
        return
    for case, each in known:
        one = _expanded(mechanism, case, each, dtype, grad) if manner == "expanded" else each
        pull = None if manner in ("held", "repeated") else one.upstream
        try:
            share, said = _share(mechanism, kernel, case, one, dtype, pull, manner)
        except CallError as error:
            yield Row("memory", manner, "disagrees", math.inf, f"{told}: case {case.name}: {error}")
            return
        if share is None:
            reason = said
        elif share > worst:
            worst, told = share, f"{MEANING[manner]}{said and ': ' + said}"
    if worst < 0.0:
        yield Row("memory", manner, "not run", None, reason)
    else:
        yield Row("memory", manner, "agrees" if worst <= 1.0 else "disagrees", worst, told)


def _share(
    mechanism: Mechanism, kernel: Any, case: Case, known: Truth, dtype: str, pull: Any, manner: str
) -> tuple[float | None, str]:
    """Return the largest used share of a call in a manner, and what that was; None and why where it was declined."""
    outputs = ("out", *mechanism.outputs)
    given = kernel, known.inputs, case.options, dtype, pull, outputs
    found = call(*given, further={} if pull is None else known.further, manner=manner)
    if isinstance(found, Decline):
        return None, f"declined: {found.reason}"
    worst = max(judge(found, known), key=lambda verdict: verdict.share, default=None)
    if worst is None:
        return None, "returned nothing that is judged"
    if worst.agrees:
        return worst.share, ""
    by_itself = call(*given, further={} if pull is None else known.further) if manner else None
    if isinstance(by_itself, Result) and any(not v.agrees for v in judge(by_itself, known)):
        return None, f"case {case.name} fails in C order, too"
    at = list(worst.index) if worst.index else ""
    return worst.share, f"case {case.name}: {worst.tensor}{at} is {worst.got}, needs {worst.expected}"


def _masked(mechanism: Mechanism, kernel: Any, dtype: str, grad: bool, seed: int) -> Iterator[Row]:
    """Put large numbers, and NaN, where nothing may attend."""
    sizes = {"b": 2, "h": 4, "g": 2, "n_q": 19, "n_k": 70, "d": 16}
    case = qkv("masked", "memory", "keys that nothing attends", sizes)
    seen = np.arange(70) < np.asarray([41, 3]).reshape(2, 1, 1, 1)
    name = "mask" if "mask" in mechanism.defaults else "k_lengths"
    array = seen if name == "mask" else np.asarray([41, 3])
    design = Input(array.shape, "mask" if name == "mask" else "counts")
    case = replace(case, inputs={**case.inputs, name: design}, given={name: array})
    known = truth(mechanism, case, dtype, grad=grad, seed=seed)
    hidden = np.broadcast_to(~seen[:, :, 0, :, None], (2, 2, 70, 16))
    for row, number in (("masked, large", LARGE), ("masked, NaN", np.nan)):
        inputs = {n: np.where(hidden, x.dtype.type(number), x) if n in "kv" else x for n, x in known.inputs.items()}
        changed = replace(known, inputs=inputs)
        words = f"{number:g} in keys and values that nothing attends"
        try:
            share, said = _share(mechanism, kernel, case, changed, dtype, known.upstream, "")
        except CallError as error:
            share, said = math.inf, str(error)
        if share is None:
            yield Row("memory", row, "not run", None, said)
        elif share > 1.0 and math.isnan(number):  # 0 * NaN is NaN: no convention forbids it
            yield Row("memory", row, "not run", None, f"{words}: it comes through, which no convention forbids")
        else:
            yield Row("memory", row, "agrees" if share <= 1.0 else "disagrees", share, f"{words}{said and ': ' + said}")
