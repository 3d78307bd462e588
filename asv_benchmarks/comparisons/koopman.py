"""Koopman attention beside a fit for each query: what one factorisation of the keys for all queries is worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asv_benchmarks.comparison import Comparison, Side
from asv_benchmarks.sides import Plan
from refattn import philox

WIDTH, UPDATES, SAMPLED = 64, 4, 16


def arrays(n: int) -> list[Any]:
    """Return q, k, v and the upstream gradient, (1, 1, n, WIDTH) each, float64."""
    return [philox.normal((1, 1, n, WIDTH), seed=0, purpose=f"koopman.{name}") for name in ("q", "k", "v", "d_out")]


def options(causal: bool) -> dict[str, Any]:
    """Return the options of both sides: with the future hidden the fit that one factorisation serves."""
    return {
        "updates": UPDATES,
        "perturbation": "identity",
        "causal": causal,
        "fit": "separable" if causal else "stein",
    }


def ours(n: int, run: str, causal: bool) -> Callable[[], Any]:
    """refattn on NumPy, in the form that it chooses itself."""
    import refattn as ra

    q, k, v, d_out = arrays(n)
    given = options(causal)

    def forward() -> Any:
        return ra.koopman.forward(q, k, v, **given)[0]

    def both() -> Any:
        out, saved = ra.koopman.forward(q, k, v, **given)
        return out, ra.koopman.backward(saved, d_out)

    return forward if run == "forward" else both


def each(n: int, run: str, causal: bool) -> Callable[[], Any]:
    """Return a fit of its own for each of some queries, by the eigenvectors of its own Gram matrix, at every update.

    It runs for `SAMPLED` of the n queries; the reports multiply by hand. The last place of a query is not computed: the
    inverse of the perturbation is the smaller part.
    """
    import numpy as np

    from refattn.analysis.operators import spectral
    from refattn.mechanisms.koopman.options.kernel import Rbf

    if run != "forward":
        raise NotImplementedError("a fit for each query is timed forward alone")
    q, k, v, _ = (x[0, 0] for x in arrays(n))
    kernel, fit = Rbf(WIDTH**0.5, 1.0), options(causal)["fit"]
    places = [(2 * i + 1) * n // (2 * SAMPLED) for i in range(SAMPLED)]

    def attend(x: Any, keys: Any, values: Any) -> Any:
        powers = np.exp((keys @ x - np.max(keys @ x)) / WIDTH**0.5)
        return powers @ values / np.sum(powers)

    def forward() -> Any:
        found = []
        for place in places:
            keys, values = (k[: place + 1], v[: place + 1]) if causal else (k, v)
            path = [q[place], attend(q[place], keys, values)]
            for _ in range(2, UPDATES + 1):
                attended = attend(path[-1], keys, values)
                points = np.stack(path)
                gram = kernel.values(keys, keys)
                gram = gram + 1e-8 * (2.0 if causal else np.mean(np.diagonal(gram))) * np.eye(len(keys))
                starts, ends = kernel.values(points[:-1], keys), kernel.values(points[1:], keys)
                dual = np.linalg.solve(gram, starts.T).T
                coefficients = spectral(fit, dual @ starts.T, gram, 0.1, ends)
                path.append((kernel.values(attended[None], keys) @ dual.T @ coefficients @ keys)[0])
            found.append(path[-1])
        return np.stack(found)

    return forward


COMPARISON = Comparison(
    name="koopman",
    title="Koopman attention beside a fit for each query",
    text=(
        f"One head of width {WIDTH}, float64, {UPDATES} updates. *each* fits an operator for every query at every "
        f"update, from the Gram matrix of its keys. It is timed for {SAMPLED} of the n queries, evenly spread; for all "
        f"it would take n / {SAMPLED} times as long, so its times and the ratios have to be scaled by that: by 64 for "
        'n = 1024. *causal* hides the future, with the fit "separable"; otherwise the fit is "stein".'
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("each", f"{__name__}:each"),
    ),
    grid=tuple(
        {"n": n, "run": run, "causal": causal}
        for n in (256, 1024)
        for run in ("forward", "both")
        for causal in (False, True)
    ),
    quick=lambda point: point["n"] <= 256,
    threads=(1,),
    plan=Plan(rounds=3, round_seconds=0.5),
)
