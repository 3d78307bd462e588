"""The same bits: whether a kernel gives them whatever else is in the batch, and however a call is cut.

Both sides of each row are computed by it. No budget is asked: where bits differ the row tells the first element that
does, by how many units in the last place, and how many do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.args import checked
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import spacing
from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters import call_manners
from refattn.verify.adapters.adapter import CallError
from refattn.verify.invariances import answered, report
from refattn.verify.outcome import CheckReport
from refattn.verify.selfcheck.sections import Found
from refattn.verify.user_cases import qkv

SIZES = {"b": 3, "h": 4, "g": 2, "n_q": 70, "n_k": 133, "d": 64}

PADDING = 59
"""Keys that nothing attends."""

THREADS = (2, 3, 4)
"""How many threads are compared with one."""

Arrays = Mapping[str, NDArray[Any]]
Pair = tuple[Arrays, Arrays]
Run = Callable[..., Arrays]  # of arrays, options, and perhaps a manner
Check = Callable[[Run, Arrays], Iterator[Pair]]


def checks_of(mechanism: Mechanism) -> dict[str, Check]:
    """Return what is compared, by name: each check yields pairs of results that have the same bits."""
    parts: dict[str, list[dict[str, slice]]] = {
        "batch size": [{"batch": np.s_[n : n + 1]} for n in range(SIZES["b"])],
        "position in the batch": [{"batch": np.s_[::-1]}],
    }
    if "independent" in mechanism.properties:
        parts["heads"] = [{"groups": np.s_[n : n + 1]} for n in range(SIZES["g"])]
    if "query_permutation" in mechanism.properties:
        parts["chunk of queries"] = [{"rows": np.s_[:17]}, {"rows": np.s_[17:]}]
    found: dict[str, Check] = {"repetition": _repetition, "threads": _threads}
    found |= {name: partial(_parts, cuts=cuts, options={}) for name, cuts in parts.items()}
    if "chunk of queries" in parts and "causal" in mechanism.defaults:
        last = [{"rows": np.s_[-1:]}, {"rows": np.s_[-5:]}]
        found["prefill and decode"] = partial(_parts, cuts=last, options={"causal": True})
    by = [name for name in ("mask", "k_lengths") if name in mechanism.defaults]
    return found | {f"padding by {name}": partial(_padding, by=name) for name in by}


def _repetition(run: Run, given: Arrays) -> Iterator[Pair]:
    yield run(given, {}), run(given, {})


def _threads(run: Run, given: Arrays) -> Iterator[Pair]:
    one = run(given, {}, f"{call_manners.THREADS}1")
    for count in THREADS:
        yield run(given, {}, f"{call_manners.THREADS}{count}"), one


def _parts(run: Run, given: Arrays, cuts: list[dict[str, slice]], options: Mapping[str, Any]) -> Iterator[Pair]:
    whole = run(given, options)
    for cut in cuts:
        yield run(_cut(given, **cut), options), _cut(whole, **cut)


def _cut(
    arrays: Arrays, batch: slice = np.s_[:], groups: slice = np.s_[:], rows: slice | None = None
) -> dict[str, Any]:
    """Return some sequences, key/value heads with their query heads, and queries, which have no d_k and d_v alone."""
    found = {}
    for name, x in arrays.items():
        shared = SIZES["h"] // SIZES["g"] if name not in ("k", "v", "d_k", "d_v") else 1
        heads = np.arange(x.shape[1]).reshape(-1, shared)[groups].reshape(-1)
        x = x[batch][:, heads]
        if rows is None or name not in ("d_k", "d_v"):
            found[name] = x[:, :, rows] if rows is not None and name in ("q", "d_out", "out", "lse", "d_q") else x
    return found


def _padding(run: Run, given: Arrays, by: str) -> Iterator[Pair]:
    keys = given["k"].shape[2]
    more = np.arange(keys + PADDING) % keys
    longer = {n: x[:, :, more] if n in ("k", "v") else x for n, x in given.items()}
    seen = np.broadcast_to(np.arange(keys + PADDING) < keys, (SIZES["b"], 1, 1, keys + PADDING))
    hidden = {"mask": seen.copy()} if by == "mask" else {"k_lengths": np.full(SIZES["b"], keys)}
    found = run({**longer, **hidden}, {})
    yield {n: x[:, :, :keys] if n in ("d_k", "d_v") else x for n, x in found.items()}, run(given, {})


@checked(mechanism=Mechanism)
def verify_bitwise(
    mechanism: Mechanism,
    kernel: Any,
    *,
    label: str = "",
    dtype: str = "float32",
    grad: bool = False,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> CheckReport:
    """Compare the bits of a kernel's results; arguments as those of `refattn.verify.verify`.

    >>> import refattn as ra
    >>> from refattn.verify import verify_bitwise
    >>> def attend(q, k, v, **options):
    ...     return ra.softmax.forward(q, k, v, **options)[0]
    >>> row = verify_bitwise(ra.mechanism("softmax"), attend).rows[0]
    >>> row.name, row.status
    ('repetition', 'agrees')
    """
    sizes = {**SIZES, "n_q": SIZES["n_k"]} if mechanism.one_sequence else SIZES
    case = qkv("bitwise", "bitwise", "", sizes)
    given = make(mechanism.name, case, dtype, seed=seed)
    if grad:
        shape = (*given["q"].shape[:3], given["v"].shape[3])
        given["d_out"] = make_upstream(mechanism.name, case, "out", shape, dtype, seed=seed)

    def run(arrays: Arrays, options: Mapping[str, Any], manner: str = "") -> Arrays:
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        d_out = arrays.pop("d_out", None)
        return answered(kernel, arrays, options, dtype, d_out, ("out", *mechanism.outputs), manner=manner).tensors

    tasks = [(name, partial(_same, check, run, given, dtype)) for name, check in checks_of(mechanism).items()]
    return report(mechanism, label or repr(kernel), "bitwise", tasks, progress)


def _same(check: Check, run: Run, given: Arrays, dtype: str) -> Found:
    for one, other in check(run, given):
        for tensor, a in one.items():
            if tensor in other and (told := differing(tensor, a, other[tensor], dtype)):
                raise CallError(told)
    return 0.0, "the same bits"


def differing(tensor: str, a: NDArray[Any], b: NDArray[Any], dtype: str) -> str:
    """Return where two arrays differ first, by how many units in the last place, and how often; "" for the same."""
    if a.shape != b.shape:
        return f"{tensor} has shape {a.shape}, and {b.shape}"
    if np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes():
        return ""
    other = ~((a == b) | ((a != a) & (b != b)))
    if not other.any():
        return f"{tensor}: zeros of other signs, or other NaN"
    at = tuple(int(n) for n in np.argwhere(other)[0])
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    stored = dtype if tensor != "lse" or dtype == "float64" else "float32"
    with np.errstate(invalid="ignore"):
        apart = np.where(other, np.abs(x - y), 0.0) / spacing(np.maximum(np.abs(x), np.abs(y)), stored)
    told = f"{tensor}{list(at)} is {a[at]:.9g} and {b[at]:.9g}, {apart[at]:.3g} units in the last place"
    return f"{told}; {int(other.sum())} of {a.size} differ, by {np.max(apart):.3g} at most"
