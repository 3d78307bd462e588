"""Kernels that are wrong where two features meet, and right elsewhere: the cases catch each, and accept it mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import has_gradient
from refattn.mechanisms.case_features import features, fewest
from refattn.mechanisms.registry import list_mechanisms
from refattn.verify import verify
from refattn.verify.diagnose.mutants import stored
from refattn.verify.tolerance.budget import evaluate, truth
from refattn.verify.tolerance.compare import judge

Given = Any
"""The arguments of a call, by name."""


def _of_group(x: Any, heads: int) -> Any:
    """Return the key/value heads of query heads that take them one after the other."""
    return np.tile(x, (1, heads // x.shape[1], 1, 1))


def place_of_first_sequence(a: Given) -> Given:
    offset = a.get("offset")
    causal = a.get("causal", False) is not False and np.ndim(offset) == 1
    return {"offset": np.broadcast_to(offset[:1], offset.shape).copy()} if causal else {}


def interleaved_for_wider_values(a: Given) -> Given:
    q, k, v = a["q"], a["k"], a["v"]
    wide = v.shape[3] > q.shape[3] and q.shape[1] > k.shape[1] > 1
    return {"k": _of_group(k, q.shape[1]), "v": _of_group(v, q.shape[1])} if wide else {}


def sink_of_wide_heads(a: Given) -> Given:
    return {"sink": None} if a["q"].shape[3] > 64 else {}


def lengths_of_one_query(a: Given) -> Given:
    one = a["q"].shape[2] == 1 and a.get("k_lengths") is not None and a.get("q_lengths") is None
    return {"k_lengths": np.full_like(a["k_lengths"], a["k"].shape[2])} if one else {}


def states_of_packed_groups(a: Given) -> Given:
    q, state = a["q"], a.get("state")
    packed = a.get("lengths") is not None and state is not None and q.shape[1] > a["v"].shape[1] > 1
    return {"state": state[:, ::-1].copy()} if packed else {}


def queries_of_packed_groups(a: Given) -> Given:
    q, groups = a["q"], a["v"].shape[1]
    if a.get("lengths") is None or q.shape[1] <= groups:
        return {}
    return {"q": q[:, np.argsort(np.arange(q.shape[1]) % groups, kind="stable")]}


def padding_of_wide_heads(a: Given) -> Given:
    return {"key_mask": None} if a["q"].shape[3] > 64 else {}


WRONG: list[tuple[str, tuple[str, str], Callable[[Given], Given]]] = [
    ("softmax", ("offset", "causal"), place_of_first_sequence),
    ("softmax", ("grouped heads", "values wider than keys"), interleaved_for_wider_values),
    ("softmax", ("sink", "a head wider than 64"), sink_of_wide_heads),
    ("softmax", ("k_lengths", "one query"), lengths_of_one_query),
    ("delta", ("lengths", "state"), states_of_packed_groups),
    ("delta", ("lengths", "queries share a state"), queries_of_packed_groups),
    ("delta", ("key_mask", "a head wider than 64"), padding_of_wide_heads),
]


@pytest.mark.parametrize(("name", "pair", "wrong"), WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_what_is_wrong_where_two_features_meet_is_caught(
    name: str, pair: tuple[str, str], wrong: Callable[[Given], Given]
) -> None:
    record = ra.mechanism(name)
    core = getattr(ra, name)

    def mended(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return core.forward(q, k, v, **options)[0]

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, **options}
        return core.forward(**given | wrong(given))[0]

    together = [case for case in (*record.cases, *record.kernel_sizes) if {*pair} <= features(case)]
    few = replace(record, cases=(record.case("tiny"), *together), kernel_sizes=())
    assert verify(few, mended, dtypes=["float32"]).passed
    report = verify(few, kernel, dtypes=["float32"])
    assert not report.passed
    assert all({*pair} <= features(few.case(one.case)) for one in report.outcomes if one.failed)


ALONE = "one query alone, the last, sees every key; one token alone has all the weight"
SILENT = {
    "higher_order": {("causal", "one query"): ALONE},
    "koopman": {
        ("causal", "one query"): ALONE,
        **dict.fromkeys(
            [("perturbation", name) for name in ("causal", "grouped heads", "kernel", "mask", "similarity", "space")],
            "another perturbation than the default is not always inverted",
        ),
    },
    "sympformer": {("causal", "one query"): ALONE},
    "graph_energy": {
        **dict.fromkeys([(name, "one query") for name in ("causal", "mu", "start")], ALONE),
        ("graph", "causal"): "causal scores have the graph of the default",
    },
}
"""By mechanism the options whose absence shows in no case with a feature, each with its reason."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("mechanism", [name for name in list_mechanisms() if name != "growing"])  # its core is softmax
def test_an_option_that_is_ignored_beside_any_feature_is_caught(mechanism: str) -> None:
    """A kernel ignores an option in calls that have a feature, and is right in all others."""
    record = ra.mechanism(mechanism)
    caught: dict[tuple[str, str], bool] = {}
    for case in (*record.cases, *record.kernel_sizes):
        known = truth(record, case, "float32", grad=True)
        assert known.upstream is not None
        single = {name: x.astype(np.float32) if has_gradient(x) else x for name, x in known.inputs.items()}
        for option in ({*single} | {*case.options}) - {*"qkv"}:
            inputs, options = (
                {name: x for name, x in given.items() if name != option} for given in (single, case.options)
            )
            try:
                with np.errstate(all="ignore"):  # another flow may diverge
                    got = stored(evaluate(record, inputs, options, known.upstream.astype(np.float32)), known)
            except (ArithmeticError, TypeError, ValueError):  # the others need it
                shows = True
            else:
                shows = not all(verdict.agrees for verdict in judge(got, known))
            for feature in features(case):
                caught[option, feature] = caught.get((option, feature), False) or shows
    assert {pair for pair, shows in caught.items() if not shows} == {*SILENT.get(mechanism, {})}


@pytest.mark.parametrize("mechanism", list_mechanisms())
def test_the_fewest_cases_have_every_feature_of_all(mechanism: str) -> None:
    cases = ra.mechanism(mechanism).cases
    few = fewest(cases)
    of_all, of_few = (set().union(*(features(case) for case in some)) for some in (cases, few))
    assert of_few == of_all and len(few) < len(cases)
