"""The record: what a mechanism tells about itself, and all that tools know of it.

Trainer, checks, verification, vectors, benchmarks and docs are written against `Mechanism` and never ask for a name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import ModuleType
from typing import Any

from refattn import equations
from refattn.args import Each, Real, Whole, check_all
from refattn.mechanisms.block import Block, Stream
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.option_kinds import Forbidden, numbers_of, with_numbers
from refattn.mechanisms.wrong import WrongKernel
from refattn.messages import html_table, meant
from refattn.xp import Array

RoundingScale = Callable[[Mapping[str, Any], Any], Array]


class Unsupported(ValueError, NotImplementedError):  # noqa: N818 (to its caller it is a ValueError like others)
    """Raised by an implementation that does not compute what it was asked for, such as one that is never causal.

    Tools that run all implementations pass over it; a benchmark that raises NotImplementedError is shown as n/a.
    """


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
    axes
        The letters of the axes, "bgn" for instance, "." for one whose size stays as it is. Arrays beside q, k, v and
        masks need them, and then all arrays of the case have them: smaller cases are made by these.

    Examples
    --------
    >>> from refattn.golden.inputs import make
    >>> from refattn.mechanisms.record import Case, Input
    >>> mine = Case("mine", "plain", {"q": Input((1, 1, 2, 3), "normal", {"scale": 0.5})})
    >>> make("softmax", mine, "float64")["q"].round(2).tolist()
    [[[[0.17, -0.7, -0.69], [-0.71, -0.06, -0.46]]]]
    """

    shape: tuple[int, ...]
    design: str = "normal"
    numbers: Mapping[str, float] = field(default_factory=dict)
    axes: str = ""

    def __post_init__(self) -> None:
        check_all(self, shape=[Whole()], design=str, numbers=Each(Real(infinite=True)), axes=str)


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
    exact
        The results that are judged bit for bit, each with the storage types in which they are: every honest order of
        computing gives these numbers.
    slack
        What rows of q, k, v and d_out hold that the lengths of the case leave out: "" for what is drawn, "nan", or
        "huge" for the largest number of the type.
    given
        Arrays, or nested sequences, that stand in place of designed ones, by name; "d_out" may be one of them.

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.mechanisms.record import Case, Input
    >>> from refattn.verify import verify_case
    >>> inputs = {name: Input((1, 2, 3, 4)) for name in "qkv"}
    >>> mine = Case("mine", "causal", inputs, {"causal": True}, purpose="what lies ahead is not seen")
    >>> def attend(q, k, v, *, causal):
    ...     return ra.softmax.forward(q, k, v, causal=False)[0]
    >>> verify_case(ra.mechanism("softmax"), attend, mine, "float32").status
    'disagrees'
    """

    name: str
    kind: str
    inputs: Mapping[str, Input]
    options: Mapping[str, Any] = field(default_factory=dict)
    purpose: str = ""
    exact: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slack: str = ""
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Question:
    """What tells which of several conventions an implementation follows: one small call.

    Attributes
    ----------
    name, answer
        What is asked, and what this library answers.
    case
        The call.
    readings
        Other answers, each with the name of the wrong convention that gives it. On this call all results differ.
    outputs
        Where the answer is looked for: "out", and names of the mechanism's `outputs`.
    """

    name: str
    answer: str
    case: Case
    readings: Mapping[str, str]
    outputs: tuple[str, ...] = ("out",)


@dataclass(frozen=True)
class Claim:
    """What a source says, and what shows whether it holds.

    Attributes
    ----------
    source
        Who says it, and where: a paper with its equation or section, or code.
    claim
        What is said, in a sentence.
    holds
        "as said", or what is true instead.
    shown
        The call or the command that shows it. Calls know `np`, `ra`, and arrays q, k, v of shape (1, 2, 8, 4).
    tests
        The tests that hold it, each as PATH::NAME.
    broken
        The line that it is about, as `tests/broken.py` breaks it to see its tests red: an equation, "KOOP.9", or
        "FILE: OLD => NEW".
    ours
        Why the row is ours, though it stands beside the source: what this does not say. Empty where the source says it.
    """

    source: str
    claim: str
    holds: str
    shown: str
    tests: tuple[str, ...]
    broken: str = ""
    ours: str = ""


class Claims(tuple[Claim, ...]):
    """The claims of a mechanism, which show themselves in a line each, and in a notebook as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return what is claimed, and whether it holds."""
        lines = (f"- {one.claim}: {one.holds} ({one.source}{'; ours' if one.ours else ''})" for one in self)
        return "\n".join((f"{len(self)} claims", *lines))

    def _repr_html_(self) -> str:
        rows = ((one.claim, one.holds, f"{one.source}{'; ours' if one.ours else ''}", one.shown) for one in self)
        return html_table(("claim", "holds", "source", "shown by"), rows)


@dataclass(frozen=True)
class Picture:
    """What a page that steps through a run draws on top of it.

    Attributes
    ----------
    kind
        "matrix" (rows), "lines" (a list of values each), "plane" (ways, each a list of points of two coordinates), or
        of matrices their "eigenvalues" or "singular" values.
    title
        What is seen.
    of
        Takes the values of a run, by argument and equation, and its options, and returns an array; raises KeyError
        where it needs an equation that did not run, and ValueError where there is no such thing.
    """

    kind: str
    title: str
    of: Callable[[Mapping[str, Array], Mapping[str, Any]], Array]


@dataclass(frozen=True, eq=False)
class Example:
    """A small run of a definition that is no map of q, k and v: what `refattn trace` shows.

    Attributes
    ----------
    inputs
        The arrays, by name.
    run
        Runs the definition on them and returns the results by name. Without it `forward` and then `backward` run, and
        the outputs are called after the gradients that `backward` takes.
    """

    inputs: Mapping[str, Input]
    run: Callable[[Any, Mapping[str, Array]], Mapping[str, Array]] | None = None


@dataclass(frozen=True)
class Knob:
    """A number, or a truth value, that a reader of a tour may set.

    Attributes
    ----------
    name
        The keyword of the definition.
    label
        What it does, in a word or two.
    value
        Where it stands at first.
    low, high
        The numbers between which it may be set; unused if `value` is a truth value.
    step
        What it moves by; 0 for any number.
    """

    name: str
    label: str
    value: float | bool
    low: float = 0.0
    high: float = 1.0
    step: float = 0.0


@dataclass(frozen=True, eq=False)
class Tour:
    """How a definition is called for the page that explains it; what the page says and draws is its `tour.js`.

    Attributes
    ----------
    knobs
        What a reader may set.
    given
        Numbers that the definition takes beside q, k and v of the sentence, by name, as nested lists.
    words
        What differs from the sentence of all tours, of tokens, follow, q, k, v and target.
    instead
        If the definition is no map of q, k and v: what it does with what, as the reason why a call of the core has no
        tour.
    narrowest
        The least width of vectors of a user's own that its picture can show.
    table
        The arrays that the table of words makes if a reader types words of their own, by name: the largest size of a
        number in tenths. Empty if tokens are no words.
    counts
        How many words a reader may type, at least and at most.
    arguments
        Takes the given numbers by name, with axes of batch and heads, and the knobs by name; returns the arguments of
        `forward`. Without it these are q, k and v with the knobs as keywords.
    run
        If the definition is no such map: takes it, the given numbers as they are, the knobs, and which token is
        followed, and calls it, forward and backward. Without it `forward` runs, and `backward` on the gradient of half
        the squared distance of one output and the target.
    beside
        Takes what `arguments` takes; returns the values of what the page computes and the definition does not, by name.
    """

    knobs: tuple[Knob, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""
    narrowest: int = 1
    table: Mapping[str, int] = field(default_factory=lambda: {"q": 18, "k": 18, "v": 12})
    counts: tuple[int, int] = (5, 7)
    arguments: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    run: Callable[[Any, Mapping[str, Any], Mapping[str, Any], int], None] | None = None
    beside: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None


class _Later:
    """A field that is read when it is first asked for, unless it is given."""

    def __init__(self, read: Callable[[Mechanism], Any]) -> None:
        self.read = read

    def __set_name__(self, owner: type, field: str) -> None:
        self.field = field

    def __get__(self, record: Mechanism | None, owner: type | None = None) -> Any:
        if record is None:
            return self  # the default of the dataclass
        if self.field not in vars(record):
            vars(record)[self.field] = self.read(record)
        return vars(record)[self.field]

    def __set__(self, record: Mechanism, value: Any) -> None:
        if value is not self:
            vars(record)[self.field] = value


def _later(read: Callable[[Mechanism], Any]) -> Any:
    return _Later(read)


_IN_SMALL_ROOMS = {"example": "tour", "layer.pictures": "tour"}
"""The file that has the same where there is no file of its own; otherwise it is that of the folder."""


def _in_room(path: str, name: str = "", empty: Any = ()) -> Any:
    """Read what a module of the folder of the definition has under this name: all of it without one."""

    def read(record: Mechanism) -> Any:
        home = record.home
        if not home:
            return empty
        # A field that is a whole module has a file of its own.
        others = (_IN_SMALL_ROOMS.get(path, path.partition(".")[0]),) if name else ()
        for place in (path, *others):
            try:
                module = importlib.import_module(f"{home}.{place}")
            except ModuleNotFoundError as problem:
                if problem.name not in (f"{home}.{place}", f"{home}.{place.partition('.')[0]}"):
                    raise
            else:
                return getattr(module, name, empty) if name else module
        return empty

    return _Later(read)


@dataclass(frozen=True, eq=False)
class Mechanism:
    """The record of a mechanism.

    What only tools ask for is no argument of a record: it is read when it is first asked for, from files of the folder
    whose names say which field they are. ``testing/cases.py`` has ``CASES``, and so ``kernel_sizes``, ``wrong``,
    ``questions`` and ``layers``; ``testing/rounding_scales.py`` has ``ROUNDING_SCALES``, ``FURTHER``, ``STORED`` and
    ``NAMED``; ``testing/block_derived_twice.py`` the function of that name; ``layer/pictures.py`` has ``PICTURES``,
    ``example.py`` ``EXAMPLE``, ``tour.py`` ``TOUR``; ``loops.py`` and ``testing/parts.py`` are such fields themselves.
    A small folder has them in ``testing/__init__.py``, and the example and the pictures in ``tour.py``. If a file is
    missing, the field is empty.

    Attributes
    ----------
    name, title, source
        The identifier, the name in words, and the publication.
    address
        What another process finds it by: its name, or the MODULE:NAME that it was loaded from.
    definition
        The paper alone: the module that a reader opens first.
    example
        A small run of the definition, if it is no map of q, k and v; otherwise its run is the case "tiny".
    equation_modules
        The modules whose lines carry the equations: the dense implementation first, then the block.
    block_modules
        Those modules of `equation_modules` that stand around the core, beside the module of the block.
    loops
        The second derivation: ``forward`` and ``backward`` in scalar loops, returning equation values by id.
    block_derived_twice
        What the equations around the core and `extra_modules` it are in a small run, by id in the order that they ran:
        as traced, and by a second derivation; None where they are derived once.
    implementations
        The evaluations of the core, the dense one first: its ``IMPLEMENTATIONS``.
    defaults
        The options of the core with their defaults.
    context_fields
        The fields of the context that the block reads.
    core
        ``forward`` and ``backward`` of the map of q, k, v; None where the mechanism is no such map.
    block
        The mechanism as one step of a dynamical system.
    cases
        Designed calls of the core.
    kernel_sizes
        Further ones in the sizes that kernels have, of which there are no golden vectors; `refattn verify` runs both.
    properties
        Names of the properties of `refattn.verify.selfcheck.properties` that hold.
    rounding_scales
        By equation id, where they are not measured from the operations (`refattn.instruments.sized`) because kernels do
        others: the size of the rounding error, as a function of the inputs and the traced values. None means the size
        of the value itself, as for what iterations find.
    further_rounding_scales
        By equation id, what kernels round beside that.
    stored
        By id, the equations that kernels in float16 or bfloat16 round to the storage type on the way, with the size
        that this rounding is relative to, None if that is the value; all others they compute in float32.
    named_roundings
        What a kernel may declare to round that is no equation, by name: by id the equations that feel it, each with the
        size of the error in units of the unit roundoff.
    wrong
        Plausible wrong readings, and wrong backward passes, by name.
    questions
        What implementations are asked beside what any attention is, see `refattn.verify.adapters.conventions`.
    outputs
        Fields of the core's `saved` that are outputs beside `out`, each with the equation that computes it.
    fallback_equation
        Equations that are not computed where an option is not given, each with the one whose value goes on then.
    accumulates_before_rounding
        Equations whose values a kernel may sum before it rounds them, each with the equations, the first that ran,
        that such a rounding is felt in.
    differentiable
        Options of the core that are numbers with a gradient, and such numbers of its families, by their own names.
    families
        The options that are one of several kinds (`refattn.mechanisms.option_kinds`), each with what makes its object.
    forbidden
        Which options of the core and of the block do not go together: when, and the message, see
        `refattn.mechanisms.option_kinds.refuse`.
    one_sequence
        Whether queries and keys are those of the same tokens, and so have to be as many.
    configs
        Further configurations of the block whose gradients are checked, beside width and heads. A ``Config`` that reads
        fewer fields of the context than the mechanism tells them as ``context_fields``.
    sampled
        Options that the samples of properties are given, if the defaults are not what they should be tried on. An
        `Input` has its axes, and in place of a shape ().
    tokenless
        Inputs and outputs beside q, k, v that have no axis of tokens, such as the state of a recurrence.
    perturbation
        What the check of properties adds to numbers that must not matter: less if the mechanism raises for them.
    tiled
        Whether an implementation cuts queries and keys into tiles, so that properties are tried on lengths of several.
    provides
        What the block brings to a layer itself: "norm" (its own norms and residual; otherwise a model gives it
        normalised tokens and adds the result), "mlp" (it contains or replaces the MLP sublayer).
    stream
        Decoding token by token; None where the mechanism has to compute everything again.
    grow
        How a block gets wider, None where it cannot: a module with ``Options`` (a dataclass; the trainer reads its
        ``keeps``, ``searches``, ``amplitude``, ``gain`` and ``most``), ``observe(params, saved, d_state, keep=)`` which
        gathers statistics at the block's backward, ``merge(a, b)`` of two of them, ``plan(params, statistics, options,
        columns=, halves=)`` with ``columns``, ``slope``, ``gain`` and ``facts``, ``apply(plan, amplitude)`` which gives
        parameters whose arrays grew at the end of their axes, ``search(loss, before, slope, options)``,
        ``facts_of(found)`` and ``width(params)``; it may have ``TAGGED``, the modules whose lines carry the equations
        of all this.
    diagnostics
        How far a block is from rest, None where there is no such thing: a module with ``force(saved)`` for what the
        block's forward saved, which returns the sum of the squared norms of the gradient of an energy over batch and
        heads, a 0-d array, and of how many. The trainer's setting ``gamma`` needs it.
    pointer
        How the last queries of a block point at tokens, None where there is no such thing: a module with ``init`` (as
        that of a block, of its configuration; what it returns has a ``block``), ``forward(params, x, context)``, which
        returns the logarithms (b, h, i, 1 + i) of weights of an empty token and the tokens x, the next x, and what is
        saved, ``backward(params, saved, d_log_weights, d_x)``, which returns the gradients of x and of the parameters,
        and to go on token by token ``start(params, batch)`` and ``extend(params, cache, x, context)``, which returns a
        cache in place of saved. Its lines carry the equations of all this.
    pictures
        What a page that steps through a run shows on top.
    learned
        The numbers that a block has learned, by name, for given parameters, as the trainer writes them down; None where
        there are none.
    redrawn
        How often a call of the block drew its random numbers again, for what its forward saved; None where it draws
        none.
    presets
        Settings after a source by name, as `refattn.train.settings` has them; ``--set preset=NAME`` takes one.
    whose
        Of each preset whose each setting is, by its name (``block.order``): "printed, PLACE", "code, PLACE" of what
        only the authors' code has, or "ours, REASON". Settings that the preset leaves at their defaults may be named.
    layers
        Maps of q, k and v that a block may have in place of the core, each as a record of its own, with its equations,
        second derivation and designed cases: they are checked beside the core.
    parts
        How a call is cut into parts that the definition can afford: a module with ``of_queries`` and ``of_keys``, as
        softmax attention has it; None where only whole calls can be judged.

    Examples
    --------
    >>> import refattn as ra
    >>> record = ra.mechanism("softmax")
    >>> record.context_fields
    ('mask', 'key_mask', 'causal', 'memory', 'memory_mask')
    >>> record.equations["SM.1"]
    's_ij = scale q_i . k_j'
    >>> record.case("tiny").inputs["q"].shape
    (1, 2, 4, 2)
    >>> record.claims[0].claim
    'attention is the mean of the values, weighted by the softmax of scaled inner products'
    """

    name: str
    title: str
    source: str
    equation_modules: tuple[ModuleType, ...]
    context_fields: tuple[str, ...]
    core: ModuleType | None
    block: Block
    properties: tuple[str, ...]
    outputs: Mapping[str, str] = field(default_factory=dict)
    fallback_equation: Mapping[str, str] = field(default_factory=dict)
    accumulates_before_rounding: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    families: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    block_modules: tuple[ModuleType, ...] = ()
    one_sequence: bool = False
    configs: tuple[Mapping[str, Any], ...] = ()
    forbidden: Forbidden = ()
    sampled: Mapping[str, Any] = field(default_factory=dict)
    tokenless: tuple[str, ...] = ()
    perturbation: float = 1e6
    tiled: bool = True
    provides: tuple[str, ...] = ()
    stream: Stream | None = None
    grow: ModuleType | None = None
    diagnostics: Any = None
    pointer: Any = None
    learned: Callable[[Any], Mapping[str, Array]] | None = None
    redrawn: Callable[[Any], int] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whose: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    address: str = _later(lambda record: record.name)
    implementations: tuple[str, ...] = _later(lambda record: tuple(getattr(record.core, "IMPLEMENTATIONS", ())))
    defaults: Mapping[str, Any] = _later(lambda record: defaults_of(record.core.forward) if record.core else {})
    definition: ModuleType | None = None
    example: Example | None = _in_room("example", "EXAMPLE", None)
    tour: Tour | None = _in_room("tour", "TOUR", None)
    loops: ModuleType = _in_room("loops", empty=None)
    pictures: tuple[Picture, ...] = _in_room("layer.pictures", "PICTURES")
    cases: tuple[Case, ...] = _in_room("testing.cases", "CASES")
    kernel_sizes: tuple[Case, ...] = _in_room("testing.kernel_sizes", "KERNEL_SIZES")
    rounding_scales: Mapping[str, RoundingScale | None] = _in_room("testing.rounding_scales", "ROUNDING_SCALES", {})
    further_rounding_scales: Mapping[str, RoundingScale] = _in_room("testing.rounding_scales", "FURTHER", {})
    stored: Mapping[str, RoundingScale | None] = _in_room("testing.rounding_scales", "STORED", {})
    named_roundings: Mapping[str, Mapping[str, RoundingScale]] = _in_room("testing.rounding_scales", "NAMED", {})
    wrong: Mapping[str, WrongKernel] = _in_room("testing.wrong", "WRONG", {})
    questions: tuple[Question, ...] = _in_room("testing.questions", "QUESTIONS")
    layers: tuple[Mechanism, ...] = _in_room("testing.layers", "LAYERS")
    parts: ModuleType | None = _in_room("testing.parts", empty=None)
    block_derived_twice: Callable[[], tuple[Mapping[str, Array], Mapping[str, Array]]] | None = _in_room(
        "testing.block_derived_twice", "block_derived_twice", None
    )

    @property
    def home(self) -> str:
        """The package of the definition, which has the folder's other files; "" without a definition."""
        return self.definition.__name__.rpartition(".")[0] if self.definition else ""

    def changed(self, **fields: Any) -> Mechanism:
        """Return the record with other fields, as `dataclasses.replace` does, but without reading those that wait."""
        return Mechanism(**{**vars(self), **fields})

    @property
    def equations(self) -> dict[str, str]:
        """All equations of the mechanism, id to formula, in the order of the docstrings."""
        return {id: formula for module in self.equation_modules for id, formula in equations.declared(module).items()}

    @property
    def extra_modules(self) -> tuple[ModuleType, ...]:
        """The modules whose lines carry equations of what a block is used for, how it grows and points."""
        pointer = () if self.pointer is None else (self.pointer,)
        return (*getattr(self.grow, "TAGGED", ()), *pointer)

    @property
    def pulled(self) -> tuple[str, ...]:
        """The outputs beside `out` that have a gradient: those that the core's backward takes one of."""
        taken = inspect.signature(self.core.backward).parameters if self.core is not None else {}
        return tuple(name for name in self.outputs if f"d_{name}" in taken)

    @property
    def claims(self) -> Claims:
        """What its sources claim, read from `claims.toml` of its folder or of `testing/`; none if neither is there."""
        import tomllib

        home = resources.files(self.home) if self.home else None
        files = [] if home is None else [home / "testing" / "claims.toml", home / "claims.toml"]
        texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()][:1]
        rows = [row for text in texts for row in tomllib.loads(text)["claims"]]
        return Claims(Claim(**{**row, "tests": tuple(row["tests"])}) for row in rows)

    def numbers(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the differentiable numbers that are given among options of the core, by their own names."""
        given = numbers_of(options, self.families)
        return {name: value for name, value in given.items() if name in self.differentiable}

    def with_numbers(self, options: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of the core with such numbers; those that no option and no family of them has are left out."""
        usual = {name: self.defaults[name] for name in self.families if name in self.defaults and name not in options}
        found = with_numbers({**usual, **options}, self.families, numbers)
        # A family that has none of these numbers and was not given stays so: it may come in as an array.
        return {n: x for n, x in found.items() if n in self.defaults and (n not in usual or x is not usual[n])}

    def case(self, name: str) -> Case:
        """Return the case of this name; ValueError where there is none."""
        known = {case.name: case for case in (*self.cases, *self.kernel_sizes)}
        if isinstance(name, str) and name in known:
            return known[name]
        needs = ", ".join(case.name for case in self.cases)
        raise ValueError(f"case: got {name!r}{meant(name, known)}, needs one of {needs}")

    def __repr__(self) -> str:
        """Return what a caller asks for first: options, outputs, and what there is to read and to run."""
        return "\n".join(f"{word:<16} {text}" for word, text in self._facts())

    def _repr_html_(self) -> str:
        return html_table((), self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        options = (name if usual is None else f"{name}={usual!r}" for name, usual in self.defaults.items())
        facts = {
            "mechanism": f"{self.name}: {self.title}",
            "source": self.source,
            "implementations": ", ".join(self.implementations),
            "options": ", ".join(options),
            "outputs": ", ".join(("out", *self.outputs)) if self.core else "",
            "cases": f"{len(self.cases)} designed, {len(self.kernel_sizes)} in sizes of kernels",
            "claims": f"{len(self.claims)}; equations: {len(self.equations)}",
        }
        return [(word, text) for word, text in facts.items() if text]
