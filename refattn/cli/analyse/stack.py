"""The stack of layers that a study looks at: a fresh model, or one that `refattn train` has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn import tree
from refattn.cli.arguments import Problem, record_of
from refattn.files import reason

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism

Map = Callable[[Any], Any]

TEXT = b'''
def mean(values):
    """Return the arithmetic mean of the values."""
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    if count == 0:
        raise ValueError("the mean of no values is not defined")
    return total / count
'''
"""What a model reads, over and over where it reads more: bytes such as those that it was trained on by default."""


@dataclass(frozen=True)
class Stack:
    """Layers as maps of states, the state before the first of them, and what they are."""

    maps: list[Map]
    state: Any
    title: str


def stacks(
    mechanism: str, run: str | None, layers: int, tokens: int, width: int, heads: int, seed: int
) -> dict[str, Stack]:
    """Return a fresh model, or with a run the trained one first and then the same as it was before."""
    from refattn import model

    record = record_of(mechanism)
    try:
        if run is None:
            config = model.Config(record, context=tokens, width=width, heads=heads, layers=layers)
            params = model.init(config, seed=seed, like=np.zeros(1))
            title = f"{record.title}: {layers} fresh layers, {tokens} tokens of width {width}"
            return {"fresh": _stack(params, tokens, title)}
        settings, params, step = trained(record, run)
        tokens = min(tokens, params.position_embedding.shape[0])
        title = f"{record.title}: {len(params.passes)} layers after {step} steps of training, {tokens} tokens"
        before = model.init(settings.model, seed=settings.seed, like=np.zeros(1))
    except ValueError as error:
        raise Problem(str(error)) from error
    return {"trained": _stack(params, tokens, title), "fresh": _stack(before, tokens, title)}


def _stack(params: Any, tokens: int, title: str) -> Stack:
    from refattn.model import network
    from refattn.ops import embedding

    record = params.config.record
    vocabulary = params.token_embedding.shape[0]
    given = np.resize(np.frombuffer(TEXT.strip(), np.uint8), (1, tokens)).astype(np.int64) % vocabulary
    x = embedding.embedding_forward(params.token_embedding, given) + params.position_embedding[:tokens]
    state = record.block.start(params.passes[0].block, x, network.context_of(params, given, 0))

    def map_of(index: int) -> Map:
        def advance(state: Any) -> Any:
            def placed(arrays: Any) -> Any:  # beside arrays that measure constants are such arrays, too
                return arrays if isinstance(state.x, np.ndarray) else tree.map_leaves(state.x.instrument.array, arrays)

            def step(_: int, layer: Any, own: Any) -> tuple[Any, Any]:
                context = network.context_of(params, given, index)
                return record.block.forward(layer.block, own, placed(context))

            return network.advance(params, placed(params.passes[index]), state, index, step)[0]

        return advance

    return Stack([map_of(index) for index in range(len(params.passes))], state, title)


def trained(mechanism: Mechanism, run: str) -> tuple[Any, Any, int]:
    """Return the settings of a run, the parameters of its newest checkpoint, and that one's step."""
    from refattn import model
    from refattn.train import checkpoint, folder
    from refattn.train.settings import from_json

    path, needs = Path(run), "needs the folder of a run of refattn train with a checkpoint"
    try:
        stored = folder.stored_config(path, {"mechanism": mechanism})
        found = checkpoint.newest(path / "checkpoints", lambda _: None)
    except (OSError, folder.RunError) as error:
        raise Problem(f"--run: got {run!r}, {needs}: {reason(error, named=True)}") from error
    if stored is None or found is None:
        raise Problem(f"--run: got {run!r}, {needs}")
    settings = from_json(stored["settings"], {"mechanism": mechanism})
    if (other := settings.model.record.name) != mechanism.name:
        raise Problem(f"--run: got {run!r}, a run of {other}, needs one of {mechanism.name}")
    template = model.init(settings.model, seed=0, like=np.zeros(1))
    own = {n.removeprefix("params."): x.astype(np.float64) for n, x in found.arrays.items() if n.startswith("params.")}
    return settings, tree.unflatten(template, own), found.step


def flow_of_run(run: str, layer: int, head: int, text: str) -> Any:
    """Return the flow on a graph of one head of a block that was trained, on a text."""
    from refattn import model
    from refattn.analysis.graph_flow import MECHANISM, flow_of_call

    _, params, _ = trained(record_of(MECHANISM), run)
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)[None]
    if not 1 < tokens.shape[1] <= params.position_embedding.shape[0]:
        raise Problem(f"--text: got {tokens.shape[1]} bytes, needs 2 to {params.position_embedding.shape[0]}")
    if layer >= len(params.passes):
        raise Problem(f"--layer: got {layer}, needs one below {len(params.passes)}")
    try:
        return flow_of_call(model.forward(params, tokens)[1].layers[layer].block.core, head=head)
    except ValueError as error:
        raise Problem(str(error)) from error
