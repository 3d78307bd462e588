"""A causal language model over a stack of any mechanism's blocks.

Equations (a layer is one pass of LM.2 to LM.5)::

    [LM.1]  x_n = E[token_n] + P[n]
    [LM.2]  u = norm_1(x)                   not where the block brings a norm of its own: then u = x
    [LM.3]  x' = x + a                      a what the block makes of u; with a norm of its own: x' = a
    [LM.4]  w = norm_2(x')                  LM.4 and LM.5 not where the block stands in place of the MLP
    [LM.5]  x'' = x' + mlp(w)
    [LM.6]  y = norm(x)
    [LM.7]  z_nt = y_n . E_t                a head that points: LM.8 to LM.10 of `pointer` in its place

Adjoints, for given dz::

    [dLM.7]  dy = dz E
    [dLM.6]  dx = adjoint of norm at dy
    [dLM.5]  dw = adjoint of the MLP at dx''
    [dLM.4]  dx' = dx'' + adjoint of norm_2 at dw
    [dLM.3]  du = adjoint of the block at dx'
    [dLM.2]  dx = dx' + adjoint of norm_1 at du
    [dLM.position_embedding]  dP_n = sum_b dx_bn
    [dLM.token_embedding]  dE = dz^T y + sum of dx_n in the row of token_n

With `loops` the passes through the layers repeat, and the gradients of a layer are the sums over its passes.

The state of the stack is the block's own (x, and where it has one a velocity or a history); norms and MLPs act on x.

Axes: b batch, n token, m width, t token of the vocabulary.

Source: Radford et al. 2019 (Language models are unsupervised multitask learners), section 2.3: norms before the
sublayers and one after the last; Press, Wolf 2017 (arXiv:1608.05859): the head shares the embedding's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from refattn import equations, tree
from refattn.mechanisms.context import Context
from refattn.model import pointer
from refattn.model.params import Layer, Norm, Params
from refattn.ops import embedding, layer_norm, mlp
from refattn.ops.weights import fresh_normal
from refattn.xp import Array, arange, namespace, product, zeros

Head = Callable[[Array], tuple[Array, Any]]
"""What a head that points makes of y (b, n, m): the logits and what it saved."""

Step = Callable[[int, Layer, Any], tuple[Any, Any]]
"""What a block makes of a state: (index of the pass, its parameters, state) -> (next state, what it saved)."""


Chance = tuple[int, int]
"""The seed and the step by which blocks that draw numbers have them drawn; without it they take no random ones."""

Watch = Callable[[int, Any, Any, Any], None]
"""Who is told what the backward of each block is given: index of the pass, parameters, what it saved, d_state."""


@dataclass(frozen=True)
class LayerSaved:
    """What the backward of a layer reads."""

    norm_1: layer_norm.Saved | None
    block: Any
    norm_2: layer_norm.Saved | None
    mlp: mlp.Saved | None


@dataclass(frozen=True)
class Saved:
    """What the backward of the model reads."""

    tokens: Array  # (b, n)
    layers: tuple[LayerSaved, ...]
    state: Any
    norm: layer_norm.Saved
    y: Array  # (b, n, m)
    head: pointer.Saved | None


def forward(params: Params, tokens: Array, training: bool, chance: Chance | None = None) -> tuple[Array, Saved]:
    """Return the logits (b, n, t) of the tokens (b, n), and what `backward` reads."""

    def step(index: int, layer: Layer, state: Any) -> tuple[Any, Any]:
        context = context_of(params, tokens, index, training, chance=chance)
        return params.config.record.block.forward(layer.block, state, context)

    def point(y: Array) -> tuple[Array, Any]:
        context = context_of(params, tokens, params.config.depth, training, chance=chance)
        return equations.active(pointer).forward(params, y, tokens, context)

    head = None if params.pointer is None else point
    return run(params, tokens, 0, context_of(params, tokens, 0, training), step, head)


def context_of(
    params: Params, tokens: Array, layer: int, training: bool = False, first: int = 0, chance: Chance | None = None
) -> Context:
    """Return what the block of a pass is told of tokens (b, n) at the positions `first`, `first` + 1, ...

    It is told the tokens, all positions so far, and draws, where its configuration reads them. These are fixed: the
    same in every call; or those that a configuration with ``chances`` makes for a seed and a step.
    """
    # Behind the last layer stands a head that points.
    config = (params.at(layer) if layer < params.config.depth else params.pointer).block.config
    count = first + tokens.shape[1]
    context_fields = getattr(config, "context_fields", params.config.record.context_fields)
    own: dict[str, Any] = {"tokens": tokens} if "tokens" in context_fields else {}
    if hasattr(config, "context_fields") and "positions" in context_fields:
        own["positions"] = arange(0, count, tokens)
    if reads_draws(config):
        shapes, like = config.drawn(params.config.context), params.token_embedding
        every = {name: fresh_normal(shape, f"model.draws.{name}", layer, like) for name, shape in shapes.items()}
        own["draws"] = {name: x[..., :count, :] for name, x in every.items()}
    if chance is not None and hasattr(config, "chances"):
        seed, step = chance
        own["draws"] = config.chances(seed=seed, step=step, layer=layer, like=params.token_embedding)
    return Context(causal=True, training=training, layer=layer, **own)


def reads_draws(config: Any) -> bool:
    """Tell whether a block of this configuration reads draws."""
    return "draws" in getattr(config, "context_fields", ())


def run(
    params: Params, tokens: Array, first: int, context: Context, step: Step, head: Head | None = None
) -> tuple[Array, Saved]:
    """Return the logits (b, n, t) of tokens at the positions `first`, `first` + 1, ..., with `step` for the blocks.

    With a `head` they are what it makes of the last y.
    """
    xp = namespace(params.token_embedding, tokens)
    block, passes = params.config.record.block, params.passes
    rows = params.position_embedding[first : first + tokens.shape[1], ...]  # (n, m): part of P
    x = embedding.embedding_forward(params.token_embedding, tokens) + rows  # (b, n, m) [LM.1]
    state = block.start(passes[0].block, x, context)
    layers = []
    for index, layer in enumerate(passes):
        state, saved = advance(params, layer, state, index, step)
        layers.append(saved)
    last = block.read(passes[-1].block, state)  # (b, n, m): x of LM.6
    y, norm = _norm(params.norm, last)  # the first is LM.6
    normed = y  # (b, n, m) [LM.6]
    if head is not None:
        logits, pointed = head(normed)  # (b, n, t): LM.10
        return logits, Saved(tokens, tuple(layers), state, norm, normed, pointed)
    logits = product(normed, xp.matrix_transpose(params.token_embedding))  # (b, n, t) [LM.7]
    return logits, Saved(tokens, tuple(layers), state, norm, normed, None)


def advance(params: Params, layer: Layer, state: Any, index: int, step: Step) -> tuple[Any, LayerSaved]:
    """Advance the state by one layer."""
    before = state.x  # (b, n, m): x of LM.2
    norm_1 = norm_2 = mlp_saved = None
    if layer.norm_1 is None:
        state, block = step(index, layer, state)
        x = state.x  # (b, n, m): LM.3 of a block with a norm of its own
    else:
        u, norm_1 = _norm(layer.norm_1, before)  # the first is LM.2
        inner = u  # (b, n, m) [LM.2]
        state, block = step(index, layer, replace(state, x=inner))
        x = before + state.x  # (b, n, m) [LM.3]
    if layer.mlp is not None and layer.norm_2 is not None:
        w, norm_2 = _norm(layer.norm_2, x)  # the first is LM.4
        outer = w  # (b, n, m) [LM.4]
        out, mlp_saved = mlp.mlp_forward(layer.mlp, outer, params.config.gelu)  # part of LM.5
        x = x + out  # (b, n, m) [LM.5]
    return replace(state, x=x), LayerSaved(norm_1, block, norm_2, mlp_saved)


def backward(params: Params, saved: Saved, d_logits: Array, watch: Watch | None = None) -> Params:
    """Return the gradients of all parameters for a given gradient of the logits (b, n, t)."""
    xp = namespace(params.token_embedding, d_logits)
    block, passes, count = params.config.record.block, params.passes, len(params.layers)
    d_pointer = None
    if saved.head is not None:
        # forward: logits = head(normed)
        own = equations.active(pointer)
        d_normed, d_pointer, d_head = own.backward(params, saved.head, d_logits)  # (b, n, m), -, (t, m)
    else:
        # forward: logits = normed @ token_embedding^T
        d_normed = product(d_logits, params.token_embedding)  # (b, n, m) [dLM.7]
        rows = xp.reshape(saved.y, (-1, saved.y.shape[-1]))  # (b*n, m): y with all tokens in a row
        d_rows = xp.reshape(d_logits, (-1, d_logits.shape[-1]))  # (b*n, t): dz with all tokens in a row
        d_head = product(xp.matrix_transpose(d_rows), rows)  # (t, m): part of dLM.token_embedding
    # forward: normed = norm(last)
    d_last, d_norm = _norm_backward(saved.norm, d_normed)  # the first is dLM.6
    d_read = d_last  # (b, n, m) [dLM.6]
    d_state, d_block = block.read_backward(passes[-1].block, saved.state, d_read)
    found: list[Layer | None] = [None] * count
    for index in reversed(range(len(passes))):
        d_state, d_layer = _layer_backward(params, index, saved.layers[index], d_state, watch)
        found[index % count] = tree.union(found[index % count], d_layer, _add)
    layers = [_whole(*each) for each in zip(params.layers, found, strict=True)]
    layers[-1] = replace(layers[-1], block=tree.union(layers[-1].block, d_block, _add))
    d_x, d_block = block.start_backward(passes[0].block, d_state)  # the first is the gradient of LM.1
    layers[0] = replace(layers[0], block=tree.union(layers[0].block, d_block, _add))
    # forward: x = embedding(token_embedding, tokens) + position_embedding[:n]
    unused = zeros((params.config.context - d_x.shape[1], d_x.shape[2]), d_x)  # positions without a token
    d_positions = xp.concat([xp.sum(d_x, axis=0), unused], axis=0)  # [dLM.position_embedding]
    d_input = embedding.embedding_backward(params.token_embedding, saved.tokens, d_x)  # (t, m): the other part
    d_tokens = d_head + d_input  # (t, m) [dLM.token_embedding]
    return Params(params.config, d_tokens, d_positions, tuple(layers), d_norm, d_pointer)


def _layer_backward(
    params: Params, index: int, saved: LayerSaved, d_state: Any, watch: Watch | None
) -> tuple[Any, Layer]:
    """Return the gradients of the state that came in and of the parameters of one pass."""
    layer = params.at(index)
    d_x = d_state.x  # (b, n, m): it came in
    d_norm_1 = d_norm_2 = d_mlp = None
    if saved.mlp is not None and saved.norm_2 is not None and layer.mlp is not None:
        # forward: x = x + mlp(outer)
        d_w, d_mlp = mlp.mlp_backward(layer.mlp, saved.mlp, d_x, params.config.gelu)  # the first is dLM.5
        d_outer = d_w  # (b, n, m) [dLM.5]
        # forward: outer = norm_2(x)
        d_through, d_norm_2 = _norm_backward(saved.norm_2, d_outer)  # part of dLM.4
        d_x = d_x + d_through  # (b, n, m) [dLM.4]
    # forward: state = block(state with inner in place of x)
    d_state = replace(d_state, x=d_x)
    if watch is not None:
        watch(index, layer.block, saved.block, d_state)
    d_state, d_block, _ = params.config.record.block.backward(layer.block, saved.block, d_state)
    if saved.norm_1 is not None:
        d_inner = d_state.x  # (b, n, m) [dLM.3]
        # forward: inner = norm_1(before); x = before + state.x
        d_through, d_norm_1 = _norm_backward(saved.norm_1, d_inner)  # part of dLM.2
        d_before = d_x + d_through  # (b, n, m) [dLM.2]
        d_state = replace(d_state, x=d_before)
    return d_state, Layer(d_norm_1, d_block, d_norm_2, d_mlp)


def _norm(norm: Norm, x: Array) -> tuple[Array, layer_norm.Saved]:
    return layer_norm.layer_norm_forward(x, norm.gain, norm.bias)


def _norm_backward(saved: layer_norm.Saved, d_y: Array) -> tuple[Array, Norm]:
    d_x, d_gain, d_bias = layer_norm.layer_norm_backward(saved, d_y)  # tagged where it is called
    return d_x, Norm(d_gain, d_bias)


def _add(a: Array, b: Array) -> Array:
    return a + b


def _whole(layer: Layer, found: Layer | None) -> Layer:
    """Return the gradients of a layer: zeros for what none of its passes has read."""
    leaves = tree.flatten(found)
    return tree.unflatten(
        layer, {name: leaves[name] if name in leaves else 0.0 * x for name, x in tree.flatten(layer).items()}
    )
