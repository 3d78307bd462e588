"""The derivations say something of every equation of a definition, and typeset what they say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import refattn as ra
from refattn.equations import declared
from refattn.explorer.mathml import mathml
from refattn.mechanisms import registry

FOLDER = Path(__file__).parents[2] / "docs" / "derivations"


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_each_equation_of_the_definition_is_derived_once(name: str) -> None:
    shown = [id for ids in re.findall(r"```{derived} \w+ (.*)", text_of(name)) for id in ids.split()]
    assert len(shown) == len(set(shown))
    dense = f"{registry.room(name).__name__}.dense"
    mechanism = ra.mechanism(name)
    modules = (*mechanism.tagged, *mechanism.beside)
    growth = f"{registry.room(name).__name__}.growth."
    named = (module for module in modules if module.__name__ == dense or module.__name__.startswith(growth))
    wanted = [id for module in named for id in declared(module)]
    assert wanted and {*wanted} <= {*shown}
    assert set(re.findall(r"```{derived} (\w+)", text_of(name))) == {name}


@pytest.mark.parametrize("name", ["index", *ra.list_mechanisms()])
def test_formulas_are_well_formed(name: str) -> None:
    formulas = re.findall(r"{m}`([^`]*)`", text_of(name))
    assert formulas
    for formula in formulas:
        made = ElementTree.fromstring(mathml(" ".join(formula.split()), inline=True))
        assert "^" not in "".join(made.itertext()) and "_" not in "".join(made.itertext()), formula
