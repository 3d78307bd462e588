"""What checked entries refuse, also after calls that fit: these are remembered by class, shape and dtype of arrays."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from refattn.args import Axes, Maybe, Real, Tree, Whole, checked, naming
from refattn.ops import mlp


@checked(x="... m", w="m o", mask=Maybe(Axes("m", "bool")), count=Whole(1), rate=Real(0.0))
def f(x: Any, w: Any, mask: Any = None, count: Any = 1, rate: Any = 0.0) -> str:
    return "taken"


RIGHT = {"x": np.ones((2, 3)), "w": np.ones((3, 4)), "mask": np.ones(3, bool), "count": 2, "rate": 0.5}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"w": np.ones((4, 3))}, r"w: got shape \(4, 3\), needs \(m, o\) with m = 3, as in x"),
    "dtype": ({"x": np.ones((2, 3), int)}, "x: got dtype int64"),
    "objects": ({"x": np.ones((2, 3), object)}, "x: got dtype object"),
    "order of bytes": ({"x": np.ones((2, 3), ">f8")}, "x: got"),
    "mask": ({"mask": np.ones(3)}, "mask: got dtype float64"),
    "masked": ({"x": np.ma.masked_array(np.ones((2, 3)))}, "x: got MaskedArray"),
    "all masked": ({name: np.ma.masked_array(RIGHT[name]) for name in ("x", "w", "mask")}, "x: got MaskedArray"),
    "a class": ({"x": np.ndarray}, "x: got type"),
    "a list": ({"x": [[1.0] * 3] * 2}, "x: got list"),
    "number": ({"count": 0}, "count: got 0"),
    "truth": ({"count": True}, "count: got True"),
    "float": ({"count": 2.0}, "count: got 2.0"),
    "negative": ({"rate": -0.5}, "rate: got -0.5"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_call_after_a_right_one_is_refused(how: str) -> None:
    change, message = WRONG[how]
    for _ in range(2):
        assert f(**RIGHT) == "taken"
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            f(**{**RIGHT, **change})


@checked(count=Whole(1), rate=Real(0.0))
def g(count: Any, rate: Any) -> str:
    return "taken"


def test_numbers_of_numpy_are_read_each_time() -> None:
    """They have their kind and their size in common, not their value."""
    g(np.int64(3), np.float64(1.0))
    with pytest.raises(ValueError, match="^count: got -3"):
        g(np.int64(-3), np.float64(1.0))
    with pytest.raises(ValueError, match="^rate: got -1.0"):
        g(1, np.float64(-1.0))
    with pytest.raises(TypeError, match="^count: got ndarray"):
        g(np.asarray(3), 1.0)


def test_torch_tensors_of_another_layout_are_refused() -> None:
    torch = pytest.importorskip("torch")
    warnings.simplefilter("ignore")  # "in beta state"
    x, w = torch.ones((2, 3), dtype=torch.float64), torch.ones((3, 4), dtype=torch.float64)
    assert f(x, w) == "taken"
    for wrong in (x.to_sparse(), x.to_sparse_csr(), torch.nested.nested_tensor([x[0], x[1]])):
        with pytest.raises((TypeError, ValueError), match="^x: got"):
            f(wrong, w)
    assert f(x, w) == "taken"
    with pytest.raises(TypeError, match="^w: got numpy, needs an array of the library of x"):
        f(x, RIGHT["w"])


@dataclass(frozen=True)
class Weights:
    w: Any


class UserCaseError(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("shapes do not fit"), ValueError, "weights: shapes do not fit"),
        (ValueError("matmul: a mismatch"), ValueError, "weights: matmul: a mismatch"),
        (ValueError("jitter: got 3"), ValueError, "jitter: got 3"),
        (TypeError("x: got 3"), TypeError, "x: got 3"),
        (AttributeError("no shape"), TypeError, "weights: AttributeError: no shape"),
        (KeyError("a"), ValueError, "weights: KeyError: 'a'"),
        (ZeroDivisionError("by 0"), ValueError, "weights: ZeroDivisionError: by 0"),
        (UserCaseError("of its own"), UserCaseError, "of its own"),
        (np.linalg.LinAlgError("singular"), np.linalg.LinAlgError, "singular"),
        (OSError("w: gone"), OSError, "w: gone"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_errors_from_inside_of_a_tree_name_it(error: Exception, kind: type[Exception], words: str) -> None:
    def inner() -> None:
        raise error

    @naming("weights")
    def plain(weights: Any, x: Any) -> None:
        inner()

    @checked(weights=Weights, x=Tree)
    def whole(weights: Any, x: Any) -> None:
        inner()

    for function, named in ((plain, words), (whole, words.replace("weights:", "weights or x:"))):
        with pytest.raises(kind) as caught:
            function(Weights(1.0), {})
        assert type(caught.value) is kind and str(caught.value) == named
        assert traceback.extract_tb(caught.tb)[-1].name == "inner"


def test_what_is_wrong_inside_of_an_argument_names_it() -> None:
    """Where the piece of a network that reads it calls it otherwise."""
    x = np.ones((1, 1, 3, 4))
    rows, flat = x[0, 0], np.ones(4)
    with pytest.raises(ValueError, match=r"^params or x: w: got shape \(4,\)"):
        mlp.mlp_forward(mlp.Params(flat, flat, np.ones((4, 4)), flat), rows)
    _, saved = ra.softmax.forward(x, x, x)
    object.__setattr__(saved.inner, "v", x[..., :2])
    with pytest.raises(ValueError, match=r"^saved: "):
        ra.softmax.backward(saved, x)
    record = ra.mechanism("softmax")
    params = record.block.init(record.block.Config(width=4, heads=2), like=np.ones(1))
    object.__setattr__(params, "w_v", np.ones((1, 4, 4)))
    assert record.stream is not None
    with pytest.raises(ValueError, match=r"^params: w: got shape \(1, 4, 4\)"):
        record.stream.start(params, 1)


def test_an_error_of_a_hook_stays_as_it_is() -> None:
    x = np.ones((1, 1, 3, 4))
    _, saved = ra.softmax.forward(x, x, x)

    def fail(id: str, name: str, value: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="^'mine'$"), equations.apply(fail):
        ra.softmax.backward(saved, x)


def test_what_a_core_has_read_is_not_read_again() -> None:
    """Definitions and implementations hand on their core's arguments; all others are read."""
    seen: list[Any] = []

    @checked(x="a")
    def f(x: Any) -> None:
        seen.append(x)

    for module in ("refattn.mechanisms.softmax.dense", "refattn.mechanisms.softmax.implementations.tiled"):
        exec("f('no array')", {"f": f, "__name__": module})
    assert len(seen) == 2
    for module in ("refattn.mechanisms.softmax.core", "refattn.mechanisms.softmax.layer.block", "dense", "__main__"):
        with pytest.raises(TypeError, match="x: got 'no array', needs an array"):
            exec("f('no array')", {"f": f, "__name__": module})
