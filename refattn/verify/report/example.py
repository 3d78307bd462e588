"""The smallest case that fails as numbers: what was got, what was expected, and a program of plain NumPy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.record import Case
from refattn.verify.outcome import Outcome, Verdict
from refattn.verify.tolerance.compare import ELEMENT

SHOWN = 24
"""Elements that are listed."""

LITERAL = 400
"""Numbers that a program has at most."""


def wrong(outcome: Outcome) -> Verdict | None:
    """Return the first verdict on numbers that disagree; None where there is none."""
    if outcome.seen is None:
        return None
    truth, result = outcome.seen
    for verdict in outcome.verdicts:
        name = verdict.tensor
        if not verdict.agrees and result.tensors[name].shape == truth.values[name].shape:
            return verdict
    return None


def rows(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Return index, got, expected and difference of elements of what disagrees: the worst, in their order."""
    verdict = wrong(outcome)
    if verdict is None or outcome.seen is None:
        return []
    truth, result = outcome.seen
    got, needs = result.tensors[verdict.tensor].astype(np.float64), truth.values[verdict.tensor]
    with np.errstate(invalid="ignore"):
        apart = got - needs
        size = np.nan_to_num(np.abs(apart), nan=np.inf)
    size = np.where((got == needs) | (np.isnan(got) & np.isnan(needs)), 0.0, size)
    worst = sorted(np.argsort(-size, axis=None, kind="stable")[:SHOWN].tolist())
    found = []
    for at in worst:
        index = tuple(int(n) for n in np.unravel_index(at, got.shape))
        shown = (f"{float(x[index]):.9g}" for x in (got, needs, apart))
        found.append((f"[{', '.join(map(str, index))}]", *shown))
    return found  # type: ignore[return-value]


_IMPORTS = {"torch": ("import torch",), "jax": ("import jax", "import jax.numpy as jnp"), "cupy": ("import cupy",)}
_TO_HOST = {"torch": ".detach().double().cpu().numpy()", "cupy": ".get()"}


def program(case: Case, outcome: Outcome, kernel: str, framework: str = "", device: str = "") -> list[str]:
    """Return lines that show the failure, with nothing of refattn; [] where the numbers are too many.

    The kernel is called with arrays of its `framework` on its `device`, or with NumPy's.
    """
    verdict = wrong(outcome)
    if verdict is None or outcome.seen is None:
        return []
    truth, name = outcome.seen[0], verdict.tensor
    arrays = dict(truth.inputs)
    if name.startswith("d_") and truth.upstream is not None:
        arrays["d_out"] = truth.upstream
    if sum(x.size for x in arrays.values()) + truth.values[name].size > LITERAL:
        return []
    file, _, function = kernel.rpartition(":")
    called = function if function.isidentifier() else "attend"
    module = re.sub(r"\.py$", "", file.rpartition("/")[2])
    lines = ["import numpy as np", *_IMPORTS.get(framework, ())]
    if framework == "jax" and outcome.dtype == "float64":
        lines.append('jax.config.update("jax_enable_x64", True)')
    lines += [f"from {module} import {called}"] if module.isidentifier() and called == function else []
    lines += [f"{one} = {_placed(x, outcome.dtype, framework, device)}" for one, x in arrays.items()]
    given = [one if one in "qkv" else f"{one}={one}" for one in truth.inputs]
    told = {"dtype": "bfloat16"} if outcome.dtype == "bfloat16" and not framework else {}
    given += [f"{one}={x!r}" for one, x in {**case.options, **told}.items()]
    made = f"{called}().forward" if called[:1].isupper() else called  # a class
    call = f"{made}({', '.join(given)})"
    lines.append(f"expected = {literal(truth.values[name])}  # of {name}, in float64")
    if name == "out":
        lines += [f"got = {call}", "got = got[0] if isinstance(got, tuple) else got"]
        lines += [f"got = got{_TO_HOST[framework]}"] if framework in _TO_HOST else []
    else:
        lines.append(f"got = ...  # {name} of {call}" + (", for d_out" if "d_out" in arrays else ""))
    variance = truth.variance[name]
    allowed = ELEMENT * float(np.sqrt(np.max(variance[verdict.index]))) if variance.size else 0.0
    stored = f"; arrays stand for {outcome.dtype}" if outcome.dtype == "bfloat16" else ""
    at = f"[{', '.join(map(str, verdict.index))}]"
    lines.append(f"print(np.asarray(got, float){at} - expected{at})  # {allowed:.1e} is allowed{stored}")
    return lines


def _placed(x: NDArray[Any], dtype: str, framework: str, device: str) -> str:
    """Return an array as an expression of Python that makes an array of a library."""
    numbers, floating = literal(x), x.dtype.kind == "f"
    if framework == "torch":
        more = [f"dtype=torch.{dtype}"] if floating else []
        more += [f'device="{device}"'] if device else []
        return f"torch.tensor({', '.join((numbers, *more))})"
    if framework == "jax":
        made = f"jnp.asarray({numbers}{f', jnp.{dtype}' if floating else ''})"
        kind, _, number = device.partition(":")
        return f'jax.device_put({made}, jax.devices("{kind}")[{number or 0}])' if device else made
    return f"cupy.asarray({numbers})" if framework == "cupy" else numbers


def literal(x: NDArray[Any]) -> str:
    """Return an array as an expression of Python: its numbers in order, and its shape."""
    flat: Sequence[Any] = x.reshape(-1).tolist()
    digits = 17 if x.dtype == np.float64 else 9
    told = ", ".join(_number(n, digits) if isinstance(n, float) else repr(n) for n in flat)
    return f'np.array([{told}], "{x.dtype}").reshape{x.shape}'


def _number(x: float, digits: int) -> str:
    if np.isfinite(x):
        return f"{x:.{digits}g}"
    return "np.nan" if np.isnan(x) else "np.inf" if x > 0 else "-np.inf"
