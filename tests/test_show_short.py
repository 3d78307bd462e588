"""What makes a page shorter: each rule on the smallest source that it changes, and on one that it must leave alone."""

from __future__ import annotations

import ast
from collections.abc import Callable
from textwrap import dedent

import numpy as np
import pytest

from refattn.show.commented import read, text_of
from refattn.show.short import shorten, spell_out, untyped


def changed(source: str, change: Callable[[ast.Module], object] = shorten) -> str:
    tree = read(dedent(source).lstrip("\n"))
    change(tree)
    return text_of(tree).strip()


def expected(source: str) -> str:
    return dedent(source).strip()


@pytest.mark.parametrize(
    ("source", "short"),
    [
        # A choice of two values is one expression.
        (
            """
            def f(x, causal):
                if causal:
                    y = x + 1.0  # (b): one
                else:
                    y = x
                return y * y
            """,
            """
            def f(x, causal):
                y = x + 1.0 if causal else x  # (b): one
                return y * y
            """,
        ),
        # What an equation only renames has the name of the equation.
        (
            """
            def f(x):
                found = x * x
                z = found  # [E.1] (b)
                return z + z
            """,
            """
            def f(x):
                z = x * x  # [E.1] (b)
                return z + z
            """,
        ),
        # What is added up has, from the start, the name that it gets at the end.
        (
            """
            def f(x):
                total = x + 1.0
                total = total * x
                z = total  # [E.1] (b)
                return z + z
            """,
            """
            def f(x):
                z = x + 1.0
                z = z * x  # [E.1] (b)
                return z + z
            """,
        ),
        # What is read once, soon, and has nothing said of it, is written where it is read; numbers are multiplied.
        (
            """
            def f(x):
                quarter = 0.25
                y = 2.0 * quarter
                return y * x
            """,
            """
            def f(x):
                return 0.5 * x
            """,
        ),
        # Entries of a dictionary are written into the one that takes them all.
        (
            """
            def f(x, y):
                known = {"x": x, "y": y}
                return {"z": y, **known}
            """,
            """
            def f(x, y):
                return {"z": y, "x": x, "y": y}
            """,
        ),
        # A field that always is a number is this number.
        (
            """
            class Saved:
                x: object
                y: object
                a: object
                b: object
                c: object
                d: object
                e: object
                f: object
                g: object
                h: object
                i: object
                step: float

            def forward(x, y):
                size = 0.5
                return x * size, Saved(x, y, x, x, x, x, x, x, x, x, x, size)

            def backward(saved):
                return saved.x * saved.step
            """,
            """
            class Saved:
                x: object
                y: object
                a: object
                b: object
                c: object
                d: object
                e: object
                f: object
                g: object
                h: object
                i: object

            def forward(x, y):
                size = 0.5
                return x * size, Saved(x, y, x, x, x, x, x, x, x, x, x)

            def backward(saved):
                return saved.x * 0.5
            """,
        ),
    ],
    ids=("choice", "renamed", "added up", "read once", "entries", "number"),
)
def test_it_is_shorter(source: str, short: str) -> None:
    found = changed(source)
    assert [line for line in found.splitlines() if line] == [line for line in expected(short).splitlines() if line]


@pytest.mark.parametrize(
    "source",
    [
        # two equations, each with its own id
        """
        def f(x, causal):
            if causal:
                y = x + 1.0  # [E.1] (b)
            else:
                y = x  # [E.2] (b)
            return y * y
        """,
        # two names
        """
        def f(x, causal):
            y = z = x
            if causal:
                y = x + 1.0
            else:
                z = x
            return y * z * y * z
        """,
        # a value that is an equation is not written elsewhere
        """
        def f(x):
            y = x * x  # [E.1] (b)
            return y + x
        """,
        # x is another one where y is read
        """
        def f(x):
            y = x * x
            x = x + 1.0  # (b)
            return y * x
        """,
        # it is read twice
        """
        def f(x):
            y = x * x
            return y * y
        """,
        # read after the equation, under its first name
        """
        def f(x):
            total = x + 1.0
            total = total * x
            z = total  # [E.1] (b)
            return z + total
        """,
        # few fields
        """
        class Saved:
            x: object
            step: float

        def forward(x):
            size = 0.5
            return size * x, Saved(x, size)

        def backward(saved):
            return saved.x * saved.step
        """,
    ],
    ids=("two ids", "two names", "an equation", "given again", "read twice", "old name", "few fields"),
)
def test_it_stays(source: str) -> None:
    assert changed(source) == expected(source)


@pytest.mark.parametrize("fields", [12, 30])
def test_a_class_of_many_fields_is_a_named_tuple(fields: int) -> None:
    names = [f"number_{n}" for n in range(fields)]
    source = f"""
    class Saved:
        \"\"\"What the backward reads.

        More.
        \"\"\"
        {f"{chr(10)}        ".join(f"{name}: float" for name in names)}

    def forward({", ".join(names)}):
        return Saved({", ".join(names)})
    """
    text = changed(source)
    assert text.startswith("# What the backward reads.\nSaved = namedtuple(") and "class" not in text
    assert max(map(len, text.splitlines()[:-3])) <= 120
    names_of: dict[str, object] = {}
    exec("from collections import namedtuple\n" + text, names_of)
    assert names_of["Saved"]._fields == tuple(names)  # type: ignore[attr-defined]
    assert names_of["forward"](*range(fields)) == tuple(range(fields))  # type: ignore[operator]


def test_what_is_written_on_one_line_means_the_same() -> None:
    source = """
    def f(x, causal):
        a = x * 3.0
        b = a - 1.0
        if causal:
            c = b * b  # (b): one
        else:
            c = b
        d = c + x
        return {"d": d, **{"c": c}}
    """
    before: dict[str, object] = {}
    after: dict[str, object] = {}
    exec(dedent(source), before)
    exec(changed(source), after)
    assert changed(source).count("\n") < dedent(source).strip().count("\n")
    for causal in (False, True):
        x = np.linspace(-1.0, 2.0, 7)
        assert str(before["f"](x, causal)) == str(after["f"](x, causal))  # type: ignore[operator]


def test_an_annotation_is_spelled_out_where_nothing_else_reads_its_name() -> None:
    source = """
    Number = float | Array

    def f(x: Number) -> Number:
        y: Number = x
        return y
    """
    assert "def f(x: float | Array) -> float | Array:\n    y: float | Array = x" in changed(source, spell_out)
    read_at_once = source + "\n    KINDS = [Number]\n"
    assert "def f(x: Number) -> Number:" in changed(read_at_once, spell_out)


def test_without_types_empty_lists_stay_empty() -> None:
    (statement,) = read(
        "def f(x: float, *, n: int = 2) -> list[int]:\n    return list[int](), tuple[int](), list[int](x)\n"
    ).body
    text = ast.unparse(untyped(statement))
    assert text == "def f(x, *, n=2):\n    return ([], (), x)"
