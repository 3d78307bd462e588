"""Higher-order attention: a Taylor polynomial in place of the exponential, and thereby a state of constant size."""

from __future__ import annotations

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.higher_order import block as _block
from refattn.mechanisms.higher_order import core as _core
from refattn.mechanisms.higher_order import dense as _dense
from refattn.mechanisms.higher_order import loops as _loops
from refattn.mechanisms.higher_order import stream as _stream
from refattn.mechanisms.higher_order.cases import CASES as _CASES
from refattn.mechanisms.higher_order.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.higher_order.core import Saved, backward, empty_state, forward
from refattn.mechanisms.higher_order.forms import FORMS as _FORMS
from refattn.mechanisms.higher_order.magnitudes import MAGNITUDES as _MAGNITUDES
from refattn.mechanisms.higher_order.magnitudes import STORED as _STORED
from refattn.mechanisms.higher_order.state import State
from refattn.mechanisms.readings import of_group_gradients as _of_group_gradients
from refattn.mechanisms.record import Mechanism

__all__ = ["Saved", "State", "backward", "empty_state", "forward", "record"]

_TITLE = "Higher-order attention"
_READS = ("key_mask", "causal", "memory", "memory_mask")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="higher_order",
    title=_TITLE,
    source="J. Mercat 2020, Higher Order Linear Transformer (arXiv:2010.14816), equations 1 to 3",
    tagged=(_dense, _block),
    loops=_loops,
    forms=tuple(_FORMS),
    defaults={
        "order": 2,
        "alpha": 3.0,
        "delta": 0.0,
        "policy": "exact",
        "layer_norm": True,
        "eps": None,
        "norm_eps": 1e-5,
        "denominator": "matched",
        "key_mask": None,
        "causal": False,
        "state": None,
        "form": "auto",
    },
    reads=_READS,
    core=_core,
    block=_BLOCK,
    cases=_CASES,
    laws=(
        "permutation",
        "query_permutation",
        "linear_in_v",
        "constant_value",
        "padding",
        "causal",
        "truncation",
        "independent",
        "workers",
        "repeatable",
    ),
    magnitudes=_MAGNITUDES,
    stored=_STORED,
    conventions=_CONVENTIONS,
    wrong_gradients=_of_group_gradients(_core),
    stream=ModuleStream(_stream, _BLOCK),
)
