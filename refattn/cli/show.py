"""``refattn show``: the definition of a mechanism as one file that runs on NumPy alone."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

import click

from refattn.cli.arguments import Name, Place, Problem, check_writable, record_of
from refattn.cli.output import write_text

ON_NUMPY = {
    "Array": "Array = np.ndarray",
    "namespace": "def namespace(*arrays):\n    return np",
    "transpose": "def transpose(x):\n    return np.matrix_transpose(x)",
    "sum_wide": "def sum_wide(x):\n    return np.sum(x, dtype=np.float64).astype(x.dtype)",
    "zeros": "def zeros(shape, like):\n    return np.zeros(shape, like.dtype)",
    "eye_like": "def eye_like(size, like):\n    return np.eye(size, dtype=like.dtype)",
    "arange": "def arange(start, stop, like):\n    return np.arange(start, stop)",
    "Unsupported": (
        'class Unsupported(ValueError, NotImplementedError):\n    """Raised for a call that this does not compute."""'
    ),
}
"""What a definition takes of `refattn.xp`, on NumPy, and what it raises."""

LEFT_OUT = ("paper_alone",)
"""Decorators that a file of its own does not need."""


@click.command("show", short_help="Print the definition of a mechanism as one file.")
@click.argument("mechanism", type=Name())
@click.option("--out", type=Place(), metavar="FILE", help="Write the file there; - is standard output, as without it.")
@click.option("--set", "assignments", multiple=True, hidden=True)
def show(mechanism: str, out: str | None, assignments: tuple[str, ...]) -> None:
    """Print the definition of MECHANISM, forward and backward, as one file that runs on NumPy alone.

    The file is the source of the definition, with the few functions that it imports below it.
    """
    if assignments:
        raise Problem(f"--set: got {assignments[0]!r}, but a definition has no options; refattn trace runs them")
    record = record_of(mechanism)
    check_writable(out, "--out")
    if record.definition is None:
        raise Problem(f"MECHANISM: got {mechanism!r}, which has no definition.py")
    text = standalone(record.definition)
    if out is None or out == "-":
        click.echo(text.rstrip("\n"), file=sys.stdout)
    else:
        write_text(out, text, "--out")


def standalone(definition: ModuleType) -> str:
    """Return the source of a definition with what it imports of refattn written below it, on NumPy."""
    source = inspect.getsource(definition)
    lines: list[str | None] = [*source.splitlines()]
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        if _is_own(node):
            lines[node.lineno - 1 : node.end_lineno] = [None] * ((node.end_lineno or node.lineno) - node.lineno + 1)
            above = node.lineno - 2
            while (lines[above] or "").startswith("#"):  # it says what is imported, which stands below
                lines[above], above = None, above - 1
    last = max(n for n, line in enumerate(lines) if line is not None and line.startswith(("import ", "from ")))
    lines[last] = f"{lines[last]}\n\nimport numpy as np"
    while lines[last + 1] in ("", None):
        del lines[last + 1]
    lines.insert(last + 1, "")
    helpers = dict(_helpers(definition))
    if "Array" in helpers:
        lines.insert(last + 1, f"\n{helpers.pop('Array')}\n")
    else:
        lines.insert(last + 1, "")
    kept = [line for line in lines if line is not None and line not in (f"@{name}" for name in LEFT_OUT)]
    return "\n\n\n".join(["\n".join(kept).rstrip(), *helpers.values()]) + "\n"


def _helpers(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the functions of refattn that a module imports, and those that these use, each with its source."""
    used = {node.id for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Name)}
    for name in sorted(used & {*vars(module)}):
        if name in LEFT_OUT:
            continue
        if name in ON_NUMPY:
            yield name, ON_NUMPY[name]
        elif inspect.isfunction(function := getattr(module, name)) and function.__module__ != module.__name__:
            text = inspect.getsource(function).rstrip()
            yield name, text[text.index("def ") :]  # without a check of arguments, which decorates it
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Name) and node.id in ON_NUMPY:
                    yield node.id, ON_NUMPY[node.id]


def _is_own(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("refattn")
