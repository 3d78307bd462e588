"""SympFormer: attention as a step of damped particles with momentum, strictly causal.

Tokens are particles with momenta; attention is the force between them, and a layer is one step of an integrator.

What to read, in this order:

1. `definition.py`, the paper alone: a layer, forward and backward;
2. `dense.py`, its force with all options (`core.py` is the public call of it, `tiled.py` the same in linear memory);
3. `forces/softmax.py`, what a block makes of it with its matrices: the force and the velocity of tokens;
4. `integrators/one_call.py`, the step for any force: kick, damp, drift;
5. `block.py`, a layer: the attention step, a norm of the momentum, the MLP step (`mlp.py`).

`forces/` has a file for each other force, and `integrators/` for each other family of steps, among them the blocks that
SympFormer is compared with. `config.py` has the options of a block, `presets.py` the authors' variants by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.sympformer import block as _block
from refattn.mechanisms.sympformer import core as _core
from refattn.mechanisms.sympformer import definition as _definition
from refattn.mechanisms.sympformer import dense as _dense
from refattn.mechanisms.sympformer import mlp as _mlp
from refattn.mechanisms.sympformer import stream as _stream
from refattn.mechanisms.sympformer.config import FORBIDDEN as _FORBIDDEN
from refattn.mechanisms.sympformer.config import FORCES as _FORCES
from refattn.mechanisms.sympformer.config import INTEGRATORS as _INTEGRATORS
from refattn.mechanisms.sympformer.config import learned as _learned
from refattn.mechanisms.sympformer.config import module_of as _module_of
from refattn.mechanisms.sympformer.core import Saved, backward, forward
from refattn.mechanisms.sympformer.integrators import damping as _damping
from refattn.mechanisms.sympformer.presets import PRESETS as _PRESETS
from refattn.mechanisms.sympformer.presets import WHOSE as _WHOSE

__all__ = ["Saved", "backward", "forward", "record"]

_TITLE = "SympFormer"
_READS = ("causal", "tokens")
_BLOCK = Block(_block, _TITLE, _READS)

_SMALL = {"width": 3, "heads": 1, "mlp": "attention_velocity(ratio=1)", "layers": 2}
_MOVING: Mapping[str, Any] = {**_SMALL, "start": "linear"}
_MIDDLE: Mapping[str, Any] = {"layer": 1, "layers": 3}
_CONFIGS: tuple[Mapping[str, Any], ...] = (
    {**_SMALL, "integrator": "exponential_presymplectic", "mlp": "velocity(ratio=1)"},
    {**_MOVING, "integrator": "half_damped", "mlp": "momentum(ratio=1)", "look_ahead": True},
    {**_MOVING, "integrator": "forward_euler", "mlp": "none", "layers": 1},
    {**_MOVING, "integrator": "exponential_euler", "mlp": "momentum(ratio=1)"},
    {**_MOVING, "integrator": "explicit_euler", "mlp": "momentum(ratio=1)", "damping": "log", "normalise": "none"},
    {**_MOVING, "integrator": "plain_euler", "mlp": "momentum(ratio=1)", "oracle": "softmax(mobility='identity')"},
    {**_SMALL, "integrator": "ab2", "mlp": "velocity(ratio=1)", **_MIDDLE},
    {**_SMALL, "integrator": "etd_ab2", "mlp": "momentum(ratio=1)", "damping": "linear", **_MIDDLE},
    {
        **_SMALL,
        "integrator": "exponential_midpoint",
        "mlp": "none",
        "oracle": "reduced",
        "normalise": "none",
        **_MIDDLE,
    },
    {**_SMALL, "integrator": "classical", "mlp": "plain(ratio=1)"},
    {**_SMALL, "integrator": "classical", "mlp": "none", "oracle": "linear"},
    {**_SMALL, "integrator": "lie_trotter(connection='r2')", "mlp": "none", "oracle": "signed(ridge=0.5)"},
    {**_MOVING, "integrator": "lie_trotter", "mlp": "momentum(ratio=1)", "look_ahead": True},
    {**_MOVING, "integrator": "lie_trotter(connection='h1')", "mlp": "momentum(ratio=1)"},
    {**_SMALL, "integrator": "lie_trotter(connection='r2', strength=0.7)", "mlp": "none"},
    {**_SMALL, "integrator": "forward_euler", "mlp": "none", "start": "table", "vocabulary": 3, "context": 4},
    {**_MOVING, "oracle": "hamiltonian", "mlp": "none", "look_ahead": True},
    {**_MOVING, "oracle": "linear", "mlp": "none", "look_ahead": True},
    {**_MOVING, "integrator": "presymplectic", "normalise": "each_substep", "mlp": "none"},
    {**_MOVING, "integrator": "strang(angle=1.0)", "look_ahead": True, "mlp": "momentum(ratio=1)"},
)
"""Every integrator, and with them every other choice; those of several steps go on in the tests of the block."""

_AROUND = (*dict.fromkeys(map(_module_of, (*_INTEGRATORS.values(), *_FORCES.values()))), _damping, _mlp)

record = Mechanism(
    name="sympformer",
    title=_TITLE,
    definition=_definition,
    source="V. Stein, W. Li, G. Steidl 2026, SympFormer (arXiv:2603.16535)",
    equation_modules=(_dense, *_AROUND, _block),
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    properties=("token_permutation", "linear_in_v", "causal", "truncation", "independent", "workers", "repeatable"),
    stored=dict.fromkeys(("SYMP.11", "dSYMP.10", "dSYMP.5")),
    outputs={"log_z": "SYMP.7"},
    block_modules=_AROUND,
    one_sequence=True,
    # Later tokens that are larger have a z beyond float32, and 0 times infinity reaches the tokens before them.
    perturbation=3.0,
    configs=_CONFIGS,
    forbidden=_FORBIDDEN,
    provides=("norm", "mlp"),
    stream=ModuleStream(_stream, _BLOCK),
    presets=_PRESETS,
    whose=_WHOSE,
    learned=_learned,
)
