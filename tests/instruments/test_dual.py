"""Dual arrays: every rule beside differences, every mechanism forward and backward, and what is refused."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.instruments.dual import Dual, tangents
from refattn.mechanisms.record import Unsupported
from refattn.verify.selfcheck import gradients
from refattn.verify.selfcheck.gradients import OF_TANGENTS, WAYS
from refattn.xp import backend, namespace
from tests.test_equation_ids import SIZES


def draw(purpose: str, *shape: int, seed: int = 0) -> Any:
    return philox.normal(shape, seed=seed, purpose=f"dual.{purpose}")


A, B, SQUARE = draw("a", 2, 3, 4), draw("b", 2, 3, 4), draw("square", 2, 3, 3)
DEFINITE = SQUARE @ SQUARE.mT + np.eye(3)
WITHIN, ABOVE = 0.9 * np.tanh(A), 1.0 + np.abs(A)
AT = np.asarray([[2, 0], [1, 1]])


def symmetric(x: Any) -> Any:
    return (x + namespace(x).matrix_transpose(x)) / 2.0


def wrote(xp: Any, a: Any, b: Any) -> Any:
    x = xp.zeros((2, 3, 4))
    x[..., :2] = a[..., 2:]
    view = x[:, 1, :]
    view += b[:, 0, :]
    x *= b
    x[0, 0, 0] = 5.0
    x -= 1.0
    x /= 2.0 + b * b
    return x


Rule = Callable[..., Any]

# Operation -> a function of (xp, arrays), and the arrays; a name before a dot is that of the rule.
CASES: dict[str, tuple[Rule, tuple[Any, ...]]] = {
    **{
        name: (lambda xp, x, n=name: getattr(xp, n)(x), (A,))
        for name in (
            "abs asinh atan conj cos cosh exp expm1 imag negative positive real sin sinh square tan tanh".split()
        )
    },
    **{name: (lambda xp, x, n=name: getattr(xp, n)(x), (WITHIN,)) for name in "acos asin atanh log1p".split()},
    **{
        name: (lambda xp, x, n=name: getattr(xp, n)(x), (ABOVE,))
        for name in ("acosh log log2 log10 sqrt reciprocal".split())
    },
    **{
        name: (lambda xp, x, y, n=name: getattr(xp, n)(x, y), (A, B))
        for name in ("add subtract multiply divide atan2 hypot logaddexp copysign maximum minimum vecdot".split())
    },
    "add.operators": (lambda xp, x, y: 1.0 + x * 2.0 - (3.0 - y) / 4.0 + 2.0 / (3.0 + y * y) - (-x) + abs(y), (A, B)),
    "neg": (lambda xp, x: -x, (A,)),
    "erf": (lambda xp, x: backend(x).erf(x), (A,)),
    "pow": (lambda xp, x, y: x**y + 2.0**y + x**3.0 + x**0, (ABOVE, B)),
    "remainder": (lambda xp, x, y: xp.remainder(x, y), (A, ABOVE)),
    "clip": (lambda xp, x, y: xp.clip(x, -0.3, y), (A, ABOVE / 3.0)),
    "where": (lambda xp, x, y: xp.where(x > y, x, y * x) + xp.where(x > 0.0, 1.0, x), (A, B)),
    "astype": (lambda xp, x: xp.astype(xp.astype(x, xp.complex128) * (1.0 + 2.0j), xp.complex128), (A,)),
    "asarray": (lambda xp, x: xp.asarray(x, copy=True) * 2.0, (A,)),
    "full_like": (lambda xp, x, y: xp.full_like(x, y[0, 0, 0]), (A, B)),
    "broadcast_to": (lambda xp, x: xp.broadcast_to(x, (5, 2, 3, 4)), (A,)),
    "broadcast_arrays": (lambda xp, x, y: xp.broadcast_arrays(x, y[:1])[1], (A, B)),
    "concat": (lambda xp, x, y: xp.concat([x, y], axis=1), (A, B)),
    "stack": (lambda xp, x, y: xp.stack((x, y), axis=-1), (A, B)),
    "unstack": (lambda xp, x: xp.unstack(x, axis=1)[1], (A,)),
    "cumulative_sum": (lambda xp, x: xp.cumulative_sum(x, axis=1, include_initial=True), (A,)),
    "diff": (lambda xp, x: xp.diff(x, axis=1), (A,)),
    "expand_dims": (lambda xp, x: xp.expand_dims(x, axis=1), (A,)),
    "squeeze": (lambda xp, x: xp.squeeze(x[:1], axis=0), (A,)),
    "flip": (lambda xp, x: xp.flip(x, axis=-1), (A,)),
    "roll": (lambda xp, x: xp.roll(x, 1, axis=-1), (A,)),
    "moveaxis": (lambda xp, x: xp.moveaxis(x, 0, 1), (A,)),
    "permute_dims": (lambda xp, x: xp.permute_dims(x, (2, 0, 1)), (A,)),
    "matrix_transpose": (lambda xp, x: xp.matrix_transpose(x) @ x + x.mT @ x, (A,)),
    "repeat": (lambda xp, x: xp.repeat(x, 2, axis=1), (A,)),
    "tile": (lambda xp, x: xp.tile(x, (1, 2, 1)), (A,)),
    "reshape": (lambda xp, x: xp.reshape(x, (6, 4)), (A,)),
    "tril": (lambda xp, x: xp.tril(x) + xp.triu(x, k=1) * 2.0, (A,)),
    "triu": (lambda xp, x: xp.triu(x, k=-1), (A,)),
    "getitem": (lambda xp, x: x[:, None, 1:, ::2] + x[0, 0, 0], (A,)),
    "getitem.indices": (lambda xp, x: x[..., xp.asarray(AT[0])], (A,)),
    "take": (lambda xp, x: xp.take(x, xp.asarray(AT[0]), axis=-1), (A,)),
    "take_along_axis": (lambda xp, x: xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1), (A,)),
    "sum": (lambda xp, x: xp.sum(x, axis=(0, 2), keepdims=True, dtype=xp.float64), (A,)),
    "mean": (lambda xp, x: xp.mean(x, axis=-1) + xp.mean(x), (A,)),
    "max": (lambda xp, x: xp.max(x, axis=(0, 2), keepdims=True) + xp.max(x) + xp.max(x, axis=1, keepdims=True), (A,)),
    "min": (lambda xp, x: xp.min(x, axis=-1) + xp.min(x, axis=(-2, 0))[0], (A,)),
    "sort": (lambda xp, x: xp.sort(x, axis=1), (A,)),
    "matmul": (lambda xp, x, y: x @ xp.matmul(xp.matrix_transpose(y), x), (A, B)),
    "tensordot": (lambda xp, x, y: xp.tensordot(x, y, axes=([0], [0])), (A, B)),
    "outer": (lambda xp, x, y: xp.linalg.outer(x[0, 0], y[0, 0]), (A, B)),
    "cross": (lambda xp, x, y: xp.linalg.cross(x[..., :3], y[..., :3]), (A, B)),
    "diagonal": (lambda xp, x: xp.linalg.diagonal(x), (SQUARE,)),
    "trace": (lambda xp, x: xp.linalg.trace(x), (SQUARE,)),
    "setitem": (wrote, (A, B)),
    "solve": (lambda xp, x, y: xp.linalg.solve(x, y) + xp.linalg.solve(x, 1.0 * y[0, :, :1]), (DEFINITE, A)),
    "inv": (lambda xp, x: xp.linalg.inv(x), (DEFINITE,)),
    "pinv": (lambda xp, x: xp.linalg.pinv(x), (A,)),
    "det": (lambda xp, x: xp.linalg.det(x), (DEFINITE,)),
    "slogdet": (lambda xp, x: xp.linalg.slogdet(x).logabsdet, (DEFINITE,)),
    "cholesky": (lambda xp, x: xp.linalg.cholesky(symmetric(x)), (DEFINITE,)),
    "cholesky.upper": (lambda xp, x: xp.linalg.cholesky(symmetric(x), upper=True), (DEFINITE,)),
    "eigh": (lambda xp, x: xp.abs(xp.linalg.eigh(symmetric(x)).eigenvectors), (DEFINITE,)),
    "eigh.values": (lambda xp, x: xp.linalg.eigh(symmetric(x))[0] + xp.linalg.eigvalsh(symmetric(x)), (DEFINITE,)),
    "eigvalsh": (lambda xp, x: xp.linalg.eigvalsh(symmetric(x)), (DEFINITE,)),
    "qr": (lambda xp, x: xp.concat(list(xp.linalg.qr(xp.matrix_transpose(x))), axis=1), (A,)),
    "svd": (lambda xp, x: xp.abs(xp.linalg.svd(x, full_matrices=False).U), (A,)),
    "svd.right": (lambda xp, x: xp.abs(xp.linalg.svd(x, full_matrices=False)[2]), (A,)),
    "svdvals": (lambda xp, x: xp.linalg.svdvals(x) + xp.linalg.svd(x, full_matrices=False)[1], (A,)),
    "matrix_norm": (lambda xp, x: xp.linalg.matrix_norm(x) + xp.linalg.matrix_norm(x, ord=2), (A,)),
    "vector_norm": (lambda xp, x: xp.linalg.vector_norm(x, axis=-1), (A,)),
}


def moved(function: Rule, arrays: tuple[Any, ...], along: tuple[Any, ...]) -> tuple[Any, Any]:
    names = "xyz"[: len(arrays)]

    def f(**given: Any) -> Any:
        return function(namespace(given["x"]), *given.values())

    return ra.tangent(f, dict(zip(names, arrays, strict=True)), dict(zip(names, along, strict=True)))


@pytest.mark.parametrize("case", CASES)
def test_a_rule_agrees_with_differences(case: str) -> None:
    function, arrays = CASES[case]
    along = tuple(draw(f"along {n}", *x.shape) for n, x in enumerate(arrays))
    value, found = moved(function, arrays, along)
    assert np.array_equal(value, function(np, *arrays)), "the values are NumPy's"

    def at(h: float) -> Any:
        return function(np, *(x + h * t for x, t in zip(arrays, along, strict=True)))

    h = 1e-4
    expected = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8 * float(np.max(np.abs(expected))))


@pytest.mark.parametrize("name", ["abs", "exp", "sqrt", "tanh", "divide", "matmul", "solve", "eigh.values", "qr"])
def test_complex_numbers(name: str) -> None:
    function, arrays = CASES[name]
    arrays = tuple(x + 0.3j * draw(f"imaginary {n}", *x.shape) for n, x in enumerate(arrays))
    if name == "matmul":
        function = lambda xp, x, y: xp.real(x @ xp.conj(xp.matrix_transpose(y))) + xp.imag(x @ y.mT)  # noqa: E731
    if name == "eigh.values":
        function = lambda xp, x: xp.linalg.eigh(x @ xp.conj(x.mT))[0]  # noqa: E731
    if name == "qr":
        function = lambda xp, x: xp.abs(xp.linalg.qr(x)[1])  # noqa: E731
        arrays = (arrays[0].mT,)
    along = tuple(draw(f"along {n}", *x.shape) + 1j * draw(f"i {n}", *x.shape) for n, x in enumerate(arrays))
    _, found = moved(function, arrays, along)
    h = 1e-5
    plus, minus = (function(np, *(x + s * t for x, t in zip(arrays, along, strict=True))) for s in (h, -h))
    np.testing.assert_allclose(found, (plus - minus) / (2.0 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("repeated", [(2.0, 2.0, 2.0, 2.0), (1.0, 1.0, 3.0, 3.0), (0.5, 2.0, 2.0, 2.0)])
@pytest.mark.parametrize("exact", [True, False])
def test_equal_eigenvalues_and_singular_values(repeated: tuple[float, ...], exact: bool) -> None:
    """What does not depend on the basis of a space has its derivative, whether values are equal or so to rounding."""
    turns = [np.eye(4) if exact else np.linalg.qr(draw(f"turn {n}", 4, 4))[0] for n in range(2)]
    diagonal = np.diag(repeated)
    a = turns[0] @ diagonal @ turns[0].T
    a, b = (a + a.T) / 2.0, turns[0] @ diagonal @ turns[1].T
    da, db = symmetric(draw("da", 4, 4)), draw("db", 4, 4)

    def inverse(xp: Any, x: Any) -> Any:
        values, vectors = xp.linalg.eigh(x)
        return (vectors / (1.0 + values)) @ vectors.mT, xp.sum(values**3), xp.sum(xp.linalg.eigvalsh(x) ** 3)

    _, (found, *cubes) = moved(inverse, (a,), (da,))
    within = np.linalg.inv(np.eye(4) + a)
    np.testing.assert_allclose(found, -within @ da @ within, atol=1e-13)
    np.testing.assert_allclose(cubes, 2 * [np.trace(3.0 * a @ a @ da)], rtol=1e-12)

    def parts(xp: Any, x: Any) -> Any:
        u, s, vh = xp.linalg.svd(x, full_matrices=False)
        return u * (s**3 + s) @ vh, u @ vh

    _, (odd, rotation) = moved(parts, (b,), (db,))
    np.testing.assert_allclose(odd, db + db @ b.T @ b + b @ db.T @ b + b @ b.T @ db, atol=1e-12)
    # with b = r h, where r is a rotation and h positive: dh h + h dh = d(b^T b), db = dr h + r dh
    r = turns[0] @ turns[1].T
    h = r.T @ b
    eye, right = np.eye(4), db.T @ b + b.T @ db
    dh = np.linalg.solve(np.kron(h, eye) + np.kron(eye, h), right.ravel()).reshape(4, 4)
    np.testing.assert_allclose(rotation, (db - r @ dh) @ np.linalg.inv(h), atol=1e-12)


def test_nearly_equal_eigenvalues_are_said() -> None:
    a = np.diag([1.0, 1.0 + 1e-12, 2.0])
    with pytest.warns(RuntimeWarning, match=r"eigh: values nearly equal, the tangent may be off by \de-0[34] of it"):
        moved(lambda xp, x: xp.linalg.eigh(x)[1], (a,), (np.ones((3, 3)),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the values have their tangents
        moved(lambda xp, x: xp.linalg.eigvalsh(x), (a,), (np.ones((3, 3)),))
        moved(lambda xp, x: xp.linalg.eigh(x)[1], (a,), (np.diag([1.0, 2.0, 3.0]),))  # nothing turns


def test_the_branch_that_was_taken() -> None:
    x, t = np.asarray([0.0, 2.0, 2.0, -1.0]), np.asarray([1.0, 10.0, 100.0, 1000.0])

    def f(x: Any) -> Any:
        xp = namespace(x)
        low = xp.maximum(x, 0.0 * x), xp.minimum(x, x * 0.0 + 2.0), xp.clip(x, 0.0, 2.0)
        return xp.max(x), xp.abs(x), *low, xp.sign(x) * xp.floor(x), xp.where(x > 0.0, xp.log(x * (x > 0.0)), 0.0)

    _, (top, size, above, below, inside, none, logs) = ra.tangent(f, {"x": x}, {"x": t})
    assert top == 10.0, "the first of equal ones"
    assert size.tolist() == [0.0, 10.0, 100.0, -1000.0]
    assert above.tolist() == [1.0, 10.0, 100.0, 0.0] and below.tolist() == t.tolist()
    assert inside.tolist() == [1.0, 10.0, 100.0, 0.0]
    assert not np.any(none) and logs.tolist() == [0.0, 5.0, 50.0, 0.0]
    _, root = ra.tangent(lambda x: namespace(x).sqrt(x), {"x": np.zeros(2)}, {"x": np.asarray([0.0, 1.0])})
    assert root.tolist() == [0.0, np.inf], "what does not move stays"


def test_trees_constants_and_dtypes() -> None:
    @dataclass(frozen=True)
    class Params:
        w: Any
        table: Any
        name: str = "p"

    params = Params(np.asarray([[1.0, 2.0]], np.float32), np.asarray([1, 0]))
    x = {"params": params, "rows": [np.asarray([3.0], np.float32), True], "scale": 0.5, "how": "so", "function": abs}

    def f(params: Any, rows: Any, scale: Any, how: str, function: Any) -> Any:
        assert how == "so" and function is abs and rows[1] is True
        xp = namespace(params.w)
        return replace(params, w=params.w * xp.astype(scale, xp.float32)), (rows[0] * 2.0, params.table[0], how)

    y, dy = ra.tangent(f, x, {"params": {"w": np.asarray([[1, 0]])}, "scale": 2.0})
    assert isinstance(y[0], Params) and y[0].w.dtype == dy[0].w.dtype == np.float32
    assert dy[0].w.tolist() == [[2.5, 4.0]] and dy[0].table.tolist() == [0, 0]
    assert dy[1][0].tolist() == [0.0] and dy[1][1] == 0 and dy[1][2] == "so"
    y, dy = ra.tangent(
        lambda q: ra.softmax.forward(q, q, q), {"q": np.ones((1, 1, 0, 4))}, {"q": np.ones((1, 1, 0, 4))}
    )
    assert dy[0].shape == (1, 1, 0, 4) and y[1].implementation == "dense"


@pytest.mark.parametrize(
    ("f", "x", "t", "error", "words"),
    [
        (3, {}, {}, TypeError, "f: got 3, needs a function"),
        (abs, [A], {}, TypeError, "x: got list, needs a mapping"),
        (abs, {"x": A}, A, TypeError, "t: got ndarray, needs a mapping"),
        (abs, {"x": A}, {"z": A}, ValueError, "t: got 'z', needs names of x: x"),
        (abs, {"x": {"w": A}}, {"x": {"v": A}}, ValueError, "t: got 'x.v', which x has no array for"),
        (abs, {"x": A}, {"x": A[0]}, ValueError, r"t: x has the shape \(3, 4\), needs \(2, 3, 4\) as in x"),
        (abs, {"x": AT}, {"x": AT}, ValueError, "t: x is of int64 in x, which has no tangent"),
        (abs, {"x": 3}, {"x": 1.0}, ValueError, "t: x is 3 in x, which has no tangent; needs a floating-point number"),
        (abs, {"x": A}, {"x": A * 1j}, TypeError, "t: x is of complex128, needs numbers as in x, of float64"),
        (abs, {"x": A}, {"x": A.astype(str)}, TypeError, "t: x is of <U"),
        (abs, {"x": A}, {"x": A.tolist()}, ValueError, "t: got 'x.0.0.0', which x has no array for"),
        (abs, {"x": A}, {"x": abs}, TypeError, "t: x is builtins.builtin_function_or_method, needs an array"),
        (lambda x: object(), {"x": A}, {}, TypeError, "f: returned builtins.object, needs arrays or a tree"),
        (lambda x: x + A, {"x": A}, {"x": A}, TypeError, "add: got numpy.ndarray beside an array that carries"),
        (lambda x: A + x, {"x": A}, {"x": A}, TypeError, "add: got numpy.ndarray beside an array that carries"),
        (lambda x: namespace(x).prod(x), {"x": A}, {"x": A}, NotImplementedError, "prod: has no rule for a tangent"),
        (lambda x: np.einsum("ij->j", x[0]), {"x": A}, {"x": A}, NotImplementedError, "einsum: has no rule"),
        (lambda x: np.add.reduce(x), {"x": A}, {"x": A}, TypeError, "add: got Dual, which has neither reduce nor out"),
        (lambda x: namespace(x).clip(x, min=x), {"x": A}, {"x": A}, NotImplementedError, "clip: has a rule for"),
        (lambda x: namespace(x).linalg.qr(x), {"x": A}, {"x": A}, NotImplementedError, "qr: of a matrix with more"),
    ],
)  # fmt: skip
def test_what_is_refused_in_one_line(f: Any, x: Any, t: Any, error: type[Exception], words: str) -> None:
    f = f if f is not abs else lambda x: x
    with pytest.raises(error, match=words) as raised:
        ra.tangent(f, x, t)
    assert "\n" not in str(raised.value)


def test_other_libraries_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"x: x is torch\.Tensor, needs NumPy's arrays"):
        ra.tangent(lambda x: x, {"x": x}, {})
    with pytest.raises(TypeError, match=r"t: x is torch\.Tensor, needs NumPy's arrays"):
        ra.tangent(lambda x: x, {"x": np.ones(2)}, {"x": x})
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        ra.tangent(lambda y: y * x, {"y": np.ones(2)}, {"y": np.ones(2)})


def test_a_tangent_that_is_dropped_is_said() -> None:
    with pytest.warns(UserWarning, match="f: returned plain arrays, so that their tangent is 0"):
        y, dy = ra.tangent(lambda x: x.value + 1.0, {"x": A}, {"x": B})
    assert np.array_equal(y, A + 1.0) and not np.any(dy)
    with pytest.warns(UserWarning, match="asarray: drops the tangent of an array"):
        y, dy = ra.tangent(lambda x: (x, np.asarray(x)), {"x": A}, {"x": B})
    assert np.array_equal(dy[0], B) and not np.any(dy[1])


def test_results_and_arguments_are_objects_of_any_class() -> None:
    x = {name: draw(name, 1, 2, 3, 4) for name in ("q", "k", "v")}
    t, d_out = draw("t", 1, 2, 3, 4), draw("d_out", 1, 2, 3, 4)
    for core, options in ((ra.softmax, {"implementation": "tiled", "causal": True}), (ra.graph_energy, {"steps": 2})):
        # Their `saved` hold masks that are made on the way, and functions.
        (out, saved), (d, _) = ra.tangent(core.forward, x | options, {"q": t})
        gradients = core.backward(saved, d_out)
        np.testing.assert_allclose(np.sum(gradients["q"] * t), np.sum(d_out * d), rtol=1e-12)
        plain_out, saved = core.forward(**x, **options)
        assert np.array_equal(plain_out, out)
        _, linear = ra.tangent(core.backward, {"saved": saved, "d_out": d_out}, {"d_out": t})
        np.testing.assert_allclose(linear["k"], core.backward(saved, t)["k"], rtol=1e-9, atol=1e-12)


def test_numbers_and_functions_of_numpy() -> None:
    def f(x: Any, scale: float, options: Any) -> Any:
        assert len(x) == 2 and x.shape == (2, 3, 4)
        y = np.where(np.power(x, 2) < 4.0, np.arctan2(np.absolute(x), 2.0 + 0.0 * x), 1.0)
        return np.concatenate([y, np.transpose(x, (0, 1, 2))]) @ x[0].T, scale * options["by"], float(x[0, 0, 0]), 3

    (moved, by, number, whole) = ra.tangent(
        f,
        {"x": A, "scale": 2.0, "options": {"by": 5.0}},
        {"x": B, "options": {"by": 1.0}},
    )[1]
    assert by == 2.0 and (number, whole) == (0.0, 0), "what is no array is a constant"
    h = 1e-6
    plus, minus = (f(A + s * B, 2.0, {"by": 5.0})[0] for s in (h, -h))
    np.testing.assert_allclose(moved, (plus - minus) / (2.0 * h), rtol=1e-7, atol=1e-7)


def test_nothing_is_left_behind() -> None:
    with tangents() as instrument:
        x: Any = instrument.array(A, B)
        assert isinstance(x * x, Dual)
    with pytest.raises(RuntimeError, match="with tangents"):
        x + x


# --- every mechanism


IMPLEMENTATIONS = [
    (name, implementation) for name in ra.list_mechanisms() for implementation in ra.mechanism(name).implementations
]
LONG = ("sympformer", "graph_energy")  # calls that take more than a second


def at_once(name: str, implementation: str) -> Any:
    quick = implementation == ra.mechanism(name).implementations[-1] and name not in LONG
    return pytest.param(name, implementation, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "implementation"), [at_once(*pair) for pair in IMPLEMENTATIONS])
def test_everything_that_a_mechanism_does_has_tangents(name: str, implementation: str) -> None:
    """Cores, blocks, growth and flows, forward and backward: no operation is without a rule, nothing is not finite."""
    exercise = importlib.import_module(f"tests.mechanisms.{name}.exercise")
    with tangents() as instrument:

        def make(x: Any) -> Any:
            return instrument.array(x, np.ones(x.shape) if x.dtype.kind == "f" else None)

        for _, call in exercise.runs(SIZES, make, implementation):
            try:
                call()
            except Unsupported:
                continue


def subjects(name: str) -> list[gradients.Subject]:
    record = ra.mechanism(name)
    cores = gradients.core_subjects(record, record.cases) if record.core is not None else ()
    return [*cores, *gradients.block_subjects(record)]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow(sampled=False))])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_forward_and_backward_agree(name: str, way: str, whole: bool) -> None:
    """Each implementation, block and designed case; the quick test has the first and the last of them, a block;
    `refattn check --full` all."""
    found = subjects(name)
    for subject in found if whole else (found[0], found[-1]):
        for implementation in subject.implementations:
            try:
                share = WAYS[way](subject, implementation) / OF_TANGENTS
            except Unsupported:
                continue
            assert share <= 1.0, (subject.name, implementation, share)


def test_wrong_backwards_are_seen() -> None:
    right = next(s for s in subjects("softmax") if s.name == "plain with scale, softcap")

    def wrong(change: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]) -> gradients.Subject:
        return replace(right, backward=lambda x, d, implementation: change(right.backward(x, d, implementation), x))

    for leaf in right.leaves:
        scaled = wrong(lambda g, x, leaf=leaf: {**g, leaf: g[leaf] * (1.0 + 1e-9)})  # type: ignore[misc]
        assert WAYS["duality"](scaled, "tiled") > OF_TANGENTS, leaf
    half = wrong(lambda g, x: {**g, "k": 0.5 * g["k"]})
    turned = wrong(lambda g, x: {**g, "q": g["q"] + 1e-6 * namespace(x["q"]).flip(x["q"], axis=-1) * x["q"]})
    for subject in (half, turned):
        assert WAYS["symmetry"](subject, "dense") > OF_TANGENTS
