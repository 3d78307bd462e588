"""Whether a block of these options can be trained: a few tokens go through a small model and back."""

from __future__ import annotations

import dataclasses
import warnings

from refattn import model, philox
from refattn.mechanisms.record import Unsupported
from refattn.train.step import loss_and_gradients

_FIT: dict[str, None] = {}
"""The last models whose blocks were seen to fit."""


def check_block(config: model.Config) -> None:
    """Raise ValueError that begins with ``block``, and where it is one of them an option, where no model can have it.

    A model is causal, and gives its blocks no memory. Layers but two are left out, and what
    depends on numbers, such as steps that do not converge, is not asked.
    """
    small = dataclasses.replace(
        config, layers=min(config.layers, 2), loops=min(config.loops, 2), context=min(config.context, 4), mlp=False
    )
    if (known := repr(small)) in _FIT:
        return
    tokens = philox.integers((1, small.context), 0, small.vocabulary, seed=0, purpose="probe")
    params = model.init(small, like=philox.normal((1,), seed=0, purpose="probe").astype("float32"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_and_gradients(params, tokens, tokens)
    except ArithmeticError:
        return
    except (TypeError, ValueError, Unsupported) as error:
        raise ValueError(f"block{_place(config, str(error))}") from error
    if len(_FIT) == 64:
        del _FIT[next(iter(_FIT))]
    _FIT[known] = None


def _place(config: model.Config, message: str) -> str:
    """Return the message behind the option that it is about: it names that, or a number of it."""
    name = message.partition(":")[0]
    if name in {field.name for field in dataclasses.fields(config.record.block.Config)}:
        return f".{message}"
    option = next((option for option, value in config.options.items() if f"{name}=" in str(value)), None)
    return f": {message}" if option is None else f".{option}: got {config.options[option]!r}; {message}"
