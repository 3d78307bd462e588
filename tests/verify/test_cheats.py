"""Kernels that cheat: what they do is seen, each by what the table of the documentation says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import refattn as ra
from refattn.verify import Isolated, verify
from refattn.verify.report import tables

RECORD = ra.mechanism("softmax")
FEW = replace(RECORD, cases=tuple(RECORD.case(name) for name in ("plain", "peaked", "scale", "causal")))


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ra.softmax.forward(q, k, v, **options)[0]


class Stale:
    """Gives the result of the call before, where shapes are the same."""

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        before = self.held.get(q.shape)
        self.held[q.shape] = attend(q, k, v, **options)
        return self.held[q.shape] if before is None else before


class Memory:
    """Knows the answers to what it was asked once, and guesses otherwise."""

    def __init__(self) -> None:
        self.known: dict[bytes, Any] = {}
        self.learns = True

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        key = q.tobytes() + k.tobytes() + v.tobytes() + repr(options).encode()
        if self.learns:
            self.known[key] = attend(q, k, v, **options)
        return self.known.get(key, v[:, :, : q.shape[2]])


class Last:
    """Answers each case with what the one before should have been, of its shape or not."""

    def __init__(self) -> None:
        self.held: Any = None

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        found, self.held = self.held, attend(q, k, v, **options)
        return self.held if found is None else found


def failed(kernel: Any, seed: int = 0) -> int:
    return verify(FEW, kernel, dtypes=["float32"], seed=seed).counts()["all"]["failed"]


def test_results_of_other_calls() -> None:
    assert failed(attend) == 0 and failed(Stale()) == 3 and failed(Last()) == 3


def test_answers_that_were_learned_are_those_of_one_seed() -> None:
    kernel = Memory()
    assert failed(kernel) == 0
    kernel.learns = False
    assert failed(kernel) == 0 and failed(kernel, seed=23) == 4


def test_a_call_of_the_reference_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import refattn as ra\n"
        "def honest(q, k, v):\n    return ra.Decline('nothing')\n"
        "def cheats(q, k, v):\n    return ra.softmax.forward(q, k, v)[0]\n"
    )
    one = replace(RECORD, cases=(RECORD.case("tiny"),))
    for name, told in (("honest", False), ("cheats", True)):
        with Isolated(f"{file}:{name}") as kernel:
            found = verify(one, kernel, dtypes=["float32"])
        assert found.reference is told
        assert ("loaded a definition of refattn" in tables.verified(found, one)) is told
