"""The engine: it reads equation tags and builds hooked copies of a module.

A tag is a comment at the end of an assignment. It names the axes of the value and the equation that the line computes::

    scores = q @ xp.matrix_transpose(k) * scale  # (b, h, i, j) [SM.1]

An id is letters, a dot and a number (`SM.1`); its adjoint, computed in the backward, has a `d` in front (`dSM.1`),
and the gradient of an input is called after the input (`dSM.q`). Axes without an id mean that the value is no equation;
words may follow them, after a colon. Where several names are assigned at once, the comment has a tag for each, in their
order and as far as it goes, with `-` for a name that has none::

    out, saved = attend(q, k, v)  # (b, h, i, e) [SM.5]
    between = x[:, None] - x  # (b, i, j): x_j - x_i

A line that computes several equations at once is tagged with their range (`[SM.3-SM.4]`) and claims no value, as does
an augmented assignment. Exclusive branches may each claim the same equation.

In a hooked copy every tagged ``name = expr`` reads ``name = hook(id, name, expr)``; the copy is compiled under the
original file name, so tracebacks and debuggers point at the real line. One mechanism serves four uses: the trace (the
hook records a copy), substitution (it returns another tensor), mutation (it perturbs) and rounding (it rounds).

`apply` puts a hook in force for the code in its ``with`` block; public functions look for it through `active`. Hooks
nest: the inner one acts first, so that an outer trace sees what the inner hook made. A hook is in force in the thread
(more exactly, the context) that entered it. Under a hook work that a pool would share is done in order, so that passes
are numbered as they stand in the code, whatever the number of workers.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import io
import math
import re
import sys
import tokenize
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from refattn.args import Each, Function, checked
from refattn.backends.pool import in_order
from refattn.messages import html_table
from refattn.xp import Array, namespace

Branch = tuple[tuple[int, int], ...]

Hook = Callable[[str, str, Array], Array]
"""Called as ``hook(id, name, value)`` after each tagged assignment; returns the value that the assignment takes."""

_ID = r"d?[A-Z]+\.(?:\d+|[a-z][a-z_]*)"
_AXES = r"\((?P<axes>(?:[a-z0-9*]+(?:, ?[a-z0-9*]+)*,?)?)\)"
_TAG = re.compile(rf"\s*(?:-|(?:{_AXES}\s*)?(?:\[(?P<first>{_ID})(?:-(?P<last>{_ID}))?\])?)\s*(?=[,:]|$)")
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_DECLARED = re.compile(rf"^\s*\[(?P<id>{_ID})\]\s+(?P<formula>\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Tag:
    """What the comment at the end of one assignment says.

    Attributes
    ----------
    id, last
        The equation and "", or the first and the last of a range; both "" where the comment names axes alone.
    name
        The variable that the line assigns.
    axes
        One entry per axis: a letter, a product of letters, or a number; None where the comment names none.
    line
        The line of the file on which the assignment starts.
    claims
        Whether the value of the assignment is the value of the equation.
    position
        Which of several names that are assigned at once; None where there is one.
    branch
        In which arms of which conditions the line stands: pairs of the line of the condition and the number of the arm.
        What follows an arm that returns or raises stands in the last arm.

    Examples
    --------
    >>> from refattn.equations import tags
    >>> from refattn.mechanisms.softmax import dense
    >>> {tag.id: tag.name for tag in tags(dense)}["dSM.q"]
    'd_q'
    """

    id: str
    last: str
    name: str
    axes: tuple[str, ...] | None
    line: int
    claims: bool
    position: int | None = None
    branch: Branch = ()

    def excludes(self, other: Tag) -> bool:
        """Tell whether a call that reaches this line never reaches the other one."""
        arms = dict(self.branch)
        return any(arms.get(line, arm) != arm for line, arm in other.branch)


@checked(module=ModuleType)
def declared(module: ModuleType) -> dict[str, str]:
    """Return the equations of a module's docstring, id to formula: lines such as ``[SM.1]  s_ij = scale q_i . k_j``.

    Where a file of the general code has "as in the definition" for one, that is its formula, with the note of the file.

    >>> from refattn.equations import declared
    >>> from refattn.mechanisms.softmax import dense
    >>> declared(dense)["SM.1"]
    's_ij = scale q_i . k_j'
    """
    found: dict[str, str] = {}
    for match in _DECLARED.finditer(docstring(module)):
        if match["id"] in found:
            raise ValueError(f"{module.__name__}: the docstring declares {match['id']} twice")
        formula, gap, note = match["formula"].partition("  ")
        if formula == AS_DEFINED:
            formula = _defined(module, match["id"])
        found[match["id"]] = f"{formula}{gap}{note}"
    return found


AS_DEFINED = "as in the definition"
"""What stands in place of a formula that the definition of the mechanism has."""


def _defined(module: ModuleType, id: str) -> str:
    """Return the formula that the definition has for an id, without its note."""
    definition = _definition(module)
    if (formula := declared(definition).get(id)) is None:
        words = f"the docstring says {AS_DEFINED!r} of {id}, and that of {definition.__name__} does not declare it"
        raise ValueError(f"{module.__name__}: {words}")
    return formula.partition("  ")[0]


def _definition(module: ModuleType) -> ModuleType:
    """Return the definition that stands in the folder of a module, or in one above it."""
    folder = module.__name__
    while folder := folder.rpartition(".")[0]:
        if find_spec(f"{folder}.definition") is not None:
            return import_module(f"{folder}.definition")
    raise ValueError(f"{module.__name__}: its docstring says {AS_DEFINED!r}, but there is none")


def family(id: str) -> str:
    """Return the letters of a mechanism's ids: "SM" of SM.1 and of dSM.1."""
    return id.partition(".")[0].removeprefix("d")


def docstring(module: ModuleType) -> str:
    """Return the docstring of a module, from its source where Python left it out (``python -OO``)."""
    return _written_docstring(module) if module.__doc__ is None else module.__doc__


@functools.cache
def _written_docstring(module: ModuleType) -> str:
    try:
        return ast.get_docstring(ast.parse(inspect.getsource(module)), clean=False) or ""
    except (OSError, TypeError):  # a module without source has no tags either
        return ""


@checked(module=ModuleType)
def tags(module: ModuleType) -> tuple[Tag, ...]:
    """Return the tags of a module in the order of its lines.

    Raises
    ------
    ValueError
        Where an id stands on a line that is no assignment to names, or a line has more tags than names.

    Examples
    --------
    >>> from refattn.equations import tags
    >>> from refattn.mechanisms.softmax import dense
    >>> [(tag.name, tag.axes) for tag in tags(dense) if tag.id == "SM.1"]
    [('scores', ('b', 'h', 'i', 'j'))]
    """
    return tuple(tag for _, found in _tagged_nodes(module) for tag in found)


@functools.cache
def _tagged_nodes(module: ModuleType) -> list[tuple[ast.stmt, list[Tag]]]:
    """Parse a module and pair its assignments with their tags."""
    source = inspect.getsource(module)
    comments: dict[int, list[re.Match[str]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (matches := _tags_of(token.string)):
            comments[token.start[0]] = matches
    found: list[tuple[ast.stmt, list[Tag]]] = []
    for node, branch in _statements(ast.parse(source).body, ()):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            continue
        matches = comments.pop(node.end_lineno or 0, [])
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        chained = isinstance(node, ast.Assign) and len(node.targets) > 1
        tagged = []
        for n, match in enumerate(matches):
            name = names[n] if n < len(names) else None
            if match["first"] and (chained or not isinstance(name, ast.Name)):
                raise ValueError(f"{module.__name__}:{node.lineno}: a tag belongs to a name that the line assigns")
            if name is None or (match["axes"] is None and not match["first"]):
                continue
            axes = None if match["axes"] is None else tuple(a.strip() for a in match["axes"].split(",") if a.strip())
            tag = Tag(
                id=match["first"] or "",
                last=match["last"] or "",
                name=ast.unparse(name),
                axes=axes,
                line=node.lineno,
                claims=bool(match["first"]) and not match["last"] and not isinstance(node, ast.AugAssign),
                position=n if isinstance(target, ast.Tuple) else None,
                branch=branch,
            )
            tagged.append(tag)
        if tagged:
            found.append((node, tagged))
    stray = [line for line, matches in comments.items() if any(match["first"] for match in matches)]
    if stray:
        raise ValueError(f"{module.__name__}:{min(stray)}: a tag stands on a line that ends no assignment")
    return sorted(found, key=lambda pair: pair[0].lineno)


def _tags_of(comment: str) -> list[re.Match[str]]:
    """Return the tags with which a comment begins; words may follow the last, after a colon."""
    found, text = [], comment.removeprefix("#")
    while (match := _TAG.match(text)) and match.group().strip():
        found.append(match)
        rest = text[match.end() :]
        if not rest.startswith(","):
            return found
        text = rest[1:]
    return []


def _statements(body: list[ast.stmt], branch: Branch) -> Iterator[tuple[ast.stmt, Branch]]:
    """Yield all statements with the arms of conditions in which they stand."""
    for node in body:
        yield node, branch
        if isinstance(node, (ast.If, ast.Match)):
            arms = [node.body, node.orelse] if isinstance(node, ast.If) else [case.body for case in node.cases]
            for n, arm in enumerate(arms):
                yield from _statements(arm, (*branch, (node.lineno, n)))
            if any(arm and isinstance(arm[-1], _LEAVES) for arm in arms):
                branch = (*branch, (node.lineno, len(arms) - 1))
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, part, []), branch)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, branch)


@functools.cache
def _code(module: ModuleType) -> Any:
    """Compile the functions of a module with a hook call in each tagged assignment."""
    claims = {
        (node.lineno, node.col_offset): [tag for tag in found if tag.claims] for node, found in _tagged_nodes(module)
    }

    def call(tag: Tag, value: ast.expr) -> ast.expr:
        made = ast.Call(
            func=ast.Name(id="__refattn_hook__", ctx=ast.Load()),
            args=[ast.Constant(tag.id), ast.Constant(tag.name), value],
            keywords=[],
        )
        return ast.fix_missing_locations(ast.copy_location(made, value))

    class Insert(ast.NodeTransformer):
        def _hooked(self, node: ast.Assign | ast.AnnAssign) -> ast.stmt | list[ast.stmt]:
            after: list[ast.stmt] = []
            for tag in claims.get((node.lineno, node.col_offset), []):
                if tag.position is None and node.value is not None:
                    node.value = call(tag, node.value)
                else:
                    value = call(tag, ast.copy_location(ast.Name(id=tag.name, ctx=ast.Load()), node))
                    after.append(ast.Assign(targets=[ast.Name(id=tag.name, ctx=ast.Store())], value=value))
            for extra in after:
                ast.copy_location(extra, node)
            return [node, *(ast.fix_missing_locations(extra) for extra in after)] if after else node

        visit_Assign = _hooked  # noqa: N815 (the names that ast.NodeTransformer looks for)
        visit_AnnAssign = _hooked  # noqa: N815

    own = Insert().visit(ast.parse(inspect.getsource(module)))
    functions: list[ast.stmt] = [node for node in own.body if isinstance(node, ast.FunctionDef)]
    flags = __future__.annotations.compiler_flag
    return compile(ast.Module(functions, []), module.__file__ or "<unknown>", "exec", flags, dont_inherit=True)


def hooked(module: ModuleType, hook: Hook) -> SimpleNamespace:
    """Return the functions of `module` with `hook` called after each tagged assignment.

    The copy shares everything but its functions with the module, so that dataclasses made on one side are of the same
    class on the other. With a hook that returns its value unchanged the results have the same bits.
    """
    scope = dict(vars(module))
    scope["__refattn_hook__"] = hook
    exec(_code(module), scope)
    return SimpleNamespace(**scope)


_HOOKED: weakref.WeakSet[ModuleType] = weakref.WeakSet()
"""The modules of which copies were made."""


class _Active:
    """A hook in force, with the copies made for it."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.copies: dict[ModuleType, SimpleNamespace] = {}

    def copy_of(self, module: ModuleType) -> SimpleNamespace:
        _HOOKED.add(module)
        if module not in self.copies:
            self.copies[module] = hooked(module, self.call)
        return self.copies[module]

    def call(self, id: str, name: str, value: Array) -> Array:
        return self.hook(id, name, value)  # by this line an error is known to be a hook's: see `checked.naming`


_in_force: ContextVar[_Active | None] = ContextVar("refattn_hook", default=None)


def active(module: ModuleType) -> Any:
    """Return `module`, or its hooked copy where a hook is in force."""
    current = _in_force.get()
    return module if current is None else current.copy_of(module)


def is_active() -> bool:
    """Tell whether a hook is in force here."""
    return _in_force.get() is not None


@contextmanager
def apply(hook: Hook) -> Iterator[None]:
    """Put `hook` in force for the code of the ``with`` block.

    >>> import numpy as np, refattn as ra
    >>> from refattn.equations import apply
    >>> with apply(lambda id, name, value: 0.0 * value if id == "SM.5" else value):
    ...     ra.softmax.forward(*np.ones((3, 1, 1, 2, 1)))[0].tolist()
    [[[[0.0], [0.0]]]]
    """
    outer = _in_force.get()
    combined = hook if outer is None else lambda id, name, value: outer.hook(id, name, hook(id, name, value))
    token = _in_force.set(_Active(combined))
    try:
        with in_order():
            yield
    finally:
        _in_force.reset(token)


@contextmanager
def paused() -> Iterator[None]:
    """Run the code of the ``with`` block without the hook that is in force, if there is one."""
    token = _in_force.set(None)
    try:
        yield
    finally:
        _in_force.reset(token)


class Trace(Mapping[str, Array]):
    """The values of the equations that ran, by id.

    ``t["SM.1"]`` is the value of the first pass; later passes of a repeated equation are ``t["SM.1[1]"]``,
    ``t["SM.1[2]"]``, ... Values are copies. `variables` maps each id to the name that the code gives it, and `lines`
    each key to the file and the line that ran.

    >>> import numpy as np, refattn as ra
    >>> with ra.trace() as t:
    ...     out, saved = ra.softmax.forward(*np.ones((3, 1, 1, 2, 4)))
    >>> t.variables["SM.4"], t["SM.4"].tolist(), len(t.passes("SM.4"))
    ('weights', [[[[0.5, 0.5], [0.5, 0.5]]]], 1)
    """

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.lines: dict[str, tuple[str, int]] = {}
        self._passes: dict[str, int] = {}
        self._values: dict[str, Array] = {}

    def record(self, id: str, name: str, value: Array) -> Array:
        """Store a copy of `value`; the hook of a trace."""
        n = self._passes.get(id, 0)
        self._passes[id] = n + 1
        self.variables[id] = name
        key = f"{id}[{n}]" if n else id
        self.lines[key] = _line_that_runs()
        self._values[key] = namespace(value).asarray(value, copy=True)
        return value

    def passes(self, id: str) -> tuple[Array, ...]:
        """Return the values of all passes of one equation; KeyError where there is none of this id."""
        if not isinstance(id, str):
            raise KeyError(f"id: got {type(id).__name__}, needs a text")
        if id not in self._passes and not _is_declared(id):
            raise KeyError(f"id: got {id!r}: no such equation; these ran: {', '.join(self._passes) or 'none'}")
        return tuple(self[f"{id}[{n}]" if n else id] for n in range(self._passes.get(id, 0)))

    def __getitem__(self, key: str) -> Array:
        try:
            return self._values[key.removesuffix("[0]")]
        except KeyError:
            ran = ", ".join(self._values) or "none"
            raise KeyError(f"{key}: no such equation ran; these did: {ran}") from None

    def __repr__(self) -> str:
        """A line for each equation that ran: its id, variable, shape, and range."""
        return "\n".join([f"Trace of {len(self)} values", *("  ".join(row) for row in self._rows(fixed=True))])

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html_table(("equation", "variable", "shape", "from", "to"), self._rows(fixed=False))

    def _rows(self, fixed: bool) -> list[list[str]]:
        rows = []
        for key, value in self._values.items():
            xp = namespace(value)
            ends = ("-", "-")
            if math.prod(value.shape) and xp.isdtype(value.dtype, "real floating"):
                ends = (f"{float(xp.min(value)):.4g}", f"{float(xp.max(value)):.4g}")
            rows.append([key, self.variables[key.partition("[")[0]], str(tuple(value.shape)), *ends])
        widths = [max((len(row[n]) for row in rows), default=0) for n in range(5)] if fixed else [0] * 5
        return [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _line_that_runs() -> tuple[str, int]:
    """Return the file and the line of the hooked assignment that called, from its frame."""
    frame = sys._getframe(2)
    while "__refattn_hook__" not in frame.f_globals and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def tag_at(file: str, line: int, id: str) -> tuple[ModuleType, Tag]:
    """Return the module in `file` that was hooked, and its tag of an equation that a line computes."""
    module = next(module for module in _HOOKED if module.__file__ == file)
    found = [tag for tag in tags(module) if tag.claims and tag.id == id and tag.line <= line]
    return module, max(found, key=lambda tag: tag.line)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the value of every equation of the general code that runs in the ``with`` block.

    The public `refattn.trace` runs the definitions.

    >>> import numpy as np, refattn as ra
    >>> from refattn.equations import trace
    >>> x = np.ones((1, 1, 2, 4))
    >>> with trace() as t:
    ...     out, saved = ra.softmax.forward(x, x, x)
    >>> t["SM.1"].shape
    (1, 1, 2, 2)
    """
    record = Trace()
    with apply(record.record):
        yield record


@checked(values=Each(None))
def substitute(values: Mapping[str, Array]) -> AbstractContextManager[None]:
    """Use the given tensors in place of the values of the named equations.

    Raises
    ------
    ValueError
        When the equation runs, where the tensor has another shape than the value it replaces; at the end of the block,
        where there is no such equation.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> from refattn.equations import substitute
    >>> with substitute({"SM.4": np.full((1, 1, 2, 2), 3.0)}):
    ...     ra.softmax.forward(*np.ones((3, 1, 1, 2, 1)))[0].tolist()
    [[[[6.0], [6.0]]]]
    """

    def hook(id: str, name: str, value: Array) -> Array:
        if id not in values:
            return value
        if tuple(values[id].shape) != tuple(value.shape):
            raise ValueError(f"{id} ({name}): got shape {tuple(values[id].shape)}, needs {tuple(value.shape)}")
        return values[id]

    return _apply_to(values, hook)


@checked(id=str, change=Function)
def mutate(id: str, change: Callable[[Array], Array]) -> AbstractContextManager[None]:
    """Replace the value of one equation by ``change(value)``.

    Raises ValueError at the end of the block where there is no such equation.

    >>> import numpy as np, refattn as ra
    >>> from refattn.equations import mutate
    >>> with mutate("SM.4", lambda weights: 2.0 * weights):
    ...     ra.softmax.forward(*np.ones((3, 1, 1, 2, 1)))[0].tolist()
    [[[[2.0], [2.0]]]]
    """
    return _apply_to((id,), lambda ran, name, value: change(value) if ran == id else value)


@checked(points=Each(str), round_to=Function)
def rounding(points: Mapping[str, str], round_to: Callable[[Array, str], Array]) -> AbstractContextManager[None]:
    """Round the values of the named equations: ``round_to(value, dtype)`` with the dtype that `points` gives.

    Raises ValueError at the end of the block where there is no such equation.

    >>> import numpy as np, refattn as ra
    >>> from refattn.equations import rounding
    >>> with ra.trace() as t, rounding({"SM.1": "float16"}, lambda x, dtype: x.astype(dtype).astype(x.dtype)):
    ...     out, saved = ra.softmax.forward(*np.full((3, 1, 1, 2, 1), 0.3))
    >>> round(float(t["SM.1"][0, 0, 0, 0]), 8)  # 0.09 in float16
    0.09002686
    """
    return _apply_to(points, lambda id, name, value: round_to(value, points[id]) if id in points else value)


@contextmanager
def _apply_to(ids: Iterable[str], hook: Hook) -> Iterator[None]:
    """Put a hook for some equations in force; raise at the end where one is none that any module has."""
    ran: dict[str, None] = {}  # a set that keeps the order

    def watched(id: str, name: str, value: Array) -> Array:
        ran[id] = None
        return hook(id, name, value)

    with apply(watched):
        yield
    for id in ids:
        if id.partition("[")[0] not in ran and not _is_declared(id.partition("[")[0]):
            told = ", ".join(ran) or "none"
            raise ValueError(f"{id}: got no such equation, needs one that there is; these ran: {told}")


def _is_declared(id: str) -> bool:
    """Tell whether a module in use, of the library or one that was hooked, declares an equation."""
    home = __name__.partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == home]
    return any(f"[{id}]" in docstring(module) for module in (*modules, *_HOOKED))
