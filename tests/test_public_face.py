"""The names that users' scripts rely on."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest

import refattn as ra
import refattn.verify as verify
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.softmax.core import Saved


def small() -> tuple[Any, Any, Any]:
    return np.ones((1, 2, 3, 4)), np.ones((1, 1, 5, 4)), np.ones((1, 1, 5, 6))


def test_the_mechanisms() -> None:
    assert "softmax" in ra.list_mechanisms()
    for name in ra.list_mechanisms():
        record = ra.mechanism(name)
        assert isinstance(record, Mechanism)
        assert record.name == name
        assert record is ra.mechanism(name)
        assert getattr(ra, name) is importlib.import_module(f"refattn.mechanisms.{name}")
        assert getattr(ra, name).record is record
        assert repr(record).startswith(f"mechanism        {name}: {record.title}\nsource ")
        assert record.case("tiny").name == "tiny"
        assert record.title and record.source and record.equations and record.context_fields
        assert len({case.name for case in record.cases}) == len(record.cases)
        assert record.core is not None and record.defaults == defaults_of(record.core.forward)


def test_all_and_dir() -> None:
    fixed = {"Context", "Decline", "__version__", "bridges", "list_mechanisms", "mechanism", "reading"}
    fixed |= {"assert_close", "explore", "tangent", "trace", "train", "verify"}
    expected = fixed | set(ra.list_mechanisms())
    assert set(ra.__all__) == expected
    assert list(ra.__all__) == sorted(ra.__all__)
    assert dir(ra) == sorted(expected)
    for name in ra.__all__:
        assert getattr(ra, name) is getattr(ra, name)
    names: dict[str, Any] = {}
    exec("from refattn import *", names)
    assert expected <= set(names)


def test_the_names_of_verification() -> None:
    homes = {name: f"refattn.verify.{home}" for name, home in verify._HOMES.items()}
    assert verify.__all__ == sorted(homes) and {"check", "load", "verify", "verify_case"} <= set(homes)
    for name, home in homes.items():
        assert getattr(verify, name) is getattr(importlib.import_module(home), name)
        assert getattr(verify, name).__module__ == home
    with pytest.raises(AttributeError, match="has no attribute 'falsify'"):
        getattr(verify, "falsify")  # noqa: B009


def test_an_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'refattn' has no attribute 'hardmax'"):
        ra.hardmax  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(ra, "hardmax")
    with pytest.raises(ImportError, match="cannot import name 'hardmax'"):
        from refattn import hardmax  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("name", ["hardmax", "Softmax", "", None, 3])
def test_an_unknown_mechanism(name: Any) -> None:
    hint = " (did you mean softmax?)" if name == "Softmax" else ""
    with pytest.raises(ValueError, match=re.escape(f"mechanism: got {name!r}{hint}, needs one of softmax")):
        ra.mechanism(name)


def test_an_unknown_case() -> None:
    with pytest.raises(ValueError, match="case: got 'huge', needs one of tiny, plain"):
        ra.mechanism("softmax").case("huge")


def test_softmax_returns_what_the_design_says() -> None:
    result = ra.softmax.forward(*small())
    assert isinstance(result, tuple) and len(result) == 2
    out, saved = result
    assert out.shape == (1, 2, 3, 6)
    assert isinstance(saved, Saved) and isinstance(saved, ra.softmax.Saved)
    assert saved.lse.shape == (1, 2, 3) and saved.implementation == "dense"
    with pytest.raises(AttributeError):
        saved.implementation = "tiled"  # type: ignore[misc]
    assert list(ra.softmax.backward(saved, out)) == ["q", "k", "v"]
    _, saved = ra.softmax.forward(*small(), scale=0.5, softcap=3.0, implementation="tiled")
    gradients = ra.softmax.backward(saved, out)
    assert list(gradients) == ["q", "k", "v", "scale", "softcap"]
    assert [np.shape(x) for x in gradients.values()] == [(1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 6), (), ()]


def test_a_block_as_the_design_shows_it() -> None:
    m = ra.mechanism("softmax")
    x, context = np.ones((2, 3, 8)), ra.Context(causal=True)
    params = m.block.init(m.block.Config(width=8, heads=2), seed=0, like=x)
    state = m.block.start(params, x, context)
    state, saved = m.block.forward(params, state, context)
    assert m.block.read(params, state).shape == x.shape
    d_state, d_params = m.block.read_backward(params, state, x)
    assert d_params is None
    d_state, d_params, d_context = m.block.backward(params, saved, d_state)
    assert d_params.w_q.shape == params.w_q.shape and d_context == {}
    d_x, _ = m.block.start_backward(params, d_state)
    assert d_x.shape == x.shape
