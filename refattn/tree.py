"""Trees of arrays: one flat dictionary with readable names, and back.

A tree is an array, or a frozen dataclass, tuple, list or dict of trees. None, texts and numbers are static, and fields
that are declared to hold nothing else, and dataclasses with ``STATIC = True``, which may hold functions: they stay as
they are and have no name. The name of an array is its path:
``layers.0.w_q`` is the field `w_q` of entry 0 of `layers`. Optimisers, checkpoints, gradient checks and golden vectors
all see parameters through these names.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Number
from typing import Any, TypeVar

from refattn.messages import html_table
from refattn.xp import Array, ByClass, dtype_name, is_array, namespace

T = TypeVar("T")

_SORTS = ByClass()
"""What `_sort` has found."""

_SORTS.lasting[type(None)] = "static"  # a class that its module has no name for

_DECLARED = ByClass()
"""What `_declared` has found."""

_STATIC = (str, int, float, Number)  # the usual ones first: asking an abstract class takes longer

_PLAIN = frozenset((type(None), bool, str, int, float))
"""Classes of most static parts."""

_WORDS = frozenset(("None", "bool", "str", "int", "float"))
"""What annotations call them. Most fields of parameters are those of a configuration, and need not be looked at."""


class Shown:
    """A dataclass whose `repr` has the shapes and types of its arrays, not their numbers.

    It needs ``repr=False``, since a dataclass has a `repr` of its own otherwise.
    """

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        parts = [f"{field.name}={_shown(getattr(self, field.name))}" for field in fields]
        if len(text := f"{type(self).__name__}({', '.join(parts)})") <= 120:
            return text
        lines = "".join(f"    {part}".replace("\n", "\n    ") + ",\n" for part in parts)  # for a reader, one each
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return html_table(
            ("name", type(self).__name__), ((each.name, _shown(getattr(self, each.name))) for each in fields)
        )


def _shown(value: Any) -> str:
    if is_array(value):
        return f"{dtype_name(value)}{tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_shown(x)}' for key, x in value.items())}}}"
    return repr(value) if type(value) in _PLAIN else f"<{type(value).__name__}>"


def flatten(tree: Any) -> dict[str, Array]:
    """Return the arrays of a tree by name, in the order of fields, positions and keys.

    Raises
    ------
    TypeError
        Where an entry is neither a tree nor static, or the key of a dict is no text.
    ValueError
        Where the key of a dict is empty or has a dot in it, since its name could then not be told from a path.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import tree
    >>> {name: x.shape for name, x in tree.flatten({"a": np.ones(2), "b": (np.ones(3), np.ones(4))}).items()}
    {'a': (2,), 'b.0': (3,), 'b.1': (4,)}
    """
    leaves: dict[str, Array] = {}
    waiting = [("", tree)]  # in place of a recursion: a call for every leaf is most of what a walk takes
    while waiting:
        path, node = waiting.pop()
        sort = _SORTS.lasting.get(type(node)) or _sort(node)
        if sort == "array":
            leaves[path] = node
        elif sort != "static":
            start = f"{path}." if path else ""
            waiting += reversed([(start + name, child) for name, child in _children(node, path)])
    return leaves


def unflatten(template: T, leaves: Mapping[str, Array]) -> T:
    """Return a tree with the structure and the static parts of `template` and the given arrays.

    Parameters
    ----------
    template
        Any tree. Its arrays say only which names there are: `leaves` may have other shapes and dtypes.
    leaves
        The arrays by name, as `flatten` returns them, in any order.

    Raises
    ------
    ValueError
        Where a name of the template is missing in `leaves`, or `leaves` has one that the template has not.
    TypeError
        Where a value in `leaves` is no array.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import tree
    >>> template = {"a": np.zeros(1), "b": (np.zeros(1),)}
    >>> made = tree.unflatten(template, {"b.0": np.ones(2), "a": np.zeros(3)})
    >>> made["a"].tolist(), made["b"][0].tolist()
    ([0.0, 0.0, 0.0], [1.0, 1.0])
    """
    if not isinstance(leaves, Mapping):
        raise TypeError(f"leaves: got {type(leaves).__name__}, needs a mapping from names to arrays")
    compare_names("leaves", flatten(template), leaves)
    for name, leaf in leaves.items():
        if _SORTS.lasting.get(type(leaf)) != "array" and not is_array(leaf):
            raise TypeError(f"leaves[{name!r}]: got {type(leaf).__name__}, needs an array")
    return _rebuild(template, leaves, "")[0]


def map_leaves(function: Callable[..., Any], tree: T, *others: Any) -> T:
    """Return a tree like `tree` whose entries are ``function(leaf, *leaves of the same name in others)``.

    Static parts are those of `tree`. `others` must have the same names; they may be trees of other types, such as a
    dict of gradients for a dataclass of parameters.

    >>> import numpy as np
    >>> from refattn import tree
    >>> params, gradients = {"a": np.ones(2), "b": (np.ones(1),)}, {"a": np.ones(2), "b": (4 * np.ones(1),)}
    >>> made = tree.map_leaves(lambda x, d: x - 0.5 * d, params, gradients)
    >>> made["a"].tolist(), made["b"][0].tolist()
    ([0.5, 0.5], [-1.0])
    """
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"function: got {function!r}, needs a function")
    leaves = flatten(tree)
    rest = [flatten(other) for other in others]
    for i, other in enumerate(rest):
        compare_names(f"others[{i}]", leaves, other)
    mapped = {name: function(x, *(other[name] for other in rest)) for name, x in leaves.items()}
    return _rebuild(tree, mapped, "")[0]


def union(a: T, b: Any, both: Callable[[Array, Array], Any]) -> T:
    """Return a tree with the arrays of two of one kind: where both have one, `both` of them; static parts are a's.

    >>> import numpy as np
    >>> from refattn import tree
    >>> made = tree.union({"a": np.ones(1)}, {"a": np.ones(1), "b": np.zeros(1)}, lambda x, y: x + y)
    >>> made["a"].tolist(), made["b"].tolist()
    ([2.0], [0.0])
    """
    if a is None or b is None:
        return b if a is None else a
    if is_array(a):
        return both(a, b)
    if isinstance(a, dict):
        return {name: union(a.get(name), b.get(name), both) for name in {**a, **b}}  # type: ignore[return-value]
    if isinstance(a, tuple):
        return tuple(union(*pair, both) for pair in zip(a, b, strict=True))  # type: ignore[return-value]
    if not dataclasses.is_dataclass(a):
        return a
    return _like(a, {name: union(own, getattr(b, name), both) for name, own in _children(a, "")})


def only(tree: T, names: Collection[str]) -> T:
    """Return a tree with the arrays of these names alone: None stands in the place of others, and dicts lack them.

    >>> import numpy as np
    >>> from refattn import tree
    >>> tree.only({"a": np.ones(1), "b": (np.zeros(1), np.ones(1))}, {"b.0"})
    {'b': (array([0.]), None)}
    """
    return _only(tree, names, "")


def _only(node: Any, names: Collection[str], path: str) -> Any:
    if is_array(node):
        return node if path in names else None
    new = {name: _only(child, names, f"{path}.{name}" if path else name) for name, child in _children(node, path)}
    if isinstance(node, dict):
        return {name: kept for name, kept in new.items() if kept is not None or node[name] is None}
    return _like(node, new)


def zeros_like(tree: T) -> T:
    """Return a tree of zeros with the shapes, dtypes and devices of `tree`.

    >>> import numpy as np
    >>> from refattn import tree
    >>> tree.zeros_like({"a": np.ones(2), "b": (np.ones(1),)})["b"][0].tolist()
    [0.0]
    """
    return map_leaves(lambda x: namespace(x).zeros_like(x), tree)


def check_fields(name: str, node: Any) -> None:
    """Raise TypeError, with the place, where a field of a tree of dataclasses holds something else than it declares.

    Looked at are arrays, texts and objects, and tuples of arrays.
    """
    if isinstance(node, tuple | list):
        for n, entry in enumerate(node):
            check_fields(f"{name}.{n}", entry)
    known = _DECLARED.lasting.get(type(node))
    for field, kinds, classes, many in _declared(type(node)) if known is None else known:
        value = getattr(node, field)
        for entry in value if many and isinstance(value, tuple) else (value,):
            if entry is None and type(None) in classes:
                continue
            array = (_SORTS.lasting.get(type(entry)) or _sort(entry)) == "array"
            if not (array and "Array" in kinds or isinstance(entry, classes)):
                needs = " or ".join("an array" if kind == "Array" else kind.__name__ for kind in kinds)
                raise TypeError(f"{name}.{field}: got {type(entry).__name__}, needs {needs}")
            if array and getattr(entry.dtype, "kind", "f") in "OSU":  # of NumPy: objects and texts
                raise TypeError(f"{name}.{field}: got dtype {dtype_name(entry)}, needs numbers")
        if isinstance(value, tuple | list) or hasattr(type(value), "__dataclass_fields__"):
            check_fields(f"{name}.{field}", value)


def _declared(kind: type) -> tuple[tuple[str, tuple[Any, ...], tuple[type, ...], bool], ...]:
    """Return the fields of a dataclass: what each may be, "Array" or classes, the latter, and whether it is a tuple."""
    known: tuple[tuple[str, tuple[Any, ...], tuple[type, ...], bool], ...] | None = _DECLARED.lasting.get(kind)
    if known is None and (known := _DECLARED.get(kind)) is None:
        found = []
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            text = str(field.type)
            many = text.startswith("tuple[") and text.endswith(", ...]")
            words = text.removeprefix("tuple[").removesuffix(", ...]") if many else text
            kinds = [_kind(word, kind.__module__) for word in words.split(" | ")]
            if None not in kinds:
                found.append((field.name, tuple(kinds), tuple(each for each in kinds if each != "Array"), many))
        known = _DECLARED.set(kind, tuple(found))
    return known


def _kind(word: str, module: str) -> Any:
    """Return the class that an annotation of a module means, "Array", or None where it says nothing sure."""
    if word in ("Array", "None", "str"):
        return {"Array": "Array", "None": type(None), "str": str}[word]
    found = getattr(sys.modules.get(module), word, None)
    sure = isinstance(found, type) and dataclasses.is_dataclass(found)
    return found if sure else None


def _children(node: Any, path: str) -> Iterable[tuple[str, Any]]:
    """Return the named entries of a node that is no array; a static one has none."""
    sort = _SORTS.lasting.get(type(node)) or _sort(node)
    if isinstance(sort, tuple):
        return [(name, getattr(node, name)) for name in sort]
    if sort == "static":
        return ()
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return zip(node._fields, node, strict=True)
    if isinstance(node, tuple | list):
        return [(str(i), entry) for i, entry in enumerate(node)]
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise TypeError(f"{_place(path)}: got the key {key!r} of type {type(key).__name__}, needs a text")
            if not key or "." in key:
                raise ValueError(f"{_place(path)}: got the key {key!r}, needs one that is not empty and has no dot")
        return node.items()
    raise TypeError(
        f"{_place(path)}: got {type(node).__name__}, needs an array, a dataclass, tuple, list or dict of arrays, "
        "or a static None, text or number"
    )


def _sort(node: Any) -> str | tuple[str, ...]:
    """Return what nodes of this class are: "array", "static", "other", or the fields of a dataclass but static ones."""
    kind = type(node)
    known: str | tuple[str, ...] | None = _SORTS.lasting.get(kind)
    if known is None and (known := _SORTS.get(kind)) is None:
        if is_array(node):
            known = "array"
        elif isinstance(node, _STATIC):
            known = "static"
        elif dataclasses.is_dataclass(kind) and getattr(kind, "STATIC", False):
            known = "static"
        elif dataclasses.is_dataclass(kind):
            declared = ((field.name, str(field.type).split(" | ")) for field in dataclasses.fields(kind))
            known = tuple(name for name, words in declared if not _WORDS.issuperset(words)) or "static"
        else:
            known = "other"
        _SORTS.set(kind, known)
    return known


def _rebuild(node: Any, leaves: Mapping[str, Any], path: str) -> tuple[Any, bool]:
    """Return the new node, and whether there was an array in it: what has none is static and stays as it is."""
    if (_SORTS.lasting.get(type(node)) or _sort(node)) == "array":
        return leaves[path], True
    new, found, start = {}, False, f"{path}." if path else ""
    for name, child in _children(node, path):
        sort, has_array = _SORTS.lasting.get(type(child)) or _sort(child), False
        if sort == "array":
            child, has_array = leaves[start + name], True
        elif sort != "static":
            child, has_array = _rebuild(child, leaves, start + name)
        new[name], found = child, found or has_array
    return (_like(node, new), True) if found else (node, False)


def _like(node: Any, new: dict[str, Any]) -> Any:
    """Return a node with other entries."""
    if isinstance(node, dict):
        return new
    if isinstance(node, tuple | list):
        return node._make(new.values()) if hasattr(node, "_make") else type(node)(new.values())
    # Static fields are left alone: they may be ones that the constructor does not take.
    changed = {name: value for name, value in new.items() if value is not getattr(node, name)}
    return dataclasses.replace(node, **changed) if changed else node


def compare_names(argument: str, needed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError if the names of two flat trees differ."""
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in needed]
    if missing or unknown:
        lacks = f"lacks {', '.join(map(repr, missing))}" if missing else ""
        extra = f"has the unknown {', '.join(map(repr, unknown))}" if unknown else ""
        what = " and ".join(filter(None, (lacks, extra)))
        raise ValueError(f"{argument}: {what}; needs exactly the {len(needed)} names of the tree")


def _place(path: str) -> str:
    return f"tree entry {path!r}" if path else "tree"
