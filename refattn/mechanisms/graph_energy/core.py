"""The public core of graph energy attention: arguments are checked once, cast once, and handed on."""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.arguments import (
    check_arrays,
    check_causal,
    check_gradient,
    check_is,
    check_mask,
    check_qkv,
)
from refattn.mechanisms.graph_energy import attend
from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.forms import form_of, module_of
from refattn.mechanisms.graph_energy.given import check_jitter
from refattn.mechanisms.graph_energy.options import NUMBERS, USUAL, Options, check_options
from refattn.mechanisms.graph_energy.polynomial import check_coefficients
from refattn.mechanisms.graph_energy.sparse import CSR
from refattn.ops.masks import Causal, allowed_pairs, causal_offset
from refattn.xp import Array, namespace, raised


@dataclass(frozen=True)
class Saved:
    """What `backward` reads, and what a caller may want beside the output.

    Attributes
    ----------
    form
        The form that ran.
    weights
        (b, h, i, j): the attention weights p; None in state "feature".
    graph
        (b, h, j, j): the links w on which scores flowed.
    scores
        (b, h, j, c): the scores after the last step, before the threshold.
    """

    form: str
    weights: Array | None
    graph: Array | CSR
    scores: Array
    shape: tuple[int, ...]  # of the output
    like: Array  # an input, for its dtype
    given: dict[str, tuple[int, ...]]  # shapes of the differentiable options that have a gradient
    options: Options
    inner: attend.Saved


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    state: str = "token",
    coupling: str | Coupling | None = None,
    coefficients: Array | tuple[float, ...] | None = None,
    intrinsic: str = "anchor",
    mu: float | Array = 1.0,
    kappa: float | Array = 1.0,
    tau: float | Array | None = None,
    step: float | Array | None = None,
    steps: int = 10,
    integrator: str = "euler",
    accuracy: float = 1e-6,
    max_nfe: int = 10000,
    stop_force: float | None = None,
    stop_plateau: float | None = None,
    stop_level: float | None = None,
    symmetrise: str | None = None,
    graph: Array | CSR | None = None,
    graph_scores: str = "qk",
    start: Array | None = None,
    jitter: Array | None = None,
    mask: Array | None = None,
    causal: Causal = False,
    scale: float | Array | None = None,
    bias: Array | None = None,
    kind: str = "hard",
    signed: bool | None = None,
    straight_through: bool = False,
    empty: str = "argmax",
    adjoint: str = "unroll",
    checkpoint: int | None = None,
    form: str = "auto",
) -> tuple[Array, Saved]:
    """Attention whose scores first flow on the graph of the tokens, down the gradient of an energy.

    Parameters
    ----------
    q
        (b, h, n, d), float64, float32, float16 or bfloat16; the last two are computed in float32.
    k
        (b, g, n, d) with g a divisor of h: each key/value head serves h/g consecutive query heads. As many tokens as q,
        unless `graph_scores` is "kk".
    v
        (b, g, n, e).
    state
        What flows: "token": a score of each token, which weighs its attention scores; "query": for each query its
        attention distribution; "feature": the values themselves, which then are the output.
    coupling
        "sin", "tanh", "identity", "arctan", "sinh", "cubic" or "polynomial": how two scores act on each other; None
        means "sin", and "tanh" in state "feature". Or a `Coupling` of your own, an odd analytic function with its
        derivatives, which is checked when it is first used. See `refattn.mechanisms.graph_energy.couplings`.
    coefficients
        (m,): of the coupling "polynomial", g(x) = sum_n coefficients[n] x^(2n+1), and of no other.
    intrinsic
        "anchor": a score is drawn to where it started; "none"; "double_well".
    mu, kappa
        Strength of the intrinsic force and of the coupling: a number, or an array (h,); mu also (h, n), one for each
        node, which `refattn.mechanisms.graph_energy.sharing` takes from a table.
    tau
        Threshold, at least 0: a number, or an array (h,). None means 0.4 for "token", a quarter of the mean weight for
        "query" and 0 for "feature".
    step
        h, above 0: a number, or an array (h,). None means 1/L, where an Euler step lowers the energy up to 2/L.
    steps
        How many; with 0 scores stay where they start.
    integrator
        "euler", "heun", "rk4": fixed explicit steps; "rk45": Dormand and Prince, with steps as long as `accuracy`
        allows, over the same time; "implicit_midpoint"; "discrete_gradient": the energy falls with every step, of any
        length.
    accuracy
        Of "rk45": the error of a step, relative to 1 plus the size of a score.
    max_nfe
        Of "rk45": how many rates it may evaluate.
    stop_force, stop_plateau, stop_level
        A channel stops where no rate is larger, where its energy has changed by no more in three steps (relative to 1
        plus its size), or where its energy is no larger. None: it takes all steps.
    symmetrise
        Which links the graph has: "kernel", "mean", "min", "none" or "causal_mirror"; see
        `refattn.mechanisms.graph_energy.graph`. None means "kernel" ("min" for "query"), and where scores are causal
        "none" ("causal_mirror" for "query").
    graph
        Links of your own in place of those: an array (n, n), or one for each head, of weights or booleans, which hold
        where i may attend j; or a sparse one, `refattn.mechanisms.graph_energy.CSR`, which `window_graph`,
        `nearest_graph` and `sparse_graph` make. It is a constant of the backward.
    graph_scores
        "qk": links come from the scores of the tokens; "kk": from those of keys with keys, and the queries, any number
        of them, are no nodes. Keys that no query may attend are none either.
    start
        Where scores start, in state "token": an array that broadcasts to (b, h, n). None: the sigmoid of s_jj.
    jitter
        Broadcastable to the scores (b, h, n, c): what is added to where scores start, but not to the anchor; a constant
        of the backward. Draws of `refattn.counter.normal`, which a seed fixes, take scores off an unstable rest.
    mask
        Boolean, broadcastable to (b, h, n, n); True = may attend. Padding has to be masked as keys and as queries.
    causal
        False; True, "bottom_right" or "top_left", which are the same here.
    scale
        Factor of the scores; None means 1/sqrt(d).
    bias
        Broadcastable to (b, h, n, n): what is added to the scores, such as that of a table, see `.sharing`.
    kind
        The threshold: "hard" (below tau: 0), "soft" (tau is subtracted) or "proximal" (step times tau is subtracted
        after every step of Euler, which lowers the energy plus tau times the sum of the scores).
    signed
        Whether |x| is compared with tau; None means only in state "feature".
    straight_through
        Whether the gradient passes a hard threshold by.
    empty
        What becomes of a row whose scores are all below tau: "argmax", "dense", "zero" or "error"; see
        `refattn.mechanisms.graph_energy.readout`.
    adjoint
        "unroll": the gradient of the steps that were taken; "implicit": that of the equilibrium, which they have
        to have reached, see `refattn.mechanisms.graph_energy.equilibrium`.
    checkpoint
        Every how many steps a state is kept for the backward, which takes the steps between again, to the same bits;
        None: all of every step is kept. The square root of `steps` needs the least memory.
    form
        "dense" (every difference of scores at once), "products" (matrix products: the couplings "sin", "identity" and
        "cubic"), "tiled" (a few rows of differences at a time) or "auto".

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
        Where scores diverge, or a row is emptied and `empty` is "error".
    ArithmeticError
        Where "rk45" would need more evaluations than `max_nfe`.

    Notes
    -----
    Equations GE.1 to GE.16, written out in `.graph`, `.flow` and `.readout`. Numbers that are not finite propagate.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.graph_energy.forward(q, k, v)
    >>> out[0, 0].round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """
    given = {name: value for name, value in locals().items() if name in USUAL}
    xp = check_arrays(q=q, k=k, v=v, **({} if mask is None else {"mask": mask}))
    check_qkv(q, k, v)
    plane = (*q.shape[:3], k.shape[2])
    channels = {"token": 1, "query": q.shape[2], "feature": v.shape[3]}.get(state, 1)
    given["jitter"] = check_jitter(jitter, q, (*q.shape[:2], k.shape[2], channels))
    options = check_options(q, k.shape[2], causal=check_causal(causal) is not False, **given)
    if mask is not None and isinstance(graph, CSR):
        raise ValueError("mask: got one with a sparse graph; needs None, and a graph without the edges that it hides")
    mask = check_mask(mask, plane)
    allowed = allowed_pairs(mask, causal_offset(causal, *plane[2:]), (0, plane[2]), (0, plane[3]), q)
    if allowed is not None:
        allowed = xp.broadcast_to(allowed, (*((1, 1, *allowed.shape)[-4:-2]), *plane[2:]))
    chosen = form_of(form, options, q, v)
    out, inner = equations.active(attend).forward(
        raised(q), raised(k), raised(v), allowed=allowed, options=options, form=module_of(chosen)
    )
    attend.check_scores(inner)
    if coefficients is not None:
        given["coefficients"] = check_coefficients(coefficients, q)
    shapes = {name: tuple(getattr(given[name], "shape", ())) for name in NUMBERS if given[name] is not None}
    saved = Saved(
        chosen,
        inner.readout.weights,
        inner.graph.graph,
        inner.readout.x,
        tuple(out.shape),
        q,
        shapes,
        options,
        inner,
    )
    return xp.astype(out, q.dtype, copy=False), saved


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
        depends on them, as with `refattn.mechanisms.graph_energy.regularisers`.
    d_energy
        (b, h): gradient with respect to the energy after the last step, where the loss depends on it.

    Returns
    -------
    dict of str to Array
        "q", "k", "v", "mu" and "kappa", and "scale", "tau", "step", "bias", "start" and "coefficients" where given,
        each of the shape of its argument. A step that was not given is a constant.

    Raises
    ------
    TypeError, ValueError
        Where a gradient is of a wrong type, dtype, shape, library or device, or `d_energy` is given and the graph has
        no energy.
    ArithmeticError
        Where `adjoint` is "implicit", and the scores are not at rest or near a bifurcation.

    Notes
    -----
    Equations dGE.1 to dGE.16: the adjoint of the steps that were taken. Called twice it gives the same bits.
    """
    check_is("saved", saved, Saved)
    check_gradient("d_out", d_out, saved.shape, saved.like)
    xp, like = namespace(saved.like), raised(saved.like)
    if d_weights is not None and saved.weights is None:
        raise ValueError('d_weights was given, but state="feature" has no weights')
    if d_graph is not None and isinstance(saved.graph, CSR):
        raise ValueError("d_graph was given, but a sparse graph is a constant")
    read = {"weights": d_weights, "scores": d_scores, "graph": d_graph, "energy": d_energy}
    for name, gradient in read.items():
        if gradient is not None:
            shape = saved.like.shape[:2] if name == "energy" else getattr(saved, name).shape
            check_gradient(f"d_{name}", gradient, tuple(shape), saved.like)
            read[name] = xp.astype(gradient, like.dtype, copy=False)
    d_result = xp.astype(d_out, like.dtype, copy=False)
    gradients = equations.active(attend).backward(saved.inner, d_result, read)
    gradients |= {name: xp.reshape(gradients[name], shape) for name, shape in saved.given.items()}
    return {name: xp.astype(gradients[name], saved.like.dtype, copy=False) for name in ("q", "k", "v", *saved.given)}
