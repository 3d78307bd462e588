"""Kernels of the recurrences that are wrong where two features meet are seen, and honest ones by other sums are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import round_to
from refattn.mechanisms.delta.testing.cases import RULES
from refattn.verify.run import verify_case
from refattn.verify.tolerance.budget import evaluate, truth
from refattn.verify.tolerance.compare import compare
from tests.thinned import thinned

RECORD = ra.mechanism("delta")


def forgets(given: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """The arguments of some tokens alone."""
    whole = ("state", "scale", "qk_norm")
    return {n: x if n in whole else x[:, tokens] if n == "key_mask" else x[:, :, tokens] for n, x in given.items()}


class Chunked:
    """Chunks of 64 tokens, each of which begins with what the one before left: or at 0, or with the incoming state."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, **options}
        if "lengths" in given:
            return ra.Decline("no packed sequences")
        outs, first = [], given.get("state")
        for at in range(0, max(q.shape[2], 1), 64):
            out, saved = ra.delta.forward(**forgets(given, slice(at, at + 64)))
            outs.append(out)
            given["state"] = {"": saved.state, "zero": 0 * saved.state, "first": first}[self.fault]
            if given["state"] is None:
                del given["state"]
        return np.concatenate(outs, axis=2)


@pytest.mark.parametrize("rule", thinned([*RULES], 3))
def test_a_chunk_that_begins_at_zero_or_anew_is_seen_in_every_rule(rule: str) -> None:
    for name in (f"carried-{rule}", "long-masked"):
        assert verify_case(RECORD, Chunked(), RECORD.case(name), "float32").status == "agrees"
        for fault in ("zero", "first"):
            assert verify_case(RECORD, Chunked(fault), RECORD.case(name), "float32").status == "disagrees"


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
@pytest.mark.parametrize(
    "name", ["strong", "gated-channel", "chunks-gated-channel", "chunks-gated-head", "wide-values"]
)
def test_the_gradient_of_a_decay_may_be_a_sum_in_which_terms_cancel(name: str, dtype: str) -> None:
    """q dq - k dk without the lookup's part, summed from the end: what libraries compute."""
    case = RECORD.case(name)
    known = truth(RECORD, case, dtype, grad=True)
    inputs = {n: x.astype(dtype) for n, x in known.inputs.items()}
    assert known.upstream is not None
    found = evaluate(RECORD, inputs, case.options, known.upstream.astype(dtype), "chunked")
    terms = inputs["q"] * found["d_q"]
    if inputs["log_decay"].ndim == 4:
        terms = terms - inputs["k"] * found["d_k"]
    else:  # with a lookup the key's parts are those of the value
        terms = terms.sum(-1) - (inputs["v"] * found["d_v"]).sum(-1)
    summed = np.flip(np.cumsum(np.flip(terms, 2), 2, dtype=dtype), 2)
    assert compare("d_log_decay", summed, dtype, known).agrees
    # What is granted is still less than the cancelling terms, times some units.
    assert not compare("d_log_decay", summed * (1 + 1e-4), dtype, known).agrees


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rounds", [False, True], ids=["mended", "rounded"])
def test_a_prediction_that_is_rounded_before_it_is_taken_from_the_value_is_caught(rounds: bool, dtype: str) -> None:
    def kernel(q: Any, k: Any, v: Any, *, beta: Any, log_decay: Any, scale: float, dtype: str) -> Any:
        single = [np.asarray(x, np.float32) for x in (q, k, v, beta, log_decay)]
        state = np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), np.float32)
        out = np.zeros(v.shape, np.float32)
        for t in range(q.shape[2]):
            row, key, value, write, decay = (x[:, :, t] for x in single)
            state = state * np.exp(decay)[..., None, None]
            predicted = (key[..., None, :] @ state)[..., 0, :]
            if rounds:
                predicted = round_to(predicted.astype(np.float64), dtype).astype(np.float32)
            state = state + key[..., :, None] * (write[..., None] * (value - predicted))[..., None, :]
            out[:, :, t] = (row[..., None, :] @ state)[..., 0, :] * np.float32(scale)
        return out.astype(q.dtype)

    outcome = verify_case(RECORD, kernel, RECORD.case("cancels-gated-delta"), dtype)
    assert outcome.status == ("disagrees" if rounds else "agrees"), outcome.detail
