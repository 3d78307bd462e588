"""What common kernels of softmax attention agree with, by class of cases: a page of the documentation.

    python -m tools.kernels                          # all that are installed, some minutes on one core
    python -m tools.kernels --page docs/kernels.md
    python -m tools.kernels --only jax --dtype float32

The kernels are those of examples/, each as the library offers it, and two that this file writes out: the formula in
plain NumPy, and in PyTorch, as models have it in their eager paths, there also compiled. Each runs on all designed
cases, those in the sizes of kernels included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import refattn as ra
from refattn.mechanisms.record import Mechanism
from refattn.verify import load, verify
from refattn.verify.outcome import Report

DTYPES = ("float32", "float16", "bfloat16")


def textbook(q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False, scale: Any = None) -> Any:
    """The formula in NumPy: no maximum is subtracted, hidden scores are -inf, heads are repeated."""
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    k, v = (np.repeat(x, q.shape[1] // max(x.shape[1], 1), axis=1) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * q.dtype.type(factor)
    queries, keys = scores.shape[2:]
    if causal is not False:
        seen = np.tri(queries, keys, 0 if causal == "top_left" else keys - queries, dtype=bool)
        mask = seen if mask is None else mask & seen
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    with np.errstate(all="ignore"):
        powers = np.exp(scores)
        return ((powers / np.sum(powers, axis=-1, keepdims=True)) @ v).astype(q.dtype)


def formula(q: Any, k: Any, v: Any, mask: Any, factor: Any) -> Any:
    """The formula in PyTorch, as eager paths of models have it: hidden scores are lowest, softmax is in float32."""
    import torch

    scores = torch.matmul(q, k.transpose(2, 3)) * factor
    scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


class Eager:
    """The formula in PyTorch with masks made and heads repeated, as it is or compiled with shapes left open."""

    framework, roundings = "torch", ("SM.1",)

    def __init__(self, run: Any = formula) -> None:
        self.run = run

    def __call__(self, q: Any, k: Any, v: Any, *, mask: Any = None, causal: Any = False, scale: Any = None) -> Any:
        import torch

        queries, keys, heads = q.shape[2], k.shape[2], q.shape[1]
        k, v = (x.repeat_interleave(heads // max(x.shape[1], 1), dim=1) for x in (k, v))
        if causal is not False:
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(0 if causal == "top_left" else keys - queries)
            mask = seen if mask is None else mask & seen
        mask = None if mask is None else mask.expand(q.shape[0], heads, queries, keys)
        return self.run(
            q, k, v, mask, torch.tensor(1.0 / math.sqrt(q.shape[3]) if scale is None else scale).to(q.dtype)
        )


def compiled() -> Eager:
    """Return the formula through torch.compile."""
    import torch

    torch._dynamo.config.recompile_limit = 64  # it would go back to the formula as it is without a word
    return Eager(torch.compile(formula, dynamic=True))


EXAMPLES = Path(__file__).parents[1] / "examples"

KERNELS: dict[str, str] = {
    "PyTorch, math": "torch_sdpa.py:attend_math",
    "PyTorch, flash": "torch_sdpa.py:attend_flash",
    "PyTorch, flex": "torch_flex.py:attend",
    "PyTorch, eager formula": "Eager",
    "PyTorch, eager formula compiled": "compiled",
    "JAX, dot_product_attention": "jax_attention.py:attend",
    "ONNX Runtime, Attention": "onnxruntime_attention.py:attend",
    "ONNX Runtime, GroupQueryAttention": "onnxruntime_grouped.py:attend",
    "NumPy, the formula": "textbook",
}
"""Kernels by name: a file of examples/ with a function, or one of this file."""


@dataclass(frozen=True)
class Row:
    """What a kernel agrees with in one type; by class, how many cases agreed and how many were run."""

    kernel: str
    dtype: str
    classes: dict[str, tuple[int, int]]
    worst: float


def made(place: str) -> Any:
    """Return a kernel; None where its library is not installed."""
    try:
        found = load(f"{EXAMPLES / place}") if ":" in place else globals()[place]
        return found() if found in (Eager, compiled) else found
    except Exception as error:  # whatever a library raises that is not there
        click.echo(f"{place}: {error}", err=True)
        return None


def measured(record: Mechanism, dtypes: tuple[str, ...], only: str = "", skip: str = "-") -> Iterator[Row]:
    """Yield the rows of all kernels whose names contain a text, and not another one."""
    for name, place in KERNELS.items():
        if only.lower() not in name.lower() or skip.lower() in name.lower() or (kernel := made(place)) is None:
            continue
        for dtype in dtypes if place != "compiled" else dtypes[:1]:  # which takes minutes
            row = of(name, verify(record, kernel, dtypes=[dtype]), dtype)
            if any(run for _, run in row.classes.values()):
                yield row


def of(name: str, report: Report, dtype: str) -> Row:
    """Return the row of a report."""
    counts = {kind: (one["agreed"], one["run"]) for kind, one in report.counts().items()}
    shares = [verdict.share for one in report.outcomes for verdict in one.verdicts if one.status == "agrees"]
    return Row(name, dtype, counts, max(shares, default=0.0))


def page(rows: list[Row]) -> str:
    """Return the page."""
    kinds = [kind for kind in rows[0].classes if kind != "all" and any(row.classes[kind][1] for row in rows)]

    def cell(agreed: int, run: int) -> str:
        return "–" if not run else str(run) if agreed == run else f"**{agreed} of {run}**"

    header = ["kernel", "type", *kinds, "all"]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    for row in rows:
        cells = [row.kernel, row.dtype, *(cell(*row.classes[kind]) for kind in (*kinds, "all"))]
        lines.append(f"| {' | '.join(cells)} |")
    return _PAGE.format(table="\n".join(lines), versions=_versions())


_PAGE = """# Kernels side by side

What do common kernels of softmax attention agree with? Each row is a kernel on the CPU in one storage type, each column
a class of the designed cases, outputs alone. A number is of cases that were run, and all agree; **two** say how many of
them agree; a dash is a class that the kernel has no option for, or declines. What declines and why, and what each
library means by its options, stands at the head of its file in `examples/`.

{table}

*The formula* is what a reader would write down: without a maximum that is subtracted it overflows, and rows that may
attend nothing are NaN. *The eager formula* adds the lowest number to hidden scores, so that such a row gets the mean of
all values. `python -m tools.kernels --page docs/kernels.md` writes this page, `--only`, `--skip` and `--dtype` a part
of it. Here: {versions}.
"""


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("numpy", "torch", "jax", "onnxruntime"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


@click.command()
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Storage types; all by default.")
@click.option("--only", default="", help="Kernels with this in their name.")
@click.option("--skip", default="-", help="Kernels with this in their name are left out: compiled takes minutes.")
@click.option("--page", "file", type=Path, help="Write the page here.")
def main(dtypes: tuple[str, ...], only: str, skip: str, file: Path | None) -> None:
    """Verify common kernels, and set them side by side."""
    record = ra.mechanism("softmax")
    record = replace(record, cases=(*record.cases, *record.kernel_sizes), kernel_sizes=())
    text = page(list(measured(record, dtypes or DTYPES, only, skip)))
    click.echo(text)
    if file is not None:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
