"""The page of a tour, as one file that asks nobody for anything."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations
from refattn.explorer.mathml import mathml
from refattn.mechanisms.record import Mechanism, Tour
from refattn.mechanisms.use_definition import own_call
from refattn.verify.traced import places_in

MOST_TOKENS, MOST_WIDTH = 12, 8
"""Tokens, and coordinates of each, that a tour can show."""

LONGEST = 12
"""Letters of a token that are shown."""

MADE_UP = "The vectors are made up, with one decimal, so that the arithmetic can be followed; a model learns them."
OWN = "The vectors are those of the first head of the first sequence of this call."


@dataclass(frozen=True)
class Words:
    """What a tour is taken with: one head of one sequence.

    Attributes
    ----------
    tokens
        Their names.
    follow
        The token that is followed at first.
    q, k, v
        Its arrays (tokens, width).
    target
        What the output of the followed token should have been (width of v).
    given
        What differs from the given numbers of the tour, by name.
    """

    tokens: Sequence[str]
    follow: int
    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    target: NDArray[Any]
    given: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def sentence(tour: Tour) -> Words:
    """Return the sentence of all tours, with what is different in this one."""
    words = json.loads(resources.files(__package__).joinpath("words.json").read_text(encoding="utf-8")) | tour.words
    return Words(**words | {name: np.array(words[name]) for name in ("q", "k", "v", "target")})


def word_vector(word: str, name: str, width: int, most: int) -> list[float]:
    """Return the vector of a word: the table of words, which has no end, as a rule.

    Element c is a hash of the text ``name.c.word``: FNV-1a with 32 bits over its code points, then the finish of
    MurmurHash3. It picks one of the numbers from -most to most tenths. `wordVector` of `formulas.js` is the same.

    Parameters
    ----------
    word
        Any text.
    name
        The array that the vector is a row of.
    width
        How many numbers it has.
    most
        The largest size of a number, in tenths.
    """
    numbers = []
    for c in range(width):
        bits = 0x811C9DC5
        for letter in f"{name}.{c}.{word}":
            bits = (bits ^ ord(letter)) * 0x01000193 & 0xFFFFFFFF
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            bits = (bits ^ bits >> shift) * factor & 0xFFFFFFFF
        numbers.append((bits * (2 * most + 1) // 2**32 - most) / 10)
    return numbers


def typed(tour: Tour, words: Sequence[str]) -> Words:
    """Return a reader's own words with the vectors of the table, all else as in the tour's own sentence.

    Raises
    ------
    ValueError
        Where the tour takes more or fewer words.
    """
    least, most = tour.counts
    if not tour.table or not least <= len(words) <= most:
        raise ValueError(f"words: got {len(words)}, needs {least} to {most}")
    own, made = sentence(tour), {}
    for name, size in tour.table.items():
        width = np.asarray(getattr(own, name, tour.given.get(name))).shape[1]
        made[name] = np.array([word_vector(word, name, width, size) for word in words])
    q, k, v = (made.pop(name, getattr(own, name)) for name in ("q", "k", "v"))
    return replace(own, tokens=words, q=q, k=k, v=v, given=made)


def has_tour(mechanism: Mechanism) -> bool:
    """Tell whether the folder of a mechanism has a tour."""
    return mechanism.tour is not None and _script(mechanism) is not None


def taken(
    mechanism: Mechanism,
    options: Mapping[str, Any],
    arrays: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None,
    tokens: Sequence[str] | None = None,
) -> tuple[Words, dict[str, Any]] | str:
    """Return with which words a tour is taken and where its knobs stand for a call, or why no tour covers the call.

    Parameters
    ----------
    mechanism
        Any.
    options
        Arguments beside q, k and v.
    arrays
        q, k and v (batch, heads, tokens, width), of which the first head of the first sequence is shown; the tour's own
        sentence by default.
    tokens
        Names of the tokens of `arrays`.

    Raises
    ------
    ValueError
        Where there are not as many names as tokens.
    """
    tour = mechanism.tour
    if tour is None or _script(mechanism) is None:
        return f"{mechanism.name} has no tour"
    words = sentence(tour) if arrays is None else _own_words(tour, arrays, tokens)
    if isinstance(words, str):
        return words
    module = mechanism.definition
    assert module is not None
    knobs = {knob.name: knob.value for knob in tour.knobs}
    if arrays is None and not options:
        return words, knobs
    if tour.instead:
        return tour.instead
    own = own_call(mechanism.core, {**options, **{name: getattr(words, name)[None, None] for name in "qkv"}})
    if isinstance(own, str):
        return own
    parameters = inspect.signature(module.forward).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    if arrays is not None:  # where the call itself leaves them
        knobs |= {name: x for name, x in defaults.items() if name in knobs}
    for name, x in own.items():
        number = _number(x)
        if name in knobs and number is not None:
            knobs[name] = (
                type(knobs[name])(number) if isinstance(knobs[name], int) and number == int(number) else number
            )
        elif number is None or number != defaults.get(name):
            return f"the tour has no knob for {name}"
    return words, knobs


def _own_words(tour: Tour, arrays: tuple[NDArray[Any], ...], tokens: Sequence[str] | None) -> Words | str:
    q, k, v = arrays
    count = k.shape[2]
    if tokens is not None and len(tokens) != count:
        raise ValueError(f"tokens: got {len(tokens)} names, needs {count}, one for each token of k")
    if tour.instead:
        return tour.instead
    if q.shape[2] != count or count > MOST_TOKENS:
        return f"a tour has as many queries as keys, and at most {MOST_TOKENS}"
    if max(q.shape[3], v.shape[3]) > MOST_WIDTH or min(q.shape[3], v.shape[3]) < tour.narrowest:
        return f"its tour shows vectors of {tour.narrowest} to {MOST_WIDTH} numbers"
    names = [f"token {n}" for n in range(count)] if tokens is None else [_short(str(token)) for token in tokens]
    q, k, v = (np.asarray(x[0, 0], dtype=np.float64) for x in (q, k, v))
    return Words(names, count - 1, q, k, v, np.round(np.mean(v, axis=0) + 0.5, 1))


def _number(x: Any) -> float | bool | None:
    """Return a number, or that of an array whose elements are all the same."""
    if isinstance(x, bool | int | float):
        return x
    flat = np.asarray(x).reshape(-1)
    return float(flat[0]) if flat.dtype.kind == "f" and flat.size and np.all(flat == flat[0]) else None


def values(
    mechanism: Mechanism, words: Words, knobs: Mapping[str, Any], follow: int | None = None
) -> dict[str, NDArray[Any]]:
    """Return the value of every equation of the definition, by id, forward and backward, and of what a tour adds.

    Parameters
    ----------
    mechanism
        One that has a tour.
    words
        What it is taken with.
    knobs
        Where all knobs stand, by name.
    follow
        The token whose output is in the loss; that of `words` by default.
    """
    tour, module = mechanism.tour, mechanism.definition
    assert tour is not None and module is not None
    follow = words.follow if follow is None else follow
    arrays = {name: getattr(words, name) for name in ("q", "k", "v", "target")}
    arrays |= {name: np.array(x, dtype=np.float64) for name, x in {**tour.given, **words.given}.items()}
    with equations.trace() as recorded:
        definition = equations.active(module)
        if tour.run is not None:
            tour.run(definition, arrays, knobs, follow)
        else:
            _call(definition, arrays, knobs, follow, tour)
    given = {name: x[None, None] for name, x in arrays.items() if name != "target"}
    others = tour.beside(given, knobs) if tour.beside is not None else {}
    return {id: np.asarray(value) for id, value in (*recorded.items(), *others.items())}


def _call(
    definition: Any, arrays: Mapping[str, NDArray[Any]], knobs: Mapping[str, Any], follow: int, tour: Tour
) -> None:
    target = arrays["target"]
    given = {name: x[None, None] for name, x in arrays.items() if name != "target"}
    if tour.arguments is not None:
        arguments = tour.arguments(given, knobs)
    else:
        arguments = {**{name: given[name] for name in "qkv"}, **knobs}
    out, saved = definition.forward(**arguments)
    d_out = np.zeros_like(out)
    d_out[0, 0, follow] = out[0, 0, follow] - target
    definition.backward(saved, d_out)


def page(
    mechanism: Mechanism, words: Words | None = None, knobs: Mapping[str, Any] | None = None, command: str = ""
) -> str:
    """Return the page of a tour.

    Parameters
    ----------
    mechanism
        One that has a tour.
    words
        What it is taken with; its own sentence by default.
    knobs
        Where knobs stand at first, by name.
    command
        What makes this page, to be shown on it.
    """
    text = _text("page.html")
    filled = {
        "title": escape(mechanism.title),
        "css": colours() + drawing() + _text("page.css").strip(),
        "js": shared_script() + _code(_text("page.js")),
        "tour": function(mechanism),
        "data": data(mechanism, words, knobs, command),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], text)


def data(
    mechanism: Mechanism, words: Words | None = None, knobs: Mapping[str, Any] | None = None, command: str = ""
) -> str:
    """Return everything that a page computes with, as JSON that may stand in a script; parameters as of `page`."""
    tour, module = mechanism.tour, mechanism.definition
    assert tour is not None and module is not None
    words, own = words or sentence(tour), words is not None
    settings = {knob.name: knob.value for knob in tour.knobs} | dict(knobs or {})
    places = places_in(module)
    shown = {
        "tokens": list(words.tokens),
        "follow": words.follow,
        **{name: getattr(words, name).tolist() for name in ("q", "k", "v", "target")},
        **{name: np.asarray(x).tolist() for name, x in tour.given.items()},
        "knobs": [_knob(knob, settings[knob.name]) for knob in tour.knobs],
        "equations": {
            id: {"formula": _formula(place.formula), "code": place.code, "line": place.line}
            for id, place in places.items()
        },
        "formulas": {
            formula: mathml(formula)
            for formula in re.findall(r'formula: "([^"]*)"', _text("attention.js") + (_script(mechanism) or ""))
        },
        "python": {id: _plain(x) for id, x in values(mechanism, words, settings).items()},
        "origin": OWN if own else MADE_UP,
        "typed": None if own or not tour.table else {"table": dict(tour.table), "counts": list(tour.counts)},
        "command": command,
    }
    return json.dumps(shown, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")


def colours() -> str:
    """Return the colours of all pages, light and dark, as CSS."""
    return resources.files("refattn.explorer").joinpath("colours.css").read_text(encoding="utf-8")


def drawing() -> str:
    """Return what the classes of pictures look like, as CSS."""
    return _text("pictures.css")


def shared_script() -> str:
    """Return the JavaScript that all tours compute and draw with."""
    return "".join(_code(_text(name)) for name in ("formulas.js", "linear.js", "pictures.js", "attention.js"))


def script(mechanism: Mechanism) -> str:
    """Return the JavaScript that computes the numbers of a tour without a page: ``new Numbers(data, write)``."""
    return f"{shared_script()}\nconst write = {function(mechanism)};\n"


def function(mechanism: Mechanism) -> str:
    """Return the `tour.js` of a mechanism as the function that ``Numbers`` takes."""
    body = _code(_script(mechanism) or "")
    return f"({{ DATA, S, K, V, F, J, D, E, TYPED, knob, names, attention, tour }}) => {{\n{body}\n}}"


def _formula(formula: str) -> str:
    """Return a formula of a docstring as MathML, without the note behind it; nothing if it is a quoted line of code."""
    formula = re.split(r" {2,}", formula)[0]
    return "" if formula.startswith("forward: ") else mathml(formula)


def _knob(knob: Any, value: Any) -> dict[str, Any]:
    low, high = (min(knob.low, value), max(knob.high, value)) if not isinstance(value, bool) else (0, 1)
    return {"name": knob.name, "label": knob.label, "value": value, "low": low, "high": high, "step": knob.step}


def _plain(x: NDArray[Any]) -> list[Any]:
    """Return the numbers of an array, one behind the other, those that are not finite as text."""
    flat = np.asarray(x, dtype=np.float64).reshape(-1).tolist()
    return [number if np.isfinite(number) else str(number).replace("inf", "Infinity") for number in flat]


def _short(token: str) -> str:
    token = escape(token.strip() or repr(token))
    return token if len(token) <= LONGEST else token[: LONGEST - 1] + "…"


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _code(script: str) -> str:
    """Return JavaScript without lines that are comments: those who read them read the files."""
    return re.sub(r"(?m)^ *//.*\n", "", script)


def _script(mechanism: Mechanism) -> str | None:
    """Return the text of a mechanism's `tour.js`, which lies in the folder of its definition."""
    assert mechanism.definition is not None
    file = resources.files(mechanism.definition.__name__.rpartition(".")[0]).joinpath("tour.js")
    return file.read_text(encoding="utf-8") if file.is_file() else None
