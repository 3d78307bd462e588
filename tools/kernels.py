"""What common kernels of softmax attention agree with, by class of cases: a page of the documentation.

    python -m tools.kernels --page docs/kernels.md                # all that are installed, some ten minutes of one core
    python -m tools.kernels --only jax --dtype float32            # a part of the rows
    python -m tools.kernels --keep rows --page docs/kernels.md    # goes on with the rows that have not ended before

The kernels are those of examples/, each as the library offers it, and two that this file writes out: the formula in
plain NumPy, and in PyTorch, as models have it in their eager paths, there also compiled. Each runs, in a process of its
own, on all designed cases, those in the sizes of kernels included, one class after the other until its time is over:
libraries that compile do so for most cases anew.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import refattn as ra
from refattn import many_runs
from refattn.cli.arguments import campaign_options
from refattn.cli.output import progress
from refattn.many_runs import HERE, Unit, Where
from refattn.mechanisms.record import Case
from refattn.verify import Isolated, verify_case
from refattn.verify.adapters.adapter import LoadError

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

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    @functools.cached_property
    def run(self) -> Any:
        if not self.compiled:
            return formula
        import torch

        torch._dynamo.config.recompile_limit = 64  # it would go back to the formula as it is without a word
        return torch.compile(formula, dynamic=True)

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


eager, compiled = Eager(compiled=False), Eager(compiled=True)

EXAMPLES = Path(__file__).parents[1] / "examples"

KERNELS = {
    "PyTorch, math": f"{EXAMPLES}/torch_sdpa.py:attend_math",
    "PyTorch, flash": f"{EXAMPLES}/torch_sdpa.py:attend_flash",
    "PyTorch, flex": f"{EXAMPLES}/torch_flex.py:attend",
    "PyTorch, eager formula": f"{__file__}:eager",
    "PyTorch, eager formula compiled": f"{__file__}:compiled",
    "JAX, dot_product_attention": f"{EXAMPLES}/jax_attention.py:attend",
    "ONNX Runtime, Attention": f"{EXAMPLES}/onnxruntime_attention.py:attend",
    "ONNX Runtime, GroupQueryAttention": f"{EXAMPLES}/onnxruntime_grouped.py:attend",
    "NumPy, the formula": f"{__file__}:textbook",
}
"""Kernels by name, as `refattn verify --impl` takes them."""

COMPILED = ("PyTorch, flex", "PyTorch, eager formula compiled", "JAX, dot_product_attention")
"""Those that compile for most shapes, which takes minutes: without `--dtype` they run in the first type alone."""


@dataclass(frozen=True)
class Row:
    """How the cases of a kernel in one type ended, in the order in which there was time for them."""

    kernel: str
    dtype: str
    ended: tuple[tuple[Case, str], ...]

    def count(self, kind: str, *statuses: str) -> int:
        """Return how many cases of a class, or of "all", ended so."""
        return sum(status in statuses for case, status in self.ended if kind in (case.kind, "all"))


def in_turn(cases: Iterable[Case]) -> list[Case]:
    """Return the first case of each class, then the second of each, and so on."""
    by_class: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_class[case.kind].append(case)
    return [case for turn in itertools.zip_longest(*by_class.values()) for case in turn if case is not None]


def statuses(spec: str, dtype: str, seconds: float, names: list[str]) -> list[str]:
    """Run the cases of these names until the time is over, and return how each ended: none where nothing is loaded."""
    record, found, until = ra.mechanism("softmax"), [], time.monotonic() + seconds
    cases = {case.name: case for case in (*record.cases, *record.kernel_sizes)}
    try:
        with Isolated(spec, seconds, seconds) as kernel:
            for name in names:
                if time.monotonic() > until:
                    break
                found.append(verify_case(record, kernel, cases[name], dtype).status)
    except LoadError as error:  # its library is not installed
        click.echo(str(error), err=True)
    return found


def measured(cases: Iterable[Case], asked: Sequence[tuple[str, str]], seconds: float, where: Where = HERE) -> list[Row]:
    """Return the rows of kernels, each in a type, that run some case."""
    turns = in_turn(cases)
    names = [case.name for case in turns]
    units = {
        Unit(f"{name} {dtype} {seconds} {names}", statuses, (KERNELS[name], dtype, seconds, names)): (name, dtype)
        for name, dtype in asked
    }
    with progress("kernels", "rows") as wrap:
        ended = {units[unit]: found for unit, found in many_runs.run(list(units), where, progress=wrap)}
    rows = [Row(*each, tuple(zip(turns, ended[each], strict=False))) for each in asked]
    return [row for row in rows if row.count("all", "declined") < len(row.ended)]


def page(rows: list[Row], cases: Iterable[Case], seconds: float) -> str:
    """Return the page."""
    total = len(names := [case.name for case in cases])
    kinds = [kind for kind in dict.fromkeys(case.kind for case in cases) if any(row.count(kind, *RUN) for row in rows)]
    header = ["kernel", "type", *kinds, "all"]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    wrong: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cut = "" if len(row.ended) == total else f", {len(row.ended)} cases"
        cells = [row.kernel, row.dtype + cut]
        for kind in (*kinds, "all"):
            agreed, run = row.count(kind, "agrees"), row.count(kind, *RUN)
            cells.append("–" if not run else str(run) if agreed == run else f"**{agreed} of {run}**")
        lines.append(f"| {' | '.join(cells)} |")
        failed = sorted((case.name for case, status in row.ended if status in RUN[1:]), key=names.index)
        if failed:
            wrong.setdefault((row.kernel, ", ".join(failed)), []).append(row.dtype)
    failures = "\n".join(f"- {kernel} ({', '.join(types)}): {found}" for (kernel, found), types in wrong.items())
    return _PAGE.format(table="\n".join(lines), failures=failures, total=total, seconds=seconds, versions=_versions())


RUN = ("agrees", "disagrees", "raises")

_PAGE = """# Kernels side by side

What do common kernels of softmax attention agree with? Each row is a kernel on the CPU in one storage type, each column
a class of the designed cases, outputs alone. A number is of cases that were run, and all agree; **two** say how many of
them agree; a dash is a class that the kernel has no option for, or declines. What declines and why, and what each
library means by its options, stands at the head of its file in `examples/`. Kernels that compile for most shapes run in
float32; of others a type that is missing is declined whole. JAX runs by XLA: its path to cuDNN needs a GPU.

{table}

Which of them disagree:

{failures}

*The formula* is what a reader would write down: without a maximum that is subtracted it overflows, and rows that may
attend nothing are NaN. *The eager formula* adds the lowest number to hidden scores, so that such a row gets the mean of
all values, as JAX's does; its scores are rounded to the storage type, which it declares. Rows that may attend nothing
are in `empty-rows`, `causal-head`, `wide-96`, `beyond-head`, `padded-causal` and `window-mask`; in float16 the products
of `low` overflow before they are scaled.

`python -m tools.kernels --page docs/kernels.md` wrote this page: {total} cases, those in the sizes of kernels among
them, each kernel in a process of its own, at most {seconds:.0f} s for a row (`--seconds`). A row that was cut says how
many cases it had, taken from all classes in turn. `--only`, `--skip` and `--dtype` are for some of the rows, and with
`--keep DIR` rows that have ended are not run again. Here: {versions}.
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
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Storage types.")
@click.option("--only", default="", help="Kernels with this in their name.")
@click.option("--skip", default="-", help="Kernels with this in their name are left out.")
@click.option("--seconds", default=300.0, show_default=True, help="For a row; what is left then is not run.")
@click.option("--page", "file", type=Path, help="Write the page here.")
@campaign_options(jobs="1")
def main(dtypes: tuple[str, ...], only: str, skip: str, seconds: float, file: Path | None, where: Where) -> None:
    """Verify common kernels, and set them side by side."""
    record = ra.mechanism("softmax")
    cases = (*record.cases, *record.kernel_sizes)
    kernels = [name for name in KERNELS if only.lower() in name.lower() and skip.lower() not in name.lower()]
    where = replace(where, jobs=where.jobs or 1)
    asked = [(k, t) for k in kernels for t in dtypes or (DTYPES[:1] if k in COMPILED else DTYPES)]
    text = page(measured(cases, asked, seconds, where), cases, seconds)
    click.echo(text)
    if file is not None:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    importlib.import_module("tools.kernels").main()  # so that workers find the functions there
