"""The pages of mechanisms: one to read, and one to look things up in, which ends with what the record has.

Both, `docs/mechanisms/NAME.md` and `docs/mechanisms/NAME/reference.md`, are written by hand. If one is missing, it is
made here from the record, for somebody to go on from there.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from docs.extension.docstrings import markdown, parts, summary
from docs.extension.equations import defining, owner
from refattn.mechanisms import registry
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify import traced
from refattn.verify.selfcheck import properties

ROOT = Path(__file__).resolve().parents[2]
CAPTIONS = ROOT / "docs" / "figures" / "captions.toml"


def write(folder: Path) -> None:
    """Begin the pages of mechanisms that are missing."""
    for mechanism in map(registry.mechanism, registry.list_mechanisms()):
        for name, begin in (("", page), ("/reference", reference)):
            path = folder / f"{mechanism.name}{name}.md"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(begin(mechanism), encoding="utf-8")


def directive(written: Callable[[Mechanism], Iterable[str]], *files: Path) -> type[SphinxDirective]:
    """Return the directive ``NAME MECHANISM`` that shows the Markdown which a function yields of a mechanism."""

    class Written(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            for file in files:
                self.env.note_dependency(str(file))
            text = "\n".join(written(registry.mechanism(self.arguments[0])))
            return self.parse_text_to_nodes(text, allow_section_headings=True)

    return Written


class Index(SphinxDirective):
    """``mechanisms``: the table of all."""

    def run(self) -> list[nodes.Node]:
        all_of_them = [registry.mechanism(name) for name in registry.list_mechanisms()]
        rows = ((f"[{m.title}]({m.name}.md)", f"`ra.{m.name}`", m.source) for m in all_of_them)
        contents = ("", "```{toctree}", ":hidden:", "", *(m.name for m in all_of_them), "```")
        return self.parse_text_to_nodes("\n".join((*_table(("mechanism", "name", "source"), rows), *contents)))


def page(mechanism: Mechanism) -> str:
    """Return what the page of a mechanism begins as: what its record has, for somebody to write the text between."""
    name, about = mechanism.name, summary(registry.room(mechanism.name).__doc__)
    lines = [f"# {mechanism.title}", "", about, "", f"```{{tour}} {name}", "```", "", f"```{{idea}} {name}", "```", ""]
    if mechanism.definition is not None:
        lines += ["## The definition", "", f"```{{derived}} {name}", "```", ""]
    lines += ["## Options", "", *options(mechanism), ""]
    lines += [f"```{{further}} {name}", "```", ""]
    return "\n".join(lines)


def options(mechanism: Mechanism) -> Iterator[str]:
    """Yield the table of the options of a core, with nothing said of them yet."""
    rows = ((f"`{name}`", f"`{value!r}`", "") for name, value in mechanism.defaults.items())
    yield from _table(("option", "default", "what and why"), rows)


def reference(mechanism: Mechanism) -> str:
    """Return what the page to look things up in begins as: the equations of the general code, and the record."""
    name, title = mechanism.name, mechanism.title
    lines = [f"# {title}: reference", "", f"Of [{title}](../{name}.md).", ""]
    return "\n".join([*lines, f"```{{general}} {name}", "```", "", f"```{{lookup}} {name}", "```", ""])


def lookup(mechanism: Mechanism) -> Iterator[str]:
    """Yield what its record and its code say, section by section; those that have something to say."""
    for section, write_it in SECTIONS.items():
        body = list(write_it(mechanism))
        if body:
            yield from (f"## {section}", "", *body, "")


def idea(mechanism: Mechanism) -> Iterator[str]:
    """Yield where its idea comes from, and the commands that show and check it."""
    name = mechanism.name
    yield f"Source: {markdown(mechanism.source)}."
    if (module := mechanism.definition) is not None:
        lines = len(inspect.getsource(module).splitlines())
        file = f"one file of {lines} lines, [definition.py]({name}/reference.md#definition-py)"
        yield f"All of it is {file}, and this page goes through it. `refattn show {name}` prints it as a file that runs"
        yield f"alone, `refattn trace {name}` shows every value, `refattn check {name}` checks the library."


def further(mechanism: Mechanism) -> Iterator[str]:
    """Yield its pictures beside the tour, and its pages to look things up in."""
    name = mechanism.name
    if pictures := captioned(name):
        yield from ("## More pictures", "", *(line for lines in pictures for line in lines))
    yield from ("## To look up", "")
    said = ", ".join(map(str.lower, SECTIONS))
    yield f"- [Reference]({name}/reference.md): equations of the general code, {said}"
    yield f"- [Deviations]({name}/reference.md#deviations): where this is something else than in papers and libraries"
    yield "- [Change a line](../trace.md#change-a-line) and see which checks and which stored numbers notice"
    yield f"- Its tests stand in `tests/mechanisms/{name}/`"
    yield from ("", "```{toctree}", ":hidden:", "", f"Reference <{name}/reference>", "```")


def _short(mechanism: Mechanism) -> Iterator[str]:
    rows = [("in Python", f"`ra.{mechanism.name}`, `ra.mechanism({mechanism.name!r})`")]
    if mechanism.core is not None:
        options = ", ".join(f"`{name}={value!r}`" for name, value in mechanism.defaults.items())
        rows += [("implementations", _listed(mechanism.implementations)), ("options of the core", options)]
        rows += [("outputs", _listed(("out", *mechanism.outputs)))]
    rows += [("the block reads", ", ".join(f"`context.{name}`" for name in mechanism.context_fields))]
    abilities = [name for name in ("stream", "grow", "diagnostics", "pointer") if getattr(mechanism, name) is not None]
    if abilities:
        rows += [("also has", _listed(abilities))]
    yield from _table(("", ""), rows)


def captioned(name: str) -> list[list[str]]:
    """Return the figures of a mechanism with what is to be seen in them."""
    folder = ROOT / "docs" / "figures"
    captions = tomllib.loads((folder / "captions.toml").read_text(encoding="utf-8")).get(name, {})
    found = {path.name for path in folder.glob(f"{name}*") if path.suffix in (".png", ".svg")}
    if found != set(captions):
        raise ValueError(f"docs/figures/captions.toml: [{name}] needs {sorted(found)}, has {sorted(captions)}")
    return [
        [f"```{{figure}} ../figures/{file}", f":alt: {words}", "", words, "```", ""] for file, words in captions.items()
    ]


def _implementations(mechanism: Mechanism) -> Iterator[str]:
    """Each further implementation by the docstring of its module, where the core says which that is."""
    modules: Mapping[str, Any] = getattr(mechanism.core, "IMPLEMENTATIONS", {})
    for n, name in enumerate(mechanism.implementations):
        module = modules.get(name) or _module(f"refattn.mechanisms.{mechanism.name}.{name}")
        if not isinstance(module, ModuleType | None):  # an object of functions: it stands where these do
            module = inspect.getmodule(next(filter(inspect.isfunction, vars(module).values())))
        if n == 0 or not isinstance(module, ModuleType) or module in mechanism.equation_modules:
            definition = " The definition, with which the others are compared." if n == 0 else ""
            yield from (f"### `{name}`", "", definition.strip() or summary(_doc(module)), "")
        else:
            yield from (f"### `{name}`", "", *_prose(module), "")


def _forbidden(mechanism: Mechanism) -> Iterator[str]:
    """What the core and the block refuse, by the message that says so; dots stand for what was given."""
    messages = [re.sub(r"\{[^}]*\}", "...", message).partition(": ") for _, message in mechanism.forbidden]
    rows = [(f"`{option.replace('...', 'a stop')}`", markdown(message)) for option, _, message in messages]
    if rows:
        yield from ("Of options that are fine by themselves.", "")
        yield from _table(("option", "what is refused, and what it needs"), rows)


def _presets(mechanism: Mechanism) -> Iterator[str]:
    """The settings of published runs by name: what those of one kind have in common, and the block of each."""
    kinds: dict[str, list[str]] = {}
    for name, settings in mechanism.presets.items():
        kinds.setdefault(_listed([f"{k}={v}" for k, v in settings.items() if k != "block"]), []).append(name)
    if kinds:
        yield from (f"`refattn train {mechanism.name} --set preset=NAME` takes the settings of a run.", "")
    for shared, names in kinds.items():
        blocks = {name: mechanism.presets[name]["block"] for name in names}
        yield from (f"{shared}:", "")
        yield from _table(("preset", "its block"), ((f"`{n}`", _block(block)) for n, block in blocks.items()))
        yield ""


def _block(options: Mapping[str, Any]) -> str:
    return _listed([f"{name}={value}" for name, value in options.items()])


def _deviations(mechanism: Mechanism) -> Iterator[str]:
    """The mechanism's section of docs/deviations.md."""
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    _, found, rest = f"\n{text}".partition(f"\n## {mechanism.name}\n")
    if found:
        yield from ("What papers and libraries say or do, where refattn does something else.", "")
        yield rest.partition("\n## ")[0].strip()


def _properties(mechanism: Mechanism) -> Iterator[str]:
    rows = [(f"`{name}`", summary(_doc(properties.PROPERTIES.get(name)))) for name in mechanism.properties]
    if rows:
        yield from ("What holds whatever the numbers are, checked by `refattn check`.", "")
        yield from _table(("property", "what it says"), rows)


def _cases(mechanism: Mechanism) -> Iterator[str]:
    rows = [(f"`{case.name}`", case.kind, _call(case), markdown(case.purpose)) for case in mechanism.cases]
    if rows:
        yield from ("The designed calls that implementations are verified on.", "")
        yield from _table(("case", "class", "arguments", "what it would expose"), rows)


def _call(case: Case) -> str:
    arrays = (f"{name} {'×'.join(map(str, given.shape))}" for name, given in case.inputs.items())
    return ", ".join(f"`{each}`" for each in (*arrays, *(f"{name}={value!r}" for name, value in case.options.items())))


def _conventions(mechanism: Mechanism) -> Iterator[str]:
    rows = [(markdown(name), summary(one.wrong)) for name, one in mechanism.wrong.items() if not one.backward]
    if rows:
        yield from ("Plausible ways to get it wrong; verification has to notice each of them.", "")
        yield from _table(("reading", "what it does"), rows)
    rows = [(markdown(name), summary(one.wrong)) for name, one in mechanism.wrong.items() if one.backward]
    if rows:
        yield from ("", "And of a right output, wrong gradients.", "")
        yield from _table(("gradients", "what they are"), rows)


def _functions(mechanism: Mechanism) -> Iterator[str]:
    room = registry.room(mechanism.name)
    public = _in_order(name for name in getattr(room, "__all__", ()) if name != "record")
    yield from _documented(room, public, mechanism)
    for title, given in (("block", mechanism.block), ("stream", mechanism.stream)):
        module = getattr(given, "module", None)
        if module is not None:
            names = _in_order(name for name, thing in vars(module).items() if _own(module, name, thing))
            yield from (f"### The {title}", "")
            yield f"Call them through `ra.mechanism({mechanism.name!r}).{title}`, which checks what holds for all."
            yield from ("", *_documented(module, names, mechanism))


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names with the forward first, then the backward, then the others as they stand."""
    first = ("forward", "backward")
    return sorted(names, key=lambda name: first.index(name) if name in first else len(first))


def _own(module: ModuleType, name: str, thing: Any) -> bool:
    kind = inspect.isfunction(thing) or inspect.isclass(thing)
    return kind and not name.startswith("_") and thing.__module__ == module.__name__ and bool(thing.__doc__)


def _documented(module: ModuleType, names: list[str], mechanism: Mechanism) -> Iterator[str]:
    yield "```{eval-rst}"
    for name in names:
        thing = getattr(module, name)
        foreign = not thing.__module__.startswith(f"refattn.mechanisms.{mechanism.name}")
        directive = "autoclass" if inspect.isclass(thing) else "autofunction"
        yield f".. {directive}:: {module.__name__}.{name}"
        yield from ("   :no-index:",) if foreign else ()
        yield ""
    yield from ("```", "")


def _files(mechanism: Mechanism) -> Iterator[str]:
    room = registry.room(mechanism.name)
    names = sorted(found.name for found in pkgutil.iter_modules(room.__path__))
    modules = [room, *(importlib.import_module(f"{room.__name__}.{name}") for name in names)]
    yield from _table(
        ("file", "what it is"), [(f"`{traced.file_of(module)}`", summary(module.__doc__)) for module in modules]
    )


def _code(mechanism: Mechanism) -> Iterator[str]:
    if mechanism.definition is not None:
        yield from ("### definition.py", "", f"```{{source}} {mechanism.definition.__name__}", "```", "")
    for module in defining(mechanism):
        if owner(module) != mechanism.name:
            continue  # it stands on the page of its own mechanism, with its anchors
        yield from (f"### `{traced.file_of(module)}`", "", f"```{{source}} {module.__name__}", "```", "")


def _prose(module: ModuleType) -> Iterator[str]:
    for part in parts(module.__doc__):
        yield from (("```text", part.text, "```") if part.indented else (markdown(part.text),))
        yield ""


SECTIONS: dict[str, Callable[[Mechanism], Iterator[str]]] = {
    "In short": _short,
    "Functions": _functions,
    "Implementations": _implementations,
    "What does not go together": _forbidden,
    "Presets": _presets,
    "Deviations": _deviations,
    "Properties": _properties,
    "Cases": _cases,
    "Wrong readings": _conventions,
    "Files": _files,
    "Code": _code,
}
"""What a page to look things up in ends with."""


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a Markdown table; a bar in a cell would end it."""
    for row in (header, tuple("---" for _ in header), *rows):
        yield f"| {' | '.join(cell.replace(chr(10), ' ') for cell in row)} |"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _doc(thing: Any) -> str | None:
    while hasattr(thing, "func"):  # functools.partial
        thing = thing.func
    return inspect.getdoc(thing) if thing is not None and not dataclasses.is_dataclass(thing) else None
