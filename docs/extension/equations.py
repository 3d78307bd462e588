"""Directives that show the equations of a mechanism, each with its anchor and the line that computes it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.roles import XRefRole
from sphinx.util.docutils import SphinxDirective, SphinxRole

from docs.extension.docstrings import markdown, parts
from docs.extension.listing import anchor_of_line
from refattn.equations import AS_DEFINED, declared, tags
from refattn.explorer.mathml import mathml
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify.traced import Place, file_of, places_in

_EQUATION = re.compile(r"\s*\[(d?[A-Z]+\.\w+)\]\s+(.*?)\s*$")

QUOTED = "forward: "
"""What a line of code begins with that stands for the formula of an adjoint."""


GENERAL = "general-"
"""What the label of an equation of the general code begins with, if the definition has it, too."""


def anchor(id: str) -> str:
    """Return the anchor of an equation: "sm-1" for SM.1, "dsm-softcap" for dSM.softcap."""
    return id.lower().replace(".", "-")


@functools.cache
def defining(mechanism: Mechanism) -> tuple[ModuleType, ...]:
    """Return the modules of the general code that carry equations, those of how a block grows and points among them.

    First those whose lines compute them; then those of options, whose equations stand in their docstrings alone.
    """
    computing = (*mechanism.equation_modules, *mechanism.extra_modules)
    others = (
        module
        for module in _modules(mechanism.name)
        if declared(module) and not any(tag.claims for tag in tags(module))
    )
    return (*computing, *(module for module in others if module not in computing))


def owner(module: ModuleType) -> str:
    """Return the mechanism in whose room a module is."""
    return module.__name__.removeprefix("refattn.mechanisms.").partition(".")[0]


@functools.cache
def defined(mechanism: Mechanism) -> tuple[str, ...]:
    """Return the ids of a mechanism's definition."""
    return tuple(places_in(mechanism.definition)) if mechanism.definition is not None else ()


@functools.cache
def general(mechanism: Mechanism) -> dict[str, ModuleType]:
    """Return the ids of a mechanism's general code, and the module that each stands in; not those of another room."""
    own = [module for module in defining(mechanism) if owner(module) == mechanism.name]
    return {id: module for module in own for id in declared(module)}


class Derived(SphinxDirective):
    """``derived MECHANISM ID ...``: a piece of the definition: equations, and the lines that compute them.

    The lines reach from behind the equation before, so that nothing is left out. The name of a function in place of an
    id is all of that function. Without either all of the definition is shown.
    """

    required_arguments = 1
    optional_arguments = 100

    def run(self) -> list[nodes.Node]:
        name, *wanted = self.arguments
        mechanism = registry.mechanism(name)
        definition = mechanism.definition
        if definition is None:
            raise self.error(f"derived: {name} has no definition")
        places = places_in(definition)
        self.env.note_dependency(definition.__file__ or "")
        ids = [id for id in wanted if id in places] if wanted else list(places)
        try:
            pieces = pieces_of(definition, [id for id in wanted or places])
        except ValueError as error:
            raise self.error(f"derived: {error}") from None
        made: list[nodes.Node] = []
        if ids:
            quoted = all(places[id].formula.startswith(QUOTED) for id in ids)
            listed = nodes.definition_list(classes=["equations", "quoted" if quoted else "piece"])
            for id in ids:
                code = f"{name}/reference.html#{anchor_of_line(definition, places[id].line)}"
                term, about = _term(self, id, [places[id].formula], label=anchor(id)), nodes.paragraph()
                about += nodes.reference("", f"line {places[id].line}", refuri=code, internal=True)
                if not id.startswith("d") and id in general(mechanism):
                    link = f'<a href="{name}/reference.html#{anchor(id)}">options</a>'
                    about += [nodes.Text(", "), nodes.raw("", link, format="html")]
                listed += nodes.definition_list_item("", term, nodes.definition("", about))
            made.append(listed)
        for first, text in pieces:
            block = _block(text, "python")
            block["linenos"], block["highlight_args"] = True, {"linenostart": first}
            made.append(block)
        return made


def pieces_of(definition: ModuleType, wanted: list[str]) -> list[tuple[int, str]]:
    """Return lines of a definition, each piece with the number of its first line: those of ids, whole functions.

    A piece begins behind the equation before it, or with its function, and with the last equation it ends as that does.

    Raises
    ------
    ValueError
        If something is no equation and no function, or an equation between two that are wanted is not.
    """
    lines, functions = inspect.getsource(definition).splitlines(), _functions(definition)
    tagged = {tag.id: tag.line for tag in tags(definition) if tag.claims}
    found: list[tuple[int, str]] = []
    for name, function in functions.items():
        inside = {id: line for id, line in tagged.items() if function.first <= line <= function.last}
        asked = [line for id, line in inside.items() if id in wanted]
        first, last = function.first, function.last
        if name not in wanted:
            if not asked:
                continue
            if missing := [id for id, line in inside.items() if min(asked) <= line <= max(asked) and id not in wanted]:
                raise ValueError(f"{', '.join(missing)}: stands between the others, needs a place among them")
            if before := [line for line in inside.values() if line < min(asked)]:
                first = function.ends[max(before)] + 1
            if max(asked) < max(inside.values()):
                last = function.ends[max(asked)]
        found.append((first, textwrap.dedent("\n".join(lines[first - 1 : last]))))
    if unknown := [each for each in wanted if each not in tagged and each not in functions]:
        raise ValueError(f"{', '.join(unknown)}: no equation and no function of {definition.__name__}")
    return found


class Function(NamedTuple):
    """Where a function stands: its first and last line, and by the first line of an assignment its last."""

    first: int
    last: int
    ends: dict[int, int]


@functools.cache
def _functions(module: ModuleType) -> dict[str, Function]:
    """Return where each function of a module stands."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef):
            ends = {each.lineno: each.end_lineno or 0 for each in ast.walk(node) if isinstance(each, ast.Assign)}
            found[node.name] = Function(node.lineno, node.end_lineno or 0, ends)
    return found


def sections(mechanism: Mechanism) -> Iterator[str]:
    """Yield all files of the general code that carry equations as Markdown, a section for each."""
    for module in defining(mechanism):
        room = owner(module)
        path = f"`{file_of(module).partition(f'/{room}/')[2]}`"
        if room == mechanism.name:
            yield from (f"## {path}", "", f"```{{equations}} {room} {module.__name__}", "```", "")
        else:
            links = " ".join(f"{{ref}}`{id} <{anchor(id)}>`" for id in declared(module))
            yield from (f"## {path} of {room}", "")
            yield from (f"The core is that of [{registry.mechanism(room).title}](../{room}.md): {links}.", "")


class Equations(SphinxDirective):
    """``equations MECHANISM MODULE``: the docstring of a module of the general code, its equations as a list."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        mechanism, module = registry.mechanism(self.arguments[0]), importlib.import_module(self.arguments[1])
        self.env.note_dependency(module.__file__ or "")
        made: list[nodes.Node] = []
        for part in parts(module.__doc__):
            if not part.indented:
                made += self.parse_text_to_nodes(markdown(part.text))
            elif any(map(_EQUATION.match, part.text.splitlines())):
                made.append(self._list(part.text.splitlines(), mechanism, module))
            else:
                made.append(_block(part.text))
        return made

    def _list(self, lines: Iterable[str], mechanism: Mechanism, module: ModuleType) -> nodes.Node:
        found: dict[str, list[str]] = {}
        for line in lines:
            if match := _EQUATION.match(line):
                found[match[1]] = [declared(module)[match[1]] if match[2].startswith(AS_DEFINED) else match[2]]
                start = line.index(match[2]) + len(re.split(r" {2,}", match[2])[0])
            elif line.strip() and found:
                formula = found[list(found)[-1]]
                if " " * 2 in formula[0] and len(line) - len(line.lstrip()) > start:  # the note goes on
                    formula[0] += f" {line.strip()}"
                else:
                    formula.append(line.strip())
        listed = nodes.definition_list(classes=["equations"])
        known = general(mechanism)
        for id, formula in found.items():
            is_defined = id in defined(mechanism)
            term = _term(self, id, formula, label=GENERAL + anchor(id) if is_defined else anchor(id))
            notes: list[nodes.Node] = []
            if is_defined:
                link = f'<a href="../{mechanism.name}.html#{anchor(id)}">in the definition</a>'
                notes += [nodes.Text(", "), nodes.raw("", link, format="html")]
            other = id.removeprefix("d") if id.startswith("d") else f"d{id}"
            if other in known:
                notes += [nodes.Text(", adjoint of " if id.startswith("d") else ", adjoint ")]
                notes += [nodes.reference("", "", nodes.literal("", other), refuri=f"#{anchor(other)}", internal=True)]
            if elsewhere := _parts_elsewhere(mechanism).get(id):
                notes += [nodes.Text(f"; in parts: {', '.join(elsewhere)}")]
            if (place := places_in(module).get(id)) is not None:
                shown = _shown(place, f"reference.html#{anchor_of_line(module, place.line)}", notes)
            else:  # of an option, whose object computes it
                text = inspect.getsource(module).splitlines()
                number = 1 + next(n for n, each in enumerate(text) if f"[{id}]" in each)
                code = f"reference.html#{anchor_of_line(module, number)}"
                shown = nodes.definition("", nodes.paragraph("", "", _link(file_of(module), number, code), *notes))
            listed += nodes.definition_list_item("", term, shown)
        return listed


def _term(directive: SphinxDirective, id: str, formula: list[str], *, label: str) -> nodes.Node:
    """Return the id and the formula of an equation, and its note; `label` is what links find it by."""
    term = nodes.term("", "", classes=["equation"], ids=[anchor(id)], names=[label])
    directive.state.document.note_explicit_target(term)
    term += nodes.reference("", "", nodes.literal("", id), refuri=f"#{anchor(id)}", internal=True)
    first, *notes = re.split(r" {2,}", formula[0], maxsplit=1)
    if first.startswith(QUOTED):
        return term
    for n, line in enumerate((first, *formula[1:])):
        term += nodes.Text("\n" if n else " ")
        term += nodes.raw("", f'<span class="formula">{mathml(line)}</span>', format="html")
    for note in notes:
        remark, _ = directive.parse_inline(markdown(note))
        term += [nodes.Text(" "), nodes.inline("", "", *remark, classes=["note"])]
    return term


def _shown(place: Place, code: str, notes: list[nodes.Node]) -> nodes.Node:
    """Return the line that computes an equation, where it stands, and its axes."""
    about = nodes.paragraph()
    about += _link(place.file, place.line, code)
    if place.axes is not None:
        about += [nodes.Text(", axes "), nodes.literal("", f"({', '.join(place.axes)})")]
    about += notes
    return nodes.definition("", _block(place.code, "python"), about)


def _link(file: str, line: int, address: str) -> nodes.Node:
    return nodes.reference("", f"{file.rpartition('/')[2]}:{line}", refuri=address, internal=True)


class EquationMap(SphinxDirective):
    """``equation-map``: the ids of all equations of each mechanism, each a link to where it stands."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for mechanism in map(registry.mechanism, registry.list_mechanisms()):
            others = [id for module in defining(mechanism) for id in declared(module)]
            links = " ".join(f"{{ref}}`{id} <{anchor(id)}>`" for id in dict.fromkeys((*defined(mechanism), *others)))
            lines += [f"### {mechanism.title}", "", links, ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class Formula(SphinxRole):
    """``{m}`x_i = y` ``: a formula, typeset."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        return [nodes.raw("", mathml(self.text, inline=True), format="html")], []


class Id(XRefRole):
    """``{id}`SM.1` ``: an id as a link to its equation; ``{general}`SM.1` ``: to that of the general code."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(innernodeclass=nodes.inline, warn_dangling=True)
        self._prefix = prefix

    def process_link(
        self, env: BuildEnvironment, refnode: nodes.Element, has_explicit_title: bool, title: str, target: str
    ) -> tuple[str, str]:
        """Make it a reference to the anchor."""
        refnode.attributes |= {"refdomain": "std", "reftype": "ref", "refexplicit": True}
        return title, self._prefix + anchor(target)


def _block(text: str, language: str = "text") -> nodes.Node:
    return nodes.literal_block(text, text, language=language)


def _modules(name: str) -> Iterator[ModuleType]:
    room = registry.room(name)
    for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        yield importlib.import_module(info.name)


@functools.cache
def _parts_elsewhere(mechanism: Mechanism) -> Mapping[str, list[str]]:
    """Return, by equation, the lines of the room's other implementations that compute a part of it."""
    found: dict[str, list[str]] = {}
    for module in _modules(mechanism.name):
        if module in defining(mechanism) or module is mechanism.definition:
            continue
        for tag in tags(module):
            for id in filter(None, (tag.id, tag.last)):
                found.setdefault(id, []).append(f"{file_of(module).rpartition('/')[2]}:{tag.line}")
    return found
