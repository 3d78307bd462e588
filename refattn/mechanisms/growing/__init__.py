"""Attention whose queries and keys grow wider where the gradient needs it.

The core is softmax attention, and its definition is that of the room of softmax attention, which is read first. Then:

`dense`   what growth reads of it: the functional gradient, and its contraction with tokens
`core`    the public functions: those of softmax attention, and these two
`layer`   the block, whose weights have an axis of heads and whose scale is stored; the same token by token
`growth`  a growth step: `statistics` of a batch, the `metric` of the scores, the `bottleneck` that says what new
          columns are worth, kernels of low rank (`truncate`) or `columns` beside the old ones, the `path` from an
          amplitude to weights and the `search` for it; `step` puts them together, `options` are its choices, and heads
          that get unequal numbers of columns are `uneven`
`forms`   the contraction in tiles
`judge`   designed calls and wrong readings; in all else the core is judged as softmax attention is
"""

from __future__ import annotations

from dataclasses import replace as _replace

from refattn.mechanisms.block import Block, Stream
from refattn.mechanisms.growing import core as _core
from refattn.mechanisms.growing.core import Saved, backward, contract, forward, functional_gradient
from refattn.mechanisms.growing.growth import step as _step
from refattn.mechanisms.growing.judge.cases import CASES as _CASES
from refattn.mechanisms.growing.judge.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.growing.layer import block as _block
from refattn.mechanisms.growing.layer import stream as _stream
from refattn.mechanisms.softmax import dense as _softmax
from refattn.mechanisms.softmax import record as _record_of_softmax

__all__ = ["Saved", "backward", "contract", "forward", "functional_gradient", "record"]

_TITLE = "Growing attention"
_READS = ("mask", "key_mask", "causal")
_BLOCK = Block(_block, _TITLE, _READS)

record = _replace(
    _record_of_softmax,
    name="growing",
    title=_TITLE,
    source="L. Burgund, Attention Growing Networks (internship report, LISN), section 1",
    tagged=(_softmax, _block),
    reads=_READS,
    core=_core,
    block=_BLOCK,
    cases=_CASES,
    conventions=_CONVENTIONS,
    stream=Stream(_stream, _BLOCK),
    grow=_step,
)
