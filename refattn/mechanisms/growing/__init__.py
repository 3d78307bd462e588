"""Attention whose queries and keys grow wider where the gradient needs it.

The core is softmax attention with a scale that is stored: its definition and implementations are those of `softmax`.
What to read, in this order:

- `definition`: growth itself, GROW.1 to GROW.19, from the gradient of the scores to wider weights; `example`: a small
  step of it.
- `dense`: what growth reads of attention: the functional gradient, and its contraction with tokens.
- `layer.block`: projections around the core, from GROW.augmented on, with weights that have an axis of heads.
- `growth`: a growth step with all its options. `statistics` of a batch; the `metric` of the scores, and the direction
  that descends in it; the `bottleneck`, which says what new columns are worth; kernels of low rank (`truncate`), or
  `columns` beside the old ones; the `path` from an amplitude to weights, and the `search` for the amplitude; all of it
  together (`step`), by its `options`; heads that get unequal numbers of columns (`uneven`).
- `core`: the public functions; `implementations.tiled`: the contraction in memory linear in the lengths.
- `loops`: block and growth a second time; `testing`: designed calls, wrong readings, and what compares the loops with
  a trace (`block_derived_twice`). All else of the core is tested as softmax attention is.
"""

from __future__ import annotations

from refattn.mechanisms.block import Block
from refattn.mechanisms.cache import KeyValueStream
from refattn.mechanisms.growing import core as _core
from refattn.mechanisms.growing import definition as _definition
from refattn.mechanisms.growing.core import Saved, backward, contract, forward, functional_gradient
from refattn.mechanisms.growing.growth import step as _step
from refattn.mechanisms.growing.layer import block as _block
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.softmax import record as _softmax

__all__ = ["Saved", "backward", "contract", "forward", "functional_gradient", "record"]

_TITLE = "Growing attention"
_READS = ("mask", "key_mask", "causal")
_BLOCK = Block(_block, _TITLE, _READS)

_WHEN = "ours, the report does not say when"

_FROM_SOFTMAX = (
    "loops",
    "implementations",
    "defaults",
    "properties",
    "outputs",
    "fallback_equation",
    "accumulates_before_rounding",
    "differentiable",
)

record = Mechanism(
    **{field: getattr(_softmax, field) for field in _FROM_SOFTMAX},
    name="growing",
    title=_TITLE,
    definition=_definition,
    source="L. Burgund, Attention Growing Networks (internship report, LISN), section 1",
    equation_modules=(_softmax.equation_modules[0], _block),
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    stream=KeyValueStream(_BLOCK),
    grow=_step,
    # When it grows the report does not say. Its columns have nothing to do with the old ones, whose moments end.
    presets={
        "burgund2025": {"block": {}, "grow": [200, 400], "growth": {"method": "report", "moments": "reset"}},
        "corrected": {"block": {}, "grow": [200, 400]},
    },
    whose={
        "burgund2025": {
            "grow": _WHEN,
            "growth.method": "printed, section 1",
            "growth.moments": "ours, the report has none: its new columns have nothing to do with the old ones",
        },
        "corrected": {"grow": _WHEN},
    },
)
