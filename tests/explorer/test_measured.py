"""What numbers are made of: known for softmax, and a sum over all paths gives the gradient's own zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.explorer.measured import disturbed, links
from refattn.verify.traced import Run, Traced, core_run, record

NUMPY = backends.get("numpy")


def run_of(name: str, case: str = "tiny") -> tuple[Run, Traced]:
    mechanism = ra.mechanism(name)
    run = core_run(mechanism, case, "float64", NUMPY)
    return run, record(mechanism, run, NUMPY)


@pytest.fixture(scope="module")
def softmax() -> dict[str, Any]:
    return links(*run_of("softmax"))


def test_softmax_is_made_as_its_formulas_say(softmax: dict[str, Any]) -> None:
    heads, n, d, e = 2, 4, 2, 2
    for h, i, j in np.ndindex(heads, n, n):
        at = (h * n + i) * n + j
        # u_ij: z_i and w_ij; and of the backward dm_ij = du_ij u_ij
        assert softmax["SM.3"][at] == {"SM.total": (h * n + i,), "SM.4": (at,), "dSM.2": (at,)}
        # w_ij: o_i; dv_j, and of dz_i the sum over j
        values, d_v = ((h * n + i) * e, (h * n + i) * e + 1), ((h * n + j) * e, (h * n + j) * e + 1)
        assert softmax["SM.4"][at] == {"SM.5": values, "dSM.v": d_v, "dSM.total": (h * n + i,)}
        # dm_ij: dq_i, dk_j and dscale
        queries, keys = ((h * n + i) * d, (h * n + i) * d + 1), ((h * n + j) * d, (h * n + j) * d + 1)
        assert softmax["dSM.2"][at] == {"dSM.q": queries, "dSM.k": keys, "dSM.scale": (0,)}


def test_the_maximum_is_made_of_the_largest_score_alone(softmax: dict[str, Any]) -> None:
    _, found = run_of("softmax")
    scores = next(step.value for step in found.steps if step.id == "SM.1").reshape(-1, 4)
    for row, largest in enumerate(np.argmax(scores, axis=-1)):
        for j in range(4):
            assert ("SM.largest" in softmax["SM.1"][4 * row + j]) == (j == largest)


def test_what_is_hidden_feeds_nothing() -> None:
    measured = links(*run_of("sympformer"))  # its tiny case is causal
    for i, j in np.ndindex(4, 4):
        assert bool(measured["SYMP.unmasked"][i * 4 + j]) == (j <= i)


NOT_IN_THIS_RUN = {"graph_energy": ("GE.2",)}
"""Equations that are read in other runs alone: a_ij decides what a query reads if no token is kept."""


@pytest.mark.parametrize("name", [name for name in ra.list_mechanisms() if ra.mechanism(name).core is not None])
def test_every_number_is_used(name: str) -> None:
    if name == "koopman":
        pytest.skip("as long as all others: the page of the slow tests measures it")
    run, found = run_of(name)
    measured = links(run, found)
    results = [np.asarray(x) for x in found.results.values()]
    for step in found.steps:
        is_result = any(np.all(np.isin(step.value, x)) for x in results)  # or a part of one, of one token
        is_gradient = not step.id.rpartition(".")[2][0].isdigit()  # of a number that was not given, say
        elsewhere = step.id in NOT_IN_THIS_RUN.get(name, ())
        assert is_result or is_gradient or elsewhere or any(measured[step.id]), step.id
    forward = [step.id for step in found.forward]
    # Nothing of the forward is made of the backward, and what comes earlier is not made of what comes later.
    order = {id: n for n, id in enumerate([*forward, *(step.id for step in found.backward)])}
    for id, elements in measured.items():
        assert all(order[child] > order[id] for children in elements for child in children if id in order)


def test_another_value_of_an_element() -> None:
    assert disturbed(np.array([True, False]), 1).tolist() == [True, True]
    assert disturbed(np.array([-np.inf, 2.0]), 0).tolist() == [0.0, 2.0]
    assert disturbed(np.array([1, 2]), 0).tolist() == [2, 2]
    given = np.array([[3.0, 0.0]])
    assert disturbed(given, 1)[0, 1] != 0.0 and given[0, 1] == 0.0


def test_a_run_that_does_not_repeat_is_refused() -> None:
    run, found = run_of("softmax")
    other = dict(run.arguments, q=2.0 * run.arguments["q"])
    with pytest.raises(RuntimeError, match="a replayed run differs in SM.1"):
        links(Run(run.about, other, run.options, run.run), found)
