"""A small causal transformer of any mechanism's blocks, forward and backward by hand."""

from __future__ import annotations

from refattn import equations
from refattn.args import check, check_gradient, naming
from refattn.model import network
from refattn.model.network import Chance, Saved, Watch
from refattn.model.params import Config, Params, check_tokens, init
from refattn.xp import Array

__all__ = ["Config", "Params", "Saved", "backward", "forward", "init"]


@naming("params")
def forward(
    params: Params, tokens: Array, *, training: bool = False, chance: Chance | None = None
) -> tuple[Array, Saved]:
    """Logits of the token that follows each token.

    Parameters
    ----------
    params
        Of `init`.
    tokens
        (b, n) integers from 0 to vocabulary - 1, n at most the context.
    training
        What the blocks' context says.
    chance
        A seed and a step, by which blocks whose configuration has a law draw numbers; None: they take its means.

    Returns
    -------
    logits : Array
        (b, n, t): those at position i depend on the tokens up to i.
    saved : Saved
        What `backward` reads.

    Raises
    ------
    TypeError
        Where an argument is of a wrong type or dtype.
    ValueError
        Where there are no tokens or more than a context, or a token is outside of the vocabulary.

    Notes
    -----
    Equations LM.1 to LM.7, written out in `refattn.model.network`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import model
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> params = model.init(config, like=np.ones(1))
    >>> logits, saved = model.forward(params, np.asarray([[1, 4, 2]]))
    >>> logits.shape
    (1, 3, 5)
    """
    check_tokens(params, tokens)
    return equations.active(network).forward(params, tokens, training, chance)


@naming("params", "saved")
def backward(params: Params, saved: Saved, d_logits: Array, *, watch: Watch | None = None) -> Params:
    """Gradients of a loss with respect to all parameters, as a tree of their structure.

    Parameters
    ----------
    params, saved
        The parameters that `forward` was given, and what it returned.
    d_logits
        (b, n, t): gradient of the loss with respect to the logits.
    watch
        Is called for every pass through a layer, from the last, with what the backward of its block is given:
        ``watch(index, params, saved, d_state)``.

    Raises
    ------
    TypeError, ValueError
        Where the gradient is of a wrong type or shape.

    Notes
    -----
    Equations dLM.7 to dLM.2, dLM.position_embedding and dLM.token_embedding of `refattn.model.network`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import model
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> params = model.init(config, like=np.ones(1))
    >>> logits, saved = model.forward(params, np.asarray([[1, 4, 2]]))
    >>> gradients = model.backward(params, saved, np.ones_like(logits))
    >>> gradients.layers[0].block.w_q.shape
    (4, 4)
    """
    check("params", params, Params)
    check("saved", saved, Saved)
    check_gradient("d_logits", d_logits, (*saved.tokens.shape, params.token_embedding.shape[0]), params.token_embedding)
    return equations.active(network).backward(params, saved, d_logits, watch)
