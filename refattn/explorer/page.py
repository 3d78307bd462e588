"""The page: one file that asks nobody for anything, with every value of a run and how they hang together."""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations
from refattn.explorer.mathml import mathml
from refattn.explorer.measured import Children, links, nodes
from refattn.explorer.pictures import drawn
from refattn.explorer.varied import Knob, knobs
from refattn.mechanisms.record import Mechanism
from refattn.verify.traced import Run, Step, Traced

MOST = 4000
"""Numbers of a run that can be read on a page: arguments and equations, forward and backward."""


def page(mechanism: Mechanism, run: Run, found: Traced, why: str = "") -> str:
    """Return the page of a run, which `found` has recorded: a table of all its values.

    Parameters
    ----------
    mechanism, run, found
        The run, and its record.
    why
        Why it is no tour.

    Raises
    ------
    ValueError
        Where the run has more numbers than a page can show.
    """
    numbers = sum(node.value.size for node in nodes(found))
    if numbers > MOST:
        raise ValueError(f"case: got {found.case!r} with {numbers} numbers, needs one with at most {MOST} for a page")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of numbers that a knob makes large: what they do is shown
        data = _data(mechanism, found, links(run, found), tuple(knobs(mechanism, run, found)))
    where = f"case {found.case}" if found.case else "one step"
    title = f"{mechanism.title}: the {found.part}, {where}"
    home = resources.files("refattn.explorer")
    parts = {name: home.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    filled = {
        "title": escape(title),
        "source": escape(mechanism.source),
        "why": f'<p class="about">These are all values, and no tour: {escape(why)}.</p>' if why else "",
        "letters": _letters(mechanism, found),
        "css": home.joinpath("colours.css").read_text(encoding="utf-8") + parts["css"],
        "js": parts["js"],
        "rows": "\n".join(_rows(mechanism, found)),
        "data": data,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], parts["html"])


def _letters(mechanism: Mechanism, found: Traced) -> str:
    """Return what the formulas read beside the cards: the letters of axes, and equations that did not run."""
    ran = {_pass(step.id)[0] for step in found.steps}
    modules = [mechanism.definition] if found.part == "definition" else list(mechanism.equation_modules)
    axes, silent = [], []
    for module in modules:
        assert module is not None
        text = equations.docstring(module)
        axes += [
            " ".join(match[0].split())
            for match in re.finditer(r"^Axes: .*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
        ]
        if ran & set(equations.declared(module)):
            silent += [(id, formula) for id, formula in equations.declared(module).items() if id not in ran]
    told = "".join(f"<p>{escape(one)}</p>" for one in dict.fromkeys(axes))
    for id, formula in silent:
        told += f"<p>{escape(id)}, which did not run here: {mathml(re.split(r' {2,}', formula)[0], inline=True)}</p>"
    return f"<details><summary>Letters</summary>{told}</details>" if told else ""


def _rows(mechanism: Mechanism, found: Traced) -> Iterator[str]:
    """Yield the cards, those of an equation and of its adjoint side by side."""
    for given, adjoints in _paired(mechanism, found):
        left = _card(given, found, "forward") if given else '<div class="none"></div>'
        right = "".join(_card(adjoint, found, "backward") for adjoint in adjoints)
        yield f'<div class="row">{left}<div class="adjoints">{right}</div></div>'


Row = tuple[Step | str | None, list[Step | str]]


def _paired(mechanism: Mechanism, found: Traced) -> list[Row]:
    """Pair arguments and equations with their adjoints, in the order of the forward; some have none, or no partner."""
    upstream = _upstream(found)
    left = {step.id: step for step in found.backward}
    defined = {} if mechanism.definition is None else equations.declared(mechanism.definition)
    order = {id: n for n, id in enumerate([*defined, *mechanism.equations])}
    rows: list[Row] = []
    for name in found.arguments:
        if name not in upstream:
            own = [id for id in left if id.partition(".")[2] == name.rpartition(".")[2]]
            rows.append((name, [left.pop(id) for id in own]))
    rows += [(None, [left.pop(id)]) for id in list(left) if _pass(id)[0].removeprefix("d") not in order]
    passes: dict[str, int] = {}
    for step in found.forward:
        id, n = _pass(step.id)
        passes[id] = n + 1
    outputs = {name: found.results[name[2:]] for name in upstream}
    for step in found.forward:
        id, n = _pass(step.id)
        mine: list[Step | str] = []
        for other in list(left):  # the backward takes the passes in reverse; one that has another number is of the last
            base, m = _pass(other)
            last = n == passes[id] - 1
            if base == f"d{id}" and (
                m == passes[id] - 1 - n if f"d{id}[{passes[id] - 1}]" in left or not last else True
            ):
                mine.append(left.pop(other))
        for name, value in list(outputs.items()):
            if value.shape == step.value.shape and np.array_equal(value, step.value, equal_nan=True):
                mine.append(name)
                del outputs[name]
        rows.append((step, mine))
    for step in left.values():  # an adjoint whose equation did not run stands where that would
        place = order[_pass(step.id)[0].removeprefix("d")]
        after = [n for n, (one, _) in enumerate(rows) if isinstance(one, Step) and order[_pass(one.id)[0]] < place]
        rows.insert(max(after, default=len(rows) - 1) + 1, (None, [step]))
    return rows + [(None, [name]) for name in outputs]


def _upstream(found: Traced) -> list[str]:
    return [name for name in found.arguments if name.startswith("d_") and name[2:] in found.results]


def _pass(id: str) -> tuple[str, int]:
    """Return the id of an equation and which of its passes this is."""
    plain, _, number = id.partition("[")
    return plain, int(number[:-1] or 0)


def _card(thing: Step | str, found: Traced, kind: str) -> str:
    if isinstance(thing, str):
        about = "given" if kind == "forward" else "given: the gradient of an output"
        shape = found.arguments[thing].shape
        head = f'<h3><a href="#{escape(thing)}">{escape(thing)}</a></h3><p class="about">{about}, {shape}</p>'
        return _article(thing, "given", head)
    place = thing.place
    formula, _, note = re.sub(r" {2,}", "\0", place.formula).partition("\0")
    head = f'<h3><a href="#{escape(thing.id)}">{escape(thing.id)}</a></h3>'
    head += f'<p class="formula" title="{escape(formula)}">{mathml(formula)}</p>'
    if note:
        head += f'<p class="note">{escape(note)}</p>'
    axes = f"({', '.join(place.axes)}) = " if place.axes is not None else ""
    head += f"<pre>{escape(place.code)}</pre>"
    head += (
        f'<p class="about">{escape(place.file)}:{place.line}, {escape(place.variable)} {axes}{thing.value.shape}</p>'
    )
    return _article(thing.id, kind, head)


def _article(name: str, kind: str, head: str) -> str:
    own = escape(name)
    return (
        f'<article id="{own}" data-node="{own}" class="{kind}" tabindex="-1">{head}<div class="value"></div></article>'
    )


def _data(
    mechanism: Mechanism, found: Traced, measured: Mapping[str, Sequence[Children]], turned: Sequence[Knob]
) -> str:
    """Return everything that the page computes with, as JSON that may stand in a script."""
    known = nodes(found)
    index = {node.name: n for n, node in enumerate(known)}
    upstream = _upstream(found)
    given = [name for name in found.arguments if name not in upstream]
    axes = _axes(mechanism, found)
    data = {
        "nodes": [
            {
                "name": node.name,
                "shape": list(node.value.shape),
                "axes": list(axes.get(node.name) or ()),
                "truth": node.value.dtype == np.bool_,
            }
            for node in known
        ],
        "order": [*given, *(step.id for step in found.forward), *upstream, *(step.id for step in found.backward)],
        "values": _packed((node.value for node in known), np.dtype("<f8")),
        "feeds": [[_feeds(children, index) for children in measured[node.name]] for node in known],
        "pictures": drawn(mechanism, found),
        "knobs": [
            {
                "label": knob.label,
                "settings": [float(f"{at:.12g}") for at in knob.settings],
                "here": knob.here,
                "values": [_packed((node.value for node in nodes(other)), np.dtype("<f4")) for other in knob.runs],
                "pictures": [drawn(mechanism, other) for other in knob.runs],
            }
            for knob in turned
        ],
    }
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("</", "<\\/")


def _axes(mechanism: Mechanism, found: Traced) -> dict[str, tuple[str, ...] | None]:
    """Return the axes of all nodes by name; those of an argument are those of its gradient, or of what it is one of."""
    axes = {step.id: step.place.axes for step in found.steps}
    for one, others in _paired(mechanism, found):
        for other in others:
            a, b = (x.id if isinstance(x, Step) else x for x in (one, other)) if one else (None, None)
            if a in found.arguments and isinstance(other, Step) and other.value.shape == found.arguments[a].shape:
                axes[a] = other.place.axes
            if b in found.arguments and isinstance(one, Step):
                axes[b] = one.place.axes
    return axes


def _packed(values: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> str:
    """Return the numbers of arrays, one behind the other, in base 64."""
    with np.errstate(over="ignore"):
        flat = np.concatenate([value.astype(dtype).reshape(-1) for value in values])
    return base64.b64encode(flat.tobytes()).decode("ascii")


def _feeds(children: Children, index: Mapping[str, int]) -> str:
    """Return, as ``node:first-last,one;node:...``, the elements that an element feeds."""
    return ";".join(f"{index[name]}:{','.join(_ranges(elements))}" for name, elements in children.items())


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    start = 0
    for n in range(1, len(numbers) + 1):
        if n == len(numbers) or numbers[n] != numbers[n - 1] + 1:
            first, last = numbers[start], numbers[n - 1]
            yield str(first) if first == last else f"{first}-{last}"
            start = n
