"""Verification from a notebook or a test: a kernel in one call, and one's own result on one's own arrays.

`refattn.verify` of this name is what both are made of; `refattn.verify` itself may be called and is `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from refattn.args import spelled
from refattn.golden.storage_types import DTYPES
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify import captured, run
from refattn.verify.adapters.adapter import Adapter, LoadError, read_roundings, to_host
from refattn.verify.adapters.isolate import Isolated
from refattn.verify.diagnose.suspects import locate
from refattn.verify.outcome import Report
from refattn.verify.shrink import in_place_of_long, least, lines
from refattn.verify.tolerance import precision
from refattn.verify.user_cases import UserCaseError, from_text, of_arrays, supported
from refattn.xp import dtype_name, is_array


@spelled
def verify(
    mechanism: str | Mechanism,
    kernel: Any = None,
    *,
    dtypes: Iterable[str] | None = None,
    grad: bool = False,
    cases: Iterable[str] | None = None,
    shapes: Iterable[str] = (),
    inputs: str | Path | None = None,
    rename: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    axes: str = "",
    rounding: Iterable[str] = (),
    seed: int = 0,
    timeout: float = 60.0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Report:
    """Verify a kernel on the designed cases of a mechanism, and find the error if it has one.

    Parameters
    ----------
    mechanism
        Its name or its record.
    kernel
        A function ``f(q, k, v, **options)`` or an object with ``forward`` and ``backward``, which run in this process;
        or a text, ``"FILE.py:NAME"``, ``"MODULE:NAME"`` or ``"MODEL.onnx"``, which runs in a process of its own. None
        judges what `inputs` says was returned.
    dtypes
        Storage types to run: float64, float32, float16, bfloat16, or a format with factors such as mxfp8. By default
        float32, or what `inputs` is stored in.
    grad
        Whether gradients are judged too.
    cases
        The names of the cases to run; all of them by default.
    shapes
        Shapes of your own in place of these: "b=1,h=8,n=128,d=64,causal".
    inputs
        A file of your own arrays, .safetensors, .npz or of `torch.save`; with "out" in it a dump.
    rename, options, axes
        How the file is read: {"query": "q"}, {"causal": True}, "bnhd". See `refattn.verify.captured.readings`.
    rounding
        What the kernel rounds beside what every kernel does: names, or "NAME=TYPE".
    seed
        Of the random numbers of all inputs.
    timeout
        Seconds for each case of a kernel in a process of its own.
    progress
        Wraps the sequence of cases, for a progress bar such as ``tqdm``.

    Returns
    -------
    Report
        True if all that was run agrees. Its `repr` is the diagnosis.

    Raises
    ------
    TypeError, ValueError
        Where there is no such mechanism, case or type, or nothing to be called.

    Examples
    --------
    >>> import refattn as ra
    >>> def attend(q, k, v, *, causal=False):
    ...     return ra.softmax.forward(q, k, v, causal="top_left" if causal else False)[0]
    >>> report = ra.verify("softmax", attend, cases=["plain", "causal-tail"])
    >>> report.passed, report.suspects.ranked[0].kind
    (False, 'top-left causality')
    """
    record = registry.record_of(mechanism, "verify(mechanism, kernel)")
    for name, given in (("dtypes", dtypes), ("cases", cases), ("shapes", shapes), ("rounding", rounding)):
        if isinstance(given, str):
            raise TypeError(f"{name}: got {given!r}, needs a list of names")
    how: dict[str, Any] = {"rename": rename, "options": options, "axes": axes}
    if inputs is None and any(how.values()):
        name = next(name for name, x in how.items() if x)
        raise TypeError(f"{name}: got {how[name]!r} without inputs, needs a file that it is about")
    asked: dict[str, Any] = {"rounding": tuple(rounding), "grad": grad, "seed": seed}
    dtypes = None if dtypes is None else tuple(dtypes)
    if kernel is None and inputs is not None:
        if dtypes is not None and len(dtypes) != 1:
            raise ValueError(f"dtypes: got {dtypes}, needs one beside inputs: what was returned is of one type")
        found = captured.readings(record, Path(inputs), **how, dtype=dtypes[0] if dtypes else "")
        if "out" not in found[0].results:
            raise ValueError(f"inputs: got {', '.join(found[0].case.given)}, needs out to be judged, or a kernel")
        _, report, part = captured.judged(record, found, Path(inputs).name, asked["rounding"])
        return _diagnosed(report, captured.stored(found[0]), asked["rounding"], part)
    if not (isinstance(kernel, str) or callable(kernel) or hasattr(kernel, "forward")):
        needs = "a function, an object with forward, or a text such as 'mine.py:attend'; None needs inputs"
        raise TypeError(f"kernel: got {type(kernel).__name__}, needs {needs}")
    own = [from_text(record, text) for text in shapes]
    stored = "float32"
    remarks: tuple[str, ...] = ()
    if inputs is not None:
        read = captured.readings(record, Path(inputs), **how)[0]
        own, stored, remarks = [*own, read.case], read.dtype, read.remarks
    chosen = own or ((*record.cases, *record.kernel_sizes) if cases is None else [*map(record.case, cases)])
    record = replace(record, cases=tuple(chosen), kernel_sizes=())
    label = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)
    with ExitStack() as stack:
        text = f"load({kernel!r})" if isinstance(kernel, str) else label
        try:
            kernel = Adapter.of(stack.enter_context(Isolated(kernel, timeout)) if isinstance(kernel, str) else kernel)
        except LoadError as error:
            raise ValueError(str(error).replace("--impl", "kernel", 1)) from error
        types = dtypes or (stored,)
        if not own and cases is None:
            record, types = supported(record, kernel.supports, types, given=True)
        report = run.verify(record, kernel, label=label, dtypes=types, progress=progress, **asked)
        report = replace(report, remarks=remarks)
        part = None
        if report.failed:
            smallest = least(record, kernel, report, rounding=asked["rounding"])
            told = lines(record.name, *smallest, text, grad, asked["rounding"], seed) if smallest else ()
            report = replace(report, smallest=told, least=smallest)
            part = in_place_of_long(record, kernel, report, rounding=asked["rounding"])
        return _diagnosed(report, kernel, asked["rounding"], part)


@spelled
def assert_close(
    mechanism: str | Mechanism,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    gradients: Any = None,
    *,
    d_out: Any = None,
    rounding: Iterable[str] = (),
    **options: Any,
) -> Report:
    """Raise AssertionError unless a result on one's own arrays is what rounding allows.

    The limit is not a number that somebody chose: it is how far the rounding of a correct kernel moves each element of
    this result. Arrays are of any library: NumPy, PyTorch, JAX or CuPy.

    Parameters
    ----------
    mechanism
        Its name or its record.
    q, k, v
        Arrays (batch, heads, tokens, width). The type of q is the storage type that is allowed for.
    out
        What a kernel returned for them: the output, a tuple such as (out, lse), or a dict of outputs by name.
    gradients
        A dict {"q": ..., "k": ..., "v": ...} or a tuple in this order, if they are judged too.
    d_out
        The gradient of the output that `gradients` come from.
    rounding
        What the kernel rounds beside what every kernel does: names, or "NAME=TYPE".
    **options
        The other arguments of the call, arrays such as `mask` among them.

    Returns
    -------
    Report
        What was found: the used share of the allowed error, for instance.

    Raises
    ------
    AssertionError
        Its message has the share, the place, and the reading that would explain the result.
    TypeError, ValueError
        Where arguments are none of the mechanism, or do not fit each other, or where a result that agrees is empty or
        NaN throughout, so that no number was compared.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8)).astype(np.float32)
    >>> scores = q @ np.swapaxes(k, 2, 3) / np.sqrt(np.float32(8))
    >>> weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    >>> ra.assert_close("softmax", q, k, v, weights @ v).passed
    True
    >>> try:
    ...     ra.assert_close("softmax", q, k, v, weights @ v, causal=True)
    ... except AssertionError as error:
    ...     print(next(line for line in str(error).splitlines() if line.startswith("which")))
    which      the causal mask is ignored: explains everything
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    record = registry.record_of(mechanism, "assert_close(mechanism, q, k, v, out)")
    if (gradients is None) != (d_out is None):
        given, missing = ("d_out", "gradients") if gradients is None else ("gradients", "d_out")
        raise TypeError(f"{missing}: got None beside {given}, needs both or neither")
    upstream = {} if d_out is None else {"d_out": d_out}
    record, dtype = on_arrays(record, {"q": q, "k": k, "v": v, **upstream}, options)
    case = record.cases[0]
    kernel = captured.Returned(out, gradients)
    outcome = run.verify_case(record, kernel, case, dtype, grad=gradients is not None, rounding=tuple(rounding))
    report = Report(record.name, "your result", gradients is not None, (outcome,), record=record)
    report = _diagnosed(report, kernel, tuple(rounding))
    report.raise_if_failed()
    _check_compared("out", [out["out"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out])
    if gradients is not None:
        _check_compared("gradients", [*(gradients.values() if isinstance(gradients, dict) else gradients)])
    return report


def _check_compared(name: str, arrays: Iterable[Any]) -> None:
    """Raise ValueError where arrays that agree have no number that could have disagreed."""
    found = [to_host(name, x) for x in arrays if x is not None]
    if all(np.isnan(x).all() for x in found):
        got = "NaN alone" if any(x.size for x in found) else "no element"
        raise ValueError(f"{name}: got {got}, as the reference has it, needs at least one number to be compared")


def on_arrays(record: Mechanism, named: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Mechanism, str]:
    """Return a record with the call on some arrays as its only case, and their type."""
    for name, x in named.items():
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, needs an array")
    dtype = dtype_name(named["q"])
    if dtype not in DTYPES:
        raise TypeError(f"q: got dtype {dtype}, needs one of {', '.join(DTYPES)}")
    for name, x in named.items():
        if dtype_name(x) != dtype:
            raise TypeError(f"{name}: got dtype {dtype_name(x)}, needs {dtype}, as q has")
    arrays = {**named, **{name: x for name, x in options.items() if is_array(x)}}
    plain = {name: x for name, x in options.items() if name not in arrays and x is not None}
    try:
        case = of_arrays(record, {name: to_host(name, x) for name, x in arrays.items()}, plain, "your arrays")
    except UserCaseError as error:
        raise ValueError(str(error)) from error
    return replace(record, cases=(case,), kernel_sizes=()), dtype


def _diagnosed(
    report: Report, kernel: Any, rounding: tuple[str, ...], part: tuple[Mechanism, Report] | None = None
) -> Report:
    """Return a report with what would explain its failures; `part` stands for a call that is too long for suspects."""
    if not any(outcome.status == "disagrees" for outcome in report.outcomes):
        return report
    record = report.against
    declared = read_roundings(rounding, record) | Adapter.of(kernel).rounds(record)
    report = locate(record, precision.explained(record, report, declared))
    return replace(report, suspects=locate(*part).suspects) if part and not report.suspects else report
