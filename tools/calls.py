"""How many Python functions of refattn a call enters, by file: what it costs beside its mathematics, without a clock.

python -m tools.calls                 # forward and backward of all cores and blocks, and training steps
python -m tools.calls softmax -v      # those whose name has this text, with the functions that are called

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
from refattn.mechanisms.record import Mechanism
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


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is counted, by name: a core on its case "tiny", a block, a step of a language model."""
    for name in list_mechanisms():
        record = mechanism(name)
        if record.core is not None:
            yield from _core(record)
        yield from _block(record)
    for name in ("softmax", "sympformer"):
        yield f"{name} training step", training_step(name)


def _core(record: Mechanism) -> Iterator[tuple[str, Callable[[], Any]]]:
    core, case = record.core, record.case("tiny")
    assert core is not None
    inputs = {**make(record.name, case, "float32"), **case.options}
    out, saved = core.forward(**inputs)
    d_out = make_upstream(record.name, case, "out", out.shape, "float32")
    yield f"{record.name}.forward", lambda: core.forward(**inputs)
    yield f"{record.name}.backward", lambda: core.backward(saved, d_out)


def _block(record: Mechanism) -> Iterator[tuple[str, Callable[[], Any]]]:
    block, x = record.block, np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(1, 8, 8)
    params, context = (
        block.init(block.Config(width=8, heads=2), like=x),
        Context(causal="causal" in record.context_fields),
    )
    state = block.start(params, x, context)
    last, saved = block.forward(params, state, context)
    d_state, _ = block.read_backward(params, last, x)
    yield f"{record.name} block forward", lambda: block.forward(params, state, context)
    yield f"{record.name} block backward", lambda: block.backward(params, saved, d_state)


def training_step(mechanism: str) -> Callable[[], Any]:
    """Return a step of a model of one layer: data, loss, gradients, clipping and AdamW."""
    settings = Settings(mechanism, context=8, width=8, heads=2, layers=1, batch=2, warmup=1)
    state, given = loop.fresh(settings), np.arange(64, dtype=np.uint8)
    return lambda: loop.step(state, settings, data.Text("made", given, given, data.Counts(), ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", nargs="?", default="", help="only what has this text in its name")
    parser.add_argument("-v", "--verbose", action="store_true", help="with the functions that are called")
    chosen = parser.parse_args()
    for name, call in calls():
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
