"""How many Python functions of refattn a call enters, by file: what it costs beside its mathematics, without a clock.

python -m tools.calls                      # forward and backward of all cores and blocks, and training steps
python -m tools.calls "softmax core" -v   # those whose name has this text, with the functions that are called

Counted is a call like earlier ones: what is remembered from one call to the next is there. What a comprehension or a
generator is run as depends on the interpreter, and is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import refattn
from refattn import backends
from refattn.golden.inputs import make, make_upstream
from refattn.mechanisms.context import Context
from refattn.mechanisms.registry import list_mechanisms, mechanism
from refattn.train import data, loop
from refattn.train.settings import Settings

HOME = str(Path(str(refattn.__file__)).parent)

INLINE = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")

Place = tuple[str, str]
"""A file and a function of it."""


def count(call: Callable[[], Any]) -> Counter[Place]:
    """Return how often each Python function is called."""
    for _ in range(3):
        call()
    found: Counter[Place] = Counter()

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and code.co_name not in INLINE:
            found[code.co_filename.removeprefix(HOME).lstrip(os.sep), code.co_qualname] += 1

    with backends.use_workers(1):
        sys.setprofile(seen)
        try:
            call()
        finally:
            sys.setprofile(None)
    return found


def core_calls(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the forward and the backward of a core, on its case "tiny"."""
    record = mechanism(name)
    core, case = record.core, record.case("tiny")
    assert core is not None
    given = {**make(name, case, "float32"), **case.options}
    out, saved = core.forward(**given)
    d_out = make_upstream(name, case, "out", out.shape, "float32")
    return lambda: core.forward(**given), lambda: core.backward(saved, d_out)


def block_calls(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the forward and the backward of a block, on eight tokens."""
    record, x = mechanism(name), np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(1, 8, 8)
    block, context = record.block, Context(causal="causal" in record.context_fields)
    params = block.init(block.Config(width=8, heads=2), like=x)
    state = block.start(params, x, context)
    last, saved = block.forward(params, state, context)
    d_state, _ = block.read_backward(params, last, x)
    return lambda: block.forward(params, state, context), lambda: block.backward(params, saved, d_state)


def training_step(mechanism: str) -> Callable[[], Any]:
    """Return a step of a model of one layer: data, loss, gradients, clipping and AdamW."""
    settings = Settings(mechanism, context=8, width=8, heads=2, layers=1, batch=2, warmup=1)
    state, given = loop.fresh(settings), np.arange(64, dtype=np.uint8)
    return lambda: loop.step(state, settings, data.Text("made", given, given, data.Counts(), ""))


def all_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is counted, by name."""
    for name in list_mechanisms():
        for what, made in (("core", core_calls), ("block", block_calls)):
            yield from zip((f"{name} {what} forward", f"{name} {what} backward"), made(name), strict=True)
        yield f"{name} training step", training_step(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", nargs="?", default="", help="only what has this text in its name")
    parser.add_argument("-v", "--verbose", action="store_true", help="with the functions that are called")
    chosen = parser.parse_args()
    for name, call in all_calls():
        if chosen.text not in name:
            continue
        found, files = count(call), Counter[str]()
        for (file, _), times in found.items():
            files[file] += times
        print(f"{name}: {found.total()} calls in {len(files)} files")
        for file, times in files.most_common():
            print(f"  {times:5} {file}")
            if chosen.verbose:
                for (place, function), own in found.most_common():
                    if place == file:
                        print(f"  {own:11} {function}")


if __name__ == "__main__":
    main()
