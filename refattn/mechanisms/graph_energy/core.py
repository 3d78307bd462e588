"""The public core of graph energy attention: arguments are checked once, cast once, and handed to the general code.

Implementations differ in how they sum over pairs; a sparse graph may also have its readout a few rows at a time.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from refattn import equations
from refattn.args import (
    ROUNDS,
    check_arrays,
    check_broadcasts,
    check_choice,
    check_number,
    check_per_head,
    check_whole,
    fits,
    naming,
)
from refattn.mechanisms.core_arguments import check_saved, enter, implementation_of, returned, upstream
from refattn.mechanisms.graph_energy import definition, general
from refattn.mechanisms.graph_energy.forces import (
    COUPLINGS,
    INTRINSICS,
    Coupling,
    Intrinsic,
    Polynomial,
    check_coupling,
    check_intrinsic,
    polynomial,
)
from refattn.mechanisms.graph_energy.implementations import sparse_rows
from refattn.mechanisms.graph_energy.implementations.pairs import DENSE, TILED, OverPairs
from refattn.mechanisms.graph_energy.implementations.separable import PRODUCTS
from refattn.mechanisms.graph_energy.implementations.sparse import CSR, SPARSE
from refattn.mechanisms.graph_energy.options import FAMILIES
from refattn.mechanisms.graph_energy.options.call import Options, anywhere, check_step
from refattn.mechanisms.graph_energy.options.integrator import Euler, Integrator
from refattn.mechanisms.graph_energy.options.links import CausalMirror, Directed, Given, Kernel, Links, Min
from refattn.mechanisms.graph_energy.options.state import STATES, Start, State
from refattn.mechanisms.graph_energy.options.threshold import Hard, Proximal, Threshold
from refattn.mechanisms.graph_energy.system import System, balanced, energy_backward, system_of
from refattn.mechanisms.option_kinds import Forbidden, refuse
from refattn.mechanisms.use_definition import backward_of_definition, defined_by
from refattn.ops.masks import Causal, allowed_pairs
from refattn.tree import Shown
from refattn.xp import Array, all_finite, concrete, dtype_name, is_array, is_bool, is_floating, namespace, raised

IMPLEMENTATIONS = {"dense": DENSE, "products": PRODUCTS, "tiled": TILED}
"""How each sums over pairs; what stands around these sums is `general` for all."""

DENSE_UP_TO = 64 * 64
"""Differences of scores of one head up to which `implementation="auto"` takes the dense implementation."""


@dataclass(frozen=True, repr=False)
class Saved(Shown):
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    implementation
        The implementation that ran.
    weights
        (b, h, i, j): the attention weights p; None in state "feature", and in the implementation "rows" of a sparse
        graph.
    graph
        (b, h, j, j): the links w on which scores flowed.
    scores
        (b, h, j, c): the scores after the last step, before the threshold.
    """

    implementation: str
    weights: Array | None
    graph: Array | CSR
    scores: Array
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    options: Options
    inner: general.Saved

    @property
    def system(self) -> System:
        """The flow as a system of its own, x' = v(x)."""
        return system_of(self.inner.graph, _sums(self.implementation))


def _as_printed(options: dict[str, Any], *arrays: Array) -> str | None:
    """Make the tau of a threshold an option of its own, as the definition has it."""
    if "threshold" in options:
        given = FAMILIES["threshold"](options.pop("threshold"))
        if is_array(given.tau) or given != Hard(tau=given.tau):
            return f"the paper has no threshold {given}"
        options["tau"] = given.tau
    return None


@defined_by(definition, _as_printed)
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    state: str = "token",
    coupling: str | Coupling | Polynomial | None = None,
    intrinsic: str | Intrinsic = "anchor",
    mu: float | Array = 1.0,
    kappa: float | Array = 1.0,
    step: float | Array = 1.0 / 3.0,
    steps: int = 10,
    integrator: str | Integrator = "euler",
    threshold: str | Threshold = "hard",
    graph: str | Links | Array | CSR | None = None,
    start: Array | Start | None = None,
    mask: Array | None = None,
    causal: Causal = False,
    scale: float | Array | None = None,
    bias: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Saved]:
    """Attention whose scores first flow on the graph of the tokens, down the gradient of an energy.

    `refattn show graph_energy > ge.py` writes the definition, how it is computed, as one file on NumPy alone; in a
    block ``with ra.reading():`` a debugger steps through it.

    Parameters
    ----------
    q
        (b, h, n, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, g, n, d) with g a divisor of h: each key/value head serves h/g consecutive query heads. As many tokens as q,
        unless the links are over keys.
    v
        (b, g, n, e).
    state
        What flows: "token": a score of each token, which weighs its attention; "prefix": such a score for each
        query, on the graph of what the query may attend, with an energy where attention is causal; "query": for each
        query its attention distribution; "feature": the values themselves, which then are the output.
    coupling
        How two scores act on each other: "sin", "tanh", "identity", "arctan", "sinh", "cubic", or a `Polynomial`, as
        text "polynomial(coefficients=(1.0, -0.2))"; None means "sin", and "tanh" in state "feature". Or a `Coupling` of
        your own, an odd analytic function with its derivatives, which is checked when it is first used.
    intrinsic
        "anchor": a score is drawn to where it started; "none"; "double_well"; or an `Intrinsic` of your own, checked as
        couplings are.
    mu, kappa
        Strength of the intrinsic force and of the coupling: a number, or an array (h,); mu also (h, n), one for each
        node, which `refattn.mechanisms.graph_energy.layer.numbers` takes from a table.
    step
        h, above 0: a number, or an array (h,). A longer one than `longest_step` is warned of, where Euler takes it.
    steps
        How many; with 0 scores stay where they start.
    integrator
        "euler", "heun", "rk4": of order 1, 2, 4. Or an `Integrator`, as text "heun(checkpoint=4)", which may also stop
        early, and take the gradient at an equilibrium.
    threshold
        "hard" (below tau: 0), "soft" (tau is subtracted) or "proximal" (after every step of Euler). Or a `Threshold`,
        as text "soft(tau=0.1)", which also says what becomes of a row without scores.
    graph
        Which links the graph has: "kernel", "mean", "min", "none" or "causal_mirror", or a `Links`, as text
        "kernel(over='keys')", whose nodes are the keys, for queries that are others. None means "kernel" ("min" for
        "query"), and where scores are causal "none" ("causal_mirror" for "query" and "prefix"). Or links of your own:
        an array (n, n), or one for each head, or a sparse one, a `CSR`; over keys in a `Given`.
    start
        Where scores start, in state "token": an array that broadcasts to (b, h, n); None: the sigmoid of s_jj. A
        `Start` may add a jitter.
    mask
        Boolean, broadcastable to (b, h, n, n); True = may attend. Padding has to be masked as keys and as queries.
    causal
        False; True, "bottom_right" or "top_left", which are the same here.
    scale
        Factor of the matches q_i . k_j; None means 1/sqrt(d).
    bias
        Broadcastable to (b, h, n, n): what is added to the matches.
    implementation
        "dense" (every difference of scores at once), "products" (matrix products: the couplings "sin", "identity" and
        "cubic", and polynomials), "tiled" (a few rows of differences at a time) or "auto".

    Returns
    -------
    out : Array
        (b, h, n, e) in the dtype of the inputs; 0 for a token that may attend nothing.
    saved : Saved
        What `backward` reads, with `saved.weights`, `saved.graph` and `saved.scores`.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype, or the arrays are of several libraries.
    ValueError
        Where a shape, a number, a choice or a device does not fit, or the graph would let the future act on the past.
    FloatingPointError
        Where scores diverge, or a row is emptied and the threshold says "error".

    Notes
    -----
    Equations GE.1 to GE.13, written out in `refattn.mechanisms.graph_energy.definition`, and with all options in
    `refattn.mechanisms.graph_energy.general`. Numbers that are not finite propagate.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.graph_energy.forward(q, k, v)
    >>> out[0, 0].round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """
    given = {"state": state, "coupling": coupling, "intrinsic": intrinsic, "mu": mu, "kappa": kappa, "step": step}
    given |= {"steps": steps, "integrator": integrator, "threshold": threshold, "graph": graph, "start": start}
    call = enter(q, k, v, mask=mask, causal=causal)
    is_causal, masked = call.offset is not None, mask is not None
    options = checked(call.q, call.k, call.v, masked=masked, causal=is_causal, **given, scale=scale, bias=bias)
    chosen = _implementation(implementation, options, call.plane, v.shape[3])
    past = None if chosen == "rows" else call.offset
    allowed = allowed_pairs(call.mask, past, *call.plane[2:], q)
    if allowed is not None:
        allowed = namespace(q).broadcast_to(allowed, (*((1, 1, *allowed.shape)[-4:-2]), *call.plane[2:]))
    options = replace(options, attends=chosen == "dense")
    out, inner = equations.active(sparse_rows if chosen == "rows" else general).forward(
        call.q, call.k, call.v, allowed=allowed, options=options, implementation=_sums(chosen)
    )
    check_step(options, inner.graph.links, inner.graph.visible)
    if options.threshold.empty == "error" and (filled := inner.readout.filled) is not None:
        dead = False if allowed is None else ~namespace(q).any(allowed, axis=-1, keepdims=True)
        options.threshold.check_filled(filled | dead)
    _check_scores(inner)
    readout = inner.readout
    saved = Saved(chosen, readout.weights, inner.graph.links, readout.x, tuple(out.shape), q, options, inner)
    return call.back(out), saved


@backward_of_definition
@naming("saved")
def backward(
    saved: Saved,
    d_out: Array,
    d_weights: Array | None = None,
    d_scores: Array | None = None,
    d_graph: Array | None = None,
    d_energy: Array | None = None,
) -> dict[str, Array]:
    """Gradients of a loss with respect to the inputs of `forward`.

    Parameters
    ----------
    saved
        What `forward` returned.
    d_out
        (b, h, n, e): gradient of the loss with respect to `out`.
    d_weights, d_scores, d_graph
        Gradients with respect to `saved.weights`, `saved.scores` and `saved.graph`, of their shapes, where the loss
        depends on them, as with `refattn.mechanisms.graph_energy.layer.regularisers`.
    d_energy
        (b, h): gradient with respect to the energy after the last step, where the loss depends on it.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", "mu", "kappa" and "step", and "scale", "bias", "start", "tau" of the threshold and "coefficients"
        of a polynomial where given, each of the shape of its argument.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device, or `d_energy` is given and the graph has
        no energy.
    ArithmeticError
        Where the integrator's `adjoint` is "implicit", and the scores are not at rest or near a bifurcation.

    Notes
    -----
    Equations dGE.1 to dGE.13 of `refattn.mechanisms.graph_energy.general`: the adjoint of the steps that were taken.
    Called twice it gives the same bits.
    """
    check_saved(saved, Saved)
    if d_weights is not None and saved.weights is None:
        raise ValueError('d_weights was given, but state="feature" has no weights, and a sparse graph keeps none')
    if d_graph is not None and isinstance(saved.graph, CSR):
        raise ValueError("d_graph was given, but a sparse graph is a constant")
    needs = {"weights": saved.weights, "scores": saved.scores, "graph": saved.graph}
    shapes = {name: () if x is None else tuple(x.shape) for name, x in needs.items()}
    d_out, d_weights, d_scores, d_graph, d_energy = upstream(
        saved.like,
        d_out=(d_out, saved.shape),
        d_weights=(d_weights, shapes["weights"]),
        d_scores=(d_scores, shapes["scores"]),
        d_graph=(d_graph, shapes["graph"]),
        d_energy=(d_energy, tuple(saved.like.shape[:2])),
    )
    read: dict[str, Any] = {"weights": d_weights, "scores": d_scores, "graph": d_graph}
    more: dict[str, Array] = {}
    if d_energy is not None:
        by_energy, more = energy_backward(saved, d_energy)
        read |= {n: x if read.get(n) is None else read[n] + x for n, x in by_energy.items()}
    way = equations.active(sparse_rows if saved.implementation == "rows" else general)
    gradients = way.backward(saved.inner, d_out, **read)
    gradients |= {name: gradients[name] + x for name, x in more.items()}
    xp, numbers = namespace(d_out), saved.options.numbers
    gradients |= {name: xp.reshape(gradients[name], shape) for name, shape in numbers.items()}
    return returned(gradients, ("q", "k", "v", *numbers), saved.like)


# --- dispatch


def _implementation(implementation: str, options: Options, plane: tuple[int, ...], width: int) -> str:
    """Return the implementation to run: for a sparse graph "rows", or "sparse" where all pairs are there at once."""
    if isinstance(options.graph, CSR):
        if implementation != "auto":
            raise ValueError(f'implementation: got "{implementation}" with a sparse graph, needs "auto"')
        return implementation_of(
            implementation, ("sparse", "rows"), usual="rows" if sparse_rows.fits(options) else "sparse", plane=plane
        )
    n, channels = plane[3], options.state.channels(plane[2], width)
    usual = "tiled" if options.coupling.terms is None else "products"
    return implementation_of(
        implementation, IMPLEMENTATIONS, usual="dense" if n * n * channels <= DENSE_UP_TO else usual
    )


def _sums(implementation: str) -> OverPairs:
    """Return how an implementation sums over pairs."""
    return IMPLEMENTATIONS.get(implementation, SPARSE)


def _check_scores(inner: general.Saved) -> None:
    """Raise where finite scores have become infinite."""
    if all_finite(inner.readout.x) is not False:
        return
    states, links = inner.flow.states, inner.graph.links
    links = links.data if isinstance(links, CSR) else links
    xp = namespace(links)
    given = xp.all(xp.isfinite(states[0]) & xp.isfinite(inner.graph.start), axis=2)  # (b, h, c)
    given = given & xp.all(xp.isfinite(links), axis=tuple(range(len(links.shape)))[-2:])[..., None]
    if concrete(xp.any(given & ~xp.all(xp.isfinite(states[-1]), axis=2))) is False:
        return  # so were the inputs
    at = next(n for n, x in enumerate(states) if concrete(xp.any(given & ~xp.all(xp.isfinite(x), axis=2))))
    raise FloatingPointError(f"the scores diverged at step {at}: reduce step, which is {inner.graph.options.step}")


# --- checks


def checked(q: Array, k: Array, v: Array, *, masked: bool, causal: bool, **given: Any) -> Options:
    """Return the options of a call; raise where one does not fit."""
    nodes, chosen = k.shape[2], tuple(given[name] for name in CHOSEN)
    read_once = all(type(one) is str or one is None for one in chosen)
    kinds = (kinds_of_texts if read_once else kinds_of)(causal, *chosen)
    state, coupling, intrinsic, integrator, threshold, graph, start = kinds
    if graph.over == "tokens" and q.shape[2] != nodes:
        raise ValueError(
            f"k: got {nodes} tokens and {q.shape[2]} in q, needs as many: they are nodes of one graph, unless its "
            "links are over keys: graph=\"kernel(over='keys')\""
        )
    if isinstance(graph, Given):
        _check_given(graph.links, q, nodes, causal, integrator)
        if masked and isinstance(graph.links, CSR):
            raise ValueError("mask: got one with a sparse graph; needs None, and a graph without the edges it hides")
    numbers: dict[str, tuple[int, ...]] = {}
    if isinstance(coupling, Polynomial):
        a = coupling.array(q)
        numbers["coefficients"] = tuple(a.shape)
        coupling = polynomial([a[n] for n in range(a.shape[0])])
    elif isinstance(coupling, Coupling):
        check_coupling(coupling, q)
    else:
        coupling = COUPLINGS[coupling]
    if isinstance(intrinsic, Intrinsic):
        check_intrinsic(intrinsic, q)
    found = {name: check_per_head(name, given[name], q) for name in ("kappa", "step")}
    found |= {"mu": check_per_head("mu", given["mu"], q, nodes), "tau": check_per_head("tau", threshold.tau, q)}
    for name in ("mu", "kappa", "step"):
        if found[name] is None:
            raise TypeError(f"{name}: got None, needs a number, or an array ({q.shape[1]},)")
    _check_signs(found)
    channels = state.channels(q.shape[2], v.shape[3])
    jitter = at = bias = None
    if start.at is not None:
        at = check_broadcasts("start", start.at, q, (*q.shape[:2], nodes))
    if given["bias"] is not None:
        bias = check_broadcasts("bias", given["bias"], q, (*q.shape[:3], nodes))
    if start.jitter is not None:
        jitter = check_broadcasts("jitter", start.jitter, q, (*q.shape[:2], nodes, channels))
        jitter = namespace(jitter).broadcast_to(jitter, (*q.shape[:2], nodes, channels))
    scale = given["scale"]
    if scale is not None:
        scale = check_number("scale", scale)
        if is_array(scale):
            scale = check_arrays(q=q, scale=scale).astype(scale, raised(q).dtype)
    shown = {**{name: given[name] for name in ("mu", "kappa", "step", "scale", "bias")}, "tau": threshold.tau}
    shown["start"] = start.at
    numbers |= {name: tuple(getattr(x, "shape", ())) for name, x in shown.items() if x is not None}
    count = check_whole("steps", given["steps"], 0, ROUNDS)
    return Options(
        state=state,
        coupling=coupling,
        intrinsic=INTRINSICS.get(intrinsic, intrinsic),
        mu=found["mu"],
        kappa=found["kappa"],
        step=found["step"],
        steps=count,
        integrator=integrator,
        threshold=threshold,
        tau=found["tau"],
        links=graph,
        start=at,
        jitter=jitter,
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        bias=bias,
        numbers=numbers,
        causal=causal,
        attends=True,
    )


class Chosen(NamedTuple):
    """The options of one call that are kinds, for `FORBIDDEN`, and what several of its rows ask."""

    state: State
    links: Links
    integrator: Integrator
    threshold: Threshold
    start: Start
    causal: bool
    one_system: bool
    """Scores are causal, and all tokens are one system."""
    over_keys: str | None
    """The state of links over keys."""
    proximal: bool
    """The threshold acts after every step."""


FORBIDDEN: Forbidden = (
    (
        lambda c: c.causal and c.over_keys,
        'graph: got links over keys with causal scores, whose past depends on later keys; needs "none"',
    ),
    (
        lambda c: c.one_system and c.links.name not in ("none", "given"),
        'graph: got "{c.links.name}" with causal scores and state="{c.state.name}", where earlier scores would depend '
        'on later tokens; needs "none", or state="query" or "prefix"',
    ),
    (
        lambda c: c.causal and c.state.per_query and c.links.name in ("kernel", "min"),
        'graph: got "{c.links.name}" with causal scores, where no two tokens may attend each other; needs '
        '"causal_mirror", "mean" or "none"',
    ),
    (
        lambda c: c.one_system and c.integrator.stops,
        '{c.integrator.stops}: got a number with causal scores and state="{c.state.name}", where all tokens are one '
        'system and later tokens would decide on steps of earlier ones; needs None, or state="query" or "prefix"',
    ),
    (
        lambda c: c.over_keys == "feature",
        'graph: got links over keys with state="feature", whose output are its nodes',
    ),
    (
        lambda c: c.over_keys == "prefix",
        'graph: got links over keys with state="prefix", where no q meets its own k; needs "token"',
    ),
    (
        lambda c: c.over_keys and c.links.name == "causal_mirror",
        'graph: got "causal_mirror" over keys, which have no order',
    ),
    (
        lambda c: c.over_keys == "token" and c.start.at is None,
        'start: got None with links over keys and state="token", needs an array: no q meets its own k',
    ),
    (
        lambda c: c.start.at is not None and c.state.name != "token",
        'start: got an array with state="{c.state.name}", which has its own; needs None',
    ),
    (
        lambda c: c.links.name == "none" and c.integrator.reads_energy,
        'graph: got "none", which has no energy, with a stop by energy (stop_plateau, stop_level); needs another graph',
    ),
    (
        lambda c: c.proximal and not isinstance(c.integrator, Euler),
        'integrator: got "{c.integrator.name}" with threshold="proximal", needs "euler"',
    ),
    (
        lambda c: c.proximal and c.integrator.adjoint == "implicit",
        'adjoint: got "implicit" with threshold="proximal", whose rest is not that of the flow; needs "unroll"',
    ),
    (
        lambda c: c.proximal and c.integrator.stops,
        '{c.integrator.stops}: got a number with threshold="proximal", needs None',
    ),
)
"""What does not go together in a call, and in the configuration of a block."""


CHOSEN = ("state", "coupling", "intrinsic", "integrator", "threshold", "graph", "start")
"""Options that are one of several kinds."""


def kinds_of(
    causal: bool, state: Any, coupling: Any, intrinsic: Any, integrator: Any, threshold: Any, graph: Any, start: Any
) -> tuple[State, Any, Any, Integrator, Threshold, Links, Start]:
    """Return the objects that these options mean, in this order; raise where they do not fit together.

    Forces of the library stay names; the threshold has `signed` as it is in this state.
    """
    flows = STATES[check_choice("state", state, STATES)]
    method, limit, begin = (
        FAMILIES[name](x) for name, x in (("integrator", integrator), ("threshold", threshold), ("start", start))
    )
    links: Any
    if graph is None:
        if causal:
            links = CausalMirror() if flows.per_query else Directed()
        else:
            links = Min() if flows.name == "query" else Kernel()
    elif not isinstance(links := FAMILIES["graph"](graph), Links):
        links = Given(links=graph)
    over_keys = flows.name if links.over == "keys" else None
    one_system, proximal = causal and not flows.per_query, isinstance(limit, Proximal)
    refuse(FORBIDDEN, Chosen(flows, links, method, limit, begin, causal, one_system, over_keys, proximal))
    couples = FAMILIES["coupling"](flows.coupling if coupling is None else coupling)
    limit = replace(limit, signed=flows.signed) if limit.signed is None else limit
    return flows, couples, FAMILIES["intrinsic"](intrinsic), method, limit, links, begin


kinds_of_texts = functools.lru_cache(maxsize=64)(kinds_of)
"""The same for what is given as texts, which are read once."""


def _check_signs(numbers: Mapping[str, Any]) -> None:
    for name, needs in (("tau", "at least 0"), ("step", "above 0")):
        value = numbers[name]
        if value is not None and anywhere(value < 0.0 if name == "tau" else value <= 0.0):
            raise ValueError(f"{name}: got {value}, needs a number {needs}")
    for name, effect in (("mu", "scores are driven away from where they start"), ("kappa", "scores repel each other")):
        if anywhere(numbers[name] < 0.0):
            warnings.warn(f"{name}: got {numbers[name]}, below 0: {effect}, and may diverge", stacklevel=4)


def _check_given(graph: Any, q: Array, nodes: int, causal: bool, integrator: Integrator) -> None:
    """Raise where a graph is neither an array of links nor a sparse one, or does not fit the integrator."""
    if isinstance(graph, CSR):
        graph.check(q, nodes, causal)
        if integrator.adjoint == "implicit":
            raise ValueError(
                'adjoint: got "implicit" with a sparse graph, a gradient that solves systems of equations; needs a '
                "dense graph"
            )
        return
    if not is_array(graph):
        raise TypeError(f"graph: got {type(graph).__name__}, needs an array (n, n), or (b, h, n, n), or a CSR")
    xp = check_arrays(q=q, graph=graph)
    if not is_bool(graph) and not is_floating(graph):
        raise TypeError(f"graph: got dtype {dtype_name(graph)}, needs bool or a floating one")
    shape, full = tuple(graph.shape), (*q.shape[:2], nodes, nodes)
    if not fits(shape, full) or shape[-2:] != full[-2:]:
        raise ValueError(f"graph: got shape {shape}, needs {full}, or (n, n)")
    if integrator.reads_energy:
        balanced(xp.astype(graph, raised(q).dtype))
