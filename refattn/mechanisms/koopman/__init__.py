"""Koopman attention: queries updated by an operator that is fitted to their own trajectory.

What to read, in this order:

- `definition`: the paper's own case, KOOP.1 to KOOP.15 and their adjoints.
- `dense`: the same with all options; a system of equations for every query.
- `options`: a family of options in each file: kernels, spaces, fits, ridges, similarities, perturbations.
- `core`: the public map of q, k and v: its options, their defaults and checks.
- `rounding_error`: how far rounding may move the results of a call.
- `layer.block`: projections around the core, the mechanism as a layer; `layer.draws`: random ridges and epsilons;
  `layer.pointer`: a block whose last queries point at tokens, KOOP.pointed and KOOP.log_weights; `layer.pointing`:
  which token a last query points at, drawn or the likeliest; `layer.stream`: token by token, with a cache.
- `implementations.shared`: the same numbers by one factorisation of the Gram matrix for all queries
  (`implementations.whitening`). `implementations.features`: by a matrix of constant size, if the kernel has finitely
  many features, for `layer.stream`.
- `loops`: a second derivation, one query after the other; `testing`: designed calls, rounding scales, wrong readings.
"""

from __future__ import annotations

from refattn.mechanisms.block import Block
from refattn.mechanisms.koopman import core as _core
from refattn.mechanisms.koopman import definition as _definition
from refattn.mechanisms.koopman import dense as _dense
from refattn.mechanisms.koopman.core import Saved, backward, forward
from refattn.mechanisms.koopman.layer import block as _block
from refattn.mechanisms.koopman.layer import pointer as _pointer
from refattn.mechanisms.koopman.layer import stream as _stream
from refattn.mechanisms.koopman.options.fits import Separable, Stein
from refattn.mechanisms.koopman.options.kernel import Linear, Matern32, Matern52, Own, Polynomial, Rbf
from refattn.mechanisms.koopman.options.perturbation import Identity, KoopmanInverseError, Pencil, Shift
from refattn.mechanisms.record import Mechanism

__all__ = [
    "Identity",
    "KoopmanInverseError",
    "Linear",
    "Matern32",
    "Matern52",
    "Own",
    "Pencil",
    "Polynomial",
    "Rbf",
    "Saved",
    "Separable",
    "Shift",
    "Stein",
    "backward",
    "forward",
    "record",
]

_TITLE = "Koopman attention"
_READS = ("mask", "key_mask", "causal", "memory", "memory_mask", "draws")
_BLOCK = Block(_block, _TITLE, _READS)

record = Mechanism(
    name="koopman",
    title=_TITLE,
    definition=_definition,
    source="N. Tie 2024, Koopman attention; M. Khosravi 2023 (arXiv:2208.01681), sections IV and V",
    equation_modules=(_dense, _block),
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    properties=(
        "permutation",
        "query_permutation",
        "padding",
        "causal",
        "truncation",
        "independent",
        "workers",
        "repeatable",
    ),
    differentiable=_core.DIFFERENTIABLE,
    families=_core.FAMILIES,
    # A strong perturbation that inverts, two transitions, and a jitter that means the same in every dtype.
    sampled={"updates": 3, "perturbation": "identity(epsilon=0.3)", "jitter": 1e-2},
    # Beyond some 10^3 a Gram matrix of products loses its small eigenvalues to rounding, and psi its inverse.
    perturbation=10.0,
    tiled=False,
    stream=_stream.Stream(_BLOCK),
    pointer=_pointer,
    redrawn=lambda saved: sum(saved.core.chosen),
    # Not his system whole: the residual around a block stays, which the article does not have.
    presets={
        "tie2024": {
            "mlp": False,
            "heads": 1,
            "decode": "pointer",
            "block": {"perturbation": "shift", "draws": "beta(candidates=64)"},
        }
    },
    whose={
        "tie2024": {
            "mlp": "printed, abstract, step 4 and summary: instead of a feed-forward network",
            "heads": "ours, the article has no heads",
            "decode": "printed, the next output is a source token that the last query points at",
            "block.perturbation": "printed, psi is a proxy of phi",
            "block.draws": "ours, the article prints that ridge and epsilon are near 0, not from Beta(1, 9), and no 64",
            "block.updates": "ours, the article prints no number of updates",
        }
    },
)
