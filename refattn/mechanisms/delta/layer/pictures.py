"""What a page that steps through a linear recurrence draws on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Picture
from refattn.xp import Array, namespace


def state(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the state of head 0 after the last token."""
    return values[[name for name in values if name.startswith("DELTA.4")][-1]][0, 0, ...]


def outputs(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the elements of the output of head 0, token by token."""
    tokens = [values[name] for name in values if name.startswith("DELTA.5")]
    return namespace(tokens[0]).stack([x[0, 0, 0, ...] for x in tokens], axis=-1)


PICTURES = (
    Picture("matrix", "The state S of head 0 after the last token: keys are rows, values columns.", state),
    Picture("lines", "What head 0 reads of it, element by element, token by token.", outputs),
)
