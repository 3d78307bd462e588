"""What all cores share: the entry, the choice, reading, and options that are objects with numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn as ra
from refattn import backends, philox
from refattn.mechanisms.core_arguments import defaults_of, implementation_of
from refattn.mechanisms.option_kinds import choose, text_of

# --- reading

LONG = 300
"""So many tokens that no mechanism takes its definition by itself."""


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_reader_meets_the_definition_whatever_the_length(name: str) -> None:
    core = ra.mechanism(name).core
    assert core is not None
    definition = ra.mechanism(name).implementations[0]
    n = 40 if name == "koopman" else LONG  # its definition solves a system for every query
    x = philox.normal((1, 1, n, 2), seed=0, purpose="x")
    with ra.reading():
        assert backends.workers() == 1
        _, saved = core.forward(x, x, x)
    assert saved.implementation == definition
    if name in ("softmax", "sympformer", "growing"):
        other = ra.mechanism(name).implementations[1]
        with ra.reading():
            _, saved = core.forward(x, x, x, implementation=other)  # an implementation that is named stays
        assert saved.implementation == other


def test_reading_ends_and_holds_in_its_own_thread() -> None:
    x = philox.normal((1, 1, LONG, 2), seed=0, purpose="x")
    found = []
    with pytest.raises(ZeroDivisionError), ra.reading():
        thread = threading.Thread(target=lambda: found.append(ra.softmax.forward(x, x, x)[1].implementation))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    found.append(ra.softmax.forward(x, x, x)[1].implementation)
    assert found == ["tiled", "tiled"]


# --- implementations and defaults


def test_the_choice_of_an_implementation() -> None:
    implementations = ("dense", "tiled")
    assert implementation_of("auto", implementations, usual="tiled") == "tiled"
    assert implementation_of("tiled", implementations, usual="dense") == "tiled"
    assert implementation_of("tiled", implementations, usual="tiled", plane=(2, 0, 3, 3)) == "dense"
    with ra.trace():
        assert implementation_of("auto", implementations, usual="tiled") == "dense"
        assert implementation_of("tiled", implementations, usual="dense") == "tiled"
    for wrong in ("Dense", None, 3, ["dense"]):
        with pytest.raises(ValueError, match=r"implementation: got .*, needs one of auto, dense, tiled"):
            implementation_of(wrong, implementations, usual="dense")  # type: ignore[arg-type]


def test_defaults_are_those_of_the_signature() -> None:
    def forward(q: Any, *, causal: bool = False, implementation: str = "auto", **old: Any) -> None: ...

    assert defaults_of(forward) == {"causal": False, "implementation": "auto"}


# --- families


@dataclass(frozen=True)
class Hard:
    tau: Any = 0.4


@dataclass(frozen=True)
class Soft:
    tau: Any = 0.1
    signed: bool = False

    def __post_init__(self) -> None:
        if self.tau < 0.0:
            raise ValueError(f"tau: got {self.tau}, needs a number of at least 0")


@dataclass(frozen=True)
class Nothing:
    pass


KINDS: dict[str, type[Any]] = {"hard": Hard, "soft": Soft, "none": Nothing}


def test_an_object_a_name_and_text_mean_the_same() -> None:
    assert choose("threshold", "hard", KINDS) == Hard()
    assert choose("threshold", "none()", KINDS) == Nothing()
    assert choose("threshold", " soft(tau=0.3, signed=True) ", KINDS) == Soft(0.3, True)
    tau = np.asarray(0.2)
    assert choose("threshold", Soft(tau), KINDS).tau is tau


@given(st.floats(0.0, 1e300), st.booleans())
def test_text_and_back(tau: float, signed: bool) -> None:
    assert choose("threshold", text_of(Soft(tau, signed), KINDS), KINDS) == Soft(tau, signed)


def test_text_leaves_out_what_is_usual() -> None:
    assert text_of(Soft(), KINDS) == "soft"
    assert text_of(Soft(signed=True), KINDS) == "soft(signed=True)"
    with pytest.raises(TypeError, match="tau: got an array, which has no text"):
        text_of(Hard(np.ones(2)), KINDS)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("medium", ValueError, r"threshold: got 'medium', needs one of hard, soft, none"),
        (3, TypeError, r"threshold: got int, needs one of hard, soft, none, or a Hard or Soft or Nothing"),
        (None, TypeError, r"threshold: got NoneType, needs"),
        ("soft(width=3)", ValueError, r"threshold: got 'width' in 'soft\(width=3\)', but soft has tau, signed"),
        ("none(tau=3)", ValueError, r"threshold: got 'tau' in 'none\(tau=3\)', but none has no numbers"),
        ("soft(tau=-1.0)", ValueError, r"threshold: got 'soft\(tau=-1.0\)'; tau: got -1.0, needs a number of at"),
        ("soft(tau='x')", TypeError, r"threshold: got "),
        ("soft(0.3)", ValueError, r"threshold: got 'soft\(0.3\)', needs a name such as soft, or"),
        ("soft(tau=open('x'))", ValueError, r"threshold: got .*, needs a name such as soft, or"),
        ("soft(**{'tau': 1})", ValueError, r"threshold: got .*, needs a name such as soft, or"),
        ("soft(", ValueError, r"threshold: got 'soft\(', needs a name such as soft, or"),
        ("", ValueError, r"threshold: got '', needs a name such as soft, or"),
        ("(" * 400, ValueError, r"threshold: got '\(+', needs a name such as soft, or"),
        ("s" * 2000, ValueError, r"threshold: got text of 2000 characters, needs a name"),
    ],
)
def test_what_is_none_of_the_kinds(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose("threshold", value, KINDS)
