"""Softmax attention: the baseline."""

from __future__ import annotations

from refattn.mechanisms.block import Block, Stream
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.softmax import block as _block
from refattn.mechanisms.softmax import core as _core
from refattn.mechanisms.softmax import dense as _dense
from refattn.mechanisms.softmax import loops as _loops
from refattn.mechanisms.softmax import stream as _stream
from refattn.mechanisms.softmax.cases import CASES as _CASES
from refattn.mechanisms.softmax.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.softmax.core import Saved, backward, forward
from refattn.mechanisms.softmax.magnitudes import MAGNITUDES as _MAGNITUDES
from refattn.mechanisms.softmax.magnitudes import STORED as _STORED
from refattn.mechanisms.softmax.wrong_gradients import WRONG_GRADIENTS as _WRONG_GRADIENTS

__all__ = ["Saved", "backward", "forward", "record"]

_TITLE = "Softmax attention"
_READS = ("mask", "key_mask", "causal", "memory", "memory_mask")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="softmax",
    title=_TITLE,
    source="Vaswani et al. 2017, Attention is all you need (arXiv:1706.03762), equation 1",
    tagged=(_dense, _block),
    loops=_loops,
    forms=tuple(_core.FORMS),
    defaults={"mask": None, "causal": False, "scale": None, "softcap": None, "form": "auto"},
    reads=_READS,
    core=_core,
    block=_BLOCK,
    cases=_CASES,
    laws=(
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
    ),
    magnitudes=_MAGNITUDES,
    stored=_STORED,
    conventions=_CONVENTIONS,
    wrong_gradients=_WRONG_GRADIENTS,
    outputs=("lse",),
    differentiable=("scale", "softcap"),
    stream=Stream(_stream, _BLOCK),
)
