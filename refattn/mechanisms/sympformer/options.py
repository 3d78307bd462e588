"""The static choices of a block, and what follows from them: which parameters it has.

A parameter that can have no gradient is not allocated. Which these are depends on the block's place. A stack that
starts at rest has no momentum before its first layer, and what nothing reads after its last is not computed:

* `moving` integrators drift with the new momentum, so that even a token at rest moves; the others drift with the old
  one, and their first layer moves nothing: no B, no step of the positions, no look-ahead there;
* the others kick a momentum in the last layer that nobody reads: no values, no output matrix, no damping there.

What there is to choose stands in `choices`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from refattn.mechanisms.arguments import check_is, check_number
from refattn.mechanisms.sympformer.choices import BASELINES, CHOICES, DOUBLED, MOVING, MULTISTEP


@dataclass(frozen=True)
class Config:
    """Static choices of a block.

    Attributes
    ----------
    width, heads
        Width of the tokens; the heads, over which scores are averaged: they enter by the factor of the scores alone,
        1 / (heads sqrt(width / heads)).
    layer, layers
        Position in the stack, counted from 0, and the number of its layers.
    attention
        "exponential" kernel, softmax attention; or "linear" attention, with matrices A and V alone: see `linear`.
    force
        Of softmax attention: "prefix", which may be causal; or "hamiltonian", the gradient of a Hamiltonian of all
        tokens, which may not: see `hamiltonian`.
    normaliser
        What sums over tokens are divided by: the tokens that a token attends ("prefix"), or all of them ("length"), as
        the authors' first program does, so that the past depends on how many tokens follow.
    form
        Of linear attention: "gram" (all pairs), "state" (time linear in the tokens) or "auto".
    integrator
        See the head of this module.
    damping
        "log" (c_log / t), "linear" (c_lin) or "loglin" (both).
    c_log, c_lin
        Where they start; c_lin None: 0.1 for "linear", 1e-4 for "loglin".
    learn_damping, learn_steps
        Whether c_log and c_lin, and whether the steps, are parameters.
    step, start_time
        Where both steps of a layer start; the time of the first layer.
    clip
        Bound of a, the damping of one step. Where it bites its gradient is 0.
    normalise
        Layer normalisation of the momentum: at the "end" of a step, "each_substep" (`presymplectic` and `strang`: also
        after every kick and after the rotation) or "none".
    look_ahead
        Whether the oracle sees x + lambda p in place of x, with lambda learned from 0.001 on (`lie_trotter`: 0.9).
    mobility
        Of softmax attention: "learned", the matrix B, from the identity on; "identity": none.
    mlp
        What the MLP substep looks ahead along and changes: the velocity of the attention step ("attention_velocity"),
        the "momentum", a "velocity" of its own, or nothing: "plain", x + MLP(norm x), and "none", where there is none.
    mlp_ratio, gelu
        Width of the MLP in widths of the tokens; "exact" or "tanh".
    start
        "rest"; "linear": the first momentum is a linear map of the tokens; "table": it is looked up by the number of a
        token and by its position, see `tables`.
    vocabulary, context
        Of these tables: the number of different tokens, and the most tokens of a sequence.
    rotation, xi, angle
        Of `presymplectic` and `strang`: "fixed" turns by 2 xi h_x; "learned" by an angle between 0 and `angle`.
    connection
        Of `lie_trotter`: what its momentum is turned by: "none" (H0), or the connection along the old momentum ("h1")
        or along the new one ("r2"); see `connection`.
    retention
        Of `plain_euler`: where the share of the momentum that is kept starts.
    spread
        Standard deviation of fresh weights; None: 1 / sqrt(inputs). The authors take 0.02.
    detach
        Whether gradients through the time of a layer, the steps of the layer before it, and the step that the velocity
        of the attention step is divided by are left out, as the authors do.
    """

    width: int
    heads: int
    layer: int = 0
    layers: int = 1
    attention: str = "exponential"
    force: str = "prefix"
    normaliser: str = "prefix"
    form: str = "auto"
    integrator: str = "presymplectic_euler"
    damping: str = "loglin"
    c_log: float = 3.0
    c_lin: float | None = None
    learn_damping: bool = True
    learn_steps: bool = True
    step: float = 0.3
    start_time: float = 1.0
    clip: float = 50.0
    normalise: str = "end"
    look_ahead: bool = False
    mobility: str = "learned"
    mlp: str = "attention_velocity"
    mlp_ratio: int = 4
    gelu: str = "exact"
    start: str = "rest"
    vocabulary: int = 256
    context: int = 256
    rotation: str = "fixed"
    xi: float = 1.0
    angle: float = 1.0
    connection: str = "none"
    retention: float = 0.9
    spread: float | None = None
    detach: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "heads", "layers", "mlp_ratio", "vocabulary", "context", "layer"):
            value, least = getattr(self, name), 0 if name == "layer" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, needs a whole number of at least {least}")
        if self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}")
        if self.layer >= self.layers:
            raise ValueError(f"layer: got {self.layer}, needs one below the {self.layers} layers")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, needs one of {', '.join(choices)}")
        for field in fields(self):
            if field.type == "bool":
                check_is(field.name, getattr(self, field.name), bool)
        for name in ("c_log", "c_lin", "step", "start_time", "clip", "xi", "angle", "spread"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), positive=True)
        if not 0.0 < self.retention < 1.0:
            raise ValueError(f"retention: got {self.retention!r}, needs a number between 0 and 1")
        if self.normalise == "each_substep" and self.integrator not in DOUBLED:
            raise ValueError(f"normalise: got 'each_substep', which only {' and '.join(DOUBLED)} have")
        if self.connection != "none" and self.integrator != "lie_trotter":
            raise ValueError(f"connection: got {self.connection!r}, which only lie_trotter has")
        if self.normaliser == "length" and self.baseline:
            raise ValueError(f"normaliser: got 'length', but {self.integrator} divides by no number of tokens")
        if self.force == "hamiltonian" and (self.baseline or self.attention == "linear"):
            other = self.integrator if self.baseline else "linear attention"
            raise ValueError(f"force: got 'hamiltonian', which {other} does not have")
        if self.baseline and self.attention == "linear":
            raise ValueError(f"attention: got 'linear', {self.integrator} has softmax attention")
        if self.baseline and self.mlp == "attention_velocity":
            raise ValueError(f"mlp: got 'attention_velocity', {self.integrator} has no steps: it needs another substep")
        if self.integrator == "classical" and self.mlp == "momentum":
            raise ValueError("mlp: got 'momentum', classical has none: it needs another substep")
        if self.integrator == "classical" and self.start != "rest":
            raise ValueError(f"start: got {self.start!r}, classical has no momentum: it needs 'rest'")
        if self.rests and self.layers == 1 and not self.moving:
            raise ValueError(
                f"layers: got 1, but {self.integrator} moves no token in a first layer that starts at rest: it needs "
                "more layers, or start='linear' or 'table'"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the context that a block of this configuration reads."""
        causal = () if self.force == "hamiltonian" else ("causal",)
        return (*causal, "tokens") if self.tables else causal

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(self.heads * self.width)

    @property
    def moving(self) -> bool:
        """Whether tokens at rest move: positions drift with the new momentum."""
        return self.integrator in MOVING or self.baseline

    @property
    def baseline(self) -> bool:
        """Whether the block is one without a Hamiltonian."""
        return self.integrator in BASELINES

    @property
    def carries(self) -> bool:
        """Whether layers hand a momentum on."""
        return self.integrator != "classical"

    @property
    def connects(self) -> bool:
        """Whether there is a connection."""
        return self.connection == "r2" or (self.connection == "h1" and not self.rests)

    @property
    def multistep(self) -> bool:
        """Whether the layer before is remembered."""
        return self.integrator in MULTISTEP

    @property
    def rests(self) -> bool:
        """Whether no momentum comes in."""
        return not self.carries or (self.layer == 0 and self.start == "rest")

    @property
    def tables(self) -> bool:
        """Whether the momentum that comes in is looked up."""
        return self.layer == 0 and self.start == "table"

    @property
    def last(self) -> bool:
        """Whether the block is the last one."""
        return self.layer == self.layers - 1

    @property
    def keeps(self) -> bool:
        """Whether the new momentum is read: by the MLP substep or by the next layer."""
        return self.carries and (not self.last or self.mlp == "momentum")

    @property
    def kicks(self) -> bool:
        """Whether the force is read."""
        return self.moving or self.keeps

    @property
    def drifts(self) -> bool:
        """Whether positions change."""
        return self.moving or not self.rests

    @property
    def damps(self) -> bool:
        """Whether the damping changes anything that is read."""
        if self.integrator in ("explicit_euler", "ab2", "strang", "half_damped") and self.rests:
            # What came in is 0; the last two damp once more at the end.
            return self.integrator in ("strang", "half_damped") and self.keeps
        return self.kicks and self.integrator != "plain_euler" and not self.baseline

    def numbers(self) -> dict[str, tuple[str, float, bool]]:
        """Return the numbers of the block: "positive" or "unit", where they start, and whether they are learned.

        A number that changes nothing is not there.
        """
        c_lin = self.c_lin if self.c_lin is not None else 0.1 if self.damping == "linear" else 1e-4
        carried = self.mlp == "momentum" or (self.mlp == "velocity" and self.layer > 0)
        has = {
            "h_x": ("positive", self.step, self.learn_steps and self.drifts),
            "h_y": ("positive", self.step, self.learn_steps and self.kicks),
            "c_log": ("positive", self.c_log, self.learn_damping and self.damps),
            "c_lin": ("positive", c_lin, self.learn_damping and self.damps),
            "retention": ("unit", self.retention, True),
            "look": ("unit", 1e-3, True),
            "angle": ("unit", 0.5, True),
            "attention_mu": ("unit", 0.9, True),
            "attention_beta": ("unit", 0.9, True),
            "attention_gamma": ("positive", 1.0, True),
            "mu": ("unit", 0.9, True),
            "beta": ("unit", 0.9, True),
            "gamma": ("positive", 1.0, True),
        }
        there = {
            "h_x": not self.baseline,
            "h_y": not self.baseline,
            "c_log": self.damping != "linear" and not self.baseline,
            "c_lin": self.damping != "log" and not self.baseline,
            "retention": self.integrator == "plain_euler" and not self.rests and self.keeps,
            "look": self.look_ahead and not self.baseline and (not self.rests or self.integrator in DOUBLED),
            "attention_mu": self.look_ahead and self.baseline and not self.rests,
            "attention_beta": self.baseline and not self.rests,
            "attention_gamma": self.baseline and not self.rests,
            "angle": self.rotation == "learned" and self.integrator in DOUBLED,
            "mu": carried or (self.mlp == "attention_velocity" and self.drifts),
            "beta": carried,
            "gamma": carried or self.mlp == "attention_velocity",
        }
        return {name: x for name, x in has.items() if there[name]}
