"""Linear recurrences with a matrix state: linear, gated, delta, gated delta, KDA and momentum delta, as one.

What to read, in this order:

- `definition`: the gated delta rule alone, DELTA.1 to DELTA.5 and their adjoints, token by token.
- `dense`: the same for all rules and options, whose equations have names.
- `core`: the public map of q, k and v and the gates; `options`: how arguments are checked.
- `implementations.chunked`: the same in chunks of tokens, one triangular system each; `implementations.weights`,
  `implementations.segments` and
  `implementations.halves` have what a chunk reads and writes with, and how decays are summed.
- `layer.block`: projections, convolutions and gates around the core: the mechanism as a layer; `layer.config`, its
  choices and parameters; `layer.stream`, decoding token by token.
- `testing`: a second derivation in scalar loops, designed calls, sizes of rounding errors, wrong readings, and
  questions that tell these apart.
"""

from __future__ import annotations

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.delta import core as _core
from refattn.mechanisms.delta import definition as _definition
from refattn.mechanisms.delta import dense as _dense
from refattn.mechanisms.delta.core import Saved, backward, forward
from refattn.mechanisms.delta.implementations import chunked as _chunked
from refattn.mechanisms.delta.implementations import segments as _segments
from refattn.mechanisms.delta.implementations import weights as _weights
from refattn.mechanisms.delta.layer import block as _block
from refattn.mechanisms.delta.layer import stream as _stream
from refattn.mechanisms.record import Input as _Input
from refattn.mechanisms.record import Mechanism

__all__ = ["Saved", "backward", "forward", "record"]

_TITLE = "Linear recurrences with a matrix state"
_READS = ("key_mask", "causal")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="delta",
    title=_TITLE,
    definition=_definition,
    source="Yang, Kautz, Hatamizadeh 2024, Gated delta networks (arXiv:2412.06464), with its relatives",
    equation_modules=(_dense, _segments, _weights, _chunked, _block),
    block_modules=(_segments, _weights, _chunked),
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    properties=("linear_in_v", "sequence_padding", "causal", "truncation", "independent", "workers", "repeatable"),
    outputs={"state": "X"},
    differentiable=("scale",),
    one_sequence=True,
    configs=(
        {"rule": "linear", "activation": "none", "out_norm": False},
        {"rule": "gated", "decay": "channel", "gate": "silu"},
        {"rule": "delta", "conv": 3, "bias": True, "beta_max": 2.0, "qk_norm": False},
        {"rule": "gated_delta", "decay": "channel", "decay_map": "bounded", "conv": 2, "gate": "sigmoid"},
        {"rule": "momentum", "kv_heads": 1, "gate": "silu"},
    ),
    # Keys of length 1, several chunks, and gates, without which there is nothing to be wrong about.
    sampled={
        "beta": _Input((), "uniform", {"low": 0.1, "high": 0.9}, "bgn"),
        "log_decay": _Input((), "uniform", {"low": -0.5, "high": 0.0}, "bgn"),
        "qk_norm": True,
        "chunk": 5,
    },
    # Later keys that are larger overflow in a chunk, and 0 times infinity reaches the tokens before them.
    perturbation=8.0,
    tokenless=("state",),
    tiled=False,
    stream=ModuleStream(_stream, _BLOCK),
)
