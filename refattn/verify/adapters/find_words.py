"""Finds by trial how a function of attention is called: its layout, and what its parameters mean.

Small calls with random numbers are compared with the reference, one question after the other: the library of its
arrays, the layout, whether it is causal in every call, then each parameter that has a name known for an option, then
the sizes and types that it runs. An answer is the one that comes nearest to the reference. So a function with an error
in one option gets the words that it was meant to have, and `verify` judges it by them.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import DTYPES, stored
from refattn.mechanisms.record import Mechanism
from refattn.verify import adapt
from refattn.verify.adapters.adapter import CallError, call
from refattn.verify.adapters.isolate import Isolated
from refattn.verify.names import meaning
from refattn.verify.outcome import Decline

FURTHER: Mapping[str, str] = {
    "causal": r"use_causal(_mask)?|causal_mask",
    "scale": r"(qk|score|logits?)_?scale|scale_factor|smscale",
    "mask": r"((key_)?padding|keys?|kv)_mask",
    "bias": r"(pair|ab|logits?|score)_?bias|attn_mask",
    "window": r"(sliding_|local_|attention_)window(_size|_length)?|window_length|local_size",
    "softcap": r"(attn_)?logits?_(soft_?)?cap(ping)?|softcapping|cap",
    "sink": r"(attention|learnable)_sinks?|sink_logits",
    "offset": r"(q|query|position)_offset",
    "k_lengths": r"((k|kv|key|key_value|context|cache|nonpad_kv)_?seq(uence)?|k|kv)_?len(gth)?s?|seqused_k",
    "q_lengths": r"((q|query)_?seq(uence)?|q)_?len(gth)?s?|seqused_q",
}
"""Option -> names of parameters that may take it, beside those of `refattn.verify.names`."""

FLAGS: Mapping[str, str] = {
    "lse": r"return_(softmax_)?(lse|log_?sum_?exp|residuals?|stats|aux)|(with|need)_lse",
    "groups": r"(enable|use)_?gqa|gqa",
}
"""What a true argument may ask for -> its names."""

LAYOUTS = ("bhnd", "bnhd", "bn(hd)", "hnd", "nhd", "(bh)nd", "nd", "nbhd", "hbnd", "bhdn")
SIZES = ((2, 3, 16, 32), (2, 4, 32, 64), (2, 4, 128, 64), (1, 4, 128, 128))
"""Batch, heads, tokens and width that are tried in turn, since many kernels have no small sizes."""

NEAR, FAR = 2e-2, 0.5
"""The largest error of the output, of its largest element, that is rounding; and one that is no attention at all."""

Arrays = dict[str, NDArray[Any]]


class NotFoundError(ValueError):
    """No words make the function attention; the message says what was tried."""


@dataclass
class Found:
    """The words of a function and how each was found.

    Attributes
    ----------
    rows
        Each word with a sentence that says how it was found; "" is no word.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, word: str, how: str) -> None:
        """Add a word; one of the same name that lists something gets what it has not."""
        name, _, value = word.partition("=")
        for n, (other, before) in enumerate(self.rows):
            if name in ("full", "needs") and other.startswith(f"{name}="):
                self.rows[n] = f"{other},{value}", f"{before}; {how}"
                return
        self.rows.append((word, how))

    @property
    def words(self) -> list[str]:
        """The words, in the order in which they were found."""
        return [word for word, _ in self.rows if word]

    @property
    def text(self) -> str:
        """The words as a shell takes them."""
        return shlex.join(self.words)

    @property
    def lines(self) -> list[str]:
        """A line for each word."""
        wide = max((len(word) for word in self.words), default=0)
        return [f"{word:{wide}}  {how}" for word, how in self.rows]


class _Trial:
    """A function that is called with other words each time, in a process of its own."""

    def __init__(self, kernel: Any, record: Mechanism) -> None:
        self.kernel, self.record, self.size = kernel, record, SIZES[0]
        self.parameters = list((kernel.adapter.supports or {}).get("parameters", []))
        self.dtype = "float32"
        self.given: tuple[str, ...] = ()  # words that the user knows
        self.always: dict[str, Any] = {}  # options of every call

    def draw(self, **changed: int) -> Arrays:
        """Return q, k and v of the current sizes, some of them changed."""
        b, h, n, d = self.size
        sizes = {"b": b, "h": h, "g": h, "nq": n, "nk": n, "d": d, "e": d} | changed
        rng = np.random.default_rng(7)
        shapes = {"q": ("h", "nq", "d"), "k": ("g", "nk", "d"), "v": ("g", "nk", "e")}
        return {x: rng.normal(size=(sizes["b"], *(sizes[one] for one in axes))) for x, axes in shapes.items()}

    def run(self, words: Iterable[str], given: Arrays, **options: Any) -> Arrays | str:
        """Return what the function gives, or why it gives nothing."""
        inputs = given | {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
        plain = self.always | {name: x for name, x in options.items() if name not in inputs}
        inputs = {name: stored(x, self.dtype) if x.dtype.kind == "f" else x for name, x in inputs.items()}
        try:
            text = shlex.join(dict.fromkeys((*self.given, *words)))
            found = call(self.kernel, inputs, {"words": text, **plain}, self.dtype)
        except CallError as error:
            return str(error)
        return found.reason if isinstance(found, Decline) else dict(found.tensors)

    def error(self, words: Iterable[str], given: Arrays, reading: Mapping[str, Any], **options: Any) -> float | str:
        """Return how far the output is from that of a reading of the options, or why there is none."""
        found = self.run(words, given, **options)
        return found if isinstance(found, str) else distance(found["out"], self.expected(given, reading)["out"])

    def expected(self, given: Arrays, options: Mapping[str, Any]) -> Arrays:
        """Return the reference's results in float64."""
        assert self.record.core is not None
        wide = {name: x.astype(np.float64) for name, x in given.items()}
        out, saved = self.record.core.forward(**wide, **{**self.always, **options})
        return {"out": out} | {name: getattr(saved, name) for name in self.record.outputs}


def distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest error as a share of the largest element; infinite for another shape, or a NaN."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    largest = float(np.max(np.abs(expected), initial=0.0))
    return float(np.max(np.abs(found - expected), initial=0.0)) / max(largest, 1e-30)


def find(spec: str, record: Mechanism, *, given: Sequence[str] = (), seconds: float = 60.0) -> Found:
    """Return the words with which a function is this mechanism, and how each was found.

    Parameters
    ----------
    spec
        ``MODULE:NAME`` or ``FILE.py:NAME``.
    record
        The mechanism.
    given
        Words that are known; the others are found.
    seconds
        The limit of each call.

    Raises
    ------
    WordError
        If one that is given is none.
    NotFoundError
        If it is no such attention in any layout that is tried.
    LoadError
        If it cannot be loaded.
    """
    adapt.read(shlex.join(given))
    named = {word.partition("=")[0]: word.partition("=")[2] for word in given}
    nearest: list[tuple[float, str]] = []
    raised: dict[str, str] = {}
    for framework in (named["framework"],) if "framework" in named else ("", "numpy", "torch", "jax"):
        with ExitStack() as stack:
            first = f" framework={framework}" if framework else " layout=bhnd"
            kernel = stack.enter_context(Isolated(f"{spec}{first}{adapt.BY_CALL}", seconds))
            trial = _Trial(kernel, record)
            trial.given = tuple(given)
            base = _base(trial, nearest, raised, framework)
            if base is not None:
                for word in given:
                    if word not in base.words:
                        base.add(word, "given")
                _options(trial, base)
                _sizes(trial, base)
                return base
    layouts = (named["layout"],) if "layout" in named else LAYOUTS
    tried = f"tried the layouts {', '.join(layouts)} with arrays of NumPy, torch and JAX"
    if nearest:
        error, words = min(nearest)
        raise NotFoundError(f"{spec} is no {record.name} attention: {tried}; nearest is {words}, off by {error:.2g}")
    reasons = "; ".join(f"{words}: {why}" for words, why in [*raised.items()][:3])
    raise NotFoundError(f"{spec} returns no attention: {tried}; {reasons}")


def _base(trial: _Trial, nearest: list[tuple[float, str]], raised: dict[str, str], framework: str) -> Found | None:
    """Return the words without which nothing runs: the library, the layout, the type, and causal in every call."""
    for dtype, size in itertools.product(("float32", "float16", "bfloat16"), SIZES):
        trial.size, trial.dtype = size, dtype
        given = trial.draw()
        ran = False
        for layout in _given(trial, "layout") or LAYOUTS:
            words = [f"framework={framework}"] * bool(framework) + _arrays(trial) + [f"layout={layout}"]
            words += [f"{name}:=true" for name in _named(trial, FLAGS["lse"])]
            found = trial.run([*words, "returns=out"], given)
            if isinstance(found, str):
                raised.setdefault(" ".join(words), found)
                continue
            ran = True
            for causal in (False, True):
                meaning = "causal in every call" if causal else "every query sees every key"
                error = distance(found["out"], trial.expected(given, {"causal": causal} if causal else {})["out"])
                if error < FAR:
                    nearest.append((error, f"{' '.join(words)}, {meaning}"))
                if error < NEAR:
                    base = Found()
                    base.add(words[0] if framework else "", f"arrays of {framework or 'the library of its module'}")
                    for word in _arrays(trial):
                        base.add(word, "the parameter's name")
                    sizes = ", ".join(map(str, size))
                    base.add(
                        "" if _given(trial, "layout") else f"layout={layout}",
                        f"(b, h, n, d) = ({sizes}): {meaning}, off by {error:.1e}",
                    )
                    if causal:
                        _always(trial, base)
                    return base
        if ran:
            break  # it has these sizes, so that others show no more
    return None


def _given(trial: _Trial, name: str) -> tuple[str, ...]:
    """Return the value of a word that the user has given, if there is one."""
    return tuple(word.partition("=")[2] for word in trial.given if word.startswith(f"{name}="))


def _always(trial: _Trial, base: Found) -> None:
    """Add how a function is aligned that is causal in every call."""
    for form in ("bottom_right", "top_left"):
        causal = "top_left" if form == "top_left" else True
        given = trial.draw(nk=2 * trial.size[2])
        word = f"causal=always:{form}"
        error = trial.error([*base.words, word], given, {"causal": causal}, causal=causal)
        if not isinstance(error, str) and error < NEAR:
            trial.always = {"causal": causal}
            base.add(word, f"with twice as many keys, off by {error:.1e}")
            return
    trial.always = {"causal": True}
    base.add("causal=always:square", "it has no other number of keys than of queries")
    base.add("needs=nq=nk", "see causal")


def _arrays(trial: _Trial) -> list[str]:
    """Return words for q, k and v if these are not the first three parameters in this order."""
    names = {x: _may_take(trial, x) for x in "qkv"}
    first = trial.parameters[:3]
    if any(_given(trial, x) for x in "qkv") or not all(names.values()) or [each[0] for each in names.values()] == first:
        return []
    return [f"{x}={each[0]}" for x, each in names.items()]


def _may_take(trial: _Trial, ours: str) -> list[str]:
    """Return the parameters whose names say that they may take an argument or option."""
    known = [name for name in trial.parameters if meaning(name, (ours,)) == ours]
    return known + [name for name in _named(trial, FURTHER.get(ours, "")) if name not in known]


def _named(trial: _Trial, pattern: str) -> list[str]:
    return [name for name in trial.parameters if re.fullmatch(pattern, name.lower())]


@dataclass(frozen=True)
class _Question:
    """One way to pass an option: a word, and a call that shows it; the reference is given the same options."""

    word: str
    options: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)


def _questions(trial: _Trial, option: str, name: str, forms: tuple[str, ...] = ()) -> Iterator[_Question]:
    """Yield the forms, or these alone, in which a parameter may take an option; the likeliest first."""
    b, h, n, _ = trial.size
    rng = np.random.default_rng(3)
    mask = rng.random((b, 1, n, n)) < 0.7
    mask[..., 0] = True
    if option == "causal":
        for form, sizes in (("bottom_right", {"nk": 2 * n}), ("top_left", {"nk": 2 * n}), ("square", {})):
            causal = "top_left" if form == "top_left" else True
            yield _Question(f"causal={name}:{form}", {"causal": causal}, sizes)
    elif option == "mask":
        for form in [form for form in forms if form in adapt.FORMS["mask"]] or adapt.FORMS["mask"]:
            yield _Question(f"mask={name}:{form}", {"mask": mask})
    elif option == "window":
        for form in ("pair", "pair_none", "pair_large"):
            yield _Question(f"window={name}:{form}", {"window": (3, None)})
        for form in ("int", "left") if "+" not in name else ():
            yield _Question(f"window={name}:{form}", {"window": (4, None), "causal": True})
    elif option in ("q_lengths", "k_lengths"):
        lengths = np.arange(n - b + 1, n + 1, dtype=np.int64)
        for form in [form for form in forms if form in adapt.FORMS["k_lengths"]] or ["counts"]:
            word = f"{option}={name}" + (f":{form}" if form != "counts" else "")
            yield _Question(word, {option: lengths})
    else:
        values = {"scale": 0.07, "softcap": 0.5, "bias": rng.normal(size=(b, h, n, n)), "offset": 3}
        values["sink"] = np.linspace(-1.0, 2.0, h)
        more = {"causal": True} if option == "offset" else {}
        yield _Question(f"{option}={name}", {option: values[option], **more})


def _options(trial: _Trial, base: Found) -> None:
    """Add the words of options whose parameters have a known name."""
    for name in _named(trial, FLAGS["groups"]):
        base.add(f"{name}:=true", "grouped heads, as its name says")
    _lse(trial, base)
    for option in FURTHER:
        # A mask serves as a bias, too: one that is called a bias comes first.
        names = sorted(_may_take(trial, option), key=lambda name: option == "bias" and "mask" in name)
        names += _bounds(trial) if option == "window" else []
        for name in names if option in trial.record.defaults else ():
            if not _has(base, option):
                _one_option(trial, base, option, name)
    if not _has(base, "mask") and not _has(base, "k_lengths") and "k_lengths" in trial.record.defaults:
        for name in _may_take(trial, "mask")[:1]:
            _one_option(trial, base, "k_lengths", name, "keys", "keys_inverted")
    _together(trial, base)
    taken = {name for word in base.words for name in re.split(r"[=:+]", word)} | {*trial.parameters[:3]}
    if unknown := [name for name in trial.parameters if name not in taken]:
        base.add("", f"left at their defaults: {', '.join(unknown)}")


def _has(base: Found, name: str) -> bool:
    """Tell whether there is a word of this name."""
    return any(word.startswith(f"{name}=") for word in base.words)


def _bounds(trial: _Trial) -> list[str]:
    """Return two parameters that may be the bounds of a window: with left and right in their names."""
    left = [name for name in trial.parameters if "left" in name]
    return [f"{name}+{other}" for name in left if (other := name.replace("left", "right")) in trial.parameters]


def _together(trial: _Trial, base: Found) -> None:
    """Say which options are right alone and not beside causality: a convention of its own, or an error."""
    alone = {
        option: word for option in ("mask", "bias", "k_lengths") for word in base.words if word.startswith(f"{option}=")
    }
    if not _has(base, "causal") or trial.always:
        return
    form = next(word.rpartition(":")[2] for word in base.words if word.startswith("causal="))
    causal = {"causal": "top_left" if form == "top_left" else True}
    for option, word in alone.items():
        question = next(_questions(trial, option, word.partition("=")[2].partition(":")[0], (word.rpartition(":")[2],)))
        given = trial.draw()
        both = {**question.options, **causal}
        found = trial.error(base.words, given, both, **both)
        if isinstance(found, str) or found > NEAR:
            how = f"raise ({found[:80]})" if isinstance(found, str) else f"are off by {found:.2g}"
            base.add(
                "", f"causal and {option} are right alone; together they {how}; apart=causal+{option} declines that"
            )


def _one_option(trial: _Trial, base: Found, option: str, name: str, *forms: str) -> None:
    """Add the form of an option that comes nearest to the reference, or say why there is none."""
    tried: list[tuple[float, int, _Question]] = []
    why, ignored = "", False
    for order, question in enumerate(_questions(trial, option, name, forms)):
        if option != "causal" and "causal" in question.options and not _has(base, "causal"):
            continue
        given = trial.draw(**question.sizes)
        for full in ("", f"full={option}") if option in ("mask", "bias") else ("",):
            words = [*base.words, question.word, *([full] if full else [])]
            error = trial.error(words, given, question.options, **question.options)
            if isinstance(error, str):
                why = why or error
                continue
            if error < NEAR and question.word.endswith(":square") and tried:  # with more keys it runs, and is wrong
                error, _, question = min(tried, key=lambda one: one[:2])
                how = f"right with as many queries as keys; with twice as many keys off by {error:.2g}"
                base.add(question.word, f"{how}; causal={name}:square declines those")
                return
            if error < NEAR:
                how = adapt.FORMS.get(option, {}).get(_form(question), "as here")
                base.add(question.word, f"{how}, off by {error:.1e}")
                base.add(full, "its arrays do not broadcast") if full else None
                return
            tried.append((error, order, question))
            without = trial.error(words, given, {}, **question.options)
            ignored = ignored or (order == 0 and not isinstance(without, str) and without < NEAR)
    if ignored:
        question = tried[0][2]
        base.add(question.word, f"{name} changes nothing: {option} is ignored, off by {tried[0][0]:.2g}")
    elif tried and not forms:
        error, _, question = min(tried, key=lambda one: one[:2])
        base.add(question.word, f"no form of {name} agrees with {option}; this one is nearest, off by {error:.2g}")
    elif why and not forms:
        base.add("", f"{name} is not taken for {option}: {why[:200]}")


def _form(question: _Question) -> str:
    return question.word.rpartition(":")[2]


def _lse(trial: _Trial, base: Found) -> None:
    """Add what a tuple that the function returns holds beside the output."""
    given = trial.draw()
    flags = [f"{name}:=true" for name in _named(trial, FLAGS["lse"])]
    if "lse" not in trial.record.outputs or _has(base, "returns"):
        return
    expected = trial.expected(given, {})["lse"]
    for returns, axes in itertools.product(
        ("out,lse", "out,lse:base2", "out,_,lse", "out,_,lse:base2"), ("bhn", "bnh", "(bh)n")
    ):
        words = [*flags, f"returns={returns}", *([f"lse={axes}"] if axes != "bhn" else [])]
        found = trial.run([*base.words, *words], given)
        if not isinstance(found, str) and "lse" in found and distance(found["lse"], expected) < NEAR:
            for word in words:
                base.add(word, "the log-sum-exp agrees" if word.startswith("returns") else "for the log-sum-exp")
            return


def _sizes(trial: _Trial, base: Found) -> None:
    """Add the sizes and types that the function runs."""
    _, h, n, d = trial.size
    if not any("nq=nk" in word for word in base.words):
        _equal(trial, base, "nq=nk", {"nk": 2 * n})
    _equal(trial, base, "e=d", {"e": 2 * d})
    _equal(trial, base, "h=g", {"h": 2 * h})
    if any("h=g" in word for word in base.words if word.startswith("needs=")):
        _tiled(trial, base)
    for letter, name, now in (("n", "tokens", n), ("d", "width", d)):
        if _has(base, letter):
            continue
        for size in (5 if letter == "n" else 24, 16, 32, 64, 128):
            changed = {"nq": size, "nk": size} if letter == "n" else {"d": size, "e": size}
            error = trial.error(base.words, trial.draw(**changed), {})
            if not isinstance(error, str) and error < NEAR:
                if size not in (5, 24):
                    base.add(f"{letter}=%{size}", f"{name}: {size} runs, smaller numbers do not")
                break
            if size == now:
                base.add(f"{letter}=%{size}", f"{name}: {size} runs, smaller numbers do not")
                break
    if _has(base, "dtypes"):
        return
    kept, usual = trial.dtype, []
    for dtype in DTYPES:
        trial.dtype = dtype
        error = trial.error(base.words, trial.draw(), {})
        if not isinstance(error, str) and error < max(NEAR, 0.1):
            usual.append(dtype)
    trial.dtype = kept
    if len(usual) < len(DTYPES) and usual:
        base.add(f"dtypes={','.join(usual)}", "other types raise, or are far off")


def _tiled(trial: _Trial, base: Found) -> None:
    """Say if grouped heads run, and query head i reads key head i mod g."""
    given = trial.draw(h=2 * trial.size[1])
    found = trial.run([word for word in base.words if not word.startswith("needs=")], given)
    tiled = given | {name: np.concatenate([given[name]] * 2, axis=1) for name in "kv"}
    if not isinstance(found, str) and distance(found["out"], trial.expected(tiled, {})["out"]) < NEAR:
        base.add("", "grouped heads run, tiled: query head i reads head i mod g; here neighbours share")


def _equal(trial: _Trial, base: Found, pair: str, changed: Mapping[str, int]) -> None:
    """Add that two sizes have to be equal if a call in which they differ raises, or is no attention."""
    error = trial.error(base.words, trial.draw(**changed), {})
    if isinstance(error, str) or error > FAR:
        how = f"raises otherwise ({error[:120]})" if isinstance(error, str) else f"is off by {error:.2g} otherwise"
        base.add(f"needs={pair}", how)
