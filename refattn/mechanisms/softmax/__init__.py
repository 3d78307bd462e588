"""Softmax attention, the baseline: a mean of values, weighted by the exponentials of how well their keys match.

What to read, in this order:

- `definition`: the paper alone, SM.1 to SM.5 and their adjoints.
- `dense`: the same with all options, whose equations have names; every score at once.
- `core`: the public map of q, k and v: its options; `options`: their checks, and what an implementation is given.
- `layer.block`: projections around the core, from SM.queries to SM.output: the mechanism as a layer.
- `implementations.tiled`: the same numbers in memory linear in the lengths; `implementations.bound`: where it needs no
  running maximum.
- `testing`: a second derivation in scalar loops, designed calls, sizes of rounding errors, and wrong readings.
"""

from __future__ import annotations

from refattn.mechanisms.block import Block
from refattn.mechanisms.cache import KeyValueStream
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.softmax import core as _core
from refattn.mechanisms.softmax import definition as _definition
from refattn.mechanisms.softmax import dense as _dense
from refattn.mechanisms.softmax.core import Saved, backward, forward
from refattn.mechanisms.softmax.layer import block as _block

__all__ = ["Saved", "backward", "forward", "record"]

_TITLE = "Softmax attention"
_READS = ("mask", "key_mask", "causal", "memory", "memory_mask")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="softmax",
    title=_TITLE,
    definition=_definition,
    source="Vaswani et al. 2017, Attention is all you need (arXiv:1706.03762), equation 1",
    equation_modules=(_dense, _block),
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    properties=(
        "permutation",
        "query_permutation",
        "linear_in_v",
        "constant_value",
        "key_shift",
        "split_and_merge",
        "padding",
        "empty",
        "causal",
        "truncation",
        "causal_mask",
        "independent",
        "workers",
        "repeatable",
        "band",
        "far",
        "bias_shift",
        "sink_key",
        "sinks",
        "lengths",
        "dropout_in_two",
    ),
    outputs={"lse": "SM.lse", "max": "SM.largest"},
    fallback_equation={"SM.kept": "SM.4", "SM.2": "SM.biased", "SM.biased": "SM.capped", "SM.capped": "SM.1"},
    accumulates_before_rounding={"SM.3": ("SM.kept", "SM.4")},
    differentiable=("scale", "softcap"),
    configs=({"window": (1, None), "sink": True},),
    stream=KeyValueStream(_BLOCK),
)
