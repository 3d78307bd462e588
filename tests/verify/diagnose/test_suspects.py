"""Which equation is wrong, from results alone: reach, ranking, conventions, and what the report says of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from refattn.equations import declared, tags
from refattn.golden.storage_types import round_to
from refattn.mechanisms.softmax import definition
from refattn.verify.diagnose.changes import KINDS
from refattn.verify.diagnose.error_templates import Templates, changes, reach
from refattn.verify.diagnose.mutants import kernel, mutants
from refattn.verify.diagnose.suspects import locate
from refattn.verify.outcome import Report, Result
from refattn.verify.report import diagnosis, tables
from refattn.verify.report.suspects import told
from refattn.verify.run import verify
from refattn.verify.tolerance.budget import truth, wide
from tests.verify.diagnose.left_out import FAMILIES, found

RECORD = ra.mechanism("softmax")
CASES = ("unequal", "causal-tail", "softcap")
FEW = dataclasses.replace(RECORD, cases=tuple(RECORD.case(name) for name in CASES))
ONE = dataclasses.replace(RECORD, cases=FEW.cases[:1])
MUTANTS = {one.name: one for one in mutants(RECORD)}


class Wrong:
    """The dense implementation with one equation changed, forward and backward."""

    def __init__(self, id: str, change: Callable[[Any], Any]) -> None:
        self.id, self.change = id, change

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        with equations.mutate(self.id, self.change):
            out, self.saved = ra.softmax.forward(q, k, v, implementation="dense", **options)
        return out, self.saved.lse

    def backward(self, d_out: Any) -> Any:
        with equations.mutate(self.id, self.change):
            found = ra.softmax.backward(self.saved, d_out)
        return {name: found[name] for name in "qkv"}


def located(kernel: Any, *, grad: bool = True, dtype: str = "float32", record: Any = FEW) -> Report:
    return locate(record, verify(record, kernel, label="mine", dtypes=[dtype], grad=grad))


def reached(case: str, *, grad: bool = True) -> dict[str, tuple[str, ...]]:
    known = truth(RECORD, RECORD.case(case), "float64", grad=grad)
    return reach(RECORD, RECORD.case(case), wide(known.inputs), known.upstream)


def test_an_equation_reaches_what_is_computed_from_it() -> None:
    table = reached("softcap")
    assert table["SM.5"] == ("out",) and table["SM.lse"] == ("lse",)
    assert table["SM.4"] == ("out", "d_q", "d_k", "d_v", "d_softcap")  # lse is computed from the sum
    assert table["SM.1"] == table["SM.capped"] == ("out", "lse", "max", "d_q", "d_k", "d_v", "d_softcap")
    assert table["dSM.4"] == table["dSM.2"] == ("d_q", "d_k", "d_softcap") and table["dSM.1"] == ("d_q", "d_k")
    assert [table[f"dSM.{name}"] for name in "qkv"] == [("d_q",), ("d_k",), ("d_v",)]
    assert table["SM.2"] == table["dSM.scale"] == ()  # without a mask it does not run; no d_scale is asked for


def test_without_gradients_the_backward_reaches_nothing() -> None:
    table = reached("tiny", grad=False)
    assert not any(found for id, found in table.items() if id.startswith("d"))
    assert table["SM.4"] == ("out",)


HANDFUL = (
    ("SM.1", "sign flipped"),
    ("SM.capped", "last key dropped"),
    ("SM.total", "one row zeroed"),
    ("SM.4", "rounded one type lower"),
    ("dSM.4", "shifted by one"),
    ("dSM.total", "scaled by 1.02"),
    ("dSM.3", "heads swapped"),
    ("dSM.k", "one row zeroed"),
)


def test_the_equation_is_found_with_the_mutant_left_out() -> None:
    places = {
        str(one.mutant): one.place for one in found(FEW, "float32", [MUTANTS[" ".join(each)] for each in HANDFUL])
    }
    assert len(places) == len(HANDFUL)
    assert max(places.values()) <= 2, places


def test_what_does_the_same_counts_as_the_right_equation() -> None:
    """A factor of the masked scores' adjoint is the same error in two more equations, and in no fourth."""
    (one,) = found(ONE, "float32", [MUTANTS["dSM.2 scaled by 1.02"]])
    assert (one.class_place, one.same) == (1, 3)
    assert all(any(kind.startswith(begins) for begins in FAMILIES.values()) for kind in KINDS)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_factor_that_is_in_no_bank_is_named(dtype: str) -> None:
    known = truth(ONE, ONE.cases[0], dtype, grad=True)
    with equations.mutate("SM.total", lambda x: x * 1.37):
        result = kernel(ONE, ONE.cases[0], known, dtype)

    class Stored:
        def forward(self, *, dtype: str, **given: Any) -> Any:
            return result.tensors["out"], result.tensors["lse"]

        def backward(self, d_out: Any) -> Any:
            return {name: result.tensors[f"d_{name}"] for name in "qkv"}

    suspects = located(Stored(), dtype=dtype, record=ONE).suspects
    assert suspects is not None and suspects.dtype == dtype
    first = suspects.ranked[0]
    assert first.ids == ("SM.total",) and first.share <= 1.0
    name, _, factor = first.kind.rpartition(" ")
    assert name == "scaled by" and float(factor) == pytest.approx(1.37, rel=5e-3 if dtype == "bfloat16" else 1e-3)


def by_softcap(plain: float, capped: float) -> Callable[..., Any]:
    """A kernel whose output has one factor with a soft-cap and another without."""

    def attend(q: Any, k: Any, v: Any, *, softcap: Any = None, **options: Any) -> Any:
        out, _ = ra.softmax.forward(q, k, v, softcap=softcap, **options)
        return out * (plain if softcap is None else capped)

    return attend


def test_a_factor_that_depends_on_options_is_fitted_for_each_set_of_them() -> None:
    suspects = located(by_softcap(1.25, 2.0), grad=False).suspects
    assert suspects is not None
    first = suspects.ranked[0]
    # The sum of the weights divides the output.
    assert {*first.kind.split(", ")} == {
        "scaled by 0.8 with causal=True or with no option",
        f"by 0.5 with softcap={RECORD.case('softcap').options['softcap']}",
    }
    assert first.ids[0] == "SM.total" and first.share <= 1.0
    assert len(first.cases) == first.failing == len(CASES)


def test_a_factor_over_different_options_that_explains_little_says_so() -> None:
    def attend(q: Any, k: Any, v: Any, *, softcap: Any = None, **options: Any) -> Any:
        longer = 0.7 * q if softcap is None else 2.0 * q
        return by_softcap(1.25, 2.0)(longer, 1.5 * k, np.flip(v, 2), softcap=softcap, **options)

    suspects = located(attend, grad=False).suspects
    assert suspects is not None
    scaled = [one for one in suspects.ranked if one.kind.startswith("scaled by")]
    assert scaled and all(one.kind.endswith(", over cases with different options") for one in scaled)


def test_equations_that_give_the_same_stand_together() -> None:
    suspects = located(Wrong("dSM.2", lambda x: x * 1.02)).suspects
    assert suspects is not None
    assert (suspects.wrong, suspects.right) == (("d_q", "d_k"), ("out", "lse", "d_v"))
    assert suspects.narrow == ("dSM.4", "dSM.total", "dSM.3", "dSM.2")  # dSM.1 only runs with a soft-cap
    (first,) = suspects.ranked
    assert first.ids == ("dSM.4", "dSM.3", "dSM.2") and first.kind == "scaled by 1.02" and first.share < 1.0
    line = first.equations[-1]
    place = next(tag.line for tag in tags(definition) if tag.id == "dSM.2")
    assert line.formula == declared(definition)["dSM.2"]
    assert line.place == f"refattn/mechanisms/softmax/definition.py:{place}"
    assert line.code == "d_masked = weights * (d_weights - mean)"


def test_cases_that_agree_tell_apart_what_runs_only_there() -> None:
    """An error in the adjoint of the scores shows with a soft-cap alone: elsewhere dSM.2 takes its place."""
    suspects = located(Wrong("dSM.1", lambda x: x * 1.02)).suspects
    assert suspects is not None and suspects.ranked[0].ids == ("dSM.1",)


def test_an_error_of_no_known_kind() -> None:
    def last_five_keys(x: Any) -> Any:
        x = x.copy()
        x[..., -5:] *= 0.7
        return x

    suspects = located(Wrong("dSM.4", last_five_keys), record=ONE).suspects
    assert suspects is not None
    assert "dSM.4" in suspects.ranked[0].ids
    assert suspects.ranked[0].share > 1.0 and 0.0 < suspects.ranked[0].explained <= suspects.ranked[0].together < 1.0


def test_a_convention_comes_before_equations() -> None:
    attend = RECORD.wrong["top-left causality"]
    causal = dataclasses.replace(RECORD, cases=FEW.cases[1:2])
    suspects = located(lambda q, k, v, **options: attend(q, k, v, **options)[0], grad=False, record=causal).suspects
    assert suspects is not None
    assert suspects.ranked[0].ids == () and suspects.ranked[0].kind == "top-left causality"
    assert told(suspects.ranked[0]) == "top-left causality: explains everything"


def test_of_two_errors_the_one_of_outputs_is_first_and_then_what_remains() -> None:
    class Two(Wrong):
        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            with equations.mutate("SM.lse", lambda x: x * 1.1):
                return super().forward(q, k, v, **options)

    suspects = located(Two("dSM.v", lambda x: x * 1.1), record=ONE).suspects
    assert suspects is not None and suspects.wrong == ("lse", "d_v")
    assert {*suspects.possible} == {
        "SM.1",
        "SM.3",
        "SM.total",
    } and not suspects.narrow  # these reach all of it, and more
    first, *_, last = suspects.ranked
    assert (first.ids, first.kind, first.cases, first.whole) == (("SM.lse",), "scaled by 1.1", ("unequal",), 0)
    assert (last.ids, last.kind) == (("dSM.v",), "scaled by 1.1") and last.share < 1.0
    alone = dataclasses.replace(suspects, possible=())
    assert "none of the 27 equations can disturb all of them: there may be several errors" in shown(alone)


def shown(suspects: Any) -> list[str]:
    from refattn.verify.report.suspects import lines

    return [text for _, text in lines(suspects)]


def test_what_agrees_has_no_suspects_and_costs_nothing() -> None:
    asked: list[Any] = []

    def note(items: Iterable[Any]) -> Iterable[Any]:
        asked.append(items)
        return items

    agreed = verify(FEW, lambda q, k, v, **options: ra.softmax.forward(q, k, v, **options)[0], dtypes=["float32"])
    assert locate(FEW, agreed, progress=note) is agreed and not asked
    assert agreed.to_json()["suspects"] is None


@pytest.mark.parametrize("wrong", [lambda out: out[..., :1], lambda out: np.zeros(out.shape)], ids=["shape", "type"])
def test_a_wrong_shape_or_type_alone_has_no_suspects(wrong: Callable[[Any], Any]) -> None:
    found = located(lambda q, k, v, **options: wrong(ra.softmax.forward(q, k, v, **options)[0]), grad=False)
    assert found.suspects is None and found.exit_code == 1


def test_the_report_says_it_and_json_holds_it() -> None:
    found = located(Wrong("dSM.q", lambda x: -x), record=ONE)
    text = tables.verified(found, ONE)
    for part in ("Suspects (from float32, cases ", "d_q disagrees; out, lse, d_k, d_v agree", "1. dSM.q: sign flipped"):
        assert part in text
    assert "\n      dSM.q  dq_i = sum_j dm_ij k_j / sqrt(d)  " in text
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))["suspects"]
    assert data["wrong"] == ["d_q"] and data["ranked"][0]["equations"][0]["id"] == "dSM.q"
    assert 0.0 < data["ranked"][0]["share"] < 1.0 and data["departure"] is None


def test_a_number_that_is_not_finite_is_a_mark_too() -> None:
    def one_nan(x: Any) -> Any:
        x = x.copy()
        x.reshape(-1)[-1] = np.nan
        return x

    found = located(Wrong("SM.5", one_nan), record=ONE)
    assert found.suspects is not None and found.suspects.wrong == ("out",)
    assert found.suspects.narrow == ("SM.5",)
    assert all(math.isinf(suspect.share) for suspect in found.suspects.ranked)
    assert all(suspect["share"] is None for suspect in found.to_json()["suspects"]["ranked"])


def test_marks_are_zero_for_what_an_equation_spares() -> None:
    case = RECORD.case("causal-tail")
    templates = Templates(RECORD, case, truth(RECORD, case, "float32", grad=True), changes(RECORD, "float32"))
    assert all(not templates.predicted("dSM.q")[name].any() for name in ("out", "lse", "d_k", "d_v"))
    assert templates.predicted("dSM.q")["d_q"].any(axis=1).all()
    assert not any(marks.any() for marks in templates.predicted("SM.capped").values())  # it does not run
    honest = kernel(RECORD, case, templates.truth, "float32")
    assert isinstance(honest, Result)


def test_rows_that_are_exactly_zero_are_marks_like_others() -> None:
    """In float64 nothing is granted there, neither by noise nor by rounding."""
    case = RECORD.case("causal-head")
    templates = Templates(RECORD, case, truth(RECORD, case, "float64", grad=True), changes(RECORD, "float64"))
    assert not templates.truth.values["out"][:, :, 0].any() and not templates.truth.variance["out"][:, :, 0].any()
    assert all(np.isfinite(marks).all() for id in ("SM.4", "dSM.q") for marks in templates.predicted(id).values())


def test_rows_of_no_elements_are_no_trouble() -> None:
    """A state that is wrong where there is no token: the gradients of the gates have no elements there."""
    record = ra.mechanism("delta")
    few = dataclasses.replace(record, cases=(record.case("no-token"),))

    def low(**arguments: Any) -> Any:
        out, saved = ra.delta.forward(**arguments)
        return out, saved.state + 1.0

    report = verify(few, low, dtypes=["float32"], grad=True)
    assert report.exit_code == 1
    assert locate(few, report).exit_code == 1


def test_what_changes_nothing_in_the_failing_case_is_no_suspect() -> None:
    """With a wide budget an error agrees that is no option of the case: it does not act."""
    record = dataclasses.replace(RECORD, cases=(RECORD.case("sink-large"),))

    def short(q: Any, k: Any, v: Any, *, dtype: str, sink: Any) -> Any:
        with equations.mutate("SM.1", lambda x: round_to(x, dtype)):
            out = ra.softmax.forward(*(x.astype(np.float64) for x in (q, k, v)), sink=sink.astype(np.float64))[0]
        return round_to(np.nextafter(out, np.inf) + np.abs(out) * 2.0**-9, dtype).astype(np.float32)

    suspects = located(short, grad=False, dtype="bfloat16", record=record).suspects
    assert suspects is not None and suspects.wrong == ("out",)
    assert not [one.kind for one in suspects.ranked if any(word in one.kind for word in ("cap", "window", "offset"))]


def test_everything_is_what_failed_in_every_type() -> None:
    def kernel(q: Any, k: Any, v: Any, *, causal: bool = False, softcap: float | None = None) -> Any:
        """In float16 the soft-cap is left out, too."""
        options: Any = {} if softcap is None or q.dtype == np.float16 else {"softcap": softcap}
        return ra.softmax.forward(q, k, v, causal="top_left" if causal else False, **options)[0]

    report = locate(FEW, verify(FEW, kernel, dtypes=["float32", "float16"]))
    assert [len([one for one in report.failed if one.dtype == dtype]) for dtype in ("float32", "float16")] == [1, 2]
    assert report.suspects is not None
    first = report.suspects.ranked[0]
    assert told(first) == "top-left causality: explains 2 of 3 failing cases"
    assert first.cases == ("causal-tail", "causal-tail (float16)")


def test_what_explains_little_is_not_listed() -> None:
    def noise(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out = ra.softmax.forward(q, k, v, **options)[0]
        return out + np.random.default_rng(0).standard_normal(out.shape).astype(out.dtype)

    report = located(noise, grad=False)
    assert report.suspects is not None and all(one.explained >= 0.1 for one in report.suspects.ranked)
    assert not report.suspects.ranked
    assert any(line.startswith("nothing known explains it") for line in shown(report.suspects))
    which = [text for word, text in diagnosis.lines(report, FEW) if word == "which"]
    assert len(which) == 1 and which[0].startswith("nothing known explains it; the place may be SM.")
    assert "; of 27 equations these can disturb it" in which[0]


SQUARE = dataclasses.replace(RECORD, cases=(RECORD.case("faint"), RECORD.case("tile-97")))


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (lambda q, k, v, **_: q, ("which", "no attention is computed: the output is q: explains everything")),
        (lambda q, k, v, **_: v, ("which", "no attention is computed: the output is v: explains everything")),
        (lambda q, k, v, **how: ra.softmax.forward(q, v, k, **how)[0], ("which", "k and v exchanged")),
        (lambda q, k, v, **how: ra.softmax.forward(k, q, v, **how)[0], ("which", "q and k exchanged")),
        (
            lambda q, k, v, **how: np.swapaxes(ra.softmax.forward(q, k, v, **how)[0], 1, 2),
            ("how much", ": axes 1 and 2 are exchanged"),
        ),
        (
            lambda q, k, v, **how: np.swapaxes(ra.softmax.forward(q, k, v, **how)[0], 1, 2).reshape(*q.shape[::2], -1),
            ("how much", ": its heads are merged into the width"),
        ),
    ],
)
def test_a_kernel_that_computes_something_else_is_told_so(kernel: Any, said: tuple[str, str]) -> None:
    two_heads = dataclasses.replace(RECORD, cases=(RECORD.case("grouped"),))
    report = located(kernel, grad=False, record=two_heads if said[0] == "how much" else SQUARE)
    word, text = said
    assert text in dict(diagnosis.lines(report, RECORD))[word]


def test_no_attention_is_told_first_and_no_convention_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refattn.verify.run.differing", lambda *given, **more: pytest.fail("conventions were probed"))
    kernels: dict[str, Any] = {
        "every output is 0": lambda q, k, v, **_: np.zeros((*q.shape[:3], v.shape[3]), q.dtype),
        "every output is the same number": lambda q, k, v, **_: np.full((*q.shape[:3], v.shape[3]), 0.5, q.dtype),
        "the output is k": lambda q, k, v, **_: k,
    }
    for words, attend in kernels.items():
        report = located(attend, grad=False, record=SQUARE)
        assert (report.suspects is None) == words.startswith("every")  # no equation explains them
        answers = list(diagnosis.lines(report, SQUARE))
        assert [word for word, _ in answers][:2] == ["what", "which"]
        assert answers[1][1] == f"no attention is computed: {words}: explains everything"
        assert not [text for word, text in answers if word in ("convention", "or", "precision")]
        data = report.to_json()
        assert data["no_attention"] == words and data["diagnosis"] == [list(pair) for pair in answers]


def test_nan_from_finite_inputs_has_its_rows() -> None:
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out = ra.softmax.forward(q, k, v, **options)[0].copy()
        out[:, :, 5:9, 1] = np.nan
        return out

    report = located(attend, grad=False, record=dataclasses.replace(RECORD, cases=(RECORD.case("plain"),)))
    (text,) = [text for word, text in diagnosis.lines(report, RECORD) if word == "NaN"]
    assert text.startswith("out is NaN in ") and "(rows 5 to 8), where inputs and the reference are finite" in text


def test_an_option_that_is_ignored_is_named_once() -> None:
    record = dataclasses.replace(RECORD, cases=tuple(RECORD.case(name) for name in ("causal", "causal-head")))
    report = located(
        lambda q, k, v, causal=False, **how: ra.softmax.forward(q, k, v, **how)[0], grad=False, record=record
    )
    lines = list(diagnosis.lines(report, RECORD))
    assert ("which", "the causal mask is ignored: explains everything") in lines
    assert not [text for word, text in lines if word == "or" and "ignored" in text]


@pytest.mark.parametrize(("factor", "kind"), [(2.0, "scaled by 2"), (-1.0, "sign flipped")])
def test_a_wrong_gradient_of_an_option_is_located(factor: float, kind: str) -> None:
    class Kernel:
        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            out, self.saved = ra.softmax.forward(q, k, v, **options)
            return out

        def backward(self, d_out: Any) -> Any:
            right = ra.softmax.backward(self.saved, d_out)
            return {name: factor * x if name == "scale" else x for name, x in right.items()}

    record = dataclasses.replace(RECORD, cases=tuple(RECORD.case(name) for name in ("plain", "scale", "causal")))
    found = located(Kernel(), grad=True, record=record).suspects
    assert found is not None and (found.wrong, found.narrow) == (("d_scale",), ("dSM.scale",))
    assert (found.ranked[0].ids, found.ranked[0].kind) == (("dSM.scale",), kind) and found.ranked[0].share <= 1.0
