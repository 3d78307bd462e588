"""Stacks of SympFormer blocks, forward and backward, and the force as it is published."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, philox, tree
from refattn.verify.selfcheck import gradients
from refattn.xp import backend

RECORD = ra.mechanism("sympformer")
BLOCK = RECORD.block

ONE_CALL = (
    "presymplectic_euler",
    "forward_euler",
    "exponential_presymplectic",
    "exponential_euler",
    "exponential_midpoint",
    "half_damped",
    "explicit_euler",
    "plain_euler",
    "ab2",
    "etd_ab2",
)
FOUR_CALLS = ("presymplectic", "strang")
INTEGRATORS = (*ONE_CALL, *FOUR_CALLS)
OLD_DRIFT = ("forward_euler", "exponential_euler", "explicit_euler", "plain_euler", "ab2", "etd_ab2")
VOCABULARY = 4
BASELINES = ("classical", "lie_trotter")
SUBSTEPS = ("attention_velocity", "momentum", "velocity", "plain", "none")


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=11, purpose=name)


def stack(layers: int, moved: float = 0.2, **options: Any) -> tuple[Any, ...]:
    """Parameters of all layers, none of which is 0 or 1: there an error could hide."""
    given = {"width": 6, "heads": 2, "spread": 0.3, "vocabulary": VOCABULARY, "context": 12, **options}
    mlp = given.get("mlp", "attention_velocity")
    given["mlp"] = mlp if mlp == "none" or "(" in mlp else f"{mlp}(ratio=2)"
    configs = [BLOCK.Config(layer=n, layers=layers, **given) for n in range(layers)]
    fresh = [BLOCK.init(config, seed=3, like=np.zeros(1), layer=n) for n, config in enumerate(configs)]
    names = itertools.count()
    return tuple(tree.map_leaves(lambda w: w + moved * draw(f"moved {next(names)}", *w.shape), each) for each in fresh)


def told(params: tuple[Any, ...], x: Any, first: int = 0) -> Context:
    """What blocks are told for x: causality if they may have it, and the numbers of its tokens where they read them.

    Of the tokens `first` are before x.
    """
    causal = params[0].config.oracle.may_be_causal
    if "tokens" not in params[0].config.context_fields:
        return Context(causal=causal)
    b, n = x.shape[:2]
    tokens = philox.integers((b, 12), 0, VOCABULARY, seed=11, purpose="tokens")[:, first : first + n]
    return Context(causal=causal, tokens=backend(x).from_numpy(tokens))


def run(params: tuple[Any, ...], x: Any, context: Context | None = None) -> tuple[Any, list[Any]]:
    """The state after all layers, and what each saved."""
    context = told(params, x) if context is None else context
    state, saves = BLOCK.start(params[0], x, context), []
    for each in params:
        state, saved = BLOCK.forward(each, state, context)
        saves.append(saved)
    return state, saves


def back(params: tuple[Any, ...], state: Any, saves: list[Any], d_x: Any) -> dict[str, Any]:
    """The gradients of x and of all parameters by name."""
    d_state, _ = BLOCK.read_backward(params[-1], state, d_x)
    found: list[Any] = []
    for each, saved in zip(reversed(params), reversed(saves), strict=True):
        d_state, d_params, _ = BLOCK.backward(each, saved, d_state)
        found.insert(0, d_params)
    return {"x": BLOCK.start_backward(params[0], d_state)[0], **tree.flatten({"params": found})}


def by_autograd(params: tuple[Any, ...], x: Any, d_x: Any, context: Context) -> dict[str, Any]:
    """The same by the autograd of torch."""
    torch = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    whole = {"x": x, "params": params}
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in tree.flatten(whole).items()}
    placed = tree.unflatten(whole, leaves)
    if context.tokens is not None:
        context = replace(context, tokens=torch.tensor(context.tokens))
    loss = (run(placed["params"], placed["x"], context)[0].x * torch.tensor(d_x)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {name: value.numpy() for name, value in zip(leaves, found, strict=True)}


def check_gradients(params: tuple[Any, ...]) -> None:
    """Compare all gradients with those of autograd, and see that none is 0."""
    x, d_x = draw("x", 2, 5, 6), draw("d_x", 2, 5, 6)
    context = told(params, x)
    state, saves = run(params, x, context)
    found = back(params, state, saves, d_x)
    assert list(found) == list(tree.flatten({"x": x, "params": params}))
    largest = max(float(np.max(np.abs(value))) for value in found.values())
    assert [name for name, value in found.items() if not np.max(np.abs(value)) > 1e-13 * largest] == []
    if not params[0].config.detach:  # then they are no gradients of the loss
        error, leaf = gradients.largest_error(found, by_autograd(params, x, d_x, context))
        assert error < gradients.TOLERANCES["autograd"], leaf


def second_layer(params: tuple[Any, ...], x: Any, causal: bool = True) -> tuple[Any, Any, Any]:
    """The state that a second layer gets, the one that it gives, and what it saves."""
    context = Context(causal=causal)
    state, _ = BLOCK.forward(params[0], BLOCK.start(params[0], x, context), context)
    return state, *BLOCK.forward(params[1], state, context)


def decoded(params: tuple[Any, ...], x: Any, cuts: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """The tokens after all layers, in the pieces between the cuts, and the caches."""
    assert RECORD.stream is not None
    caches, found = [RECORD.stream.start(each, x.shape[0]) for each in params], []
    for first, stop in itertools.pairwise((0, *cuts, x.shape[1])):
        context = told(params, x[:, first:stop], first=first)
        state = BLOCK.start(params[0], x[:, first:stop], context)
        for n, each in enumerate(params):
            advance = RECORD.stream.step if stop - first == 1 else RECORD.stream.prefill
            state, caches[n] = advance(each, caches[n], state, context)
        found.append(state.x)
    return found, caches


def published(q: Any, k: Any, v: Any, kinetic: Any, *, causal: bool, eps: float = 0.0) -> Any:
    """The prefix oracle as its authors write it: e^s as it stands, and eps added to z^2."""
    heads = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, heads, axis=1), np.repeat(v, heads, axis=1)
    growth = np.exp(q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[3]))
    n = np.full((q.shape[2], 1), float(q.shape[2]))
    if causal:
        growth, n = np.tril(growth), np.arange(1.0, q.shape[2] + 1.0)[:, None]
    z = np.sum(growth, axis=-1, keepdims=True) / n
    s = kinetic / (z * z + eps)
    return (growth * (s + np.swapaxes(s, -1, -2) + 2.0)) @ v / (2.0 * n), z
