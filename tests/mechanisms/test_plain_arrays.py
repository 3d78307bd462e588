"""Arrays that mean something else than their numbers are refused by every core, and settings that cost digits too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra

CORES = [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None]
X = np.random.default_rng(0).standard_normal((1, 2, 5, 4))


class Metres(np.ndarray):
    """A class of a user's own, with units."""


STRANGE: dict[str, Callable[[Any], Any]] = {
    "masked": lambda x: np.ma.masked_greater(x, 1.0),
    "with units": lambda x: x.view(Metres),
    "records": lambda x: x.view(np.recarray),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", CORES)
def test_a_class_with_another_meaning_is_refused(name: str, kind: str) -> None:
    core, change = ra.mechanism(name).core, STRANGE[kind]
    assert core is not None
    out, saved = core.forward(X, X, X)
    for n in range(3):
        given = [change(X) if n == m else X for m in range(3)]
        with pytest.raises(TypeError, match="got (MaskedArray|Metres|recarray)"):
            core.forward(*given)
    with pytest.raises(TypeError, match="d_out: got (MaskedArray|Metres|recarray)"):
        core.backward(saved, change(out))


def test_functions_that_ask_for_a_namespace_refuse_them_too() -> None:
    from refattn.ops.layer_norm import layer_norm_forward

    with pytest.raises(TypeError, match="got MaskedArray, needs a plain array"):
        layer_norm_forward(np.ma.masked_array(X), np.ones(4), np.ones(4))
    with pytest.raises(TypeError, match="got matrix, needs a plain array"):
        ra.xp.namespace(np.asmatrix(np.ones((2, 2))))


def test_a_mapped_file_is_as_plain_as_an_array(tmp_path: Path) -> None:
    held = np.memmap(tmp_path / "x", X.dtype, "w+", shape=X.shape)
    held[:] = X
    assert np.array_equal(ra.softmax.forward(held, held, held)[0], ra.softmax.forward(X, X, X)[0])


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "nested"])
@pytest.mark.filterwarnings("ignore")
def test_sparse_and_nested_tensors_are_refused(layout: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.asarray(X)
    strange = torch.nested.nested_tensor([x[0], x[0]]) if layout == "nested" else getattr(x, layout)()
    with pytest.raises(TypeError, match="^k: got a sparse or nested tensor, needs a dense one"):
        ra.softmax.forward(x, strange, x)
