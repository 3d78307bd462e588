"""Trees of arrays: names, round trips, static parts, and what is refused."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import tree
from refattn.xp import Array


@dataclass(frozen=True)
class Config:
    heads: int = 2
    name: str = "dense"
    scale: float | None = None
    sizes: tuple[int, ...] = (3, 4)
    derived: tuple[int, ...] = field(init=False, default=(1, 2))


@dataclass(frozen=True)
class Layer:
    w_q: Any
    bias: Any
    config: Config = Config()


@dataclass(frozen=True)
class Model:
    layers: tuple[Layer, ...]
    heads: dict[str, Any]
    config: Config = Config()


class Pair(NamedTuple):
    mean: Any
    second: Any


def array(*shape: int, library: str = "numpy") -> Any:
    return importlib.import_module(library).ones(shape)


def example() -> Model:
    layers = (Layer(array(2, 3), None), Layer(array(3, 2), array(2), Config(heads=5)))
    return Model(layers, {"out": [array(1), "static", array()], "none": None})


NAMES = ["layers.0.w_q", "layers.1.w_q", "layers.1.bias", "heads.out.0", "heads.out.2"]

arrays = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape))
statics = (
    st.none() | st.text(max_size=3) | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just(Config())
)
keys = st.text(min_size=1, max_size=4).filter(lambda key: "." not in key)
trees = st.recursive(
    arrays | statics,
    lambda entries: (
        st.lists(entries, max_size=3)
        | st.lists(entries, max_size=3).map(tuple)
        | st.dictionaries(keys, entries, max_size=3)
        | st.builds(Layer, entries, entries)
        | st.builds(Pair, entries, entries)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Tell whether two trees have equal types and static parts, and the very same arrays."""
    if isinstance(a, np.ndarray):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, Layer):
        return all(same(getattr(a, name), getattr(b, name)) for name in ("w_q", "bias", "config"))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_names_are_paths() -> None:
    leaves = tree.flatten(example())
    assert list(leaves) == NAMES
    assert leaves["layers.1.w_q"].shape == (3, 2)
    assert list(tree.flatten({"moments": Pair(array(1), array(2))})) == ["moments.mean", "moments.second"]


@given(trees)
def test_round_trip(original: Any) -> None:
    leaves = tree.flatten(original)
    assert same(tree.unflatten(original, leaves), original)
    other_order = dict(reversed(leaves.items()))
    assert same(tree.unflatten(original, other_order), original)
    assert same(tree.map_leaves(lambda x: x, original), original)


def test_static_parts_come_from_the_template() -> None:
    template = example()
    result = tree.unflatten(template, {name: array(7) for name in NAMES})
    assert result.layers[1].config is template.layers[1].config
    assert result.layers[1].w_q.shape == (7,)
    assert result.heads["out"][1] == "static"
    assert template.layers[1].w_q.shape == (3, 2)


@dataclass(frozen=True)
class Scaled:
    factor: float
    learned: float | Array


def test_a_field_that_is_declared_to_be_a_number_is_static() -> None:
    scaled = Scaled(np.float64(2.0), np.ones(1))
    assert list(tree.flatten(scaled)) == ["learned"]
    assert tree.map_leaves(lambda x: 3.0 * x, scaled) == Scaled(2.0, np.asarray([3.0]))


@dataclass(frozen=True)
class Choices:
    function: Any
    STATIC: ClassVar[bool] = True


def test_a_dataclass_that_says_so_is_static_whatever_it_holds() -> None:
    node = (Choices(np.sin), np.ones(1), Choices(np.ones(2)))
    assert list(tree.flatten(node)) == ["1"]
    assert tree.map_leaves(lambda x: 3.0 * x, node)[::2] == node[::2]
    with pytest.raises(TypeError, match="tree entry 'f': got ufunc, needs"):
        tree.flatten({"f": np.sin})


def test_map_over_several_trees() -> None:
    model = example()
    gradients = {"layers": [{"w_q": 2 * array(2, 3)}, {"w_q": 3 * array(3, 2), "bias": array(2)}]}
    gradients |= {"heads": {"out": {"0": array(1), "2": array()}}}  # type: ignore[dict-item]
    stepped = tree.map_leaves(lambda p, g, h: p - g + 0 * h, model, gradients, model)
    assert isinstance(stepped, Model)
    assert stepped.layers[0].w_q[0, 0] == -1
    assert stepped.layers[1].w_q[0, 0] == -2


@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "torch", "jax.numpy"])
def test_arrays_of_every_library(library: str) -> None:
    pytest.importorskip(library.partition(".")[0])
    model = Layer(array(2, 3, library=library), (array(1, library=library),))
    doubled = tree.map_leaves(lambda x: x + x, model)
    assert type(doubled.w_q) is type(model.w_q)
    assert float(doubled.bias[0][0]) == 2.0
    zeros = tree.zeros_like(model)
    assert type(zeros.w_q) is type(model.w_q)
    assert zeros.w_q.dtype == model.w_q.dtype
    assert float(zeros.w_q[1, 2]) == 0.0
    assert list(tree.flatten(zeros)) == ["w_q", "bias.0"]


def test_missing_and_unknown_names_are_told() -> None:
    leaves = tree.flatten(example())
    extra = {name: leaves[name] for name in NAMES[1:]} | {"layers.0.w_k": array(1)}
    with pytest.raises(ValueError) as caught:
        tree.unflatten(example(), extra)
    assert str(caught.value) == (
        "leaves: lacks 'layers.0.w_q' and has the unknown 'layers.0.w_k'; needs exactly the 5 names of the tree"
    )
    with pytest.raises(ValueError, match=r"^leaves: lacks 'layers.0.w_q', 'layers.1.w_q', .*; needs exactly the 5"):
        tree.unflatten(example(), {})
    with pytest.raises(ValueError, match=r"^others\[1\]: has the unknown 'b'; needs exactly the 1 names"):
        tree.map_leaves(lambda *x: x[0], {"a": array(1)}, {"a": array(1)}, {"a": array(1), "b": array(1)})


def test_a_leaf_must_be_an_array() -> None:
    with pytest.raises(TypeError, match=r"^leaves\['a'\]: got NoneType, needs an array"):
        tree.unflatten({"a": array(1)}, {"a": None})


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"a.b": None}, ValueError, "tree: got the key 'a.b', needs one that is not empty and has no dot"),
        ({"x": {"": 1}}, ValueError, "tree entry 'x': got the key ''"),
        ({1: None}, TypeError, "tree: got the key 1 of type int, needs a text"),
        ([{"a": {3}}], TypeError, "tree entry '0.a': got set, needs an array, a dataclass, tuple, list or dict"),
        (Layer, TypeError, "tree: got type, needs"),
    ],
)
def test_what_is_no_tree_is_named(bad: Any, error: type[Exception], text: str) -> None:
    for function in (tree.flatten, tree.zeros_like, lambda t: tree.map_leaves(lambda x: x, t)):
        with pytest.raises(error) as caught:
            function(bad)
        assert text in str(caught.value)


@dataclass(frozen=True)
class Held:
    """Fields of every kind that is looked at, and one that is not."""

    one: Array
    maybe: Array | None
    many: tuple[Array, ...]
    word: str
    number: float
    inner: Held | None = None


def test_a_field_that_holds_something_else_is_named() -> None:
    right: Any = Held(np.ones(2), None, (np.ones(1), np.ones(2)), "x", 1.0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"one": None}, "a.1.one: got NoneType, needs an array"),
        ({"one": [1.0]}, "a.1.one: got list, needs an array"),
        ({"one": np.asarray("x")}, "a.1.one: got dtype <U1, needs numbers"),
        ({"one": np.ma.masked_array([1.0])}, "a.1.one: got MaskedArray, needs an array"),
        ({"maybe": 1.0}, "a.1.maybe: got float, needs an array or NoneType"),
        ({"many": (np.ones(1), 2)}, "a.1.many: got int, needs an array"),
        ({"word": 3}, "a.1.word: got int, needs str"),
        ({"inner": replace(right, word=None)}, "a.1.inner.word: got NoneType, needs str"),
        ({"inner": {}}, "a.1.inner: got dict, needs Held or NoneType"),
    ]
    tree.check_fields("a", (right, replace(right, inner=right, number="x")))
    for change, told in wrong:
        with pytest.raises(TypeError, match=f"^{re.escape(told)}$"):
            tree.check_fields("a", (right, replace(right, **change)))
