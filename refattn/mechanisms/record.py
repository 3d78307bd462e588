"""The record: what a mechanism tells about itself, and all that tools know of it.

Trainer, checks, verification, vectors, benchmarks and docs are written against `Mechanism` and never ask for a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from refattn import equations, tree
from refattn.mechanisms.arguments import check_arrays, check_floating, check_is
from refattn.mechanisms.context import Context
from refattn.xp import Array, all_finite, dtype_name, is_bool

Magnitude = Callable[[Mapping[str, Array], Mapping[str, Array]], Array]


@dataclass(frozen=True)
class Input:
    """One designed array of a case: reproducible in any language from its numbers alone.

    Attributes
    ----------
    shape
        Sizes of the axes.
    design
        A name of `refattn.golden.inputs.DESIGNS`.
    numbers
        What the design needs: a scale, a density, ...
    """

    shape: tuple[int, ...]
    design: str = "normal"
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One designed call of a core.

    Attributes
    ----------
    name
        Unique within the mechanism; every mechanism has a case named "tiny".
    kind
        The class that counts are reported for: plain, causal, masked, grouped, ...
    inputs
        The arrays of the call, by argument name.
    options
        The other arguments of the call; those at their default are absent.
    purpose
        What the case would expose, in a few words.
    """

    name: str
    kind: str
    inputs: Mapping[str, Input]
    options: Mapping[str, Any] = field(default_factory=dict)
    purpose: str = ""


class Block:
    """A mechanism as one step of a dynamical system, made from the module that computes it.

    The module has `Config`, `Params`, `State`, `Saved` and the functions ``init``, ``start``, ``start_backward``,
    ``read``, ``read_backward``, ``forward`` and ``backward``. What holds for every block is checked here, once: the
    context's fields are ones that the mechanism reads, and all arrays that come in are finite and of one library,
    device and dtype. Shapes are for the module to check.
    """

    def __init__(self, module: ModuleType, title: str, reads: tuple[str, ...]) -> None:
        self.module = module
        self.title = title
        self.reads = reads
        self.Config = module.Config

    def init(self, config: Any, *, seed: int = 0, like: Array, layer: int = 0) -> Any:
        """Return fresh parameters: a pure function of the configuration, the seed and the layer.

        `like` gives the array library, the dtype and the device.
        """
        check_is("config", config, self.Config)
        check_arrays(like=like)
        check_floating(like=like)
        return self.module.init(config, seed=seed, like=like, layer=layer)

    def start(self, params: Any, x: Array, context: Context) -> Any:
        """Return the state that the first block of a stack receives for tokens x (b, n, width)."""
        self._check_context(context, params, x=x)
        return equations.active(self.module).start(params, x, context)

    def start_backward(self, params: Any, d_state: Any) -> tuple[Array, Any]:
        """Return (d_x, d_params) of `start`."""
        self._check(params, d_state=d_state)
        return equations.active(self.module).start_backward(params, d_state)

    def read(self, params: Any, state: Any) -> Array:
        """Return the tokens (b, n, width) that a state stands for."""
        self._check(params, state=state)
        return equations.active(self.module).read(params, state)

    def read_backward(self, params: Any, state: Any, d_x: Array) -> tuple[Any, Any]:
        """Return (d_state, d_params) of `read`."""
        self._check(params, state=state, d_x=d_x)
        return equations.active(self.module).read_backward(params, state, d_x)

    def forward(self, params: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Advance the state by one step.

        Returns
        -------
        state
            The next state.
        saved
            What `backward` reads.

        Raises
        ------
        TypeError
            Where an argument is of another class, or arrays are of several libraries or dtypes.
        ValueError
            Where the context has a field that the mechanism does not read, a shape or a device does not fit, or an
            array that comes in has an element that is not finite.
        """
        self._check_context(context, params, state=state)
        return equations.active(self.module).forward(params, state, context)

    def backward(self, params: Any, saved: Any, d_state: Any) -> tuple[Any, Any, dict[str, Array]]:
        """Return the gradients (d_state, d_params, d_context); the last by field name of the context."""
        check_is("saved", saved, self.module.Saved)
        self._check(params, d_state=d_state)
        return equations.active(self.module).backward(params, saved, d_state)

    def _check_context(self, context: Context, params: Any, **given: Any) -> None:
        check_is("context", context, Context)
        context.check_reads(self.title, self.reads)
        names = ("memory", "mask", "key_mask", "memory_mask")
        memory, *masks = ({f"context.{name}": x} if (x := getattr(context, name)) is not None else {} for name in names)
        self._check(params, **given, **memory)
        for mask in masks:
            check_arrays(params=next(iter(tree.flatten(params).values())), **mask)
            for name, x in mask.items():
                if not is_bool(x):
                    raise TypeError(f"{name}: got dtype {dtype_name(x)}, needs bool")

    def _check(self, params: Any, **given: Any) -> None:
        """Raise where `params` or a state is of another class, or not all arrays are finite and of one kind."""
        check_is("params", params, self.module.Params)
        leaves = tree.flatten({"params": params})
        for name, value in given.items():
            if name.endswith("state"):
                check_is(name, value, self.module.State)
            leaves |= tree.flatten({name: value}) if name.endswith("state") else {name: value}
        check_arrays(**leaves)
        check_floating(**leaves)
        for name, leaf in leaves.items():
            if all_finite(leaf) is False:
                raise ValueError(f"{name}: got an element that is not finite, needs finite numbers")


@dataclass(frozen=True, eq=False)
class Mechanism:
    """The record of a mechanism.

    Attributes
    ----------
    name, title, source
        The identifier, the name in words, and the publication.
    tagged
        The modules whose lines carry the equations: the dense form first, then the block.
    loops
        The second derivation: ``forward`` and ``backward`` in scalar loops, returning equation values by id.
    forms
        The evaluations of the core, the dense one first.
    defaults
        The options of the core with their defaults.
    reads
        The fields of the context that the block reads.
    core
        ``forward`` and ``backward`` of the map of q, k, v; None where the mechanism is no such map.
    block
        The mechanism as one step of a dynamical system.
    cases
        Designed calls of the core.
    laws
        Names of the laws of `refattn.verify.laws` that hold.
    magnitudes
        By equation id, where its rounding error is not relative to its own value: the size of the terms that it sums,
        as a function of the inputs and the traced values.
    stored
        By id, the equations that kernels in float16 or bfloat16 round to the storage type on the way, with the size
        that this rounding is relative to; all others they compute in float32.
    conventions
        Plausible wrong readings by name: functions with the core's signature that return (out, *outputs).
    outputs
        Fields of the core's `saved` that are outputs beside `out`.
    stream, grow, diagnostics
        Further abilities, None where the mechanism has none.
    """

    name: str
    title: str
    source: str
    tagged: tuple[ModuleType, ...]
    loops: ModuleType
    forms: tuple[str, ...]
    defaults: Mapping[str, Any]
    reads: tuple[str, ...]
    core: ModuleType | None
    block: Block
    cases: tuple[Case, ...]
    laws: tuple[str, ...]
    magnitudes: Mapping[str, Magnitude] = field(default_factory=dict)
    stored: Mapping[str, Magnitude] = field(default_factory=dict)
    conventions: Mapping[str, Callable[..., tuple[Array, ...]]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    stream: Any = None
    grow: Any = None
    diagnostics: Any = None

    @property
    def equations(self) -> dict[str, str]:
        """All equations of the mechanism, id to formula, in the order of the docstrings."""
        return {id: formula for module in self.tagged for id, formula in equations.declared(module).items()}

    def case(self, name: str) -> Case:
        """Return the case of this name; ValueError where there is none."""
        for case in self.cases:
            if case.name == name:
                return case
        raise ValueError(f"case: got {name!r}, needs one of {', '.join(case.name for case in self.cases)}")

    def __repr__(self) -> str:
        return f"<Mechanism {self.name}: {self.title}>"
