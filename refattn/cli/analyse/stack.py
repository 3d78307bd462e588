"""The stack of layers that a study looks at: a fresh model, or one that `refattn train` has made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from refattn import counter, tree
from refattn.cli.arguments import Problem, record_of

Map = Callable[[Any], Any]


def stack(
    mechanism: str, run: str | None, layers: int, tokens: int, width: int, heads: int, seed: int
) -> tuple[list[Map], Any, str]:
    """Return the layers as maps of states, the state before the first of them, and a title."""
    from refattn import model
    from refattn.model import network
    from refattn.ops import embedding

    record = record_of(mechanism)
    try:
        if run is None:
            config = model.Config(mechanism, context=tokens, width=width, heads=heads, layers=layers)
            params = model.init(config, seed=seed, like=np.zeros(1))
            title = f"{record.title}: {layers} fresh layers, {tokens} tokens of width {width}"
        else:
            params, step = trained(mechanism, run)
            tokens = min(tokens, params.position_embedding.shape[0])
            title = f"{record.title}: {len(params.layers)} layers after {step} steps of training, {tokens} tokens"
    except ValueError as error:
        raise Problem(str(error)) from error
    vocabulary = params.token_embedding.shape[0]
    given = counter.integers((1, tokens), 0, vocabulary, seed=seed, purpose="analyse.tokens")
    x = embedding.embedding_forward(params.token_embedding, given) + params.position_embedding[:tokens]
    state = record.block.start(params.layers[0].block, x, network.context_of(params, given, 0))

    def map_of(index: int) -> Map:
        def advance(state: Any) -> Any:
            def placed(arrays: Any) -> Any:  # beside arrays that measure constants are such arrays, too
                return arrays if isinstance(state.x, np.ndarray) else tree.map_leaves(state.x.instrument.array, arrays)

            def step(_: int, layer: Any, own: Any) -> tuple[Any, Any]:
                context = network.context_of(params, given, index)
                return record.block.forward(layer.block, own, placed(context))

            return network.advance(params, placed(params.layers[index]), state, index, step)[0]

        return advance

    return [map_of(index) for index in range(len(params.layers))], state, title


def trained(mechanism: str, run: str) -> tuple[Any, int]:
    """Return the parameters of a model from the newest checkpoint of a run, and its step."""
    from refattn import model
    from refattn.train import checkpoint, folder
    from refattn.train.settings import from_json

    path = Path(run)
    try:
        stored = folder.stored_config(path, mechanism)
        found = checkpoint.newest(path / "checkpoints", lambda _: None)
    except OSError as error:
        raise Problem(f"--run: {error}") from error
    if stored is None or found is None:
        raise Problem(f"--run: got {run!r}, needs the folder of a run of refattn train with a checkpoint")
    settings = from_json(stored["settings"])
    template = model.init(settings.model, seed=0, like=np.zeros(1))
    own = {n.removeprefix("params."): x.astype(np.float64) for n, x in found.arrays.items() if n.startswith("params.")}
    return tree.unflatten(template, own), found.step
