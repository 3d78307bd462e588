"""MathML of a formula, read back as the text that it shows: every fraction and every group in parentheses."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from refattn.explorer.mathml import GREEK, LARGE, SIGNS, mathml

_SIGNS = {shown: sign for sign, shown in SIGNS.items()} | {"′": "'", "⟨": "<", "⟩": ">", "∞": "inf", "⁻": "-"}
_LARGE = {shown: name for name, shown in LARGE.items()}


def read_back(formula: str, known: set[str]) -> str:
    """Return what the typeset formula says; of names that look alike, as eps and epsilon do, the known one."""
    text = " ".join(_text(ElementTree.fromstring(mathml(formula)), known).split())
    for name in (name for name in known if name.startswith("d_")):  # it shows no line below the d
        text = re.sub(rf"\bd{name[2:]}(?![A-Za-z])", name, text)
    return text


def _text(element: ElementTree.Element, known: set[str]) -> str:
    parts = [_text(each, known) for each in element]
    if element.tag == "mfrac":
        return f" (({parts[0]}) / ({parts[1]})) "
    if element.tag == "msqrt":
        return f"sqrt({''.join(parts)})"
    if element.tag in ("msub", "msup", "msubsup", "munder", "munderover"):
        below = "" if element.tag == "msup" else parts[1]
        above = "" if element.tag in ("msub", "munder") else parts[-1]
        return parts[0] + _script("_", below) + _script("^", above) + (" " if element.tag == "munder" else "")
    if element.tag == "mi":
        return _name(element.text or "", known)
    if element.tag == "mo":
        sign = element.text or ""
        written = _LARGE.get(sign, _SIGNS.get(sign, sign))
        return f" {written} " if sign in "+−·" else written
    if element.tag == "mspace":
        return " "
    if element.tag == "mtext":
        return f" {(element.text or '').strip(chr(160))} "
    return "".join(parts) or element.text or ""


def _script(mark: str, inner: str) -> str:
    inner = inner.replace(" ", "")
    return "" if not inner else f"{mark}({inner})" if re.search(r"[-+/]", inner[1:]) else mark + inner


def _name(shown: str, known: set[str]) -> str:
    alike = [name for name, letter in GREEK.items() if letter == shown]
    return next((name for name in alike if name in known), (alike or [shown.replace(" ", "_")])[0])
