"""Formulas of docstrings, typeset: the notation of `docs/notation.md` as MathML, which browsers draw themselves.

Names have subscripts and superscripts (``s_ij``, ``w_o^T``, ``x_{l+1}``), a prime, a star, or the minus of ``c-_i`` is
part of a name, a ``d`` in front of a name makes it a gradient, ``sum_j`` and ``max_j`` have what they run over below
them. ``/`` makes a fraction: the product or inner product before it is the numerator, the one factor after it the
denominator. Longer words are names, too, unless the formula says something in words: "x_i if token i is kept".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "kappa": "κ", "mu": "μ", "nu": "ν",
    "tau": "τ", "phi": "φ", "psi": "ψ", "pi": "π", "eps": "ε", "lambda": "λ", "sigma": "σ", "rho": "ρ",
}  # fmt: skip
"""Names of letters; ``pi`` is a density of nodes in these formulas, not the number."""

FUNCTIONS = {"exp", "log", "max", "min", "tanh", "sin", "cos", "sqrt", "mean", "var", "sign", "clip", "tr", "softplus"}
FUNCTIONS |= {"sigmoid", "gelu", "norm", "heads", "merge"}
LARGE = {"sum": "∑", "max": "max", "sup": "sup", "prod": "∏"}
SIGNS = {"-": "−", ".": "·", "<=": "≤", ">=": "≥", "!=": "≠", "->": "→", "...": "…", "*": "∗"}
OPERATORS = {"in": "∈"}
SYMBOLS = {"inf": "∞"}
PROSE = {"if", "of", "over", "the", "at", "and", "for", "is", "with"}
"""Words of formulas that say something in words."""

WORDS = {"if", "of", "at", "is", "it", "to", "by", "or", "go", "as", "on"}
FACTORS = ("atom", "function", "dot")
"""Kinds of pieces that a product is made of."""

SCRIPTS = {"in", "out", "at", "log", "lin", "eps", "of"}
"""Short words below a name; other short scripts are the letters of axes."""


NAMES = {
    "lse",
    "scale",
    "rate",
    "start",
    "bias",
    "softcap",
    "ridge",
    "mix",
    "bandwidth",
    "weight",
    "log_z",
    "log_decay",
    "log_momentum",
    "retention",
    "step",
    "force",
    "kicked",
    "damping",
    "velocity",
    "angle",
}
"""Names of several letters which, with a ``d`` in front, are gradients."""

_TOKEN = re.compile(
    r"""(?P<quoted>"[^"]*")"""
    r"""|(?P<id>\bd?[A-Z]+\.\w+)"""
    r"""|(?P<number>\d+(?:\.\d+)?(?:!(?!=))?)"""
    r"""|(?P<name>(?:d?log_(?:z|decay|momentum)|d_[a-z]+|[A-Za-z]+\d*)(?:'+|\*(?=[\W_]|$)|-(?=_))?)"""
    r"""|(?P<sign>\.\.\.|<=|>=|!=|->|[-+/=<>|.,;:()\[\]{}_^*'])"""
    r"""|(?P<space>\s+)"""
)


@dataclass(frozen=True)
class Piece:
    """A part of a formula: its MathML, and what it is to its neighbours."""

    text: str
    kind: str = "atom"  # or "sign", "dot", "slash", "large", "words", "function", "space"
    inner: str = ""  # of what stands in parentheses, itself


def mathml(formula: str, *, inline: bool = False) -> str:
    """Return a formula as one ``<math>`` element; what was written stays as its alternative text.

    `inline` is for formulas within a sentence, which are as high as its lines.
    """
    style = "" if inline else ' displaystyle="true"'
    return f'<math{style} alttext="{escape(formula)}">{_row(_Reader(formula).pieces())}</math>'


def _row(pieces: list[Piece]) -> str:
    return f"<mrow>{''.join(_spaced(_fractions(pieces)))}</mrow>"


def _spaced(pieces: list[Piece]) -> Iterator[str]:
    """Yield the pieces; what is multiplied and what are words stands apart."""
    before = Piece("", "sign")
    for piece in pieces:
        if piece.kind == "words":
            yield f"<mtext>&#160;{piece.text}&#160;</mtext>"
        else:
            apart = before.kind in ("atom", "function") and piece.kind in ("atom", "large", "function")
            parenthesis = before.kind == "function" and piece.inner
            yield ('<mspace width="0.2em"/>' if apart and not parenthesis else "") + piece.text
        before = piece


def _fractions(pieces: list[Piece]) -> list[Piece]:
    """Put ``a / b`` one above the other: all that is multiplied above the line, one factor or a whole sum below it."""
    made: list[Piece] = []
    rest = list(pieces)
    while rest:
        piece = rest.pop(0)
        if piece.kind != "slash" or not made or not rest or made[-1].kind != "atom":
            made.append(Piece(piece.text, "sign") if piece.kind == "slash" else piece)
            continue
        above: list[Piece] = []
        while made and made[-1].kind in FACTORS:
            above.insert(0, made.pop())
        while above[0].kind == "dot":
            made.append(above.pop(0))
        below = [rest.pop(0)]
        while rest and (
            below[-1].kind == "function" or (below[0].kind == "large" and rest[0].kind in (*FACTORS, "large"))
        ):
            below.append(rest.pop(0))
        made.append(Piece(f"<mfrac><mrow>{_beside_line(above)}</mrow><mrow>{_beside_line(below)}</mrow></mfrac>"))
    return made


def _beside_line(pieces: list[Piece]) -> str:
    """Return what stands above or below the line of a fraction, which needs no parentheses around all of it."""
    return pieces[0].inner if len(pieces) == 1 and pieces[0].inner else "".join(_spaced(pieces))


class _Reader:
    """Reads a formula from left to right."""

    def __init__(self, formula: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(formula):
            match = _TOKEN.match(formula, at)
            if match is None:
                self._tokens.append(("sign", formula[at]))
                at += 1
            else:
                self._tokens.append((match.lastgroup or "", match.group()))
                at = match.end()
        self._at = 0
        self._prose = any(kind == "name" and text in PROSE for kind, text in self._tokens)

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        place = self._at + ahead
        return self._tokens[place] if place < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def pieces(self, closing: str = "") -> list[Piece]:
        """Read up to what closes, which is taken away, or to the end."""
        found: list[Piece] = []
        while (token := self._peek())[0] != "end":
            if closing and token[1] == closing:
                self._next()
                break
            found += self._piece()
        return found

    def _piece(self) -> list[Piece]:
        kind, text = self._next()
        if kind == "space":
            return []
        if kind == "quoted" or kind == "id":
            return [Piece(escape(text), "words")]
        if kind == "number":
            if self._peek()[0] == "name":  # 2h_0 below a line is one thing
                after = self._scripted(*self._name(self._next()[1]))
                return [Piece(f"<mrow><mn>{text}</mn>{after}</mrow>")]
            return [Piece(self._scripted(f"<mn>{text}</mn>", False))]
        if kind == "name":
            return [self._word(text)]
        if text in "([{":
            closing = {"(": ")", "[": "]", "{": "}"}[text]
            inner = _row(self.pieces(closing))
            high = "" if "<mfrac>" in inner else ' stretchy="false"'
            whole = f"<mrow><mo{high}>{text}</mo>{inner}<mo{high}>{closing}</mo></mrow>"
            scripted = self._factorial(self._scripted(whole, False))
            return [Piece(scripted, inner=inner if scripted == whole else "")]
        if text == "<" and self._peek()[0] != "space":
            inner = _row(self.pieces(">"))
            return [Piece(f"<mrow><mo>⟨</mo>{inner}<mo>⟩</mo></mrow>")]
        if text == "|":
            if ("sign", "|") not in self._tokens[self._at :]:
                return [Piece("<mo>|</mo>", "sign")]
            bar = '<mo stretchy="false">|</mo>'
            return [Piece(self._scripted(f"<mrow>{bar}{_row(self.pieces('|'))}{bar}</mrow>", False))]
        if text == ".":
            return [Piece(f"<mo>{SIGNS['.']}</mo>", "dot")]
        if text == "/":
            return [Piece("<mo>/</mo>", "slash")]
        return [Piece(f"<mo>{escape(SIGNS.get(text, text))}</mo>", "sign")]

    def _word(self, text: str) -> Piece:
        if text in OPERATORS:
            return Piece(f"<mo>{OPERATORS[text]}</mo>", "sign")
        if text in SYMBOLS:
            return Piece(f"<mi>{SYMBOLS[text]}</mi>")
        if text in LARGE and self._peek()[1] == "_":
            return Piece(self._under(LARGE[text]), "large")
        if text == "sum" and self._peek(1)[1] not in ("of", "over"):
            return Piece("<mo>∑</mo>", "large")
        if text in FUNCTIONS:
            if text == "sqrt" and self._peek()[1] == "(":
                self._next()
                return Piece(f"<msqrt>{_row(self.pieces(')'))}</msqrt>")
            return Piece(self._scripted(f"<mi>{text}</mi>", False), "function")
        mark = text.rstrip("'*-")
        word = len(mark) > 2 and mark not in GREEK and mark not in NAMES and not _is_gradient(mark)
        if (word and self._prose or mark in WORDS) and self._peek()[1] not in ("_", "^"):
            return Piece(escape(text), "words")
        made = self._factorial(self._scripted(*self._name(text)))
        return Piece(made, "function" if self._peek()[1] == "(" else "atom")

    def _factorial(self, made: str) -> str:
        """Put the ! that follows behind what was read."""
        return f"<mrow>{made}<mo>{self._next()[1]}</mo></mrow>" if self._peek()[1] == "!" else made

    def _name(self, text: str) -> tuple[str, bool]:
        mark = text.rstrip("'*-")
        after = text[len(mark) :].replace("'", "′").replace("*", "∗").replace("-", "⁻")
        gradient = '<mi mathvariant="normal">d</mi>' if _is_gradient(mark) else ""
        letter = re.sub("^d_?", "", mark) if gradient else mark
        letter = f"<mi>{GREEK.get(letter, letter).replace('_', ' ')}</mi>"
        if after:
            letter = f'<mrow>{letter}<mo lspace="0" rspace="0">{after}</mo></mrow>'
        return gradient + letter, bool(gradient)

    def _scripted(self, base: str, several: bool) -> str:
        """Put the scripts that follow onto what was read."""
        below = self._script("_")
        above = self._script("^")
        cut = base.index("</mi>") + len("</mi>") if several else 0
        front, base = base[:cut], base[cut:]  # the d of a gradient stands before what has scripts
        if below or above:
            tag = "msubsup" if below and above else "msub" if below else "msup"
            base = f"<{tag}>{base}{below}{above}</{tag}>"
        return f"<mrow>{front}{base}</mrow>" if several else base

    def _under(self, large: str) -> str:
        below, above = self._script("_"), self._script("^")
        if above:
            return f"<munderover><mo>{large}</mo>{below}{above}</munderover>"
        return f"<munder><mo>{large}</mo>{below}</munder>"

    def _script(self, mark: str) -> str:
        if self._peek()[1] != mark:
            return ""
        self._next()
        kind, text = self._next()
        if text in ("{", "("):
            return _row(self.pieces({"{": "}", "(": ")"}[text]))
        sign = ""
        if text == "-":
            sign, (kind, text) = "<mo>−</mo>", self._next()
        if kind == "number" and self._peek()[0] == "name" and mark == "_":
            text += self._next()[1]
        # h,e and jj' are positions on two axes
        while mark == "_" and self._peek()[1] == "," and self._peek(1)[0] == "name":
            self._next()
            text += "," + self._next()[1]
        shown = escape(GREEK.get(text, text).replace("'", "′").replace("*", "∗"))
        parts = list(shown) if len(text) <= 3 and text not in SCRIPTS else [shown]  # ij is a row and a column
        return f"<mrow>{sign}{''.join(f'<mn>{x}</mn>' if x.isdigit() else f'<mi>{x}</mi>' for x in parts)}</mrow>"


def _is_gradient(mark: str) -> bool:
    """Tell whether a name is a ``d`` and a name: ``dx``, or as in the code ``d_x``."""
    rest = mark[1:].rstrip("0123456789")
    known = len(rest) == 1 or rest in NAMES or rest in GREEK
    return mark.startswith("d_") or (mark.startswith("d") and known and mark not in GREEK)
