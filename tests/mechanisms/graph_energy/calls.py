"""Calls of graph energy attention that its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from refattn import equations, philox
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.graph_energy import Given, Polynomial, Start, core, general, loops
from refattn.mechanisms.graph_energy.implementations.pairs import DENSE
from refattn.mechanisms.graph_energy.options.integrator import INTEGRATORS
from refattn.mechanisms.graph_energy.options.links import LINKS
from refattn.mechanisms.graph_energy.options.threshold import THRESHOLDS
from refattn.mechanisms.graph_energy.system import Graph

Floats = NDArray[np.float64]

STATES = ("token", "prefix", "query", "feature")
COUPLINGS = ("sin", "tanh", "identity", "arctan", "sinh", "cubic")
SYMMETRIC = ("kernel", "mean", "min")
B, H, G, N, D, E = 2, 4, 2, 7, 3, 5


def draw(name: str, *shape: int) -> Floats:
    return philox.normal(shape, seed=23, purpose=f"graph_energy.{name}")


def kept(name: str, *shape: int, keep: float = 0.7) -> NDArray[np.bool_]:
    return np.asarray(philox.uniform(shape, seed=23, purpose=f"graph_energy.{name}") < keep)


def qkv(n: int = N) -> tuple[Floats, Floats, Floats]:
    return draw("q", B, H, n, D), draw("k", B, G, n, D), draw("v", B, G, n, E)


def run(n: int = N, **options: Any) -> tuple[Any, Any]:
    return forward(*qkv(n), **options)


def flat(**options: Any) -> dict[str, Any]:
    """Options of the core, with the numbers of a threshold, an integrator, links and a start given by themselves.

    `kind` is a threshold, `symmetrise` the kind of links, over "keys" where `over` says so, or the graph is one given.
    """
    left = dict(options)
    threshold = {n: left.pop(n) for n in ("tau", "signed", "straight_through", "empty") if n in left}
    if "kind" in left or threshold:
        left["threshold"] = THRESHOLDS[left.pop("kind", "hard")](**threshold)
    names = ("adjoint", "checkpoint", "stop_force", "stop_plateau", "stop_level")
    integrator = {n: left.pop(n) for n in names if n in left}
    if integrator:
        left["integrator"] = INTEGRATORS[left.get("integrator", "euler")](**integrator)
    over = {"over": left.pop("over")} if "over" in left else {}
    kind = left.pop("symmetrise", None)
    if "graph" in left and over:
        left["graph"] = Given(links=left["graph"], **over)
    elif kind is not None or over:
        left["graph"] = LINKS[kind or ("min" if left.get("state") == "query" else "kernel")](**over)
    if "coefficients" in left:
        left["coupling"] = Polynomial(left.pop("coefficients"))
    if "jitter" in left:
        left["start"] = Start(at=left.get("start"), jitter=left.pop("jitter"))
    return left


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """The core, with such options."""
    return core.forward(q, k, v, **flat(**options))


def flow_of(links: Any, start: Any, **options: Any) -> tuple[Any, Any]:
    """The end of a flow on given links from a start (b, h, j, c), and what it saves."""
    q = np.zeros((*start.shape[:3], 1))
    given = {
        name: x for name, x in defaults_of(core.forward).items() if name not in ("mask", "causal", "implementation")
    }
    known = core.checked(q, q, q, masked=False, causal=False, **(given | flat(**options)))
    graph = Graph(known, q, q, None, None, links, start, None, None)
    return general.flow_forward(graph, known.tau or 0.0, DENSE)


def loops_of(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> dict[str, Any]:
    """Every equation by the second derivation."""
    known = flat(**options)
    return loops.forward(q, k, v, **known) | loops.backward(q, k, v, d_out, **known)


def gradients_of(call: Any, arrays: dict[str, Any], *d_results: Any) -> dict[str, Any]:
    """The gradients of a call by the autograd of torch, for those of its first results."""
    torch: Any = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    leaves = {name: torch.tensor(np.asarray(x), requires_grad=True) for name, x in arrays.items()}
    loss = sum((x * torch.tensor(d)).sum() for x, d in zip(call(**leaves), d_results, strict=False))
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {name: x.numpy() for name, x in zip(leaves, found, strict=True)}


def agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Gradients are the same, relative to the largest element of each, or a hundredth of the largest of all."""
    floor = 1e-2 * max(float(np.max(np.abs(x))) for x in expected.values())
    for name, x in expected.items():
        size = max(float(np.max(np.abs(x))), floor)
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-12 * size, err_msg=name)


def check_gradients(arrays: dict[str, Any], implementations: Sequence[str] = ("dense",), **options: Any) -> None:
    """Gradients of some arrays by hand are those of autograd; arrays among the options are constants.

    The loss reads the output and the weights. Both are float64 evaluations of one derivative: docs/tolerances.md.
    """
    torch: Any = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    constants = {name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for implementation in implementations:
        out, saved = forward(**arrays, **options, implementation=implementation)
        upstream = {"d_out": draw("d_out", *out.shape)}
        if saved.weights is not None:
            upstream["d_weights"] = draw("d_weights", *saved.weights.shape)
        found = {name: x for name, x in core.backward(saved, **upstream).items() if name in arrays}
        assert {name: x.shape for name, x in found.items()} == {name: np.shape(x) for name, x in arrays.items()}

        def call(**leaves: Any) -> tuple[Any, Any]:
            out, saved = forward(**leaves, **constants, implementation="dense")
            return out, saved.weights

        agree(found, gradients_of(call, arrays, *upstream.values()))


def check_loops(options: dict[str, Any], n: int = N) -> None:
    """Every equation of a call, forward and backward, is that of the second derivation."""
    q, k, v = qkv(n)
    with equations.trace() as traced:
        out, saved = forward(q, k, v, **options)
        core.backward(saved, draw("d_out", *out.shape))
    expected = loops_of(q, k, v, draw("d_out", *out.shape), **options)
    assert set(traced) == set(expected)
    for id, value in expected.items():
        # A few dozen roundings, relative to the largest number.
        finite = np.where(np.isfinite(value), np.abs(value), 0.0)
        np.testing.assert_allclose(traced[id], value, rtol=0, atol=1e-13 * max(1.0, np.max(finite)), err_msg=id)
