"""Directives that show the equations of a mechanism, each with its anchor and the line that computes it."""

from __future__ import annotations

import html
import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from docutils import nodes
from numpy.typing import NDArray
from sphinx.util.docutils import SphinxDirective, SphinxRole

from docs.extension.docstrings import markdown, parts
from docs.extension.listing import anchor_of_line
from docs.extension.values import values_of
from refattn.equations import tags
from refattn.explorer.mathml import mathml
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify.traced import Place, file_of, places

_EQUATION = re.compile(r"\s*\[(d?[A-Z]+\.\w+)\]\s+(.*?)\s*$")


def anchor(id: str) -> str:
    """Return the anchor of an equation: "sm-1" for SM.1, "dsm-softcap" for dSM.softcap."""
    return id.lower().replace(".", "-")


def defining(mechanism: Mechanism) -> tuple[ModuleType, ...]:
    """Return the modules that carry a mechanism's equations, those of how its block grows and points among them."""
    return (*mechanism.tagged, *mechanism.beside)


class Equations(SphinxDirective):
    """``equations MECHANISM MODULE``: the docstring of a module, its equations as a list."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        mechanism, module = registry.mechanism(self.arguments[0]), importlib.import_module(self.arguments[1])
        self.env.note_dependency(module.__file__ or "")
        modules = defining(mechanism)
        self._values = values_of(mechanism.name)
        page = Path(self.env.srcdir) / "derivations" / f"{mechanism.name}.md"
        self.env.note_dependency(str(page))
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        self._derived = {id for ids in re.findall(r"```{derived} \w+ (.*)", text) for id in ids.split()}
        known, pieces = places(replace(mechanism, tagged=modules)), _parts_elsewhere(mechanism.name, modules)
        made: list[nodes.Node] = []
        for part in parts(module.__doc__):
            if not part.indented:
                made += self.parse_text_to_nodes(markdown(part.text))
            elif any(map(_EQUATION.match, part.text.splitlines())):
                made.append(self._list(part.text.splitlines(), known, module, pieces))
            else:
                made.append(_block(part.text))
        return made

    def _list(
        self, lines: Iterable[str], known: Mapping[str, Place], module: ModuleType, pieces: Mapping[str, list[str]]
    ) -> nodes.Node:
        found: dict[str, list[str]] = {}
        for line in lines:
            if match := _EQUATION.match(line):
                found[match[1]] = [match[2]]
                start = line.index(match[2]) + len(re.split(r" {2,}", match[2])[0])
            elif line.strip() and found:
                formula = found[list(found)[-1]]
                if " " * 2 in formula[0] and len(line) - len(line.lstrip()) > start:  # the note goes on
                    formula[0] += f" {line.strip()}"
                else:
                    formula.append(line.strip())
        listed = nodes.definition_list(classes=["equations"])
        for id, formula in found.items():
            listed += self._item(id, formula, known, module, pieces.get(id, []))
        return listed

    def _item(
        self, id: str, formula: list[str], known: Mapping[str, Place], module: ModuleType, pieces: list[str]
    ) -> nodes.Node:
        place = known[id]
        term = nodes.term("", "", classes=["equation"], ids=[anchor(id)], names=[anchor(id)])
        self.state.document.note_explicit_target(term)
        term += nodes.reference("", "", nodes.literal("", id), refuri=f"#{anchor(id)}", internal=True)
        formula_text, _, note = re.sub(r" {2,}", "\0", formula[0]).partition("\0")
        for n, line in enumerate((formula_text, *formula[1:])):
            term += nodes.Text("\n" if n else " ")
            term += nodes.raw("", f'<span class="formula">{mathml(line)}</span>', format="html")
        if note:
            remark, _ = self.parse_inline(markdown(note))
            term += [nodes.Text(" "), nodes.inline("", "", *remark, classes=["note"])]
        about = nodes.paragraph()
        where = f"{place.file.rpartition('/')[2]}:{place.line}"
        code = f"{self.arguments[0]}/code.html#{anchor_of_line(module, place.line)}"
        about += nodes.reference("", where, refuri=code, internal=True)
        if place.axes is not None:
            about += [nodes.Text(", axes "), nodes.literal("", f"({', '.join(place.axes)})")]
        other = id.removeprefix("d") if id.startswith("d") else f"d{id}"
        if other in known:
            about += nodes.Text(", adjoint of " if id.startswith("d") else ", adjoint ")
            about += nodes.reference("", "", nodes.literal("", other), refuri=f"#{anchor(other)}", internal=True)
        if id in self._derived:
            derived = f"../derivations/{self.arguments[0]}.html#derived-{anchor(id)}"
            about += [nodes.Text(", "), nodes.reference("", "derived", refuri=derived, internal=True)]
        if pieces:
            about += nodes.Text(f"; in parts: {', '.join(pieces)}")
        shown = nodes.definition("", _block(place.code, "python"), about)
        if id in self._values:
            where, value = self._values[id]
            words = f"<details><summary>{id} in {where}</summary><pre>{html.escape(_printed(value))}</pre></details>"
            shown += nodes.raw("", words, format="html")
        return nodes.definition_list_item("", term, shown)


def _printed(value: NDArray[Any]) -> str:
    """Return an array in a few digits: whole where it is small, otherwise its corners."""
    return np.array2string(value, precision=4, suppress_small=True, threshold=128, edgeitems=2, max_line_width=100)


class EquationMap(SphinxDirective):
    """``equation-map MECHANISM``: the ids of all equations, each a link to where it stands."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        mechanism = registry.mechanism(self.arguments[0])
        ids = replace(mechanism, tagged=defining(mechanism)).equations
        links = [f"{{ref}}`{id} <{anchor(id)}>`" for id in ids]
        return self.parse_text_to_nodes(" ".join(links))


class Derived(SphinxDirective):
    """``derived MECHANISM ID ...``: equations as they are on the mechanism's page, with links to it."""

    required_arguments = 2
    optional_arguments = 100

    def run(self) -> list[nodes.Node]:
        name, *ids = self.arguments
        mechanism = registry.mechanism(name)
        known = places(replace(mechanism, tagged=_all_tagged(mechanism)))
        made = nodes.definition_list(classes=["equations"])
        for id in ids:
            if id not in known:
                raise self.error(f"derived: got {id!r}, needs an equation of {name}")
            place = known[id]
            formula, _, note = re.sub(r" {2,}", "\0", place.formula).partition("\0")
            term = nodes.term("", "", classes=["equation"], ids=[f"derived-{anchor(id)}"])
            # The modules around growth stand on no page of their own equations; the others have their anchors.
            if place.file in {file_of(module) for module in defining(mechanism)}:
                address = f"../mechanisms/{name}.html#{anchor(id)}"
                term += nodes.raw("", f'<a href="{address}"><code>{id}</code></a> ', format="html")
            else:
                term += nodes.literal("", id)
            term += nodes.raw("", f'<span class="formula">{mathml(formula)}</span>', format="html")
            if note:
                remark, _ = self.parse_inline(markdown(note))
                term += [nodes.Text(" "), nodes.inline("", "", *remark, classes=["note"])]
            made += nodes.definition_list_item("", term, nodes.definition("", _block(place.code, "python")))
        return [made]


def _all_tagged(mechanism: Mechanism) -> tuple[ModuleType, ...]:
    return tuple(dict.fromkeys(defining(mechanism)))


class Formula(SphinxRole):
    """``{m}`x_i = y` ``: a formula, typeset."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        return [nodes.raw("", mathml(self.text, inline=True), format="html")], []


def _block(text: str, language: str = "text") -> nodes.Node:
    return nodes.literal_block(text, text, language=language)


def _parts_elsewhere(name: str, defining: tuple[ModuleType, ...]) -> dict[str, list[str]]:
    """Return, by equation, the lines of the room's other forms that compute a part of it."""
    room = registry.room(name)
    found: dict[str, list[str]] = {}
    for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        module = importlib.import_module(info.name)
        for tag in tags(module) if module not in defining else ():
            for id in filter(None, (tag.id, tag.last)):
                found.setdefault(id, []).append(f"{file_of(module).rpartition('/')[2]}:{tag.line}")
    return found
