"""Formulas, typeset."""

from __future__ import annotations

import re
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
    grown = {id: formula for module in record.beside for id, formula in declared(module).items()}
    for id, formula in (record.equations | grown).items():
        made = tree(formula)
        first = re.split(r" {2,}", formula)[0]  # what follows are remarks
        assert not {"^", "_"} & set(re.sub('"[^"]*"', "", "".join(tree(first).itertext()))), id
        assert letters("".join(made.itertext())) == letters(formula), id
        assert made.attrib["alttext"] == formula


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        ("s_ij", "msub(mi:s mrow(mi:i mi:j))"),
        ("a / b", "mfrac(mrow(mi:a) mrow(mi:b))"),
        ("a b / c", "mi:a mspace mfrac(mrow(mi:b) mrow(mi:c))"),
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
