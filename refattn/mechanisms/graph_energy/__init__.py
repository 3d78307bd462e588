"""Graph energy attention: scores flow on the graph of the tokens, down the gradient of an energy.

What to read, in this order:

- `definition`: one case, straight: GE.1 to GE.13 and their adjoints. It runs under `ra.reading()` and
  `ra.trace`; any other call runs `core` and then `general`, where q meets k.
- `options`: what may be chosen otherwise, each an object with its equations, forward and backward: links, where scores
  start, the state that flows, integrators, thresholds, and what an emptied row gets.
- `forces`: what moves a score: the couplings g of an edge and the intrinsic forces f, with potentials and derivatives.
- `general`: the definition with all options, put together from these objects.
- `core`: the public map of q, k and v: checks, and which implementation runs.
- `system`: the flow as a system of its own, x' = v(x), with its energy.
- `layer.block`: projections around the core; `layer.numbers`: the numbers of a block, and parameters that tokens share;
  `layer.hierarchy`: levels of tokens; `layer.stream`: token by token; `layer.regularisers`: sums that are added to a
  loss.
- `implementations`: the sums over differences of scores: over pairs, all at once or in tiles (`pairs`), as matrix
  products if the coupling separates (`separable`), and on sparse graphs (`sparse`, `sparse_rows`).
- `equilibrium`: flows that stop, the gradient at an equilibrium.
- `loops`: a second derivation, one number after the other; `testing`: designed calls, sizes of rounding errors, and
  wrong readings.
"""

from __future__ import annotations

from refattn.mechanisms.block import Block, ModuleStream
from refattn.mechanisms.graph_energy import core as _core
from refattn.mechanisms.graph_energy import definition as _definition
from refattn.mechanisms.graph_energy import general as _general
from refattn.mechanisms.graph_energy.core import Saved, backward, forward
from refattn.mechanisms.graph_energy.forces import Coupling, Intrinsic, Polynomial
from refattn.mechanisms.graph_energy.implementations.sparse import CSR, nearest_graph, sparse_graph, window_graph
from refattn.mechanisms.graph_energy.layer import block as _block
from refattn.mechanisms.graph_energy.layer import config as _config
from refattn.mechanisms.graph_energy.layer import hierarchy as _hierarchy
from refattn.mechanisms.graph_energy.layer import numbers as _numbers
from refattn.mechanisms.graph_energy.layer import stream as _stream
from refattn.mechanisms.graph_energy.options import FAMILIES
from refattn.mechanisms.graph_energy.options.integrator import RK4, Euler, Heun
from refattn.mechanisms.graph_energy.options.links import CausalMirror, Directed, Given, Kernel, Mean, Min
from refattn.mechanisms.graph_energy.options.state import Start
from refattn.mechanisms.graph_energy.options.threshold import Hard, Proximal, Soft
from refattn.mechanisms.graph_energy.system import energy, longest_step, residual, steps_taken
from refattn.mechanisms.record import Mechanism

__all__ = [
    "CSR",
    "RK4",
    "CausalMirror",
    "Coupling",
    "Directed",
    "Euler",
    "Given",
    "Hard",
    "Heun",
    "Intrinsic",
    "Kernel",
    "Mean",
    "Min",
    "Polynomial",
    "Proximal",
    "Saved",
    "Soft",
    "Start",
    "backward",
    "energy",
    "forward",
    "longest_step",
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
_LEARNED = {"learn_tau": True, "learn_step": True, "step": 0.2, "steps": 3}

record = Mechanism(
    name="graph_energy",
    title=_TITLE,
    definition=_definition,
    source="F. Preetham 2023, Graph Dynamical Systems and Odd Analytic Coupling (Medium, 21 August 2023)",
    equation_modules=(_general, _block, _numbers, _hierarchy),
    block_modules=(_numbers, _hierarchy),
    families=FAMILIES,
    context_fields=_READS,
    core=_core,
    block=_BLOCK,
    properties=(
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
    differentiable=("mu", "kappa", "scale", "step", "tau", "coefficients"),
    one_sequence=True,
    forbidden=(*_core.FORBIDDEN, *_config.FORBIDDEN),
    configs=(
        {"threshold": "proximal(tau=0.2)", **_LEARNED},
        {"graph": "min(over='keys')", "threshold": "soft(tau=0.1)", "learn_tau": True, "steps": 3},
        {"graph": "min(over='keys')", "state": "query", "steps": 3},
        {"state": "query", "step": 0.1, "steps": 3},
        {"state": "feature", "intrinsic": "none", "steps": 3},
        {"levels": 2, "stride": 2, "window": 2, "threshold": "soft(tau=0.1)", "step": 0.2, "steps": 3},
        {"classes": 2, "coupling": "polynomial(coefficients=(1.0, 0.0))", "step": 0.2, "threshold": "soft(tau=0.1)"},
    ),
    stream=ModuleStream(_stream, _BLOCK),
    diagnostics=_block,
    # What the article has beside the flow: an energy in a language model, levels, classes, R(O) and gamma / |grad E|.
    presets={
        "preetham2023": {
            "gamma": 0.05,
            "block": {
                "state": "prefix",
                "step": 0.03,
                "steps": 8,
                "levels": 2,
                "window": None,
                "classes": 4,
                "regulariser": "size",
                "strength": 1e-6,
            },
        }
    },
    whose={
        "preetham2023": {
            "gamma": "ours, the article prints the rate gamma / norm of grad E and no number",
            "block.state": "ours, a causal model needs an energy for every prefix",
            "block.step": "ours, the article prints no number",
            "block.steps": "ours, the article prints no number",
            "block.levels": "ours, the article prints levels and no number",
            "block.window": "ours, the article prints no window",
            "block.classes": "ours, the article prints classes and no number",
            "block.regulariser": "ours, the article prints a regularised loss and no regulariser",
            "block.strength": "ours, the article prints no number",
        }
    },
)
