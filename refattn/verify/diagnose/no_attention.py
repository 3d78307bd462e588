"""Kernels that compute no attention at all: what they return is told first, since no convention explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from refattn.verify.outcome import Outcome, Result, Truth

Arrays = Mapping[str, NDArray[np.generic]]
Same = Callable[[NDArray[np.generic], Arrays], bool]


def _is_input(name: str) -> Same:
    def same(out: NDArray[np.generic], inputs: Arrays) -> bool:
        return out.shape == inputs[name].shape and bool(np.array_equal(out, inputs[name]))

    return same


KINDS: dict[str, Same] = {
    "every output is 0": lambda out, inputs: not np.any(out),
    "every output is the same number": lambda out, inputs: bool(np.all(out == out.reshape(-1)[0])),
    **{f"the output is {name}": _is_input(name) for name in "qkv"},
}
"""What may be returned in place of attention, in words -> whether an output is it."""


def no_attention(outcomes: Iterable[Outcome]) -> str:
    """Return in words what a kernel returns in place of attention, in all cases where that is not the truth; or "".

    >>> import refattn as ra
    >>> from refattn.verify import verify_case
    >>> from refattn.verify.diagnose.no_attention import no_attention
    >>> record = ra.mechanism("softmax")
    >>> no_attention([verify_case(record, lambda q, k, v: 0.0 * q, record.case("tiny"), "float32")])
    'every output is 0'
    """
    seen = [one.seen for one in outcomes if one.seen is not None]
    pairs = [(truth, result) for truth, result in seen if _is_whole(truth, result)]
    for words, same in KINDS.items():
        tells = [(truth, got) for truth, got in pairs if not same(truth.values["out"], truth.inputs)]
        if tells and all(same(got.tensors["out"], truth.inputs) for truth, got in tells):
            return words
    return ""


def _is_whole(truth: Truth, result: Result) -> bool:
    """Tell whether a case has an output that can be compared."""
    out = result.tensors.get("out")
    return out is not None and out.size > 0 and out.shape == truth.values["out"].shape
