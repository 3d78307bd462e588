"""Every formula of the definition's docstring, evaluated as it is written, is the value of its line.

The run has one head. Words that name a decomposition stand for functions of NumPy, and its factors are computed here.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from refattn import equations
from refattn.mechanisms.growing import definition
from tests.formulas import value

SEQUENCES, TOKENS, WIDTH, OLD, COLUMNS = 3, 6, 5, 2, 1
NUMBERS = {"scale": 0.7, "damping": 0.03, "amplitude": 0.4}

WORDS = {
    "the singular values of H": "svdvals(H)",
    "Z_F with its d + c largest singular values alone": "truncated(Z_F)",
    "sum_(r > c)": "sum_r",
    "(w_q, 0)": "wide_q",
    "(w_k, 0)": "wide_k",
}
"""What words of a formula are called here; the r of a sum are those of columns that are not added."""

TEXT = equations.docstring(definition)
DECLARED = equations.declared(definition)
FORMULAS = {id: text.partition("  ")[0] for id, text in DECLARED.items()}


def truncated(x: Any) -> Any:
    left, values, right = np.linalg.svd(x)
    return (left * values)[:, : OLD + COLUMNS] @ right[: OLD + COLUMNS]


def projection(x: Any) -> Any:
    return x @ np.linalg.pinv(x)


@cache
def run() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the names of the docstring stand for, and the values of the lines by id."""
    random = np.random.default_rng(5)
    y, ds = random.standard_normal((SEQUENCES, TOKENS, WIDTH)), random.standard_normal((SEQUENCES, 1, TOKENS, TOKENS))
    w_q, w_k = random.standard_normal((2, 1, WIDTH, OLD))
    traced = equations.Trace()
    own = equations.hooked(definition, traced.record)
    heads, statistics = own.heads_of(w_q, w_k, scale=NUMBERS["scale"]), own.observe(y, ds)
    planned = own.plan(heads, statistics, damping=NUMBERS["damping"])
    own.grow(heads, planned, columns=COLUMNS, amplitude=NUMBERS["amplitude"])
    own.slope_of(planned, COLUMNS)
    lines = {id: x[0] if np.ndim(x) and np.shape(x)[0] == 1 else np.asarray(x) for id, x in dict(traced).items()}
    known: dict[str, Any] = {FORMULAS[id].partition(" = ")[0]: x for id, x in lines.items()}
    known |= {"rho": known.pop("rho_r"), "y": y, "ds": ds[:, 0], "w_q": w_q[0], "w_k": w_k[0], "W": planned.whiten}
    known |= {**NUMBERS, "n_b": float(SEQUENCES), "scores": float(ds.size), "I": np.eye(WIDTH)}
    known["lambda"], _ = np.linalg.eigh(known["A"])
    known |= {"P_q": projection(known["W"] @ known["w_q"]), "P_k": projection(known["W"] @ known["w_k"])}
    left, tau, right = np.linalg.svd(known["M'"])
    known |= {"Q_L": left[:, : OLD + COLUMNS], "tau": tau[: OLD + COLUMNS], "Q_R": right.T[:, : OLD + COLUMNS]}
    known |= {f"wide_{x}": np.pad(known[f"w_{x}"], ((0, 0), (0, COLUMNS))) for x in "qk"}
    known |= {"svdvals": np.linalg.svdvals, "truncated": truncated, "diag": np.diag}
    both = re.search(r"^ +B = (L\^T.*) = B_L diag\(beta\) B_R\^T", TEXT, re.MULTILINE)
    assert both is not None
    known["B_L"], _, right = np.linalg.svd(evaluated(both[1], known))
    return known | {"B_R": right.T}, lines


def evaluated(text: str, known: dict[str, Any], **scope: int) -> Any:
    for words, name in WORDS.items():
        text = text.replace(words, name)

    def names(which: str, index: tuple[Any, ...], _: Any) -> Any:
        return known[which][index] if index else known[which]

    sizes = {"b": SEQUENCES, "r": lambda _: range(COLUMNS, WIDTH)}
    return value(text, set(known), names, sizes, scope)


def far(id: str, right: str) -> float:
    """Return by how much a right side and the value of its line differ, in units of the largest or 1."""
    known, lines = run()
    scopes: list[dict[str, int]] = [{"r": r} for r in range(WIDTH)] if "_r = " in FORMULAS[id] else [{}]
    found = [evaluated(right, known, **scope) for scope in scopes]
    wanted = lines[id]
    return float(np.max(np.abs(np.reshape(found, np.shape(wanted)) - wanted)) / max(1.0, np.max(np.abs(wanted))))


@pytest.mark.parametrize("id", FORMULAS)
def test_a_formula_is_the_value_of_its_line(id: str) -> None:
    assert far(id, FORMULAS[id].partition(" = ")[2]) < 1e-11


@pytest.mark.parametrize("id", FORMULAS)
def test_a_wrong_sign_is_noticed(id: str) -> None:
    right = FORMULAS[id].partition(" = ")[2]
    signs = [at for at in re.finditer(r" ([-+]) ", right) if "largest" not in right]
    for wrong in [f"0 - ({right})"] + [
        f"{right[: at.start()]} {'-' if at[1] == '+' else '+'} {right[at.end() :]}" for at in signs
    ]:
        assert far(id, wrong) > 1e-6, wrong


def test_what_the_docstring_says_of_the_metric_and_of_both_factors() -> None:
    known, _ = run()
    for text in ("W^T W is A + damping mean(lambda) I", "M' = Q_L diag(tau) Q_R^T", "M' = L R^T"):
        assert text in TEXT
        left, right = re.split(" is | = ", text, maxsplit=1)
        np.testing.assert_allclose(evaluated(left, known), evaluated(right, known), atol=1e-12)


def test_what_old_columns_can_follow_is_at_right_angles_to_what_they_cannot() -> None:
    """Every Z of changes of old columns, to H; and G - H is one."""
    known, _ = run()
    random, found = np.random.default_rng(6), re.search(r"^    Z = (.*)$", TEXT, re.MULTILINE)
    assert found is not None
    columns = []
    for _ in range(2 * WIDTH * OLD):
        e_q, e_k = random.standard_normal((2, WIDTH, OLD))
        z = evaluated(found[1], known | {"E_q": e_q, "E_k": e_k})
        size = float(np.linalg.norm(z) * np.linalg.norm(known["H"]))
        assert np.sum(z * known["H"]) == pytest.approx(0.0, abs=1e-12 * size)
        columns.append(z.reshape(-1))
    followed = (known["G"] - known["H"]).reshape(-1)
    factors, *_ = np.linalg.lstsq(np.stack(columns, axis=1), followed)
    np.testing.assert_allclose(np.stack(columns, axis=1) @ factors, followed, atol=1e-10)
