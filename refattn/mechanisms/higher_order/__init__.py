"""Higher-order attention: a Taylor polynomial in place of the exponential, and thereby a state of constant size.

What to read: `definition`, the paper alone; `dense`, the same with all options; then `core`, the function that is
called, and `options`, what it may be asked for. After these, in any order:

- `implementations`: the same by other ways. `kernel` is why a weight is an inner product of features, `state` what sums
  of
  features make of it; then `linear`, `chunked` and `recurrent`; and `tiled`, which does without;
- `layer`: the block of a model, and decoding token by token;
- `testing`: a second derivation, designed calls, wrong readings, and the sizes of rounding errors.
"""

from __future__ import annotations

from functools import partial as _partial

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.higher_order import core as _core
from refattn.mechanisms.higher_order import definition as _definition
from refattn.mechanisms.higher_order import dense as _dense
from refattn.mechanisms.higher_order.core import Saved, backward, empty_state, forward
from refattn.mechanisms.higher_order.implementations.state import State
from refattn.mechanisms.higher_order.implementations.state import merge as merge_states
from refattn.mechanisms.higher_order.implementations.state import merge_backward as merge_states_backward
from refattn.mechanisms.higher_order.layer import block as _block
from refattn.mechanisms.higher_order.layer import stream as _stream
from refattn.mechanisms.higher_order.options import NORMALISERS as _NORMALISERS
from refattn.mechanisms.option_kinds import choose as _choose
from refattn.mechanisms.record import Mechanism

__all__ = ["Saved", "State", "backward", "empty_state", "forward", "merge_states", "merge_states_backward", "record"]

_TITLE = "Higher-order attention"
_READS = ("mask", "key_mask", "causal", "memory", "memory_mask")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="higher_order",
    title=_TITLE,
    definition=_definition,
    source="J. Mercat 2020, Higher Order Linear Transformer (arXiv:2010.14816), equations 1 to 3",
    equation_modules=(_dense, _block),
    differentiable=("alpha", "delta"),
    families={"normaliser": _partial(_choose, "normaliser", kinds=_NORMALISERS)},
    configs=({"train_alpha": True, "train_delta": True, "normaliser": "signed(eps=0.1)"},),
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    properties=(
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
    stream=ModuleStream(_stream, _BLOCK),
    # What his code does. Equations 1 and 2, as he prints them, are the default: they subtract nothing.
    presets={
        "mercat2020": {"block": {"order": 2, "alpha": 3.0, "normaliser": "signed(delta=1.0)", "layer_norm": True}}
    },
    whose={
        "mercat2020": {
            "block.order": "printed, abstract: a second-order approximation",
            "block.alpha": "code, branch linear-softmax at 76cc12f",
            "block.normaliser": "ours, signed with 1e-6 and causal; the code always subtracts 1 and ignores its eps",
            "block.layer_norm": "code, the layer normalisation of queries and keys has no affine map",
        }
    },
)
