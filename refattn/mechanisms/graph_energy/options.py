"""The options of the core: checked once, and what is taken where they are not given."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.arguments import check_arrays, check_is, check_number
from refattn.mechanisms.graph_energy.analytic import check_coupling
from refattn.mechanisms.graph_energy.couplings import COUPLINGS, Coupling
from refattn.mechanisms.graph_energy.given import (
    check_bias,
    check_checkpoint,
    check_choices_of_steps,
    check_graph,
    check_max_nfe,
    check_over_keys,
    check_proximal,
    check_start,
    check_stop,
)
from refattn.mechanisms.graph_energy.intrinsic import INTRINSICS, Intrinsic, Number
from refattn.mechanisms.graph_energy.polynomial import check_coefficients, polynomial
from refattn.mechanisms.graph_energy.sparse import CSR
from refattn.mechanisms.graph_energy.tableaus import TABLEAUS
from refattn.xp import Array, concrete, dtype_name, is_array, is_floating, namespace, raised

STATES = ("token", "query", "feature")
GRAPHS = ("kernel", "mean", "min", "none", "causal_mirror")
EMPTY = ("argmax", "dense", "zero", "error")
KINDS = ("hard", "soft", "proximal")
SCORES = ("qk", "kk")
ADJOINTS = ("unroll", "implicit")

CHOICES = {
    "state": STATES,
    "coupling": (*COUPLINGS, "polynomial"),
    "intrinsic": tuple(INTRINSICS),
    "integrator": tuple(TABLEAUS),
    "symmetrise": GRAPHS,
    "graph_scores": SCORES,
    "kind": KINDS,
    "empty": EMPTY,
    "adjoint": ADJOINTS,
}
"""The options that are one of several names."""

USUAL: dict[str, Any] = {
    "state": "token",
    "coupling": None,
    "coefficients": None,
    "intrinsic": "anchor",
    "mu": 1.0,
    "kappa": 1.0,
    "tau": None,
    "step": None,
    "steps": 10,
    "integrator": "euler",
    "accuracy": 1e-6,
    "max_nfe": 10000,
    "stop_force": None,
    "stop_plateau": None,
    "stop_level": None,
    "symmetrise": None,
    "graph": None,
    "graph_scores": "qk",
    "start": None,
    "jitter": None,
    "scale": None,
    "bias": None,
    "kind": "hard",
    "signed": None,
    "straight_through": False,
    "empty": "argmax",
    "adjoint": "unroll",
    "checkpoint": None,
}
"""What the options are where they are not given."""

NUMBERS = ("coefficients", "mu", "kappa", "scale", "tau", "step", "bias", "start")
"""The options that have a gradient."""


@dataclass(frozen=True)
class Options:
    """The options of one call; None stands for what is chosen by the state or the graph."""

    state: str
    coupling: Coupling
    intrinsic: Intrinsic
    mu: Number
    kappa: Number
    scale: Number
    tau: Number | None
    step: Number | None
    steps: int
    integrator: str
    symmetrise: str
    kind: str
    signed: bool
    straight_through: bool
    empty: str
    adjoint: str
    accuracy: float
    max_nfe: int
    stop: dict[str, float]
    graph: Array | CSR | None
    over_keys: bool  # whether links come from the scores of keys with keys
    start: Array | None
    jitter: Array | None
    checkpoint: int | None
    bias: Array | None


def check_options(q: Array, nodes: int, *, causal: bool, **given: Any) -> Options:
    """Return the options of a call, as numbers that broadcast to a state (b, h, j, c); raise where one does not fit.

    `nodes` is the number of keys.
    """
    state = choice("state", given["state"], STATES)
    over_keys = choice("graph_scores", given["graph_scores"], SCORES) == "kk"
    if not over_keys and q.shape[2] != nodes:
        raise ValueError(
            f"k: got {nodes} tokens and {q.shape[2]} in q, needs as many: they are nodes of one graph, unless "
            'graph_scores="kk"'
        )
    coupling = given["coupling"]
    if coupling is None:
        coupling = "tanh" if state == "feature" else "sin"
    coefficients = given["coefficients"]
    if (coupling == "polynomial") != (coefficients is not None):
        raise ValueError(f'coefficients: got {coefficients}, needs them with coupling="polynomial", and with no other')
    if coefficients is not None:
        numbers_of_g = check_coefficients(coefficients, q)
        coupling = polynomial([numbers_of_g[n] for n in range(numbers_of_g.shape[0])])
    elif isinstance(coupling, Coupling):
        check_coupling(coupling, q)
    else:
        coupling = COUPLINGS[choice("coupling", coupling, (*COUPLINGS, "polynomial"))]
    symmetrise = given["symmetrise"]
    if symmetrise is None:
        usual = {True: ("none", "causal_mirror"), False: ("kernel", "min")}[causal]
        symmetrise = usual[state == "query"]
    graph = given["graph"]
    if graph is not None:
        check_graph(graph, q, nodes, given, causal)
        symmetrise = "given"
    else:
        choice("symmetrise", symmetrise, GRAPHS)
        _check_causal_graph(state, symmetrise, causal)
    if over_keys:
        check_over_keys(given, state, symmetrise, causal)
    integrator = choice("integrator", given["integrator"], tuple(TABLEAUS))
    accuracy = given["accuracy"]
    check_number("accuracy", accuracy, positive=True)
    stop = check_stop(given)
    check_choices_of_steps(integrator, stop, state, symmetrise, causal)
    numbers = {name: None if given[name] is None else per_head(name, given[name], q) for name in ("tau", "step")}
    numbers |= {"mu": per_head("mu", given["mu"], q, nodes), "kappa": per_head("kappa", given["kappa"], q)}
    if causal and given["step"] is None and len(getattr(given["mu"], "shape", ())) == 2:
        raise ValueError("step: got None with causal scores and a mu of each node, which it would follow; needs one")
    _check_signs(numbers)
    scale = 1.0 / math.sqrt(q.shape[3]) if given["scale"] is None else _scale(given["scale"], q)
    steps = given["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps: got {steps!r}, needs a whole number of at least 0")
    signed = given["signed"]
    check_is("signed", state == "feature" if signed is None else signed, bool)
    check_is("straight_through", given["straight_through"], bool)
    kind = choice("kind", given["kind"], KINDS)
    if kind != "hard" and given["straight_through"]:
        raise ValueError(f'straight_through: got True with kind="{kind}", needs kind="hard"')
    if kind == "proximal":
        check_proximal(given, integrator, stop)
    return Options(
        state=state,
        coupling=coupling,
        intrinsic=INTRINSICS[choice("intrinsic", given["intrinsic"], tuple(INTRINSICS))],
        mu=numbers["mu"],
        kappa=numbers["kappa"],
        scale=scale,
        tau=numbers["tau"],
        step=numbers["step"],
        steps=steps,
        integrator=integrator,
        symmetrise=symmetrise,
        kind=kind,
        signed=state == "feature" if signed is None else signed,
        straight_through=given["straight_through"],
        empty=choice("empty", given["empty"], EMPTY),
        adjoint=choice("adjoint", given["adjoint"], ADJOINTS),
        accuracy=float(accuracy),
        max_nfe=check_max_nfe(given["max_nfe"]),
        stop=stop,
        graph=graph,
        over_keys=over_keys,
        start=check_start(given["start"], q, nodes, state),
        jitter=given["jitter"],
        checkpoint=check_checkpoint(given["checkpoint"]),
        bias=check_bias(given["bias"], q, nodes),
    )


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value`; raise where it is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(choices)}")
    return value


def per_head(name: str, value: Any, q: Array, nodes: int | None = None) -> Number:
    """Return a number for all heads, or one for each as (h, 1, 1), in the dtype that is computed in.

    With `nodes` there may be one for each node, too: (h, j, 1).
    """
    if not is_array(value) or tuple(value.shape) == ():
        number = check_number(name, value)
        if not is_array(number):
            return number
        value = number
    elif tuple(value.shape) not in ((q.shape[1],), (q.shape[1], nodes)):
        needs = f"a number or an array ({q.shape[1]},)" + (f" or ({q.shape[1]}, {nodes})" if nodes is not None else "")
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs {needs}")
    if not is_floating(value):
        raise TypeError(f"{name}: got dtype {dtype_name(value)}, needs a floating one")
    xp = check_arrays(q=q, **{name: value})
    if concrete(xp.all(xp.isfinite(value))) is False:
        raise ValueError(f"{name}: got a number that is not finite, needs finite numbers")
    value = xp.astype(value, raised(q).dtype)
    return value if tuple(value.shape) == () else xp.reshape(value, (q.shape[1], 1 if len(value.shape) == 1 else -1, 1))


def any_of(condition: Array | bool) -> Array | bool:
    return condition if isinstance(condition, bool) else namespace(condition).any(condition)


def _scale(scale: Any, q: Array) -> Number:
    number = check_number("scale", scale)
    if is_array(number):
        xp = check_arrays(q=q, scale=number)
        return xp.astype(number, raised(q).dtype)
    return number


def _check_signs(numbers: dict[str, Any]) -> None:
    for name, needs in (("tau", "at least 0"), ("step", "above 0")):
        value = numbers[name]
        if value is not None and concrete(any_of(value < 0.0 if name == "tau" else value <= 0.0)):
            raise ValueError(f"{name}: got {value}, needs a number {needs}")
    for name, effect in (("mu", "scores are driven away from where they start"), ("kappa", "scores repel each other")):
        if concrete(any_of(numbers[name] < 0.0)):
            warnings.warn(f"{name}: got {numbers[name]}, below 0: {effect}, and may diverge", stacklevel=5)


def _check_causal_graph(state: str, symmetrise: str, causal: bool) -> None:
    if causal and state != "query" and symmetrise != "none":
        raise ValueError(
            f'symmetrise: got "{symmetrise}" with causal scores and state="{state}", where earlier scores would depend '
            'on later tokens; needs "none", or state="query"'
        )
    if causal and state == "query" and symmetrise in ("kernel", "min"):
        raise ValueError(
            f'symmetrise: got "{symmetrise}" with causal scores, where no two tokens may attend each other; needs '
            '"causal_mirror", "mean" or "none"'
        )
