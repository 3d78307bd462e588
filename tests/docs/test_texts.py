"""The pages of mechanisms: each goes through its definition once, in pieces, and what it says is typeset."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import refattn as ra
from refattn.explorer.mathml import mathml
from refattn.verify.traced import places_in

FOLDER = Path(__file__).parents[2] / "docs" / "mechanisms"

PAGES = ["index", *(page for name in ra.list_mechanisms() for page in (name, f"{name}/reference"))]


def text_of(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_each_equation_of_the_definition_is_derived_once(name: str) -> None:
    shown = [id for ids in re.findall(r"```{derived} \w+ (.*)", text_of(name)) for id in ids.split() if "." in id]
    definition = ra.mechanism(name).definition
    assert definition is not None
    assert len(shown) == len(set(shown)) and {*shown} == {*places_in(definition)}
    assert {*re.findall(r"```{(?:derived|idea|tour|further)} (\w+)", text_of(name))} == {name}
    assert re.findall(r"```{general} (\w+)", text_of(f"{name}/reference")) == [name]


@pytest.mark.parametrize("page", PAGES)
def test_formulas_are_well_formed(page: str) -> None:
    formulas = re.findall(r"{m}`([^`]*)`", text_of(page))
    assert formulas or page == "sympformer/reference"
    for formula in formulas:
        made = ElementTree.fromstring(mathml(" ".join(formula.split()), inline=True))
        assert "^" not in "".join(made.itertext()) and "_" not in "".join(made.itertext()), formula
