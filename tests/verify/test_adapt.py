"""A function called through words, and the words found by trial."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn.mechanisms import registry
from refattn.verify import adapt
from refattn.verify.adapters.find_words import find
from tests.cli import command

SOFTMAX = ra.mechanism("softmax")
UNNAMED = "no word says which parameter takes"
QUICK = ("--quick", "--dtype", "float32", "--in-process")

FUNCTIONS = '''
import numpy as np
import refattn as ra


def attention(q, k, v, **options):
    return ra.softmax.forward(q, k, v, **options)


def moved(queries, keys, values, is_causal=False, sm_scale=None, sliding_window=None):
    """(batch, tokens, heads, width), causal top left, a window of W keys."""
    q, k, v = (np.moveaxis(x, 2, 1) for x in (queries, keys, values))
    window = None if sliding_window is None else (sliding_window - 1, None)
    causal = "top_left" if is_causal else False
    out, _ = attention(q, k, v, causal=causal, scale=sm_scale, window=window)
    return np.moveaxis(out, 1, 2)


def one(q, k, v):
    return attention(q[None, None], k[None, None], v[None, None])[0][0, 0]


def merged(v, q, k, attn_mask=None, return_lse=False):
    """(batch, tokens, heads width), a mask that is added, and lse to base 2 of (batch, tokens, heads)."""
    b, n, _ = q.shape
    q, k, v = (np.moveaxis(x.reshape(b, x.shape[1], 3, -1), 2, 1) for x in (q, k, v))
    bias = None if attn_mask is None else np.broadcast_to(attn_mask, (b, 3, n, k.shape[2]))
    out, saved = attention(q, k, v, bias=bias)
    out = np.moveaxis(out, 1, 2).reshape(b, n, -1)
    return (out, np.moveaxis(saved.lse, 1, 2) / np.log(2.0)) if return_lse else out


def always(q, k, v):
    return attention(q, k, v, causal=True)[0]


def hidden(q, k, v, mask=None, bias=None):
    """True hides; arrays in all of their axes, no grouped heads, one width, multiples of 16 tokens."""
    if mask is not None and mask.shape != (*q.shape[:3], k.shape[2]):
        raise ValueError("mask: needs all axes")
    if q.shape[1] != k.shape[1] or v.shape[3] != q.shape[3] or q.shape[2] % 16 or q.dtype == np.float64:
        raise ValueError("sizes")
    return attention(q, k, v, mask=None if mask is None else ~mask, bias=bias)[0]


def leaking(q, k, v, window=None, causal=False):
    """A window that is one key too wide."""
    window = None if window is None else (None if window[0] is None else window[0] + 1, window[1])
    return attention(q, k, v, window=window, causal=causal)[0]


def padded(q, k, v, attn_mask=None, left=None, right=None, causal=False, attn_bias=None):
    """A mask of keys, True hides; two bounds of a window, -1 is none; a mask of keys beside causal is dropped."""
    if attn_mask is not None:
        attn_mask = None if causal else ~attn_mask[:, None, None, :]
    window = (None if left in (None, -1) else left, None if right in (None, -1) else right)
    window = None if window == (None, None) else window
    return attention(q, k, v, mask=attn_mask, window=window, causal=causal, bias=attn_bias)[0]


def deaf(q, k, v, mask=None):
    """A mask that is ignored; grouped heads are tiled."""
    times = q.shape[1] // k.shape[1]
    return attention(q, np.concatenate([k] * times, axis=1), np.concatenate([v] * times, axis=1))[0]


def square(q, k, v, causal=False):
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError("causal: needs as many queries as keys")
    return attention(q, k, v, causal=causal)[0]


def astray(q, k, v, key_mask=None, causal=False):
    """Right with as many queries as keys; its causal mask is shifted the wrong way with more keys."""
    shift = q.shape[2] - k.shape[2]
    mask = np.tril(np.ones((q.shape[2], k.shape[2]), bool), shift) if causal else np.ones((1, 1), bool)
    return attention(q, k, v, mask=mask if key_mask is None else mask & key_mask[:, None, None, :])[0]


class Function:
    @staticmethod
    def forward(context, q, k, v, causal=False, scale=None):
        return attention(q, k, v, causal=causal, scale=scale)[0]

    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)


def mean(q, k, v):
    return np.zeros_like(q) + v.mean(axis=2, keepdims=True)
'''


@pytest.fixture
def of_file(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


def test_the_options_are_those_of_all_mechanisms() -> None:
    """They are written out, since to load the records would load the definitions."""
    records = [registry.mechanism(name) for name in registry.list_mechanisms()]
    assert {*adapt.OPTIONS} == {name for one in records for name in one.defaults} - {"implementation", "chunk"}


@pytest.mark.parametrize(
    ("name", "words", "declined"),
    [
        ("moved", "layout=bnhd causal=is_causal:top_left scale=sm_scale window=sliding_window:int", UNNAMED),
        ("one", "layout=nd", UNNAMED),
        ("merged", "q=q k=k v=v layout=bn(hd) mask=attn_mask:additive bias=attn_mask needs=h=g h=3 b=2", ""),
        ("always", "causal=always:bottom_right", UNNAMED),
        ("square", "causal=causal:square", UNNAMED),
        ("padded", "k_lengths=attn_mask:keys_inverted causal=causal apart=causal+k_lengths", UNNAMED),
        ("Function.apply", "causal=causal scale=scale", UNNAMED),
        ("hidden", "mask=mask:inverted bias=bias full=mask,bias n=%16 d=32,64 needs=e=d,h=g,nq=nk", UNNAMED),
    ],
)
def test_functions_in_words(name: str, words: str, declined: str, of_file: Callable[[str], str]) -> None:
    result = command.run("verify", "softmax", "--call", of_file(name), *words.split(), *QUICK)
    assert result.exit_code == 0, result.stdout
    assert declined in result.stdout and "agrees" in result.stdout


def test_causal_cases_run_as_the_function_can(of_file: Callable[[str], str]) -> None:
    """Top left, or with as many queries as keys: they are not declined one by one."""
    for name, words in (("square", "causal=causal:square"), ("moved", "layout=bnhd causal=is_causal:top_left")):
        result = command.run("verify", "softmax", "--call", of_file(name), *words.split(), *QUICK)
        assert re.search(r"^causal +[1-9]\d* +[1-9]", result.stdout, re.MULTILINE), result.stdout
    with pytest.raises(ValueError, match="supports: got causal = 'left', needs top_left or square"):
        ra.verify("softmax", type("Attend", (), {"supports": {"causal": "left"}, "forward": lambda self, q, k, v: q})())


def test_what_a_function_says_is_no_code(tmp_path: Path, monkeypatch: Any) -> None:
    """Its messages stand in the adapter that is written, which is imported afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "says.py").write_text(
        "import refattn as ra\n\n\ndef attend(q, k, v, mask=None):\n    if mask is not None:\n"
        '        raise ValueError(\'"""\\nopen("evil", "w")\\n"""\')\n'
        "    return ra.softmax.forward(q, k, v)[0]\n"
    )
    assert command.run("verify", "softmax", "--call", "says.py:attend", "--adapt", *QUICK).exit_code == 0
    text = (tmp_path / "attend_attend.py").read_text()
    assert "evil" in text and [type(one).__name__ for one in ast.parse(text).body] == [
        *("Expr", "ImportFrom", "Assign", "Assign")
    ]


def test_words_that_are_known_stay(of_file: Callable[[str], str]) -> None:
    known = ("framework=numpy", "layout=bhnd", "causal=causal:top_left", "returns=out", "d=32,64", "dtypes=float32")
    found = find(of_file("padded"), SOFTMAX, given=known)
    assert {*known, "window=left+right:pair"} <= {*found.words}
    names = [word.partition("=")[0] for word in found.words]
    assert len(names) == len({*names})
    with pytest.raises(adapt.WordError, match="did you mean causal"):
        find(of_file("padded"), SOFTMAX, given=("casual=causal",))


def test_words_find_what_is_wrong(of_file: Callable[[str], str]) -> None:
    report = ra.verify(
        "softmax", f"{of_file('leaking')} window=window:pair_none causal=causal", cases=["window-causal", "plain"]
    )
    assert not report.passed and "window one wider" in repr(report)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layout=bnh", "layout=bnh"),
        ("layout=bbnd", "each once"),
        ("casual=is_causal", "did you mean causal"),
        ("causal=is_causal:topleft", "did you mean top_left"),
        ("framework=tensorflow", "one of numpy, torch, jax, cupy"),
        ("scale=s:float", "needs no form"),
        ("needs=e", "equal sizes"),
        ("n=sixteen", "a multiple %16"),
        ("flag:=yes", "needs JSON"),
        ("returns=out,lse:base10", "out,lse:base2"),
        ("dtypes=fp8", "one of float64"),
        ("layout", "WORD=VALUE"),
        ("layout='bhnd", "matching quotes"),
    ],
)
def test_a_word_that_is_none_is_named(words: str, message: str) -> None:
    with pytest.raises(adapt.WordError, match=message.replace("(", r"\(")):
        adapt.read(words)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations("bhnd"), merge=st.integers(0, 3), sizes=st.tuples(*[st.integers(1, 4)] * 4))
def test_every_layout_comes_back(order: list[str], merge: int, sizes: tuple[int, ...]) -> None:
    """An array that is laid out and brought back is what it was, in any order of axes, two of them merged or none."""
    groups = (*order[:merge], "".join(order[merge : merge + 2]), *order[merge + 2 :]) if merge < 3 else tuple(order)
    x = np.random.default_rng(0).normal(size=sizes)
    there = adapt._laid_out(x, groups)
    assert there.ndim == len(groups)
    named = dict(zip("bhnd", sizes, strict=True))
    np.testing.assert_array_equal(adapt._brought_back(there, groups, named, "bhnd", "out"), x)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moved", "layout=bnhd causal=is_causal:top_left scale=sm_scale window=sliding_window:int"),
        ("one", "layout=nd"),
        ("merged", "q=q k=k v=v layout=bn(hd) return_lse:=true returns=out,lse:base2 lse=bnh mask=attn_mask:additive"),
        ("always", "layout=bhnd causal=always:bottom_right"),
        ("hidden", "layout=bhnd mask=mask:inverted full=mask bias=bias n=%16 needs=e=d,h=g dtypes=float32,float16"),
        ("leaking", "layout=bhnd causal=causal:bottom_right window=window:pair_none"),
        (
            "padded",
            "k_lengths=attn_mask:keys_inverted window=left+right:pair causal=causal:bottom_right bias=attn_bias",
        ),
        ("deaf", "mask=mask:bool needs=h=g"),
        ("square", "causal=causal:square"),
        ("astray", "causal=causal:bottom_right k_lengths=key_mask:keys"),
        ("Function.apply", "causal=causal:bottom_right scale=scale"),
    ],
)
def test_words_are_found(name: str, words: str, of_file: Callable[[str], str]) -> None:
    found = find(of_file(name), SOFTMAX)
    assert {*shlex.split(words)} <= {*found.words}, found.lines
    assert adapt.read(found.text)
    said = {
        "leaking": "no form of window agrees",
        "padded": "causal and k_lengths are right alone; together they are off by",
        "astray": "right with as many queries as keys; with twice as many keys off by",
        "deaf": "mask changes nothing: mask is ignored",
    }
    assert said.get(name, "") in " ".join(found.lines)
    assert ("query head i reads head i mod g" in " ".join(found.lines)) is (name == "deaf")


@pytest.mark.parametrize(
    ("library", "name", "words"),
    [
        (
            "torch",
            "torch.nn.functional:scaled_dot_product_attention",
            "layout=bhnd enable_gqa:=true causal=is_causal:top_left scale=scale mask=attn_mask:bool bias=attn_mask",
        ),
        (
            "jax",
            "jax.nn:dot_product_attention",
            "layout=bnhd return_residual:=true returns=out,lse lse=bnh causal=is_causal:top_left scale=scale "
            "mask=mask:bool bias=bias window=local_window_size:pair_large needs=e=d",
        ),
    ],
)
@pytest.mark.slow
def test_words_of_libraries_are_found(library: str, name: str, words: str) -> None:
    pytest.importorskip(library)
    found = find(name, SOFTMAX)
    assert {*shlex.split(words)} <= {*found.words}, found.lines


def test_what_is_no_attention_has_no_words(of_file: Callable[[str], str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = command.refused("verify", "softmax", "--call", of_file("mean"), "--adapt")
    assert "no attention: tried the layouts" in message
    assert not [*tmp_path.glob("attend_*")]


def test_from_the_command_line(of_file: Callable[[str], str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    moved = ("--call", "mine.py:moved")
    assert command.run("verify", "softmax", *moved, "layout=bnhd", *QUICK).exit_code == 0
    adapted = command.run("verify", "softmax", *moved, "--adapt", *QUICK)
    assert adapted.exit_code == 0 and "wrote attend_moved.py" in adapted.stderr
    assert command.run("verify", "softmax", "--impl", "attend_moved.py:attend", *QUICK).exit_code == 0
    for words, message in (
        ((*moved, "--adapt"), "there is attend_moved.py"),
        ((*moved, "layout=bnhd", "--impl", "mine.py:one"), "got --impl, too"),
        (("--impl", "mine.py:one", "layout=nd"), "needs --call"),
        (("--impl", "mine.py:one", "--adapt"), "needs --call"),
        ((*moved, "layuot=bnhd"), "did you mean layout"),
        ((*moved, "layuot=bnhd", "--adapt", "--in-process"), "there is attend_moved.py"),
    ):
        assert message in command.refused("verify", "softmax", *words)
