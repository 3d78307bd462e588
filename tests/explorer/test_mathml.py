"""Formulas, typeset."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

import refattn as ra
from refattn.equations import declared
from refattn.explorer.mathml import mathml


def tree(formula: str) -> ElementTree.Element:
    return ElementTree.fromstring(mathml(formula))


def letters(text: str) -> str:
    greek = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "κ": "kappa", "μ": "mu", "ν": "nu"}
    greek |= {
        "λ": "lambda",
        "σ": "sigma",
        "ρ": "rho",
        "τ": "tau",
        "φ": "phi",
        "ψ": "psi",
        "π": "pi",
        "∑": "sum",
        "∈": "in",
        "∞": "inf",
    }
    for sign, name in greek.items():
        text = text.replace(sign, name)
    return re.sub(r"[^A-Za-z0-9]|eps(ilon)?|sqrt", "", text)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_no_letter_is_lost(name: str) -> None:
    record = ra.mechanism(name)
    grown = {id: formula for module in record.extra_modules for id, formula in declared(module).items()}
    for id, formula in (record.equations | grown).items():
        made = tree(formula)
        first = re.split(r" {2,}", formula)[0]  # what follows are remarks
        assert not {"^", "_"} & set(re.sub('"[^"]*"', "", "".join(tree(first).itertext()))), id
        assert letters("".join(made.itertext())) == letters(formula), id
        assert made.attrib["alttext"] == formula


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_the_whole_product_before_a_slash_stands_above_the_line(name: str) -> None:
    record = ra.mechanism(name)
    definition = declared(record.definition) if record.definition is not None else {}
    grown = {
        f"{id} of {module.__name__}": text for module in record.extra_modules for id, text in declared(module).items()
    }
    for id, formula in (
        record.equations | grown | {f"{id} of the definition": x for id, x in definition.items()}
    ).items():
        for row in tree(re.split(r" {2,}", formula)[0]).iter():
            pieces = [each for each in row if each.tag != "mspace"]
            for before, piece in pairwise(pieces):
                if piece.tag == "mfrac":
                    assert before.tag in ("mo", "munder", "munderover", "mtext") and before.text != "·", (id, formula)
                assert piece.text != "!" or len(pieces) == 2, (id, formula)
                assert piece.text != "/" or before.tag == "mtext", (id, formula)  # words have no line


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        ("s_ij", "msub(mi:s mrow(mi:i mi:j))"),
        ("a / b", "mfrac(mrow(mi:a) mrow(mi:b))"),
        ("a b / c", "mfrac(mrow(mi:a mspace mi:b) mrow(mi:c))"),
        ("a . b / c d", "mfrac(mrow(mi:a mo:· mi:b) mrow(mi:c)) mspace mi:d"),
        ("-a b / c", "mo:− mfrac(mrow(mi:a mspace mi:b) mrow(mi:c))"),
        (
            "x^(p-1) / (p-1)!",
            "mfrac(mrow(msup(mi:x mrow(mi:p mo:− mn:1))) mrow(mrow(mrow(mo:( mrow(mi:p mo:− mn:1) mo:)) mo:!)))",
        ),
        (
            "(a + b)! / (c + d)",
            "mfrac(mrow(mrow(mrow(mo:( mrow(mi:a mo:+ mi:b) mo:)) mo:!)) mrow(mrow(mi:c mo:+ mi:d)))",
        ),
        ("|x|^2 / d", "mfrac(mrow(msup(mrow(mo:| mrow(mi:x) mo:|) mrow(mn:2))) mrow(mi:d))"),
        ("x^r / r!", "mfrac(mrow(msup(mi:x mrow(mi:r))) mrow(mrow(mi:r mo:!)))"),
        ("x^2 / 2!", "mfrac(mrow(msup(mi:x mrow(mn:2))) mrow(mn:2!))"),
        ("p*_i", "msub(mrow(mi:p mo:∗) mrow(mi:i))"),
        ("(a + b) / 2", "mfrac(mrow(mrow(mi:a mo:+ mi:b)) mrow(mn:2))"),
        ("a / sum_l exp(b)", "mfrac(mrow(mi:a) mrow(munder(mo:∑ mrow(mi:l)) mi:exp mrow(mo:( mrow(mi:b) mo:))))"),
        ("dq_i", "mrow(mi:d msub(mi:q mrow(mi:i)))"),
        ("sqrt(d)", "msqrt(mrow(mi:d))"),
        ("<p, q>", "mrow(mo:⟨ mrow(mi:p mo:, mi:q) mo:⟩)"),
        ("w^T", "msup(mi:w mrow(mi:T))"),
        ("j in A", "mi:j mo:∈ mi:A"),
        ("a if b, else -inf", "mi:a mtext:if mi:b mo:, mtext:else mo:− mi:∞"),
        ("koopman = transfer^T fit", "mi:koopman mo:= msup(mi:transfer mrow(mi:T)) mspace mi:fit"),
        ("the fit with gram", "mtext:the mtext:fit mtext:with mtext:gram"),
        ("q . k", "mi:q mo:· mi:k"),
    ],
)
def test_structure(formula: str, wanted: str) -> None:
    def told(element: ElementTree.Element) -> str:
        inner = " ".join(told(child) for child in element)
        text = (element.text or "").strip("\xa0 \n")
        return f"{element.tag}({inner})" if inner else f"{element.tag}:{text}" if text else element.tag

    (row,) = tree(formula)
    assert " ".join(told(child) for child in row) == wanted
