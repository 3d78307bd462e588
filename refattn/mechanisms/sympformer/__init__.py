"""SympFormer: attention as a step of damped particles with momentum, strictly causal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.readings import of_group_gradients as _of_group_gradients
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.sympformer import baseline as _baseline
from refattn.mechanisms.sympformer import block as _block
from refattn.mechanisms.sympformer import connection as _connection
from refattn.mechanisms.sympformer import core as _core
from refattn.mechanisms.sympformer import dense as _dense
from refattn.mechanisms.sympformer import doubled as _doubled
from refattn.mechanisms.sympformer import hamiltonian as _hamiltonian
from refattn.mechanisms.sympformer import linear as _linear
from refattn.mechanisms.sympformer import loops as _loops
from refattn.mechanisms.sympformer import oracle as _oracle
from refattn.mechanisms.sympformer import rotation as _rotation
from refattn.mechanisms.sympformer import step as _step
from refattn.mechanisms.sympformer import stream as _stream
from refattn.mechanisms.sympformer import substep as _substep
from refattn.mechanisms.sympformer import tables as _tables
from refattn.mechanisms.sympformer.cases import CASES as _CASES
from refattn.mechanisms.sympformer.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.sympformer.core import Saved, backward, forward
from refattn.mechanisms.sympformer.magnitudes import MAGNITUDES as _MAGNITUDES
from refattn.mechanisms.sympformer.magnitudes import STORED as _STORED

__all__ = ["Saved", "backward", "forward", "record"]

_TITLE = "SympFormer"
_READS = ("causal", "tokens")
_BLOCK = Block(_block, _TITLE, _READS)

_SMALL = {"width": 3, "heads": 1, "mlp_ratio": 1, "layers": 2}
_MOVING: Mapping[str, Any] = {**_SMALL, "start": "linear"}
_CONFIGS: tuple[Mapping[str, Any], ...] = (
    {**_SMALL, "integrator": "exponential_presymplectic", "mlp": "velocity"},
    {**_MOVING, "integrator": "half_damped", "mlp": "momentum", "look_ahead": True},
    {**_MOVING, "integrator": "forward_euler", "mlp": "none", "layers": 1},
    {**_MOVING, "integrator": "exponential_euler", "mlp": "momentum"},
    {**_MOVING, "integrator": "explicit_euler", "mlp": "momentum", "damping": "log", "normalise": "none"},
    {**_MOVING, "integrator": "plain_euler", "mlp": "momentum", "mobility": "identity"},
    {**_SMALL, "integrator": "ab2", "mlp": "velocity", "layer": 1, "layers": 3},
    {**_SMALL, "integrator": "etd_ab2", "mlp": "momentum", "layer": 1, "layers": 3, "damping": "linear"},
    {**_SMALL, "integrator": "classical", "mlp": "plain"},
    {**_MOVING, "integrator": "lie_trotter", "mlp": "momentum", "look_ahead": True},
    {**_MOVING, "integrator": "lie_trotter", "mlp": "momentum", "connection": "h1"},
    {**_SMALL, "integrator": "lie_trotter", "mlp": "none", "connection": "r2"},
    {**_SMALL, "integrator": "forward_euler", "mlp": "none", "start": "table", "vocabulary": 3, "context": 4},
    {**_MOVING, "force": "hamiltonian", "mlp": "none", "look_ahead": True},
    {**_MOVING, "attention": "linear", "mlp": "none", "look_ahead": True},
    {**_MOVING, "integrator": "presymplectic", "normalise": "each_substep", "mlp": "none"},
    {**_MOVING, "integrator": "strang", "rotation": "learned", "look_ahead": True, "mlp": "momentum"},
)
"""Every integrator, and with them every other choice; those of several steps go on in the tests of the block."""

_AROUND = (_oracle, _hamiltonian, _linear, _step, _doubled, _rotation, _baseline, _connection, _substep, _tables)

record = Mechanism(
    name="sympformer",
    title=_TITLE,
    source="V. Stein, W. Li, G. Steidl 2026, SympFormer (arXiv:2603.16535)",
    tagged=(
        _dense,
        _oracle,
        _hamiltonian,
        _linear,
        _step,
        _doubled,
        _rotation,
        _baseline,
        _connection,
        _substep,
        _tables,
        _block,
    ),
    loops=_loops,
    forms=tuple(_core.FORMS),
    defaults={"kinetic": None, "causal": False, "scale": None, "form": "auto"},
    reads=_READS,
    core=_core,
    block=_BLOCK,
    cases=_CASES,
    laws=("token_permutation", "linear_in_v", "causal", "truncation", "independent", "workers", "repeatable"),
    magnitudes=_MAGNITUDES,
    stored=_STORED,
    conventions=_CONVENTIONS,
    wrong_gradients=_of_group_gradients(_core),
    outputs=("log_z",),
    around=_AROUND,
    one_sequence=True,
    configs=_CONFIGS,
    brings=("norm", "mlp"),
    stream=ModuleStream(_stream, _BLOCK),
)
