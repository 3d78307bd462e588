"""One query of one head, among the keys that it sees alone: its way, a second time, by the sources.

There is no mask in the fit, only a shorter list of keys: values have zeros for the others. The operator is found from
the eigenvectors of its two Gram matrices, or by descent where it is limited, and the perturbation is inverted by
Newton's method without damping, whose Jacobian is taken by complex steps. Arrays have one axis in front, for what runs
side by side; they may be complex.

Source: Tie 2024; Khosravi 2023 (arXiv:2208.01681).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

See = Callable[[str, np.ndarray], np.ndarray]
"""What every value goes through on its way: (id, value) -> the value to go on with."""

J = 1e-20
"""Increment for the Jacobian within Newton's method: that of the adjoints vanishes beside it."""


def transposed(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def kernel(x: np.ndarray, y: np.ndarray, o: dict[str, Any]) -> np.ndarray:
    """k(x, y) of rows x (., p, d) and y (., q, d), written out with differences in place of squares of norms."""
    dot = x @ transposed(y)
    difference = x[..., :, None, :] - y[..., None, :, :]
    rho = np.sum(difference * difference, axis=-1)
    width, kind = o["bandwidth"], o["kernel"]
    if kind == "linear":
        return dot
    if kind == "rational":
        second = 1.0 / (1.0 + 0.5 * rho)
    elif kind == "rbf":
        second = np.exp(-0.5 * rho / width**2)
    elif kind == "polynomial":
        second = (dot / width**2 + o["constant"]) ** o["degree"]
    else:
        # At equal points the root has no derivative, and k2 the derivative 0.
        r = np.sqrt(np.where(np.abs(rho) < 1e-30, 1e-30, rho)) / width
        if kind == "matern32":
            second = (1.0 + math.sqrt(3.0) * r) * np.exp(-math.sqrt(3.0) * r)
        else:
            second = (1.0 + math.sqrt(5.0) * r + 5.0 * r * r / 3.0) * np.exp(-math.sqrt(5.0) * r)
    return dot + o["weight"] * second


def _fit(z: np.ndarray, g: np.ndarray, y: np.ndarray, o: dict[str, Any], ridge: Any) -> np.ndarray:
    """A of Z A G + ridge A = Y: a real solution from eigenvectors, and one correction for the imaginary parts."""
    if y.shape[-1] == 0:  # no observable
        return y
    if any(o[limit] is not None for limit in ("norm", "rank", "nuclear")):
        return _limited(z, g, y, o, ridge)
    if o["fit"] == "separable":
        left = np.linalg.solve(z + ridge * np.eye(z.shape[-1]), y)
        return transposed(np.linalg.solve(transposed(g), transposed(left)))
    (s, u), (e, w) = np.linalg.eigh(z.real), np.linalg.eigh(g.real)
    pairs = np.real(ridge) + s[..., :, None] * e[..., None, :]

    def real(right: np.ndarray) -> np.ndarray:
        return u @ ((transposed(u) @ right @ w) / pairs) @ transposed(w)

    a = real(y.real).astype(y.dtype)
    for _ in range(2):  # the residual of the real part is rounding, that of the imaginary part is linear in h
        left = y - z @ a @ g - ridge * a
        a = a + real(left.real) + (1j * real(left.imag) if np.iscomplexobj(left) else 0.0)
    return a


def _limited(z: np.ndarray, g: np.ndarray, y: np.ndarray, o: dict[str, Any], ridge: Any) -> np.ndarray:
    """A of an operator whose norm, rank or nuclear norm is limited, for the error in the norm of the kernel's space.

    The singular values of the operator are the roots of the eigenvalues of C = A G A^T Z (l, l), and what makes f(s) of
    each s is a function of C: no factor of G, and no singular value, is computed. Descent along the gradient, each step
    followed by a projection or a threshold, leads to the least; for the rank it is the free one, projected.
    """
    eye, even, gram = np.eye(z.shape[-1]), 0.5 * (z + transposed(z)), 0.5 * (g + transposed(g))
    right = transposed(np.linalg.solve(gram + 0.0 * y[..., :1, :1], transposed(y)))
    a = np.linalg.solve(z + ridge * eye, right)
    if o["rank"] is not None:
        squares = a @ gram @ transposed(a) @ even @ (even + ridge * eye)
        if o["rank"] >= len(eye):
            return a
        sizes = np.sort(np.linalg.eigvals(squares.real).real, axis=-1)[..., ::-1]
        least = 0.5 * (sizes[..., o["rank"] - 1] + sizes[..., o["rank"]])
        return _above(squares, least[..., None, None]) @ a
    length = 1.0 / (np.max(np.linalg.eigvalsh(even.real)) + np.max(np.real(ridge)))
    limit = o["norm"] if o["norm"] is not None else o["nuclear"] * length
    for _ in range(5000):
        moved = a - length * ((z + ridge * eye) @ a - right)
        squares = moved @ gram @ transposed(moved) @ even
        large = _above(squares, limit**2)
        turned = limit * large @ _inverse_root(squares @ large + eye - large)  # 1 / s of those above the limit
        kept = eye - large + turned if o["norm"] is not None else large - turned
        a, change = kept @ moved, kept @ moved - a
        if _rests(change, a):
            return a
    raise ValueError("a limited fit that does not settle")


def _rests(change: np.ndarray, x: np.ndarray) -> bool:
    """Whether a change is nothing beside x, in its real part and in its imaginary part."""
    parts = ((change.real, x.real), (change.imag, x.imag))
    return all(bool(np.all(np.abs(moved) <= 1e-15 * np.max(np.abs(size), initial=0.0))) for moved, size in parts)


def _above(squares: np.ndarray, least: Any) -> np.ndarray:
    """The projection to the eigenvectors of `squares` above a number: by Newton's method for the matrix sign."""
    sign = (squares - least * np.eye(squares.shape[-1])) / least
    for _ in range(100):
        before, sign = sign, 0.5 * (sign + np.linalg.inv(sign))
        if _rests(sign - before, sign):
            break
    return 0.5 * (np.eye(squares.shape[-1]) + sign)


def _inverse_root(x: np.ndarray) -> np.ndarray:
    """x^(-1/2), by the method of Denman and Beavers."""
    root, found = x, np.eye(x.shape[-1]) + 0.0 * x
    for _ in range(100):
        before, (root, found) = found, (0.5 * (root + np.linalg.inv(found)), 0.5 * (found + np.linalg.inv(root)))
        if _rests(found - before, found):
            break
    return found


def delta_of(o: dict[str, Any]) -> Any:
    """What is added to the diagonal of the Gram matrix."""
    return o["jitter"] * (1.0 + (0.0 if o["kernel"] == "linear" else o["weight"]))


def norm_of(o: dict[str, Any]) -> Any:
    """The squared norm of a coordinate function: 1 over the factor of x . y in the kernel."""
    if o["kernel"] != "polynomial":
        return 1.0
    return 1.0 / (1.0 + o["weight"] * o["degree"] * o["constant"] ** (o["degree"] - 1) / o["bandwidth"] ** 2)


def gram_of(k: np.ndarray, o: dict[str, Any]) -> np.ndarray:
    """The inner products of the observables at keys (., j, d), with the jitter."""
    gram, d = kernel(k, k, o), k.shape[-1]
    if o["space"] == "augmented":
        corner = norm_of(o) * np.eye(d) * np.ones((len(k), 1, 1))
        gram = np.concatenate([np.concatenate([gram, k], -1), np.concatenate([transposed(k), corner], -1)], -2)
    return gram + delta_of(o) * np.eye(gram.shape[-1])


def visible_of(gram: np.ndarray, at: list[int], o: dict[str, Any]) -> np.ndarray:
    """The inner products of what is seen; for the others, which drop out, 1 and the jitter on the diagonal."""
    own = np.isin(np.arange(gram.shape[-1]), at)
    return np.where(own[:, None] & own, gram, (1.0 + delta_of(o)) * np.eye(len(own)))


def trajectory(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: list[int], o: dict[str, Any], see: See) -> np.ndarray:
    """Return the last query (., 1, d) of q (., 1, d), which sees some of k, v (., j, d); `see` gets every value.

    Without a key it attends 0, and the fit has no observable but coordinates, so that it goes to 0.
    """
    (keys, d), x, points = k.shape[-2:], q, [q]
    fit = None
    for number in range(1, o["updates"] + 1):
        raw = see("KOOP.2", x @ transposed(k) / math.sqrt(d) if o["similarity"] == "dot" else kernel(x, k, o))
        scores = see("KOOP.masked", np.where(np.isin(np.arange(keys), seen), raw, -math.inf))[..., seen]
        powers = np.exp(scores - np.max(scores.real, axis=-1, keepdims=True, initial=-math.inf))  # none of no key
        weights = see("KOOP.3", spread(powers / np.sum(powers, axis=-1, keepdims=True), seen, keys))
        attended = see("KOOP.4", weights @ v)
        if number == 1:
            x = see("first", attended)
        else:
            fit = fit or _Fit(k, seen, o, see)
            x = fit.update(points, attended, number)
        points.append(x)
    return x


def spread(x: np.ndarray, at: list[int], size: int) -> np.ndarray:
    """Return x (..., columns) with its columns at some places of `size`, and 0 at the others."""
    full = np.zeros((*x.shape[:-1], size), x.dtype)
    full[..., at] = x
    return full


class _Fit:
    """The operators of a trajectory: K acts on a function f as (K f)(x) = tau f(x) + kappa(x)^T A f(P)."""

    def __init__(self, k: np.ndarray, seen: list[int], o: dict[str, Any], see: See) -> None:
        (keys, d), augmented = k.shape[-2:], o["space"] == "augmented"
        self.k, self.o, self.see = k[..., seen, :], o, see
        self.at = [*seen, *range(keys, keys + d)] if augmented else seen
        self.size = keys + d if augmented else keys
        whole = see("KOOP.1", gram_of(k, o))
        self.gram = see("KOOP.visible", visible_of(whole, self.at, o))[..., self.at, :][..., self.at]
        self.coordinates = self.k
        if augmented:
            own = norm_of(o) * np.eye(d) * np.ones((len(k), 1, 1))
            self.coordinates = np.concatenate([self.k, own], axis=-2)

    def put(self, id: str, value: np.ndarray) -> np.ndarray:
        """Return what goes on of a value (..., o)."""
        return self.see(id, spread(value, self.at, self.size))[..., self.at]

    def g(self, y: np.ndarray) -> np.ndarray:
        """The observables at y (., p, d)."""
        at = kernel(y, self.k, self.o)
        own = np.broadcast_to(y, (*at.shape[:-1], y.shape[-1]))
        return np.concatenate([at, own], axis=-1) if self.o["space"] == "augmented" else at

    def update(self, points: list[np.ndarray], attended: np.ndarray, number: int) -> np.ndarray:
        """Return q^r by the operator of the points so far."""
        o, see, gram, tau = self.o, self.see, self.gram, self.o["tau"]
        size = len(points) if o["window"] is None else min(len(points), o["window"] + 1)
        shape = np.broadcast_shapes(*(p.shape for p in points))
        path = np.concatenate([np.broadcast_to(p, shape) for p in points[-size:]], axis=-2)
        first, last, d = path[..., :-1, :], path[..., 1:, :], path.shape[-1]
        b_ = self.put("KOOP.5", self.g(first))
        y_ = self.put("KOOP.6", self.g(last) - tau * b_)
        if o["space"] != "full":
            solved = np.linalg.solve(transposed(gram) + 0.0 * b_[..., :1, :1], transposed(b_))
            n_ = self.put("KOOP.dual", transposed(solved))
            z_ = see("KOOP.8", n_ @ transposed(b_))
        else:
            n_, z_ = None, see("KOOP.8", kernel(first, first, o))
        ridge, epsilon = (o[name][..., number - 2][..., None, None] for name in ("ridge", "epsilon"))
        factor = first.shape[-2] * self.k.shape[-2] if o["scale"] == "mean" else 1.0
        a_ = self.put("KOOP.9", _fit(z_, gram, y_, o, ridge * factor))
        d_ = see("KOOP.modes", a_ @ self.coordinates)
        r_ = see("KOOP.operator", a_ @ transposed(b_))
        a, b = {"identity": (1.0, epsilon), "shift": (epsilon, 1.0), "pencil": (o["mix"], epsilon)}[o["perturbation"]]
        h_ = see("KOOP.lifted", (a + 2.0 * tau * b) * d_ + b * (r_ @ d_))

        def kappa(y: np.ndarray) -> np.ndarray:
            return kernel(first, y, o) if n_ is None else n_ @ transposed(self.g(y))

        c_ = see("KOOP.section", kappa(attended))
        z = see("KOOP.14", (a + b) * tau * attended + transposed(c_) @ h_)

        def residual(y: np.ndarray) -> np.ndarray:
            return (a + b * tau) * y + b * (transposed(kappa(y)) @ d_) - z

        root = tau * attended + transposed(c_) @ d_
        for _ in range(60):
            columns = [residual(root.real + J * 1j * np.eye(d)[n]).imag / J for n in range(d)]
            move = np.linalg.solve(transposed(np.concatenate(columns, axis=-2)), transposed(residual(root)))
            root = root - transposed(move)
            if np.max(np.abs(move.real)) <= 1e-15 * (1.0 + np.max(np.abs(root.real))):
                break
        return see("KOOP.15", root)
