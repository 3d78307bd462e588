"""Text from a model, byte by byte. Host side: the choice of the next byte, from random numbers of the counter."""

from __future__ import annotations

import numpy as np

from refattn import philox
from refattn.args import Real, Whole, checked
from refattn.model import Params, decode
from refattn.train.step import to_tokens
from refattn.xp import backend


@checked(params=Params, prompt=bytes, length=Whole(), temperature=Real(0.0))
def generate(params: Params, prompt: bytes, length: int, *, seed: int = 0, temperature: float = 0.8) -> bytes:
    """Return `length` bytes that the model continues a prompt with.

    Parameters
    ----------
    params
        Of a model with a vocabulary of 256.
    prompt
        At least one byte; where it is longer than the context, its end counts.
    length
        How many bytes.
    seed
        Of the random choices: of the bytes, and of what blocks with a law draw, once for the whole text.
    temperature
        Divides the logits: below 1 the likely becomes more likely; 0 takes the most likely byte.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong type or out of its range.

    Notes
    -----
    Where the context is full, the model goes on from the last half of it.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import model
    >>> from refattn.train.sample import generate
    >>> params = model.init(model.Config("softmax", context=8, width=4, heads=2, layers=1), like=np.ones(1))
    >>> made = generate(params, b"to be", 6, seed=1)
    >>> len(made), made == generate(params, b"to be", 6, seed=1)
    (6, True)
    """
    if not prompt:
        raise ValueError("prompt: got no byte, needs at least one")
    if (vocabulary := params.token_embedding.shape[0]) != 256:
        raise ValueError(f"params: got a vocabulary of {vocabulary}, needs 256: the bytes")
    context = params.position_embedding.shape[0]
    draws = philox.uniform((length,), seed=seed, purpose="sample")
    text = prompt[-context:]
    made = b""
    cache, new = decode.start(params, 1), text
    for draw in draws:
        if len(text) > context:
            text = text[-max(1, context // 2) :]
            cache, new = decode.start(params, 1), text
        tokens = to_tokens(params, np.frombuffer(new, dtype=np.uint8)[None, :].astype(np.int64))
        logits, cache = decode.extend(params, cache, tokens, chance=(seed, 0))
        new = bytes([_choose(backend(logits).to_numpy(logits)[0].astype(np.float64), float(draw), temperature)])
        made, text = made + new, text + new
    return made


def _choose(logits: np.ndarray, draw: float, temperature: float) -> int:
    """Return the byte whose part of the interval from 0 to 1 has `draw` in it."""
    if temperature == 0.0:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):  # of a temperature of nearly 0, to -inf
        weights = np.exp((logits - np.max(logits)) / temperature)
    return int(np.searchsorted(np.cumsum(weights), draw * np.sum(weights), side="right").clip(0, 255))
