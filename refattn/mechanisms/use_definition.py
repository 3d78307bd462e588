"""A reader meets the definition: under `reading` and `trace` a core hands the paper's own calls to `definition.py`.

A core says so with two decorators::

    @defined_by(definition)
    def forward(q, k, v, *, causal=False, softcap=None, ...): ...

    @backward_of_definition
    def backward(saved, d_out, d_lse=None): ...

A call is the paper's own if the definition has every option that is given. For any other call, and outside of
`reading` and `trace`, the general code runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from refattn import backends, equations
from refattn.args import raise_misspelled
from refattn.xp import Array, namespace, raised

P = ParamSpec("P")
R = TypeVar("R")

Options = Mapping[str, Any]

ARRAYS = ("q", "k", "v")
"""What every core takes."""

_reading: ContextVar[bool] = ContextVar("refattn_reading", default=False)


@contextmanager
def reading() -> Iterator[None]:
    """Run the definition of every mechanism, in one thread and in order, for a debugger to step through.

    In the ``with`` block a call that the paper has runs `definition.py` of the mechanism. A call with an option that
    the paper does not have, or with an `implementation` that is named, runs the general code, the first implementation
    if none is named.

    >>> import numpy as np, refattn as ra
    >>> q = np.ones((1, 1, 300, 4))
    >>> with ra.reading():
    ...     out, saved = ra.softmax.forward(q, q, q)
    >>> saved.definition.__name__
    'refattn.mechanisms.softmax.definition'
    """
    token = _reading.set(True)
    try:
        with backends.use_workers(1):
            yield
    finally:
        _reading.reset(token)


def defaults_of(forward: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a core with their defaults, as its signature has them."""
    options = inspect.signature(forward).parameters.values()
    return {option.name: option.default for option in options if option.kind is option.KEYWORD_ONLY}


def is_reading() -> bool:
    """Tell whether a reader is here."""
    return _reading.get()


@contextmanager
def trace() -> Iterator[equations.Trace]:
    """Record the value of every equation that runs in the ``with`` block, and the line that computed it.

    As with `reading`, a call that the paper has runs the definition; name an `implementation` for the equations of the
    general code.

    >>> import numpy as np, refattn as ra
    >>> x = np.ones((1, 1, 2, 4))
    >>> with ra.trace() as t:
    ...     out, saved = ra.softmax.forward(x, x, x)
    >>> t["SM.1"].shape
    (1, 1, 2, 2)
    """
    with reading(), equations.trace() as recorded:
        yield recorded


def defined_by(
    definition: ModuleType, says: Callable[..., str | None] | None = None, dtype: Callable[[Any], Any] = raised
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a core's forward hand the paper's own calls to its definition while somebody reads.

    Parameters
    ----------
    definition
        The module, with `forward` and `backward`.
    says
        Takes the options of a call that are not the core's defaults, and q, k and v. It makes the options, in place,
        those of the definition, or returns why the call is not the paper's own: "the paper has no mask".
    dtype
        Takes an array, and returns it in the dtype that the core computes in.
    """

    def around(forward: Callable[P, R]) -> Callable[P, R]:
        defaults = defaults_of(forward)
        parameters = inspect.signature(definition.forward).parameters
        needed = {name for name, one in parameters.items() if one.default is one.empty} - {*ARRAYS}

        def said(given: Options, q: Any, k: Any, v: Any) -> Options | str:
            if not q.shape[1] == k.shape[1] == v.shape[1]:
                return "the paper has as many heads of keys and values as of queries"
            chosen = {name: x for name, x in given.items() if x is not defaults.get(name)}
            if says is not None and (why := says(chosen, q, k, v)):
                return why
            for name in [name for name in chosen if name not in parameters]:
                value = chosen.pop(name)
                if name not in defaults or not _same(value, defaults[name]):
                    shown = f"={value!r}" if isinstance(value, str | int | float) else ""
                    return f"the paper has no {name}{shown}"
            if missing := needed - chosen.keys():
                return f"the paper has {min(missing)}"
            if "causal" not in chosen:
                return chosen
            if chosen["causal"] not in (True, "bottom_right"):
                return f"the paper has no causal={chosen['causal']!r}"
            if q.shape[2] > k.shape[2]:
                return "the paper has no query without a key"
            return {**chosen, "causal": True}

        @functools.wraps(forward)
        def entry(*args: P.args, **given: P.kwargs) -> R:
            if _reading.get():
                options = dict(given)
                arrays = args if len(args) == 3 else (*args, *(options.pop(name, None) for name in ARRAYS[len(args) :]))
                if len(arrays) == 3 and _alike(*arrays):
                    own = said(options, *arrays)
                    if not isinstance(own, str):
                        general = functools.partial(forward, *args, **given)
                        return cast(R, _read(definition, arrays, own, dtype, general))
            try:  # here and not in a function of its own: warnings count the calls to the caller
                return forward(*args, **given)
            except TypeError as error:
                raise_misspelled(forward, error, args, given)
                raise

        entry.said = said  # type: ignore[attr-defined]
        return entry

    return around


def backward_of_definition(backward: Callable[P, R]) -> Callable[P, R]:
    """Have a core's backward follow the definition where the forward did."""

    @functools.wraps(backward)
    def entry(*args: P.args, **given: P.kwargs) -> R:
        saved = args[0] if args else given.get("saved")
        definition = getattr(saved, "definition", None)
        ups = [*args[1:], *(x for name, x in given.items() if name not in ("saved", "d_out"))]
        if definition is None or any(x is not None for x in ups[len(args) > 1 :]):
            try:
                return backward(*args, **given)
            except TypeError as error:
                raise_misspelled(backward, error, args, given)
                raise
        d_out: Any = args[1] if len(args) > 1 else given.get("d_out")
        try:
            own = equations.active(definition).backward(cast(Any, saved).of_definition, cast(Any, saved).dtype(d_out))
        finally:  # the general code says what is wrong with an argument, and which gradients there are
            with equations.paused():
                general: Any = backward(*args, **given)
        return cast(R, {name: _like(own[name], x) if name in own else x for name, x in general.items()})

    return entry


def _read(
    definition: ModuleType,
    arrays: Sequence[Any],
    own: Options,
    dtype: Callable[[Any], Any],
    general: Callable[[], Any],
) -> Any:
    """Run the definition; then the general code, which checks what was given and has what else a caller may ask for."""
    q, k, v = arrays
    try:
        if getattr(q.dtype, "itemsize", 8) < 8:
            q, k, v = dtype(q), dtype(k), dtype(v)
        out, inner = equations.active(definition).forward(q, k, v, **own)
    finally:
        with equations.paused():
            general_out, saved = general()
    return _like(out, general_out), _with_definition(saved, definition=definition, of_definition=inner, dtype=dtype)


def _with_definition(saved: Any, **own: Any) -> Any:
    """Return what a core's forward saved, with what its definition saved."""
    copy = object.__new__(type(saved))
    copy.__dict__.update(vars(saved), **own)
    return copy


def own_call(core: Any, arguments: Options) -> Options | str:
    """Return what the definition is called with for these arguments of a core, or why it is not.

    Of arrays their shape is read, so that designs of arrays will do.
    """
    said = getattr(core and core.forward, "said", None)
    if said is None:
        return "the definition is no map of q, k and v"
    arrays = (arguments[name] for name in ARRAYS)
    return cast("Options | str", said({name: x for name, x in arguments.items() if name not in ARRAYS}, *arrays))


def _alike(q: Any, k: Any, v: Any) -> bool:
    """Tell whether these are arrays of one type, with four axes and at least one element each."""
    if not (type(q) is type(k) is type(v) and hasattr(q, "dtype") and q.dtype == k.dtype == v.dtype):
        return False
    return len(q.shape) == len(k.shape) == len(v.shape) == 4 and 0 not in (*q.shape, *k.shape, *v.shape)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and isinstance(value, str | int | float) and value == default


def _like(x: Array, like: Array) -> Array:
    xp = namespace(like)
    # NumPy's numbers are no arrays; of one axis they are. `asarray` would cut PyTorch's gradients off.
    return xp.reshape(xp.astype(xp.reshape(x, (-1,)), like.dtype), like.shape)
