"""What rounding leaves of a result: against 60 digits, and what is said where it leaves too little."""

from __future__ import annotations

import warnings
from typing import Any

import mpmath as mp
import numpy as np
import pytest

import refattn as ra
from refattn import backends
from refattn.mechanisms.koopman.rounding_error import Nudged, unchanged
from refattn.mechanisms.precision import BOUND, PrecisionError, PrecisionWarning, report

IMPLEMENTATIONS = ("dense", "shared")

JITTER = {"float32": 1e-4, "float64": 1e-8}


def one(size: float, dtype: str = "float64") -> tuple[Any, Any, Any]:
    """A query and a value of a size that see one key, 1."""
    q = np.full((1, 1, 1, 1), size, dtype)
    return q, np.ones_like(q), q


def kernel(x: Any, y: Any) -> Any:
    """x . y + exp(-|x - y|^2 / (2 d)) of points of mpmath's numbers."""
    squared = mp.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    return mp.fsum(a * b for a, b in zip(x, y, strict=True)) + mp.exp(-squared / (2 * len(x)))


def true(q: Any, k: Any, v: Any, updates: int, jitter: float, fit: str = "stein") -> Any:
    """The last point of one query q (d) among keys k and values v (j, d), by the equations KOOP.1 to KOOP.15."""
    n, d, ridge, epsilon, path = len(k), len(q), mp.mpf(0.1), mp.mpf(0.1), [list(q)]
    gram = mp.matrix([[kernel(a, b) for b in k] for a in k]) + 2 * mp.mpf(jitter) * mp.eye(n)
    inverse = gram**-1
    for update in range(updates):
        scores = [mp.fsum(a * b for a, b in zip(path[-1], key, strict=True)) / mp.sqrt(d) for key in k]
        powers = [mp.exp(score - max(scores)) for score in scores]
        attended = [
            mp.fsum(w * value[p] for w, value in zip(powers, v, strict=True)) / mp.fsum(powers) for p in range(d)
        ]
        if update == 0:
            path.append(attended)
            continue
        start, end = (mp.matrix([[kernel(key, x) for key in k] for x in points]) for points in (path[:-1], path[1:]))
        dual = start * inverse
        inner = dual * start.T
        if fit == "stein":
            rows = [(a, o) for a in range(update) for o in range(n)]
            system = mp.matrix(
                [[inner[a, b] * gram[p, o] + ridge * (a == b and o == p) for b, p in rows] for a, o in rows]
            )
            flat = mp.lu_solve(system, mp.matrix([end[a, o] for a, o in rows]))
            fitted = mp.matrix([[flat[a * n + o] for o in range(n)] for a in range(update)])
        else:
            fitted = (inner + ridge * mp.eye(update)) ** -1 * end * inverse
        once = fitted * mp.matrix(k)
        both = once + epsilon * (fitted * start.T * once)
        place = dual * mp.matrix([kernel(key, attended) for key in k])
        target, mapping = both.T * place, once.T * dual
        x = root(k, epsilon, mapping, target, [once.T * place, mp.matrix(attended), mp.matrix(path[-1])])
        path.append([x[p] for p in range(d)])
    return path[-1]


def root(k: Any, epsilon: Any, mapping: Any, target: Any, starts: Any) -> Any:
    """The x with x + epsilon mapping kernel(k, x) = target that damped Newton reaches: there may be more than one."""
    for start in starts:
        x, move, length, norm, d = start, 0 * start, mp.mpf(1), mp.inf, len(start)
        for _ in range(400):
            moved = x - length * move
            missing = moved + epsilon * (mapping * mp.matrix([kernel(key, moved) for key in k])) - target
            if mp.norm(missing) > (1 - length / 10**4) * norm:
                length /= 2
                continue
            x, norm, length, slopes = moved, mp.norm(missing), mp.mpf(1), mp.eye(d)
            for o, key in enumerate(k):
                near = mp.exp(-mp.fsum((a - b) ** 2 for a, b in zip(x, key, strict=True)) / (2 * d))
                slope = mp.matrix([[key[p] - (x[p] - key[p]) * near / d for p in range(d)]])
                slopes += epsilon * mapping[:, o] * slope
            move = mp.lu_solve(slopes, missing)
            if mp.norm(move) <= mp.mpf(10) ** -40 * (1 + mp.norm(x)):
                return x - move
    raise ZeroDivisionError("psi has no inverse there")


def drawn(rng: Any, sizes: tuple[float, float], dtype: str) -> tuple[tuple[Any, Any, Any], Any, int]:
    """q, k, v and d_out, of sizes between two powers of 10, and how many updates there are."""
    d, n, updates = int(rng.integers(1, 5)), int(rng.integers(1, 7)), int(rng.integers(2, 5))
    scales = 10.0 ** (rng.uniform(*sizes, 3) if rng.random() < 0.5 else np.full(3, rng.uniform(*sizes)))
    made = [rng.standard_normal((1, 1, rows, d)) * s for rows, s in zip((1, n, n), scales, strict=True)]
    q, k, v = (x.astype(dtype) for x in made)
    return (q, k, v), rng.standard_normal((1, 1, 1, d)).astype(dtype), updates


def exact(arrays: Any, updates: int, jitter: float, fit: str, moved: Any = None, step: Any = 0) -> Any:
    """The output (d) of 60 digits, where the arrays are moved so many steps along a direction."""
    with mp.workdps(60):
        points = [[[mp.mpf(float(x)) for x in row] for row in array[0, 0]] for array in arrays]
        if moved is not None:
            for rows, array in zip(points, moved, strict=True):
                for row, by in zip(rows, array[0, 0], strict=True):
                    row[:] = [x + step * mp.mpf(float(y)) for x, y in zip(row, by, strict=True)]
        return true(points[0][0], points[1], points[2], updates, jitter, fit)


def outcome(seed: int, sizes: tuple[float, float]) -> tuple[int, int, list[str]]:
    """How many calls of a seed there are, of how many something is said, and what is wrong without a word."""
    rng, said, count, wrong = np.random.default_rng(seed), 0, 0, []
    for dtype in ("float32", "float64"):
        arrays, d_out, updates = drawn(rng, sizes, dtype)
        fit = "separable" if rng.random() < 0.25 else "stein"
        moved = [np.abs(x) * rng.standard_normal(x.shape) for x in arrays]
        try:
            truth = np.asarray([float(x) for x in exact(arrays, updates, JITTER[dtype], fit)])
            step = mp.mpf(10) ** -25
            ends = [exact(arrays, updates, JITTER[dtype], fit, moved, by) for by in (step, -step)]
        except ZeroDivisionError:  # psi has no inverse there
            continue
        slope = float(mp.fsum((a - b) * float(w) for a, b, w in zip(*ends, d_out[0, 0, 0], strict=True)) / (2 * step))
        for implementation in IMPLEMENTATIONS:
            count, where = count + 1, f"seed {seed}, {dtype}, {implementation}"
            with warnings.catch_warnings(record=True) as words:
                warnings.simplefilter("always", PrecisionWarning)
                options: dict[str, Any] = {"updates": updates, "fit": fit, "implementation": implementation}
                try:
                    out, saved = ra.koopman.forward(*arrays, **options)
                except ArithmeticError:  # no inverse, or no digit
                    said += 1
                    continue
                said += bool(words)
                if not words and np.max(np.abs(out.ravel() - truth)) > BOUND[dtype] * np.max(np.abs(truth)):
                    wrong.append(f"{where}: out {out.ravel()}, needs {truth}")
                spoken = len(words)
                try:
                    gradients = ra.koopman.backward(saved, d_out)
                except PrecisionError:
                    continue
                parts = [gradients[name].astype(float) for name in "qkv"]
                found = sum(np.sum(g * by) for g, by in zip(parts, moved, strict=True))
                size = sum(np.max(np.abs(g)) * np.sum(np.abs(by)) for g, by in zip(parts, moved, strict=True))
                if len(words) == spoken and abs(found - slope) > BOUND[dtype] * size:
                    wrong.append(f"{where}: slope {found}, needs {slope}")
    return count, said, wrong


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(750), marks=pytest.mark.slow(sampled=True))])
@pytest.mark.parametrize("sizes", [(-3.0, 3.0), (-1.0, 1.0)])
def test_no_result_is_wrong_without_a_word(sizes: tuple[float, float], seeds: range) -> None:
    """Outputs and gradients: 3,000 calls for each range of sizes; with ordinary sizes words are few."""
    counts, said, wrong = zip(*(outcome(seed, sizes) for seed in seeds), strict=True)
    assert not any(wrong), [text for texts in wrong for text in texts]
    assert sizes[1] > 1.0 or sum(said) <= 0.01 * sum(counts)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_key_and_large_values(implementation: str, dtype: str) -> None:
    """In float32 it gave -204.08 and 36.96."""
    if dtype == "bfloat16":
        pytest.skip("NumPy has no such type")
    out, saved = ra.koopman.forward(*one(100.0, dtype), updates=3, jitter=1e-4, implementation=implementation)
    needs = float(exact(one(100.0), 3, 1e-4, "stein")[0])
    assert needs == pytest.approx(39.4877, abs=1e-4)
    np.testing.assert_allclose(float(out[0, 0, 0, 0]), needs, rtol=1e-3 if dtype == "float16" else 1e-6)
    assert saved.trajectory[-1].dtype == np.float64
    assert saved.error.shape == (1, 1, 1)
    assert np.all(saved.error < BOUND[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_said_tells_what_to_change(implementation: str) -> None:
    given: dict[str, Any] = {"updates": 3, "implementation": implementation}
    with pytest.warns(
        PrecisionWarning, match=r"^out: rounding may move it by .* at \(0, 0, 0\), needs a larger"
    ) as said:
        out, saved = ra.koopman.forward(*one(1000.0), **given)
    assert said[0].filename == __file__
    assert BOUND["float64"] < saved.error[0, 0, 0] < 0.5
    with pytest.warns(PrecisionWarning, match="^gradient of [qkv]: rounding may move it by") as said:
        ra.koopman.backward(saved, out)
    assert {word.filename for word in said} == {__file__}
    lost = r"^out: rounding leaves no digit right at \(0, 0, 0\), needs a larger jit|was not inverted at 1 positions"
    with pytest.raises(ArithmeticError, match=lost) as error:
        ra.koopman.forward(*one(1e5), **given)
    assert implementation == "shared" or error.type is PrecisionError
    assert np.max(ra.koopman.forward(*one(1000.0), **given, jitter=1.0, fit="stein(ridge=1e6)")[1].error) < 1e-6


def test_one_wrong_query_does_not_change_another() -> None:
    """Neither its bits nor its estimate."""
    q, k, v = one(1000.0)
    both = np.concatenate([q, 0.0 * q + 1.0], axis=2)
    with pytest.warns(PrecisionWarning):
        out, saved = ra.koopman.forward(both, k, v * 0.0 + 1000.0, updates=3, implementation="dense")
    alone, own = ra.koopman.forward(both[:, :, 1:], k, v * 0.0 + 1000.0, updates=3, implementation="dense")
    np.testing.assert_array_equal(out[:, :, 1:], alone)
    if own.repeated is not None:
        np.testing.assert_array_equal(saved.error[:, :, 1:], own.error)


def test_one_update_solves_nothing() -> None:
    out, saved = ra.koopman.forward(*one(1e6), updates=1)
    assert saved.error.tolist() == [[[0.0]]]
    assert out[0, 0, 0, 0] == 1e6


def test_a_nudge_moves_numbers_by_some_roundings_and_each_time_otherwise() -> None:
    x = np.ones((2, 3, 4))
    nudged = Nudged(ra.koopman.Rbf(1.0, 1.0), x, 1)
    first, second = nudged.nudged(x), nudged.nudged(x)
    assert np.all(np.abs(first - 1.0) <= 17 * np.finfo(float).eps)
    assert len(np.unique(first[0])) > 6
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first[0], first[1])
    assert unchanged(x) is x


@pytest.mark.parametrize("value", [np.nan, 0.0, 1e-7])
def test_nothing_is_said_of_what_is_right_or_not_a_number(value: float) -> None:
    report("x", np.asarray([value]), 1e-6, "nothing", stacklevel=1)


def test_nothing_is_said_where_values_are_not_known(backend: Any) -> None:
    if backend.owner is not backends.get("jax"):
        pytest.skip("only under jax.jit")
    import jax

    out = jax.jit(lambda q, k, v: ra.koopman.forward(q, k, v, updates=3)[0])(*map(backend.array, one(1e5)))
    assert out.shape == (1, 1, 1, 1)


# --- systems as CuPy takes them


def test_systems_have_the_axes_of_their_right_hand_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy does not broadcast them."""
    plain = np.linalg.solve

    def narrow(a: Any, b: Any) -> Any:
        if a.shape[:-1] != b.shape[:-1]:
            raise ValueError("a must have the same axes in front as b")
        return plain(a, b)

    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, 2, 3, 4)) for _ in range(3))
    ridge = rng.uniform(0.1, 1.0, (1, 2, 4))
    calls: list[dict[str, Any]] = [{}, {"causal": True}, {"space": "augmented"}, {"implementation": "shared"}]
    calls += [
        {"fit": fit(ridge=ridge), **more} for fit in (ra.koopman.Stein, ra.koopman.Separable) for more in calls[::3]
    ]

    def results(given: dict[str, Any]) -> list[Any]:
        with ra.reading():
            out, saved = ra.koopman.forward(q, k, v, updates=3, **given)
            return [out, *ra.koopman.backward(saved, out).values()]

    expected = [results(given) for given in calls]
    monkeypatch.setattr(np.linalg, "solve", narrow)
    for given, needs in zip(calls, expected, strict=True):
        for x, need in zip(results(given), needs, strict=True):
            np.testing.assert_array_equal(x, need)
