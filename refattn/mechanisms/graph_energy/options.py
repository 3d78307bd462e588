"""The options of the core: what each means, what it is where it is not given, and whether it fits.

Options that are one of several kinds are objects: an integrator, a threshold, the links of a graph. Each kind holds its
own numbers; the core takes the object, its name, or text such as ``soft(tau=0.1)``, and makes `Options` of a call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.mechanisms.arguments import check_is, check_number, check_whole
from refattn.mechanisms.families import choose, imported
from refattn.mechanisms.graph_energy.csr import CSR
from refattn.mechanisms.graph_energy.forces import COUPLINGS, INTRINSICS, Coupling, Intrinsic, Number, Polynomial
from refattn.xp import Array, backend, concrete, namespace

STATES = ("token", "query", "feature")
STOPS = ("stop_force", "stop_plateau", "stop_level")


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return a value that is one of the choices; raise where it is none."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(choices)}")
    return value


# --- links


@dataclass(frozen=True)
class Links:
    """How attention becomes the links w of a graph.

    Attributes
    ----------
    over
        "tokens": links come from the scores of queries with keys, as many; "keys": from those of keys with keys, and
        the queries, any number of them, are no nodes. Keys that no query may attend are none either.
    """

    over: str = "tokens"

    def __post_init__(self) -> None:
        choice("over", self.over, ("tokens", "keys"))


class Kernel(Links):
    """The softmax of the mean of s_ij and s_ji; has detailed balance, and with it an energy."""


class Mean(Links):
    """The mean of a_ij and a_ji: symmetric, with degrees of any size."""


class Min(Links):
    """The smaller of a_ij and a_ji: symmetric, with degrees of at most 1."""


class Directed(Links):
    """a_ij as it is: no symmetry, and no energy."""


class CausalMirror(Links):
    """a_ij for j < i, and a_ji for j > i: a symmetric link depends on nothing later than its later token."""


@dataclass(frozen=True)
class Given(Links):
    """Links of your own: a constant of the backward.

    Attributes
    ----------
    links
        An array (n, n), or one for each head, of weights or booleans, which hold where i may attend j; or a `CSR`,
        which `window_graph`, `nearest_graph` and `sparse_graph` make. Given as they are they are links over tokens.
    """

    links: Any = None


LINKS = {"kernel": Kernel, "mean": Mean, "min": Min, "none": Directed, "causal_mirror": CausalMirror}
"""What `graph` may be beside an array and None."""


@dataclass(frozen=True)
class Start:
    """Where scores start.

    Attributes
    ----------
    at
        In state "token", an array that broadcasts to (b, h, n), in place of the sigmoid of s_jj.
    jitter
        Broadcastable to the scores (b, h, n, c): what is added to where scores start, but not to the anchor; a constant
        of the backward. Draws of `refattn.counter.normal`, which a seed fixes, take scores off an unstable rest.
    """

    at: Array | None = None
    jitter: Array | None = None


# --- integrators


@dataclass(frozen=True)
class Integrator:
    """How the flow is followed; an explicit method has alpha, a row for each stage, and beta of GE.point and GE.8.

    Attributes
    ----------
    adjoint
        "unroll": the gradient of the steps that were taken; "implicit": that of the equilibrium, which they have
        to have reached, see `refattn.mechanisms.graph_energy.solvers.equilibrium`.
    checkpoint
        Every how many steps a state is kept for the backward, which takes the steps between again, to the same bits;
        None: all of every step is kept. The square root of `steps` needs the least memory.
    stop_force, stop_plateau, stop_level
        A channel stops where no rate is larger, where its energy has changed by no more in three steps (relative to 1
        plus its size), or where its energy is no larger. None: it takes all steps.
    """

    adjoint: str = "unroll"
    checkpoint: int | None = None
    stop_force: float | None = None
    stop_plateau: float | None = None
    stop_level: float | None = None

    alphas: ClassVar[tuple[tuple[float, ...], ...]] = ((),)
    beta: ClassVar[tuple[float, ...]] = (1.0,)

    def __post_init__(self) -> None:
        choice("adjoint", self.adjoint, ("unroll", "implicit"))
        if self.checkpoint is not None:
            check_whole("checkpoint", self.checkpoint, 1)
        for name in STOPS:
            value = getattr(self, name)
            if value is not None:
                check_number(name, value)
                if name != "stop_level" and value < 0.0:
                    raise ValueError(f"{name}: got {value}, needs a number at least 0")

    @property
    def name(self) -> str:
        """What the option `integrator` calls it."""
        return next(name for name, kind in INTEGRATORS.items() if type(self) is kind)

    @property
    def stops(self) -> str | None:
        """The first condition by which channels stop, or None."""
        return next((name for name in STOPS if getattr(self, name) is not None), None)

    @property
    def reads_energy(self) -> bool:
        """Whether a graph without an energy will not do."""
        return self.stop_plateau is not None or self.stop_level is not None or isinstance(self, DiscreteGradient)


class Euler(Integrator):
    """x' = x + h v(x)."""


class Heun(Integrator):
    """The mean of the rates at x and at where Euler's step ends: of order 2."""

    alphas, beta = ((), (1.0,)), (0.5, 0.5)


class RK4(Integrator):
    """The classical method of Runge and Kutta: of order 4."""

    alphas = ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0))
    beta = (1.0 / 6.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 6.0)


@dataclass(frozen=True)
class RK45(Integrator):
    """Dormand and Prince, of order 5, with steps as long as the accuracy allows, over the same time.

    Attributes
    ----------
    accuracy
        The error of a step, relative to 1 plus the size of a score.
    max_nfe
        How many rates it may evaluate.
    """

    accuracy: float = 1e-6
    max_nfe: int = 10000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("accuracy", self.accuracy, positive=True)
        check_whole("max_nfe", self.max_nfe, 1)


class ImplicitMidpoint(Integrator):
    """x' = x + h v((x + x') / 2): of order 2."""


class DiscreteGradient(Integrator):
    """x' = x + h times the mean of v from x to x': the energy falls with every step, of any length."""


INTEGRATORS: dict[str, type[Integrator]] = {
    "euler": Euler,
    "heun": Heun,
    "rk4": RK4,
    "rk45": RK45,
    "implicit_midpoint": ImplicitMidpoint,
    "discrete_gradient": DiscreteGradient,
}


# --- thresholds


@dataclass(frozen=True)
class Threshold:
    """What becomes of small scores.

    Attributes
    ----------
    tau
        At least 0: a number, or an array (h,). None means 0.4 in state "token", a quarter of the mean weight in "query"
        and 0 in "feature".
    signed
        Whether |x| is compared with tau; None means only in state "feature".
    empty
        What becomes of a row whose scores are all below tau. "argmax": all weight on the token with the largest
        a_ij x_j, to which no gradient goes but that of its value; "dense": its attention; "zero": nothing; "error": a
        FloatingPointError.
    """

    tau: Number | None = None
    signed: bool | None = None
    empty: str = "argmax"

    def __post_init__(self) -> None:
        if self.signed is not None:
            check_is("signed", self.signed, bool)
        choice("empty", self.empty, ("argmax", "dense", "zero", "error"))

    def check_filled(self, filled: Array) -> None:
        """Raise FloatingPointError where a row (b, h, i, 1) has been emptied, and name the first."""
        xp = namespace(filled)
        if concrete(xp.all(filled)) is not False:
            return
        first = int(xp.argmin(xp.astype(xp.reshape(filled, (-1,)), xp.int8)))
        _, heads, queries, _ = filled.shape
        place = f"batch {first // (heads * queries)}, head {first // queries % heads}, token {first % queries}"
        needs = 'lower tau, or choose empty="argmax", "dense" or "zero"'
        raise FloatingPointError(f"{place}: no score is above tau; {needs}")


@dataclass(frozen=True)
class Hard(Threshold):
    """A score below tau becomes 0.

    Attributes
    ----------
    straight_through
        Whether the gradient passes the threshold by.
    """

    straight_through: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is("straight_through", self.straight_through, bool)


class Soft(Threshold):
    """tau is subtracted, down to 0."""


class Proximal(Threshold):
    """The step times tau is subtracted after every step of Euler: E + tau sum pi |x| falls, pi that of `.system`."""


THRESHOLDS: dict[str, type[Threshold]] = {"hard": Hard, "soft": Soft, "proximal": Proximal}


def _intrinsic(given: Any) -> str | Intrinsic:
    """Return a name of `INTRINSICS`, or functions of the user's own."""
    given = imported("intrinsic", given, Intrinsic)
    return given if isinstance(given, Intrinsic) else choice("intrinsic", given, tuple(INTRINSICS))


def _coupling(given: Any) -> str | Coupling | Polynomial:
    """Return a name of `COUPLINGS`, a polynomial or functions of the user's own."""
    given = imported("coupling", given, Coupling)
    if isinstance(given, (Coupling, Polynomial)) or (isinstance(given, str) and given in COUPLINGS):
        return given
    if isinstance(given, str) and given.partition("(")[0].strip() not in ("polynomial", *COUPLINGS):
        names = ", ".join(COUPLINGS)
        raise ValueError(f"coupling: got {given!r}, needs one of {names}, polynomial(coefficients=...) or a Coupling")
    return choose("coupling", given, {"polynomial": Polynomial})


FAMILIES: dict[str, Callable[[Any], Any]] = {
    "coupling": lambda given: _coupling(given),
    "intrinsic": lambda given: _intrinsic(given),
    "integrator": lambda given: choose("integrator", given, INTEGRATORS),
    "threshold": lambda given: choose("threshold", given, THRESHOLDS),
    "graph": lambda given: choose("graph", given, LINKS) if isinstance(given, str) else given,
    "start": lambda given: given if isinstance(given, Start) else Start(at=given),
}
"""What makes an object of an option that is given as a name or as text."""

_HARD, _RK45, _EULER = 'threshold="hard(%s=...)"', 'integrator="rk45(%s=...)"', 'integrator="euler(%s=...)"'
RENAMED = {
    **{name: _HARD % name for name in ("tau", "signed", "empty")},
    "kind": 'threshold="hard", "soft" or "proximal"',
    "straight_through": 'threshold="hard(straight_through=True)"',
    **{name: _RK45 % name for name in ("accuracy", "max_nfe")},
    **{name: _EULER % name for name in ("adjoint", "checkpoint", *STOPS)},
    "coefficients": 'coupling="polynomial(coefficients=...)" or coupling=Polynomial(...)',
    "symmetrise": 'graph="kernel", "mean", "min", "none" or "causal_mirror"',
    "graph_scores": "graph=\"kernel(over='keys')\"",
    "jitter": "start=Start(jitter=...)",
}
"""Options of before, and what stands in their place."""


# --- all of them


@dataclass(frozen=True)
class Options:
    """The options of one call, checked, with numbers that broadcast to a state (b, h, j, c).

    Attributes
    ----------
    tau
        None where it is to be chosen.
    links
        What GE.links takes: a name of `LINKS`, or "given".
    over_keys
        Whether links come from the scores of keys with keys.
    numbers
        The shapes of the numbers that have a gradient, by name.
    causal
        Whether no token may depend on a later one.
    attends
        Whether GE.2 is computed even where nobody reads it.
    """

    state: str
    coupling: Coupling
    intrinsic: Intrinsic
    mu: Number
    kappa: Number
    step: Number
    steps: int
    integrator: Integrator
    threshold: Threshold
    tau: Number | None
    signed: bool
    links: str
    over_keys: bool
    graph: Array | CSR | None
    start: Array | None
    jitter: Array | None
    scale: Number
    bias: Array | None
    numbers: dict[str, tuple[int, ...]]
    causal: bool
    attends: bool


def longest_of(options: Options, links: Any, visible: Array | None) -> Number:
    """Return 2 / L, up to which a step of Euler lowers the energy of scores between 0 and 1, 0 where L is infinite.

    L = sup |df/dx| + 2 kappa sup |g'| max_i sum_j |w_ij|, per channel where nodes are hidden.
    """
    wells = options.intrinsic.name == "double_well"
    steep = options.coupling.largest_slope(math.inf)
    if steep == math.inf and options.state != "feature" and not wells:
        steep = options.coupling.largest_slope(1.0)
    if steep == math.inf or (options.state == "feature" and wells):
        return 0.0
    pulls = 2.0 * steep * abs(options.kappa)
    if options.links in ("mean", "causal_mirror", "given"):
        pulls = pulls * largest_degree(links, visible)
    size = 1.0 + abs(options.mu) ** 0.5  # from where on "double_well" points inwards, for |b| <= 1
    bound = options.intrinsic.largest_slope(options.mu, size) + pulls
    if isinstance(bound, float):
        return 2.0 / bound if bound > 0.0 else math.inf
    xp = namespace(bound)
    largest = xp.max(bound, axis=-2, keepdims=True) if len(bound.shape) > 2 and bound.shape[-2] else bound
    return xp.where(largest > 0.0, 2.0 / xp.where(largest > 0.0, largest, 1.0), math.inf)


def largest_degree(links: Any, visible: Array | None) -> Number:
    """Return max_i sum_j |w_ij|, by channel where nodes are hidden; links may be a sparse graph."""
    if links.shape[-1] == 0:
        return 1.0
    if isinstance(links, CSR):
        xp = namespace(links.data)
        return xp.max(links.by_row(xp.abs(links.data)[:, None]))
    xp, sizes = namespace(links), abs(links)
    sums = xp.sum(sizes, axis=-1, keepdims=True) if visible is None else visible * (sizes @ visible)
    return xp.max(sums, axis=-2, keepdims=True)


def check_step(options: Options, links: Any, visible: Array | None) -> None:
    """Warn where a step of Euler is longer than 2/L."""
    if not isinstance(options.integrator, Euler) or not options.steps:
        return
    longest = longest_of(options, links, visible)
    if concrete(any_of((options.step > longest) & (longest > 0.0))):
        least = longest if isinstance(longest, float) else float(backend(longest).to_numpy(longest).min())
        warnings.warn(f"step: got more than 2/L = {least:.3g}, the longest known to lower the energy", stacklevel=4)


def tau_of(options: Options, allowed: Array | None, start: Array) -> Number:
    """Return tau as a number that broadcasts to a state such as the start (b, h, j, c)."""
    if options.tau is not None:
        return options.tau
    if options.state != "query":
        return 0.4 if options.state == "token" else 0.0
    if allowed is None:
        return 0.25 / max(start.shape[2], 1)
    xp = namespace(start)
    seen = xp.sum(xp.astype(allowed, start.dtype), axis=-1, keepdims=True)
    return 0.25 / xp.matrix_transpose(xp.where(seen > 0.0, seen, 1.0))


def any_of(condition: Array | bool) -> Array | bool:
    return condition if isinstance(condition, bool) else namespace(condition).any(condition)
