"""Graph energy attention: scores flow on the graph of the tokens, down the gradient of an energy."""

from __future__ import annotations

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.graph_energy import block as _block
from refattn.mechanisms.graph_energy import core as _core
from refattn.mechanisms.graph_energy import diagnostics as _diagnostics
from refattn.mechanisms.graph_energy import flow as _flow
from refattn.mechanisms.graph_energy import graph as _graph
from refattn.mechanisms.graph_energy import learned as _learned
from refattn.mechanisms.graph_energy import loops as _loops
from refattn.mechanisms.graph_energy import readout as _readout
from refattn.mechanisms.graph_energy import stream as _stream
from refattn.mechanisms.graph_energy.cases import CASES as _CASES
from refattn.mechanisms.graph_energy.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.graph_energy.core import Saved, backward, forward
from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.energies import energy, residual, steps_taken
from refattn.mechanisms.graph_energy.forms import FORMS as _FORMS
from refattn.mechanisms.graph_energy.magnitudes import MAGNITUDES as _MAGNITUDES
from refattn.mechanisms.graph_energy.magnitudes import STORED as _STORED
from refattn.mechanisms.graph_energy.options import USUAL as _USUAL
from refattn.mechanisms.graph_energy.sparse import CSR, nearest_graph, sparse_graph, window_graph
from refattn.mechanisms.readings import of_group_gradients as _of_group_gradients
from refattn.mechanisms.record import Mechanism

__all__ = [
    "CSR",
    "Coupling",
    "Saved",
    "backward",
    "energy",
    "forward",
    "nearest_graph",
    "record",
    "residual",
    "sparse_graph",
    "steps_taken",
    "window_graph",
]

_TITLE = "Graph energy attention"
_READS = ("mask", "key_mask", "causal", "memory", "memory_mask", "positions", "draws")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="graph_energy",
    title=_TITLE,
    source="F. Preetham 2023, Graph Dynamical Systems and Odd Analytic Coupling (Medium, 21 August 2023)",
    tagged=(_graph, _flow, _readout, _block, _learned),
    around=(_learned,),
    loops=_loops,
    forms=tuple(_FORMS),
    defaults={**_USUAL, "mask": None, "causal": False, "form": "auto"},
    reads=_READS,
    core=_core,
    block=_BLOCK,
    cases=_CASES,
    laws=(
        "token_permutation",
        "linear_in_v",
        "constant_value",
        "token_padding",
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
    differentiable=("mu", "kappa", "scale", "tau", "step"),
    one_sequence=True,
    configs=(
        {"kind": "proximal", "tau": 0.2, "learn_tau": True, "learn_step": True, "step": 0.2, "steps": 3},
        {"graph_scores": "kk", "kind": "soft", "tau": 0.1, "learn_tau": True, "symmetrise": "min", "steps": 3},
        {"graph_scores": "kk", "state": "query", "steps": 3},
        {"classes": 2, "coupling": "polynomial", "step": 0.2, "kind": "soft", "tau": 0.1, "steps": 3},
    ),
    stream=ModuleStream(_stream, _BLOCK),
    diagnostics=_diagnostics,
)
