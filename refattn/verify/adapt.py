"""An adapter made of a few words: the layout of a function, its parameters' names, and what its options mean.

``refattn verify softmax --call package.module:function layout=bnhd causal=is_causal:top_left scale=sm_scale`` needs no
adapter file; `call` makes the same adapter in Python. The words:

===============  ===================================================================================================
word             meaning
===============  ===================================================================================================
layout=bnhd      the axes of q, k and v: b batch, h head, n token, d width, in any order; ``bn(hd)`` are merged axes; a
                 letter that is absent is looped over (``hnd``: one sequence a call). bhnd by default
out=bhnd         the axes of the output; those of `layout` by default
framework=torch  the library of its arrays: numpy, torch, jax or cupy. torch or jax by default, if the function's module
                 has imported one of them, and numpy otherwise
q=query          the parameters that take q, k and v, which are passed by place by default
OPTION=PARAM     the parameter that takes an option of the mechanism, such as scale=sm_scale
OPTION=PARAM:F   the same, in a form of `FORMS`: causal=is_causal:top_left, mask=attn_mask:additive, window=size:int
window=L+R:F     a window whose two bounds are parameters of their own
causal=always:F  the function is causal in every call, aligned as F says
full=mask,bias   the options whose arrays it needs in all of their axes: they do not broadcast
returns=out,lse  what a tuple that it returns holds, in this order; _ is ignored, lse:base2 is to base 2
lse=bnh          the axes of lse; bhn by default
needs=e=d,h=g    sizes that have to be equal; other calls are declined
apart=a+b,a+c    options that it does not take together: such calls are declined
n=%16, d=64,128  sizes that it can run: multiples of 16; these numbers; also 16.. (at least), ..256 (at most)
dtypes=float16   the storage types that it can run
NAME:=JSON       an argument of its own that every call passes: enable_gqa:=true
===============  ===================================================================================================

An option of a call that no word names is declined. Letters of sizes: b, h heads of queries, g of keys and values, n
tokens (nq, nk of queries and keys), d width, e of values.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refattn import xp as arrays
from refattn.messages import meant
from refattn.verify.outcome import Decline

FORMS: Mapping[str, Mapping[str, str]] = {
    "causal": {
        "bottom_right": "True lets the last query see every key",
        "top_left": "True lets query i see the keys up to i",
        "square": "there is no difference, since it needs as many queries as keys",
    },
    "mask": {
        "bool": "True may attend",
        "inverted": "True is hidden",
        "additive": "0 may attend, -inf is hidden",
    },
    "window": {
        "pair": "(left, right), -1 is no bound",
        "pair_none": "(left, right), None is no bound",
        "pair_large": "(left, right), a bound beyond all tokens is none",
        "int": "W keys with the query's own: (W - 1, None) and causal",
        "left": "the left bound alone, beside causal",
    },
    "k_lengths": {
        "counts": "the number of keys of each sequence",
        "keys": "(b, nk), True may attend",
        "keys_inverted": "(b, nk), True is hidden",
    },
}
"""Option -> the forms that a parameter may have, the default first."""

OPTIONS = tuple(
    "mask causal window offset bias sink q_lengths k_lengths keep scale softcap order alpha normaliser layer_norm "
    "norm_eps key_mask state kinetic coupling intrinsic mu kappa step steps integrator threshold graph start updates "
    "kernel space fit perturbation similarity jitter beta log_decay log_momentum qk_norm lengths".split()
)
"""Of all mechanisms. Their records are not loaded here: with them their definitions would be, and a kernel that may
call these is reported."""

LETTERS = "bhnd"
PLANES = ("mask", "bias", "keep")
"""Options that have a number for each pair of a query and a key, and broadcast."""

SIZES = ("b", "h", "g", "n", "nq", "nk", "d", "e")
WORDS = ("layout", "out", "lse", "framework", *"qkv", "full", "returns", "needs", "apart", "dtypes", *SIZES)
BY_CALL = " *"
"""At the end of words: each call brings its own, as its option `words`. That is how `find_words` tries them."""
FRAMEWORKS = ("numpy", "torch", "jax", "cupy")
SPEC = re.compile(r"(?P<function>.+?:[^\s:]+)\s+(?P<words>\S.*)", re.DOTALL)


class WordError(ValueError):
    """A word is none, or does not fit the others; the message names it."""


def split(spec: str) -> tuple[str, str]:
    """Return the name of a function and the words after it.

    >>> from refattn.verify import adapt
    >>> adapt.split("torch.nn.functional:scaled_dot_product_attention causal=is_causal:top_left")
    ('torch.nn.functional:scaled_dot_product_attention', 'causal=is_causal:top_left')
    >>> adapt.split("my folder/mine.py:attend")
    ('my folder/mine.py:attend', '')
    """
    found = SPEC.fullmatch(spec)
    return (found["function"], found["words"]) if found and "=" in found["words"] else (spec, "")


@dataclass(frozen=True)
class Words:
    """The words of one function, read: see this module's table.

    Attributes
    ----------
    layout, out, lse
        The axes of q, k and v, of the output, and of lse, as groups of letters: ("b", "n", "hd") is ``bn(hd)``.
    framework
        The library of its arrays; "" if no word names it.
    names
        The parameters of q, k and v, where words name them.
    options
        Option of the mechanism -> its parameters and its form.
    full
        The options whose arrays are expanded to all of their axes.
    returns
        The names of what it returns, with their forms: ("out", ""), ("lse", "base2").
    equal
        Pairs of letters of sizes that have to be equal.
    apart
        Pairs of options that it does not take together.
    sizes
        Letter -> what `supports` states about this size.
    dtypes
        The storage types that it can run; all of them if empty.
    literals
        Its own arguments that every call passes.
    """

    layout: tuple[str, ...] = tuple(LETTERS)
    out: tuple[str, ...] = ()
    lse: tuple[str, ...] = ("b", "h", "n")
    framework: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    full: tuple[str, ...] = ()
    returns: tuple[tuple[str, str], ...] = (("out", ""),)
    equal: tuple[tuple[str, str], ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    literals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def supports(self) -> dict[str, Any]:
        """What the adapter states that it can run, as its attribute `supports`."""
        found: dict[str, Any] = {**self.sizes}
        found |= {"where": [f"{a} = {b}" for a, b in self.equal]} if self.equal else {}
        parameters, form = self.options.get("causal", ((), ""))
        if form in ("top_left", "square"):
            found["causal"] = form
        if parameters == ("always",):
            found["fixed"] = {"causal": "top_left" if form == "top_left" else True}
        return found | ({"dtypes": list(self.dtypes)} if self.dtypes else {})


def read(words: str) -> Words:
    """Return the words of a text.

    Raises
    ------
    WordError
        If a word is unknown, or its value is none; the message names both.

    Examples
    --------
    >>> from refattn.verify import adapt
    >>> adapt.read("layout=bn(hd) window=size:int").layout
    ('b', 'n', 'hd')
    """
    found: dict[str, Any] = {"names": {}, "options": {}, "sizes": {}, "literals": {}}
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise WordError(f"words: got {words!r}, needs matching quotes ({error})") from error
    for part in parts:
        name, equals, value = part.partition("=")
        if not (equals and name and value):
            raise WordError(f"got {part!r}, needs WORD=VALUE such as layout=bnhd")
        if name.endswith(":"):
            found["literals"][name[:-1]] = _literal(part, value)
        elif name in ("layout", "out", "lse"):
            found[name] = _axes(part, value, LETTERS if name != "lse" else "bhn")
        elif name == "framework":
            found[name] = _one_of(part, value, FRAMEWORKS)
        elif name in ("q", "k", "v"):
            found["names"][name] = value
        elif name == "full":
            found[name] = tuple(_option(part, one) for one in value.split(","))
        elif name == "returns":
            found[name] = tuple(_returned(part, one) for one in value.split(","))
        elif name == "needs":
            found["equal"] = tuple(_pair(part, one) for one in value.split(","))
        elif name == "apart":
            found[name] = tuple(_apart(part, one) for one in value.split(","))
        elif name == "dtypes":
            found[name] = tuple(_one_of(part, one, _types()) for one in value.split(","))
        elif name in SIZES:
            found["sizes"][name] = _sizes(part, value)
        else:
            found["options"][_option(part, name)] = _parameter(part, name, value)
    return Words(**found)


def _axes(part: str, value: str, letters: str) -> tuple[str, ...]:
    groups = re.findall(r"\(([a-z]+)\)|([a-z])", value)
    axes = tuple(merged or single for merged, single in groups)
    used = "".join(axes)
    rebuilt = "".join(f"({one})" if len(one) > 1 else one for one in axes)
    if rebuilt != value or len({*used}) != len(used) or {*used} - {*letters} or {*letters[2:]} - {*used}:
        raise WordError(f"got {part!r}, needs the letters {', '.join(letters)}, each once, such as bnhd, bn(hd) or hnd")
    return axes


def _one_of(part: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise WordError(f"got {part!r}, needs one of {', '.join(known)}{meant(value, known)}")
    return value


def _types() -> tuple[str, ...]:
    from refattn.golden.storage_types import DTYPES

    return tuple(DTYPES)


def _option(part: str, name: str) -> str:
    if name not in OPTIONS:
        near = meant(name, (*WORDS, *OPTIONS))
        raise WordError(
            f"got {part!r}, needs a word ({', '.join(WORDS)}) or an option of a mechanism{near or ', such as scale'}; "
            "an argument of the function's own is NAME:=JSON"
        )
    return name


def _parameter(part: str, option: str, value: str) -> tuple[tuple[str, ...], str]:
    names, _, form = value.partition(":")
    forms = tuple(FORMS.get(option, ()))
    if form and form not in forms:
        needs = f"one of {', '.join(forms)}" if forms else "no form"
        raise WordError(f"got {part!r}, needs {needs} after the colon{meant(form, forms)}")
    return tuple(names.split("+")), form or (forms[0] if forms else "")


def _returned(part: str, text: str) -> tuple[str, str]:
    name, _, form = text.partition(":")
    if not name or form not in ("", "base2"):
        raise WordError(f"got {part!r}, needs names such as out,lse or out,lse:base2")
    return name, form


def _pair(part: str, text: str) -> tuple[str, str]:
    left, _, right = text.partition("=")
    if left not in SIZES or right not in SIZES:
        raise WordError(f"got {part!r}, needs equal sizes such as e=d, h=g, nq=nk")
    return left, right


def _apart(part: str, text: str) -> tuple[str, str]:
    left, _, right = text.partition("+")
    return _option(part, left), _option(part, right)


def _sizes(part: str, value: str) -> Any:
    if found := re.fullmatch(r"%(\d+)", value):
        return {"multiple_of": max(int(found[1]), 1)}
    if found := re.fullmatch(r"(\d*)\.\.(\d*)", value):
        bounds = {"at_least": found[1], "at_most": found[2]}
        return {name: int(number) for name, number in bounds.items() if number}
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise WordError(f"got {part!r}, needs numbers such as 64,128, a multiple %16, or bounds 16..256")
    return [int(number) for number in value.split(",")]


def _literal(part: str, value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise WordError(f"got {part!r}, needs JSON after := (true, 0.5, [1, 2] or a text in quotes)") from error


# --- the adapter


def call(function: Callable[..., Any], words: str = "") -> Callable[..., Any]:
    """Return an adapter that calls a function as words describe it.

    Parameters
    ----------
    function
        What computes attention.
    words
        The words of this module's table, with spaces between them.

    Returns
    -------
    Callable
        An adapter for `refattn.verify`, with the attributes `framework` and `supports`.

    Raises
    ------
    WordError
        If a word is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> import refattn as ra
    >>> from refattn.verify import adapt
    >>> def attention(queries, keys, values, is_causal=False):  # (batch, tokens, heads, width)
    ...     q, k, v = (np.moveaxis(x, 2, 1) for x in (queries, keys, values))
    ...     return np.moveaxis(ra.softmax.forward(q, k, v, causal=is_causal)[0], 1, 2)
    >>> attend = adapt.call(attention, "layout=bnhd causal=is_causal")
    >>> bool(ra.verify("softmax", attend, cases=["plain", "causal-tail"]))
    True
    """
    on_trial = words.endswith(BY_CALL)
    described = read(words.removesuffix(BY_CALL))

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return _attend(function, read(options.pop("words")) if on_trial else described, q, k, v, options)

    framework = described.framework or framework_of(function)
    attend.framework = None if framework == "numpy" else framework  # type: ignore[attr-defined]
    attend.supports = {"parameters": parameters_of(function)} if on_trial else described.supports or None  # type: ignore[attr-defined]
    attend.__name__ = getattr(function, "__name__", type(function).__name__)
    return attend


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; that of ``Function.apply`` of torch is of its forward, without its context.

    Raises
    ------
    TypeError, ValueError
        If it has none.
    """
    forward = getattr(getattr(function, "__self__", None), "forward", None)
    if getattr(function, "__name__", "") != "apply" or forward is None:
        return inspect.signature(function)
    found = inspect.signature(forward)
    return found.replace(parameters=[*found.parameters.values()][1:])


def _by_place(function: Callable[..., Any], given: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function that takes nothing by name; what is not given is its default, or None."""
    parameters = [*signature_of(function).parameters.values()]
    named = dict(zip((one.name for one in parameters), given, strict=False)) | dict(keywords)
    usual = {one.name: None if one.default is one.empty else one.default for one in parameters}
    return function(*({**usual, **named}[one.name] for one in parameters))


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a function, from its docstring where it has no signature.

    >>> from refattn.verify import adapt
    >>> adapt.parameters_of(lambda query, key, value, is_causal=False: 0)
    ['query', 'key', 'value', 'is_causal']
    """
    try:
        return [*signature_of(function).parameters]
    except (TypeError, ValueError):
        lines = str(function.__doc__ or "").strip().partition("->")[0]
        return re.findall(r"[(,]\s*\*?(\w+)\s*(?=[=,:)])", lines)


def framework_of(function: Any) -> str:
    """Return the library that a function's module has imported."""
    home = getattr(function, "__module__", None) or type(function).__module__
    root = home.partition(".")[0].replace("jaxlib", "jax")
    if root in FRAMEWORKS:
        return root
    names = vars(sys.modules.get(home, object())) if home in sys.modules else {}
    used = {getattr(x, "__name__", None) or getattr(x, "__module__", None) or "" for x in names.values()}
    roots = {str(one).partition(".")[0] for one in used}
    return next((name for name in ("torch", "jax", "cupy") if name in roots), "numpy")


def _attend(function: Any, words: Words, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    if why := refused(words, q, k, v, options):
        return Decline(why)
    xp = arrays.namespace(q)
    absent = [letter for letter in LETTERS[:2] if letter not in "".join(words.layout)]
    if absent and 0 in q.shape[:2]:
        return Decline("it is called once for each sequence or head, and there is none")
    if not absent:
        return _named(words, _once(function, words, q, k, v, options), q, v)
    # One call for each sequence, or for each head of it; what comes back is stacked.
    shared = q.shape[1] // max(k.shape[1], 1)
    parts = []
    for b in range(q.shape[0]):
        heads = range(q.shape[1]) if "h" in absent else [None]
        for h in heads:
            own = slice(None) if h is None else slice(h, h + 1)
            of_keys = slice(None) if h is None else slice(h // shared, h // shared + 1)
            given = {name: _part(name, x, b, own) for name, x in options.items()}
            one = (q[b : b + 1, own], k[b : b + 1, of_keys], v[b : b + 1, of_keys])
            parts.append(_named(words, _once(function, words, *one, given), *one[::2]))
    per = 1 if "h" not in absent else q.shape[1]
    found = {}
    for name in parts[0]:
        rows = [xp.concat([part[name] for part in parts[n : n + per]], axis=1) for n in range(0, len(parts), per)]
        found[name] = xp.concat(rows, axis=0)
    return found


def refused(words: Words, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> str:
    """Return why a call is declined; "" if it is not."""
    if unnamed := [name for name in options if name not in words.options]:
        return f"no word says which parameter takes {', '.join(unnamed)}"
    if together := [pair for pair in words.apart if {*pair} <= {*options}]:
        return f"it does not take {' and '.join(together[0])} together"
    rows, columns = q.shape[2], k.shape[2]
    sizes = {"b": q.shape[0], "h": q.shape[1], "g": k.shape[1], "nq": rows, "nk": columns, "d": q.shape[3]}
    sizes |= {"e": v.shape[3]}
    for left, right in words.equal:
        if sizes[left] != sizes[right]:
            return f"it needs {left} = {right}, not {sizes[left]} and {sizes[right]}"
    for letter, allowed in words.sizes.items():
        for one in ("nq", "nk") if letter == "n" else (letter,):
            if not _allowed(sizes[one], allowed):
                return f"it has no {one} = {sizes[one]}"
    causal, form = options.get("causal", False), words.options.get("causal", ((), ""))
    if form[0] == ("always",):  # `supports` has it as fixed, so that it is no argument
        causal = causal or ("top_left" if form[1] == "top_left" else True)
    if causal and rows != columns and form[1] != ("top_left" if causal == "top_left" else "bottom_right"):
        return (
            "it needs as many queries as keys to be causal" if form[1] == "square" else f"its causal mask is {form[1]}"
        )
    return _window_refused(words.options["window"][1], options["window"], causal) if "window" in options else ""


def _allowed(size: int, allowed: Any) -> bool:
    if not isinstance(allowed, dict):
        return size in allowed
    step, most = allowed.get("multiple_of", 1), allowed.get("at_most", size)
    return bool(size % step == 0 and allowed.get("at_least", min(size, step)) <= size <= most)


def _window_refused(form: str, window: Any, causal: Any) -> str:
    left, right = (None, None) if window is None else window
    if window is not None and form in ("int", "left") and not (causal and left is not None and right in (None, 0)):
        return f"its window is a left bound beside causal, not {window!r}" + ("" if causal else " without causal")
    return ""


def _once(function: Any, words: Words, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Any:
    """Call the function once, in its own layout and forms."""
    keywords = dict(words.literals)
    for option, (parameters, form) in words.options.items():
        keywords |= _keywords(option, parameters, form, options.get(option), q, k, option in words.full, words.layout)
    mask, bias = (options.get(name) for name in ("mask", "bias"))
    if mask is not None and bias is not None and words.options["mask"][0] == words.options["bias"][0]:
        keywords |= _keywords("bias", *words.options["bias"], hidden(bias, mask), q, k, "bias" in words.full, ())
    given = [_laid_out(x, words.layout) for x in (q, k, v)]
    if getattr(function, "__name__", "") == "apply":
        return _by_place(function, given, keywords)
    if words.names:
        return function(**{words.names.get(name, name): x for name, x in zip("qkv", given, strict=True)}, **keywords)
    return function(*given, **keywords)


def hidden(bias: Any, mask: Any) -> Any:
    """Return a bias that is -inf where a boolean mask is False.

    >>> import numpy as np
    >>> from refattn.verify import adapt
    >>> adapt.hidden(np.asarray([1.0, 2.0]), np.asarray([True, False]))
    array([  1., -inf])
    """
    xp = arrays.namespace(bias)
    return xp.where(mask, bias, xp.asarray(-math.inf, dtype=bias.dtype))


def additive(mask: Any, like: Any) -> Any:
    """Return a boolean mask as numbers to add to scores: 0 where True, -inf where False, in the type of an array.

    >>> import numpy as np
    >>> from refattn.verify import adapt
    >>> adapt.additive(np.asarray([True, False]), np.zeros(1, np.float32))
    array([  0., -inf], dtype=float32)
    """
    return hidden(arrays.namespace(like).asarray(0.0, dtype=like.dtype), mask)


def _keywords(
    option: str, parameters: tuple[str, ...], form: str, value: Any, q: Any, k: Any, full: bool, layout: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of the function that stand for one option."""
    name = parameters[0]
    if option == "causal":
        return {} if name == "always" else {name: bool(value)}
    if value is None:
        return {}
    if option == "window":
        left, right = value
        if form in ("int", "left"):
            return {name: left + 1 if form == "int" else left}
        none = {"pair": -1, "pair_none": None, "pair_large": q.shape[2] + k.shape[2]}[form]
        bounds = tuple(none if x is None else x for x in (left, right))
        return dict(zip(parameters, bounds, strict=True)) if len(parameters) == 2 else {name: bounds}
    if option == "k_lengths" and form != "counts":
        xp = arrays.namespace(value)
        seen = xp.arange(k.shape[2], dtype=value.dtype) < value[:, None]
        seen = ~seen if form == "keys_inverted" else seen
        return {name: seen if "b" in "".join(layout) else seen[0, :]}
    if option in PLANES:
        value = value[(None,) * (4 - value.ndim)]
        if full:
            value = arrays.namespace(value).broadcast_to(value, (*q.shape[:3], k.shape[2]))
        value = {"inverted": lambda: ~value, "additive": lambda: additive(value, q)}.get(form, lambda: value)()
    elif getattr(value, "ndim", 0) >= 3 and value.shape[:2] in (q.shape[:2], k.shape[:2]):
        value = _laid_out(value, layout, LETTERS[: value.ndim])  # numbers of tokens, such as a decay
    return {name: value}


def _laid_out(x: Any, layout: Sequence[str], letters: str = LETTERS) -> Any:
    """Return an array with the axes b, h, n, and d where it has one, in a layout that may lack axes of size 1."""
    xp = arrays.namespace(x)
    groups = [found for found in ("".join(one for one in group if one in letters) for group in layout) if found]
    order = [letters.index(letter) for letter in "".join(groups)]
    moved = xp.permute_dims(x, (*(n for n in range(len(letters)) if n not in order), *order))
    found = xp.reshape(moved, tuple(math.prod(x.shape[letters.index(one)] for one in group) for group in groups))
    return found.contiguous() if hasattr(found, "contiguous") else found


def _brought_back(x: Any, layout: Sequence[str], sizes: Mapping[str, int], letters: str, name: str) -> Any:
    """Return an array in a layout as one whose axes are these letters; one that is absent has size 1."""
    needs = tuple(math.prod(sizes[letter] for letter in group) for group in layout)
    if tuple(getattr(x, "shape", ())) != needs:
        got = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise ValueError(f"the function returned {name} of shape {got}, needs {needs} in the layout {_text(layout)}")
    xp = arrays.namespace(x)
    flat = "".join(layout)
    order = [letter for letter in letters if letter not in flat] + [*flat]
    apart = xp.reshape(x, tuple(sizes[letter] if letter in flat else 1 for letter in order))
    return xp.permute_dims(apart, tuple(order.index(letter) for letter in letters))


def _text(layout: Iterable[str]) -> str:
    return "".join(f"({one})" if len(one) > 1 else one for one in layout)


def _named(words: Words, returned: Any, q: Any, v: Any) -> dict[str, Any]:
    """Return what came back by name, in the layout of refattn."""
    values = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(values) < len(words.returns):
        names = ",".join(name for name, _ in words.returns)
        raise ValueError(f"the function returned {len(values)} arrays, needs {len(words.returns)}: returns={names}")
    sizes = {"b": q.shape[0], "h": q.shape[1], "n": q.shape[2], "d": v.shape[3]}
    axes = {"out": (words.out or words.layout, LETTERS), "lse": (words.lse, "bhn")}
    found = {}
    for (name, form), value in zip(words.returns, values, strict=False):
        if name in axes:
            layout, letters = axes[name]
            there = tuple(one for one in layout if {*one} <= {*"".join(words.layout)})
            value = _brought_back(value, there, sizes, letters, name)
        if name != "_":
            found[name] = value * math.log(2.0) if form == "base2" else value
    return found


def _part(option: str, x: Any, b: int, heads: slice) -> Any:
    """Return what an option is for one sequence, and for some of its heads."""
    if not hasattr(x, "ndim"):
        return x
    if option in PLANES:
        x = x[(None,) * (4 - x.ndim)]
        return x[slice(b, b + 1) if x.shape[0] > 1 else slice(None)][:, heads if x.shape[1] > 1 else slice(None)]
    return x[heads] if option == "sink" else x[b : b + 1] if x.ndim == 1 else x[b : b + 1, heads]


# --- what adapters often decline


def needs(
    q: Any,
    k: Any,
    v: Any,
    *,
    one_width: bool = False,
    no_groups: bool = False,
    square: bool = False,
    sizes: bool = False,
) -> Decline | None:
    """Return `Decline` if a call has sizes that a kernel cannot run, None otherwise.

    Parameters
    ----------
    q, k, v
        (b, h, i, d), (b, g, j, d), (b, g, j, e).
    one_width
        Whether it needs values as wide as keys, e = d.
    no_groups
        Whether it needs as many heads of keys as of queries, g = h.
    square
        Whether it needs as many queries as keys, i = j.
    sizes
        Whether it needs every axis to hold something.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.verify import adapt
    >>> adapt.needs(*np.zeros((3, 1, 2, 4, 8)), one_width=True) is None
    True
    >>> adapt.needs(np.zeros((1, 2, 3, 8)), *np.zeros((2, 1, 2, 4, 8)), square=True).reason
    'it needs nq = nk, not 3 and 4'
    """
    equal = {("e", "d"): one_width, ("h", "g"): no_groups, ("nq", "nk"): square}
    words = Words(equal=tuple(pair for pair, asked in equal.items() if asked))
    if why := refused(words, q, k, v, {}):
        return Decline(why)
    empty = sizes and 0 in (*q.shape, *k.shape, *v.shape)
    return Decline("it needs axes that hold something") if empty else None
