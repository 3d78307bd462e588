"""No pair of features is absent from the cases of a mechanism, but those that are named here with their reason."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

import refattn as ra
from refattn.golden.inputs import make
from refattn.mechanisms.case_features import features
from refattn.mechanisms.record import Mechanism
from refattn.verify.outcome import Floats

SIZES = ("one query", "2 to 8 queries", "more than 64 queries")
LONG = ("more than 64 keys", "more than 128 keys", "more than 512 keys")
ONE_SIZE = dict.fromkeys(combinations(SIZES, 2), "a case has one number of queries")
ONE_LENGTH = {(few, long): "queries and keys are the same tokens" for few in SIZES[:2] for long in LONG[:2]}
ONE_WIDTH = {("values wider than keys", "values narrower than keys"): "values have one width"}
OF_PAIRS = {
    **ONE_SIZE,
    **ONE_WIDTH,
    ("more than 512 keys", "more than 64 queries"): "parts of the keys are for few queries; it costs a second",
}
EXCLUDED = {
    "softmax": OF_PAIRS,
    "growing": OF_PAIRS,
    "delta": {
        **ONE_SIZE,
        **ONE_WIDTH,
        **ONE_LENGTH,
        ("lengths", "more than one batch"): "sequences are packed in a batch of one",
        ("queries share a state", "states share a query"): "there are more of the one or of the other",
    },
    "higher_order": {**ONE_SIZE, **ONE_WIDTH},
    "koopman": {SIZES[:2]: "a case has one number of queries"},
    "sympformer": {**ONE_SIZE, **ONE_LENGTH},
    "graph_energy": {
        **ONE_SIZE,
        **dict.fromkeys(ONE_LENGTH, "nodes are the keys only beside other queries, which have cases of their own"),
        ("causal", "other lengths of queries and keys"): "causal scores have no links over keys",
        ("start", "state"): "other states than that of tokens have a start of their own",
    },
}
"""By mechanism the pairs that no case has, each with its reason."""


def absent(record: Mechanism) -> set[frozenset[str]]:
    """Return the pairs of features that no case has; a case has one rule."""
    seen = [features(case) for case in (*record.cases, *record.kernel_sizes)]
    pairs = {frozenset(pair) for pair in combinations(sorted(frozenset().union(*seen)), 2)}
    found = {frozenset(pair) for one in seen for pair in combinations(sorted(one), 2)}
    return {pair for pair in pairs - found if not all(name.startswith("gates ") for name in pair)}


@pytest.mark.parametrize("name", EXCLUDED)
def test_no_pair_is_absent(name: str) -> None:
    assert absent(ra.mechanism(name)) == {frozenset(pair) for pair in EXCLUDED[name]}


def test_every_case_of_kernels_sizes_has_a_name_and_a_purpose_of_its_own() -> None:
    for name in EXCLUDED:
        record = ra.mechanism(name)
        names = [case.name for case in (*record.cases, *record.kernel_sizes)]
        assert len({*names}) == len(names)
        assert all(case.purpose for case in record.kernel_sizes)


def test_scores_are_as_far_out_as_their_cases_say() -> None:
    record = ra.mechanism("softmax")

    def scores(name: str) -> Floats:
        found = make("softmax", record.case(name), "float64")
        return np.asarray(found["q"] @ found["k"].swapaxes(2, 3) / np.sqrt(found["q"].shape[3]))

    assert make("softmax", record.case("sink-above"), "float64")["sink"].max() > scores("sink-above").max() + 88
    assert scores("high").min() > 100 and scores("high").shape[3] > 128
    low = scores("low-rows").max(axis=3) < -100
    assert low[..., ::3].all() and not low[..., 1].any()
