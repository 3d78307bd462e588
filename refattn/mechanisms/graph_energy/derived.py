"""What follows from the options and the graph: the law of the flow with its step, and the threshold."""

from __future__ import annotations

import math
import warnings
from types import ModuleType

from refattn.mechanisms.graph_energy.intrinsic import Number
from refattn.mechanisms.graph_energy.law import Law, Stop, Threshold
from refattn.mechanisms.graph_energy.options import Options, any_of
from refattn.mechanisms.graph_energy.sparse import CSR, degrees
from refattn.xp import Array, concrete, namespace


def law_of(
    options: Options,
    graph: Array,
    visible: Array | None,
    balance: Array | None,
    form: ModuleType,
    threshold: Threshold,
) -> Law:
    """Return the law of the flow, with a step of 1/L where none is given; such a step is a constant of the backward."""
    bound = _bound(options, graph, visible)
    step = options.step
    if step is None:
        if bound is None:
            raise ValueError(
                f'step: got None with state="{options.state}", coupling="{options.coupling.name}" and intrinsic='
                f'"{options.intrinsic.name}", whose slopes have no bound; needs a number'
            )
        step = _inverse(bound)
    elif bound is not None and options.integrator == "euler" and concrete(any_of(step * bound > 2.0)):
        warnings.warn("step: got more than 2/L, the largest that is known to lower the energy", stacklevel=4)
    numbers = (
        options.mu,
        options.kappa,
        step,
        options.step is not None,
        options.steps,
        options.integrator,
        form,
    )
    stop = None
    if options.stop:
        by_energy = {"plateau", "level"} & set(options.stop)
        stop = Stop(**options.stop, balance=(1.0 if balance is None else balance) if by_energy else None)
    return Law(
        options.coupling,
        options.intrinsic,
        *numbers,
        accuracy=options.accuracy,
        max_nfe=options.max_nfe,
        jitter=options.jitter,
        stop=stop,
        checkpoint=options.checkpoint,
        threshold=threshold,
    )


def threshold_of(options: Options, allowed: Array | None, attention: Array) -> Threshold:
    """Return the threshold; without a tau 0.4 for "token", a quarter of the mean for "query", 0 for "feature"."""
    tau = options.tau
    if tau is None and options.state == "query":
        if allowed is None:
            tau = 0.25 / max(attention.shape[3], 1)
        else:
            xp = namespace(attention)
            seen = xp.sum(xp.astype(allowed, attention.dtype), axis=-1, keepdims=True)
            tau = 0.25 / xp.matrix_transpose(xp.where(seen > 0.0, seen, 1.0))
    elif tau is None:
        tau = 0.4 if options.state == "token" else 0.0
    return Threshold(
        tau, options.tau is not None, options.kind, options.signed, options.straight_through, options.empty
    )


def _bound(options: Options, graph: Array | CSR, visible: Array | None) -> Number | None:
    """Return L = sup |f'| + 2 kappa sup |g'| max_i sum_j w_ij, per channel where nodes are hidden; None for infinity.

    Scores of tokens and queries start between 0 and 1 and, where g increases there and the step is at most 1/L, stay
    there: a bound that depends on no score, and so on no later token.
    """
    steep = options.coupling.largest_slope(math.inf)
    wells = options.intrinsic.name == "double_well"
    if options.state == "feature" and wells:
        return None
    if steep == math.inf and options.state != "feature" and not wells:
        steep = options.coupling.largest_slope(1.0)
    if steep == math.inf:
        return None
    degree: Number = 1.0
    if isinstance(graph, CSR):
        degree = namespace(graph.data).max(degrees(graph)) if graph.shape[0] else 1.0
    elif options.symmetrise in ("mean", "causal_mirror", "given"):
        xp = namespace(graph)
        graph = xp.abs(graph)
        sums = xp.sum(graph, axis=-1, keepdims=True) if visible is None else visible * (graph @ visible)
        degree = xp.max(sums, axis=-2, keepdims=True) if graph.shape[-1] else 1.0
    curved = options.intrinsic.largest_slope(options.mu)
    if not isinstance(curved, float) and len(curved.shape) == 3 and curved.shape[1]:
        curved = namespace(curved).max(curved, axis=1, keepdims=True)  # of all nodes
    return curved + 2.0 * steep * abs(options.kappa) * degree


def _inverse(bound: Number) -> Number:
    if isinstance(bound, float):
        return 1.0 / bound if bound > 0.0 else 1.0
    xp = namespace(bound)
    return xp.where(bound > 0.0, 1.0 / xp.where(bound > 0.0, bound, 1.0), 1.0)
