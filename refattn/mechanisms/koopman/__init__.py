"""Koopman attention: queries updated by an operator that is fitted to their own trajectory."""

from __future__ import annotations

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.koopman import block as _block
from refattn.mechanisms.koopman import core as _core
from refattn.mechanisms.koopman import dense as _dense
from refattn.mechanisms.koopman import loops as _loops
from refattn.mechanisms.koopman import stream as _stream
from refattn.mechanisms.koopman import update as _update
from refattn.mechanisms.koopman.adjoint_magnitudes import ADJOINTS as _ADJOINTS
from refattn.mechanisms.koopman.cases import CASES as _CASES
from refattn.mechanisms.koopman.conventions import CONVENTIONS as _CONVENTIONS
from refattn.mechanisms.koopman.core import Saved, backward, forward
from refattn.mechanisms.koopman.forms import FORMS as _FORMS
from refattn.mechanisms.koopman.magnitudes import MAGNITUDES as _MAGNITUDES
from refattn.mechanisms.koopman.magnitudes import STORED as _STORED
from refattn.mechanisms.koopman.options import DIFFERENTIABLE as _DIFFERENTIABLE
from refattn.mechanisms.koopman.perturbation import KoopmanInverseError
from refattn.mechanisms.readings import of_group_gradients as _of_group_gradients
from refattn.mechanisms.record import Mechanism

__all__ = ["KoopmanInverseError", "Saved", "backward", "forward", "record"]

_TITLE = "Koopman attention"
_READS = ("mask", "key_mask", "causal", "memory", "memory_mask", "draws")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="koopman",
    title=_TITLE,
    source="N. Tie 2024, Koopman attention; M. Khosravi 2023 (arXiv:2208.01681), sections IV and V",
    tagged=(_dense, _update, _block),
    loops=_loops,
    forms=tuple(_FORMS),
    defaults={
        "updates": 2,
        "kernel": "linear+rbf",
        "bandwidth": None,
        "weight": None,
        "degree": 2,
        "constant": 1.0,
        "fit": "stein",
        "space": "keys",
        "augment": False,
        "ridge": None,
        "ridge_scale": "sum",
        "tau": 0.0,
        "epsilon": None,
        "perturbation": "shift",
        "mix": None,
        "similarity": "dot",
        "window": None,
        "jitter": None,
        "certify": False,
        "mask": None,
        "causal": False,
        "form": "auto",
    },
    reads=_READS,
    core=_core,
    block=_BLOCK,
    cases=_CASES,
    laws=(
        "permutation",
        "query_permutation",
        "padding",
        "causal",
        "truncation",
        "independent",
        "workers",
        "repeatable",
    ),
    magnitudes=_MAGNITUDES | _ADJOINTS,
    stored=_STORED,
    conventions=_CONVENTIONS,
    wrong_gradients=_of_group_gradients(_core),
    differentiable=_DIFFERENTIABLE,
    # A strong perturbation that inverts, two transitions, and a jitter that means the same in every dtype.
    sampled={"updates": 3, "perturbation": "identity", "epsilon": 0.3, "jitter": 1e-2},
    # Beyond some 10^3 a Gram matrix of products loses its small eigenvalues to rounding, and psi its inverse.
    huge=10.0,
    tiled=False,
    stream=ModuleStream(_stream, _BLOCK),
)
