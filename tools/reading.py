"""What a reader meets on the way to an equation: the reading budget of every mechanism.

    python -m tools.reading              # a row for each mechanism, from the root of the repository
    python -m tools.reading koopman -v   # the files that each call enters, by name

A call is of the case "tiny" with default options and `form="dense"`; the block's has default options and five tokens.
Files are those of the mechanism's room in which a function is entered.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import refattn as ra
from refattn import counter
from refattn.mechanisms.record import Mechanism

ROOMS = Path(str(ra.__file__)).parent / "mechanisms"


@dataclass(frozen=True)
class Reading:
    """What was measured of one mechanism.

    Attributes
    ----------
    files, top, lines
        Python files of the room, those at its top, and their lines.
    options
        Keyword arguments of the core's forward.
    forward, backward, block
        The files of the room that each call enters.
    """

    name: str
    files: int
    top: int
    lines: int
    options: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    block: tuple[str, ...]


def entered(room: Path, call: Callable[[], Any]) -> tuple[Any, tuple[str, ...]]:
    """Return what a call returns, and the files below a folder whose functions it enters, in that order."""
    found: dict[str, None] = {}
    prefix = f"{room}/"

    def note(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        # The body of a module or a class is no function that a reader steps into.
        if event == "call" and file.startswith(prefix) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.setdefault(file.removeprefix(prefix))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return result, tuple(found)


def measure(mechanism: Mechanism) -> Reading:
    """Return the reading budget of a mechanism."""
    room, core = ROOMS / mechanism.name, mechanism.core
    texts = {path: path.read_text(encoding="utf-8") for path in room.rglob("*.py")}
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    options = 0
    if core is not None:
        case = mechanism.case("tiny")
        inputs = {name: counter.normal(given.shape, seed=0, purpose=name) for name, given in case.inputs.items()}
        parameters = inspect.signature(core.forward).parameters.values()
        options = sum(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
        (out, saved), forward = entered(room, lambda: core.forward(**inputs, **case.options, form=mechanism.forms[0]))
        _, backward = entered(room, lambda: core.backward(saved, np.ones_like(out)))
    block = _block(room, mechanism)
    top = sum(path.parent == room for path in texts)
    lines = sum(text.count("\n") for text in texts.values())
    return Reading(mechanism.name, len(texts), top, lines, options, forward, backward, block)


def _block(room: Path, mechanism: Mechanism) -> tuple[str, ...]:
    """Return the files of the room that the forward of a block enters, parameters and start included."""
    block = mechanism.block
    known = {field for field in ("width", "heads", "layers") if field in inspect.signature(block.Config).parameters}
    sizes = {"width": 8, "heads": 2, "layers": 2}
    params = block.init(block.Config(**{name: sizes[name] for name in known}), seed=0, like=np.zeros(1))
    x, context = counter.normal((1, 5, 8), seed=0, purpose="x"), ra.Context(causal=True)
    state = block.start(params, x, context)
    return entered(room, lambda: block.forward(params, state, context))[1]


def table(readings: list[Reading]) -> str:
    """Return the numbers as a table in Markdown, which the documentation shows."""
    head = "| mechanism | files | at the top | lines | options | forward | backward | block |"
    rows = [
        f"| {r.name} | {r.files} | {r.top} | {r.lines:,} | {r.options} | "
        f"{len(r.forward)} | {len(r.backward)} | {len(r.block)} |"
        for r in readings
    ]
    return "\n".join([head, "| --- |" + " --- |" * 7, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="What a reader meets on the way to an equation.")
    parser.add_argument("mechanism", nargs="*", help="the mechanisms; all without one")
    parser.add_argument("-v", "--verbose", action="store_true", help="name the files that are entered")
    arguments = parser.parse_args()
    readings = [measure(ra.mechanism(name)) for name in arguments.mechanism or ra.list_mechanisms()]
    print(table(readings))
    for reading in readings if arguments.verbose else ():
        print(f"\n{reading.name}")
        for call in ("forward", "backward", "block"):
            print(f"  {call}: {', '.join(getattr(reading, call))}")


if __name__ == "__main__":
    main()
