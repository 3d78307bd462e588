"""What an adapter can run is found by trial, and offered as a line that can be pasted."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify import found_supports
from refattn.verify.run import verify
from refattn.verify.user_cases import fitted

WHOLE = ra.mechanism("softmax")
RECORD = WHOLE.changed(cases=(*WHOLE.cases, *WHOLE.kernel_sizes), kernel_sizes=())


def of(runs: Callable[..., bool], **always: Any) -> Any:
    """A kernel that declines what does not fulfil a condition on its sizes and options."""

    def attend(q: Any, k: Any, v: Any, *, causal: Any = False, scale: Any = None, window: Any = None) -> Any:
        given = {"causal": causal, "scale": scale, "window": window} | always
        if not runs(*q.shape[1:], *k.shape[1:3], v.shape[3], given):
            return ra.Decline("no such call")
        return ra.softmax.forward(q, k, v, **given)[0]

    return attend


SQUARE = ["e = d", "h = g", "nq = nk"]
OPTIONS = ["causal", "scale", "window"]


@pytest.mark.parametrize(
    ("kernel", "supports"),
    [
        (of(lambda h, n, d, g, m, e, o: e == d), {"where": ["e = d"], "options": OPTIONS}),
        (of(lambda h, n, d, g, m, e, o: h == g and n == m), {"where": SQUARE[1:], "options": OPTIONS}),
        (
            of(lambda h, n, d, g, m, e, o: n == m and n % 64 == 0 < n and d == e == 64),
            {"n": {"multiple_of": 64}, "d": [64], "where": ["e = d", "nq = nk"], "options": OPTIONS},
        ),
        (of(lambda h, n, d, g, m, e, o: d <= 96 and not o["window"]), {"d": {"at_most": 96}, "options": OPTIONS[:2]}),
        (of(lambda h, n, d, g, m, e, o: not o["window"] or o["causal"]), {"options": OPTIONS}),
        (
            of(lambda h, n, d, g, m, e, o: n == m and o["causal"] is True and not o["window"]),
            {"where": ["nq = nk"], "fixed": {"causal": True}, "options": ["scale"]},
        ),
        (of(lambda h, n, d, g, m, e, o: 0 not in (n, m)), {"n": {"at_least": 1}, "options": OPTIONS}),
    ],
)
def test_what_runs_is_found_and_what_never_failed_is_left_out(kernel: Any, supports: dict[str, Any]) -> None:
    found = found_supports.found(RECORD, kernel, ["float32"])
    assert found is not None and found == supports
    few = [one for one in fitted(RECORD.cases, found) if one.inputs["q"].shape[2] < 70]
    given = {name for one in few for name in {*one.options, *one.inputs}} - {*"qkv"}
    assert few and given <= {*found["options"], *found.get("fixed", ())}


def test_nothing_is_stated_for_a_kernel_that_runs_all_or_nothing() -> None:
    assert found_supports.found(WHOLE, lambda q, k, v, **o: ra.softmax.forward(q, k, v, **o)[0], ["float32"]) is None
    assert found_supports.found(WHOLE, lambda q, k, v, **o: ra.Decline("nothing"), ["float32"]) is None


def test_a_recurrence_is_found_too() -> None:
    delta = ra.mechanism("delta")

    def attend(q: Any, k: Any, v: Any, *, beta: Any, log_decay: Any) -> Any:
        if v.shape[3] != q.shape[3] or not q.shape[1] == k.shape[1] == v.shape[1] or log_decay.ndim != 3:
            return ra.Decline("no such call")
        return ra.delta.forward(q, k, v, beta=beta, log_decay=log_decay)[0]

    found = found_supports.found(delta, attend, ["float32"])
    assert found == {"where": ["e = d", "h = g"], "options": ["beta", "log_decay"]}


def test_few_cases_that_ran_are_many_that_did_not() -> None:
    def report(kernel: Any) -> Any:
        few = WHOLE.changed(cases=tuple(map(WHOLE.case, ("tiny", "causal", "bias", "sink", "mask-keys", "softcap"))))
        return verify(few, kernel, dtypes=["float32"])

    assert found_supports.few_ran(report(of(lambda *_: False)))
    assert found_supports.few_ran(report(of(lambda h, n, d, g, m, e, o: d == 2)))
    assert not found_supports.few_ran(report(of(lambda *_: True)))


KERNEL = """
import refattn as ra

def attend(q, k, v, *, causal=False):
    if q.shape != k.shape or v.shape != q.shape or q.shape[2] % 16 or q.shape[3] != 32:
        {}
    return ra.softmax.forward(q, k, v, causal=bool(causal))[0]
"""


@pytest.mark.parametrize("refusal", ["return ra.Decline('no such sizes')", "raise ValueError('no such sizes')"])
def test_the_command_runs_again_and_offers_a_line(refusal: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format(refusal))
    call = ["verify", "softmax", "--impl", f"{path}:attend", "--dtype", "float32", "--quick", "--limit", "0"]
    first = CliRunner().invoke(cli, call)
    offered = re.search(r"(\d+) cases run with this in the adapter, 0 without \(found by trial\): (.+)", first.output)
    assert offered is not None and int(offered[1]) >= 2, first.output
    assert ast.literal_eval(offered[2].partition(" = ")[2])["d"] == [32]
    raises = "raise" in refusal
    assert first.exit_code == (1 if raises else 3 if "crosses" in first.output else 0)
    assert ("no such sizes" in first.output) == raises  # what raised is an error all the same
    path.write_text(f"{KERNEL.format(refusal)}\n{offered[2]}\n")
    again = CliRunner().invoke(cli, call)
    assert "found by trial" not in again.output and "softmax: agrees" in again.output or "crosses" in again.output
    assert f"{offered[1]} cases run" in again.output


def test_a_function_in_one_line_is_offered_words(tmp_path: Path) -> None:
    path = tmp_path / "lib.py"
    path.write_text(KERNEL.format("raise ValueError('no such sizes')"))
    call = ["verify", "softmax", "--call", f"{path}:attend", "causal=causal", "--dtype", "float32", "--limit", "0"]
    first = CliRunner().invoke(cli, [*call, "--quick"])
    assert (words := re.search(r"in --call, 0 without \(found by trial\): (.+)", first.output)), first.output
    assert words[1] == "needs=e=d,h=g,nq=nk n=%16 d=32"
    again = CliRunner().invoke(cli, [*call[:5], *words[1].split(), *call[5:], "--quick"])
    assert "found by trial" not in again.output and "0 failed" in again.output
