"""What each form reaches of what this machine can do: the page docs/benchmarks/roofline.md.

    python -m asv_benchmarks.roofline --out docs/benchmarks

The operations of matrix products and the bytes of all new arrays are counted (`refattn.instruments`), times are CPU
times of one thread. A form can be no quicker than its products at the peak of the machine, nor than its bytes at the
bandwidth: the larger of both times is its bound, and what it reaches is the bound divided by its time.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from asv_benchmarks import machine
from asv_benchmarks.comparisons.softmax import without_avx512
from asv_benchmarks.sides import ROOT, STEADY, held_to, ran
from asv_benchmarks.worker import facts

KERNELS: dict[str, dict[str, str]] = {"stock": {}, "AVX-512": {"OPENBLAS_CORETYPE": "SkylakeX"}}
"""By name of the kernels the environment in which OpenBLAS takes them."""

DTYPES = ("float32", "float64")
COPIED = 1 << 28
"""Bytes of the array that is copied: no cache holds them."""


def measure(n: int, d: int) -> Iterator[dict[str, Any]]:
    """Yield what this process reaches: first the machine by itself, then each form."""
    import numpy as np

    from asv_benchmarks.benchmarks.common import FORMS, core_call
    from asv_benchmarks.benchmarks.peak import fastest, products

    arrays = [np.ones(COPIED // 8), np.zeros(COPIED // 8)]
    bandwidth = 2.0 * COPIED / fastest(lambda: np.copyto(arrays[0], arrays[1]))
    arrays.clear()
    yield {"kernels": facts()["threads"], "peaks": {t: products(t) for t in DTYPES}, "bandwidth": bandwidth}
    for form in FORMS:
        for dtype in DTYPES:
            if form.endswith((".dense", ".recurrent")):
                continue
            call = core_call(form, n, d, dtype, "numpy")
            assert call.counts is not None
            for run, tally in zip(("forward", "backward"), call.counts(), strict=True):
                seconds = fastest(getattr(call, run))
                row = {"form": form, "dtype": dtype, "run": run, "seconds": seconds}
                yield row | {"products": float(tally.products), "others": tally.others, "bytes": tally.written}


def gather(n: int, d: int) -> dict[str, list[dict[str, Any]]]:
    """Return by kernels what a process of its own measured, without those that cannot run here or run anyway."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, env in KERNELS.items():
        if env and without_avx512() is not None:
            continue
        whole = {**held_to(1), **STEADY, **env, "PYTHONPATH": str(ROOT)}
        words = ["--inside", "--n", str(n), "--d", str(d)]
        code, out, errors = ran("asv_benchmarks.roofline", *words, env=whole)
        if code:
            sys.exit(errors)
        rows = [json.loads(line) for line in out.splitlines()]
        if not any(rows[0]["kernels"] == other[0]["kernels"] for other in found.values()):
            found[name] = rows
    return found


def page(found: dict[str, list[dict[str, Any]]], n: int, d: int) -> str:
    """Return the page."""
    device = machine.describe()
    lines = ["# The roofline", "", f"Each form of each core at n = {n}, d = {d}, one thread.", ""]
    lines += ["| kernels | GFLOP/s float32 | float64 | copy, GB/s read and written |", "| --- | --- | --- | --- |"]
    for name, ((first, *_)) in found.items():
        cells = [f"{first['peaks'][dtype] / 1e9:.0f}" for dtype in DTYPES] + [f"{first['bandwidth'] / 1e9:.0f}"]
        lines.append(f"| {' | '.join([f'{name}: ' + '; '.join(first['kernels']), *cells])} |")
    lines += [
        "",
        "*Products* are the operations of matrix products and factorisations, *others* those of functions of each",
        "element and of sums, *written* the bytes of all new arrays: counted. *Peak* is the share of the peak that the",
        "products reach; *roof* is the time that products at the peak, or bytes at the bandwidth, would take, the",
        "longer of both, divided by the time. Bytes that stay in a cache are quicker than the bandwidth, so a roof may",
        "be above 1. What is missing to it are functions of each element, small products and overhead.",
        "",
        "| form | ms | products, 10^6 | others, 10^6 | written, MB | GFLOP/s | peak | roof |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (first, *rows) in found.items():
        for row in rows:
            peak, seconds = first["peaks"][row["dtype"]], row["seconds"]
            bound = max(row["products"] / peak, row["bytes"] / first["bandwidth"])
            cells = [f"{1e3 * seconds:.3g}", *(f"{row[key] / 1e6:.4g}" for key in ("products", "others", "bytes"))]
            cells += [f"{row['products'] / seconds / 1e9:.3g}", f"{row['products'] / seconds / peak:.2f}"]
            label = f"{row['form']} {row['run']}, {row['dtype']}, {name}"
            lines.append(f"| {' | '.join([label, *cells, f'{bound / seconds:.2f}'])} |")
    date = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    where = ", ".join(device[key] for key in ("cpu", "memory", "system", "python"))
    lines += ["", f"{where}; refattn at {device['commit']}, {date}.", ""]
    return "\n".join([*lines, "```sh", "python -m asv_benchmarks.roofline --out docs/benchmarks", "```", ""])


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write roofline.md and .json here.")
@click.option("--n", type=click.IntRange(1), default=1024, show_default=True, help="Tokens.")
@click.option("--d", type=click.IntRange(1), default=64, show_default=True, help="Width.")
@click.option("--inside", is_flag=True, help="Measure in this process and print lines of JSON.")
def main(out: Path | None, n: int, d: int, inside: bool) -> None:
    """Measure and print the page, or write it."""
    if inside:
        for row in measure(n, d):
            print(json.dumps(row), flush=True)
        return
    found = gather(n, d)
    text = page(found, n, d)
    if out is None:
        click.echo(text)
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "roofline.md").write_text(text, encoding="utf-8")
    (out / "roofline.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(f"wrote {out / 'roofline.md'}")


if __name__ == "__main__":
    main(prog_name="python -m asv_benchmarks.roofline")
