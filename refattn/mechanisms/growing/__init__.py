"""Attention whose queries and keys grow wider where the gradient needs it."""

from __future__ import annotations

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.growing import block as _block
from refattn.mechanisms.growing import core as _core
from refattn.mechanisms.growing import dense as _dense
from refattn.mechanisms.growing import growth as _growth
from refattn.mechanisms.growing import loops as _loops
from refattn.mechanisms.growing import stream as _stream
from refattn.mechanisms.growing.cases import CASES as _CASES
from refattn.mechanisms.growing.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.growing.core import Saved, backward, contract, forward
from refattn.mechanisms.growing.magnitudes import MAGNITUDES as _MAGNITUDES
from refattn.mechanisms.growing.magnitudes import STORED as _STORED
from refattn.mechanisms.readings import of_group_gradients as _of_group_gradients
from refattn.mechanisms.record import Mechanism

__all__ = ["Saved", "backward", "contract", "forward", "record"]

_TITLE = "Growing attention"
_READS = ("mask", "key_mask", "causal")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="growing",
    title=_TITLE,
    source="L. Burgund, Attention Growing Networks (internship report, LISN), section 1",
    tagged=(_dense, _block),
    loops=_loops,
    forms=tuple(_core.FORMS),
    defaults={"mask": None, "causal": False, "scale": None, "form": "auto"},
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
    wrong_gradients=_of_group_gradients(_core),
    differentiable=("scale",),
    stream=ModuleStream(_stream, _BLOCK),
    grow=_growth,
)
