"""The usual case of a definition: what its code would do for other choices than those of the library is left out.

A choice is text, a class, None or a truth value that an option holds; numbers, arrays and their sizes are none. What is
known at each place (`known`) for calls that have the usual choices, and any numbers, masks and sizes, is folded away
(`fold`); functions that are then called once are written into their callers (`merge`), and objects that only hold
values are taken apart (`records`); what nobody reads any more goes (`unread`). This goes round until nothing changes.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from refattn.show import fold, merge, records, unread
from refattn.show.commented import Kept, read, set_kept
from refattn.show.known import Reader
from refattn.show.nodes import walk
from refattn.show.short import shorten, spell_out
from refattn.show.values import SOME, Constant, Entries, Function, Made, Row, Value

ROUNDS = 40


@dataclass(frozen=True)
class Sample:
    """A call of `forward`, and one of `backward` with its results, as the text of their arguments."""

    forward: str
    backward: str


@dataclass(frozen=True)
class Split:
    """An argument of `forward` that is an object: how it is made, and the numbers that stand in its place."""

    name: str
    made: str
    numbers: tuple[str, ...]


def prune(
    items: Sequence[tuple[str, str]], samples: Sequence[Sample], roots: Sequence[str], splits: Sequence[Split]
) -> ast.Module:
    """Return the tree of a page, from the texts of its items and where they are from, which `home` of a node says.

    `roots` are the names of `forward` and `backward`; objects that `forward` takes are taken apart as `splits` say.
    """
    tree = ast.Module([], [])
    for home, text in items:
        for node in read(text).body:
            cast(Any, node).home = home
            tree.body.append(node)
    forward, backward = (node for name in roots for node in tree.body if getattr(node, "name", "") == name)
    assert isinstance(forward, ast.FunctionDef) and isinstance(backward, ast.FunctionDef)
    for split in splits:
        _split(tree, forward, split)
    before = ""
    for _ in range(ROUNDS):
        merge.drop_items(tree, roots)
        fold.write_out(tree, roots)
        reader = _read(tree, samples, (forward, backward), [split.name for split in splits])
        fold.Folded(reader).visit(tree)
        _drop(tree, reader, roots)
        if not merge.merge(tree, roots):
            reader = _read(tree, samples, (forward, backward), [split.name for split in splits])
            if not any(step(tree, reader) for step in (records.flatten, records.drop_twins, records.join_bases)):
                for node in tree.body:
                    if isinstance(node, ast.FunctionDef):
                        records.take_apart(node, reader)
        after = ast.dump(tree)
        if after == before:
            break
        before = after
    records.unwrap(tree, reader)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            unread.drop_aliases(node)
            unread.drop_values(node)
    spell_out(tree)
    shorten(tree)
    merge.drop_items(tree, roots)
    return tree


def _drop(tree: ast.Module, reader: Reader, roots: Sequence[str]) -> None:
    for top in tree.body:
        for node in [top, *(top.body if isinstance(top, ast.ClassDef) else [])]:
            if isinstance(node, ast.FunctionDef):
                unread.drop_stores(node)
                unread.drop_aliases(node)
                unread.drop_values(node)
        if isinstance(top, ast.FunctionDef) and top.name in roots:
            _drop_unread(top)
    merge.drop_arguments(tree, roots)
    records.drop_fields(tree, reader)


def _drop_unread(root: ast.FunctionDef) -> None:
    """Drop the keyword arguments of a root that it does not read."""
    read_names = {each.id for each in walk(root) if isinstance(each, ast.Name)}
    lost = {each.arg for each in (*root.args.args[2:], *root.args.kwonlyargs)} - read_names - {"q", "k", "v"}
    merge.without(root.args, lost, ())
    if root.args.kwarg is not None and root.args.kwarg.arg not in read_names:
        root.args.kwarg = None


def _split(tree: ast.Module, forward: ast.FunctionDef, split: Split) -> None:
    """Let a function take numbers and make an object of them, in place of the object."""
    value = ast.parse(split.made, mode="eval").body
    kinds: dict[str, ast.expr] = {}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for call in walk(value):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in classes:
            fields = _annotations(classes[call.func.id], classes)
            for each in call.keywords:
                if isinstance(each.value, ast.Name) and each.value.id in split.numbers:
                    kinds[each.value.id] = fields[str(each.arg)]
    merge.without(forward.args, {split.name}, ())
    forward.args.kwonlyargs += [ast.arg(name, kinds.get(name, ast.Name("Array", ast.Load()))) for name in split.numbers]
    forward.args.kw_defaults += [None] * len(split.numbers)
    made = ast.Assign([ast.Name(split.name, ast.Store())], value)
    set_kept(made, Kept([], "", False, [], 0, ""))
    forward.body.insert(1, made)
    ast.fix_missing_locations(forward)


def _annotations(kind: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for base in kind.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= _annotations(classes[base.id], classes)
    return found | {ast.unparse(node.target): node.annotation for node in kind.body if isinstance(node, ast.AnnAssign)}


def _read(tree: ast.Module, samples: Sequence[Sample], roots: Sequence[ast.FunctionDef], lost: Sequence[str]) -> Reader:
    """Return what is known for all samples. Those that differ from others in numbers alone are not read again."""
    ast.fix_missing_locations(tree)
    reader = Reader(tree)
    seen: list[tuple[dict[str, Value], dict[str, Value]]] = []
    for sample in samples:
        given = _arguments(reader, roots[0], sample.forward)
        further = _arguments(reader, roots[1], sample.backward)
        if (given, further) in seen:
            continue
        seen.append((given, further))
        names = {each.arg for each in (*roots[0].args.args, *roots[0].args.kwonlyargs)}
        result = reader.call(Function(roots[0], {}), (), {name: SOME for name in names} | given)
        saved = result.parts[-1] if isinstance(result, Row) else SOME
        names = {each.arg for each in (*roots[1].args.args, *roots[1].args.kwonlyargs)}
        reader.call(Function(roots[1], {}), (), further | ({"saved": saved} if "saved" in names else {}))
    return reader


def _arguments(reader: Reader, root: ast.FunctionDef, text: str) -> dict[str, Value]:
    """Return what is known of the arguments that a call gives, but for `saved`."""
    call = ast.parse(f"_({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    names = {each.arg for each in (*root.args.args, *root.args.kwonlyargs)}
    return {
        str(each.arg): loosened(reader.look(each.value, {}))
        for each in call.keywords
        if each.arg in names and ast.unparse(each.value) != "saved"
    }


def loosened(value: Value) -> Value:
    """Return what is known of an argument where its numbers may be any."""
    if isinstance(value, Constant) and type(value.value) in (int, float, complex):
        return SOME
    if isinstance(value, Row):
        return Row(tuple(map(loosened, value.parts)))
    if isinstance(value, Made):
        return Made(value.kind, {name: loosened(part) for name, part in value.fields.items()})
    if isinstance(value, Entries):
        return SOME
    return value if value != Constant(...) else SOME
