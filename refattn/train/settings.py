"""The settings of a run: what the command line can change, what a run folder remembers."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refattn import backends, model
from refattn.args import Each, Maybe, One, Real, Whole, check, check_all, checked, refused
from refattn.files import MIB, read_regular
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.messages import meant
from refattn.train import growing
from refattn.train.check_block import check_block
from refattn.train.optimiser import AdamW, adaptive_rate, default_groups
from refattn.train.schedule import WarmupCosine
from refattn.xp import backend, is_array

MAPPINGS = ("block", "growth")
"""Settings that hold settings of their own, called ``block.NAME``."""

MODEL = ("mechanism", "context", "width", "heads", "layers", "loops", "mlp", "mlp_ratio", "gelu", "decode")


COUNT = Whole(1, 2**31)
"""A count that a run takes: of steps, sequences, bytes."""

_ABOVE = Real(0.0, above=True)

NEEDS: dict[str, Any] = {
    **dict.fromkeys(("steps", "batch", "accumulate", "checkpoint_every", "score_every", "score_bytes"), COUNT),
    **dict.fromkeys(("warmup", "sample_bytes"), Whole(0, COUNT.high)),
    "seed": Whole(0, 2**64 - 1),
    "temperature": Real(0.0),
    **dict.fromkeys(("learning_rate", "scalar_rate"), _ABOVE),
    **dict.fromkeys(("clip", "gamma"), Maybe(_ABOVE)),
    **dict.fromkeys(("data", "backend"), str),
    "device": Maybe(str),
    "dtype": One(("float32", "float64")),
    "growth": Mapping,
}
"""What the settings have to be that nothing else reads: the model, the schedule and the optimiser check their own."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on, apart from the text and the versions of the libraries.

    Attributes
    ----------
    mechanism, context, width, heads, layers, loops, mlp, mlp_ratio, gelu, decode, block
        The model, as `refattn.model.Config` describes it; `block` are its options. A file has the mechanism's name.
    data
        "stdlib", "repeats" or a path.
    steps
        Number of updates.
    batch, accumulate
        Sequences of an update, and into how many portions they are cut to save memory.
    learning_rate, warmup, floor
        The schedule: the highest rate, the steps that lead up to it, and the last rate as a part of the highest.
    beta1, beta2, epsilon, weight_decay, decayed, scalar_rate, clip
        AdamW, what decays and how much faster learned numbers go, see `refattn.train.optimiser.default_groups`; and the
        largest norm of the gradients (None: no limit).
    gamma
        A step's rate is at most gamma / |grad E|, of a mechanism whose diagnostics tell that norm (None: no limit).
    seed
        Of the parameters, the order of the data and the sample.
    grow, growth
        When blocks get wider, of a mechanism that can: None, "auto" or a list of steps; and how, by the names of
        `refattn.train.growing.Schedule` and of the mechanism's options.
    backend, device, dtype
        The array library, its device (None: its default) and "float32" or "float64".
    checkpoint_every, score_every
        Steps from one checkpoint, or one score of the held-out text, to the next.
    score_bytes
        How many held-out bytes are scored at the end; on the way it is every sixteenth window of these.
    sample_bytes, temperature
        Length of the text sample at the end, and how adventurous it is.

    Examples
    --------
    >>> from refattn.train.settings import Settings
    >>> settings = Settings("koopman", steps=200, warmup=20, block={"updates": 3})
    >>> settings.learning_rate, settings.dtype, settings.block["updates"]
    (0.003, 'float32', 3)
    """

    mechanism: str | Mechanism
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4
    loops: int = 1
    mlp: bool | None = None
    mlp_ratio: int = 4
    gelu: str = "tanh"
    decode: str = "vocabulary"
    block: Mapping[str, Any] = field(default_factory=dict)
    data: str = "stdlib"
    steps: int = 800
    batch: int = 16
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup: int = 100
    floor: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    decayed: str = "weights"
    scalar_rate: float = 1.0
    clip: float | None = 1.0
    gamma: float | None = None
    seed: int = 0
    grow: str | Sequence[int] | None = None
    growth: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "numpy"
    device: str | None = None
    dtype: str = "float32"
    checkpoint_every: int = 100
    score_every: int = 100
    score_bytes: int = 262144
    sample_bytes: int = 400
    temperature: float = 0.8

    def __post_init__(self) -> None:
        check_all(self, **NEEDS)
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate: got {self.accumulate}, needs a divisor of the batch of {self.batch}")
        if self.gamma is not None and (record := self.model.record).diagnostics is None:
            raise ValueError(f"gamma: got {self.gamma} with {record.name}, needs one of {registry.able('diagnostics')}")
        self.model, self.schedule, self.optimiser, self.growing  # noqa: B018 (each checks its own)
        if self.block:
            check_block(self.model)
        late = [step for step in self.growing[0].steps if step > self.steps] if self.growing is not None else []
        if late:
            needs = f"steps of at most {self.steps}, which is the last one: --grow takes the place of a preset's"
            raise ValueError(f"grow: got step {late[0]}, needs {needs}")

    @functools.cached_property
    def model(self) -> model.Config:
        """The configuration of the model."""
        try:
            return model.Config(**{name: getattr(self, name) for name in MODEL}, options=self.block)
        except (TypeError, ValueError) as error:
            if getattr(error, "of_block", False):  # called as it was set
                raise type(error)(f"block.{error}") from error
            raise

    @functools.cached_property
    def schedule(self) -> WarmupCosine:
        """The learning rate of each step; a run shorter than the warm-up only warms up."""
        return WarmupCosine(self.learning_rate, min(self.warmup, self.steps - 1), self.steps, self.floor)

    def rate(self, step: int, force: float | None) -> float:
        """Return the learning rate of a step, where the gradient of an energy has the norm `force`."""
        largest = self.schedule(step)
        return largest if force is None or self.gamma is None else adaptive_rate(force, self.gamma, largest)

    @functools.cached_property
    def optimiser(self) -> AdamW:
        """The optimiser."""
        groups = default_groups(self.weight_decay, decayed=self.decayed, scalar_rate=self.scalar_rate)
        return AdamW(self.learning_rate, self.beta1, self.beta2, self.epsilon, groups)

    @functools.cached_property
    def growing(self) -> tuple[growing.Schedule, Any] | None:
        """When and how blocks get wider; None where they do not."""
        return growing.parts(self.model.record, self.grow, self.growth)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON has them.

        An object in the block is stored as the text that the block makes of it, such as "rbf(bandwidth=2.0)". One that
        has no such text, because it consists of functions, is stored as its description in angle brackets, which no
        option accepts: see `from_json`.
        """
        made = self.model.block(0)
        objects = {name: getattr(made, name) for name, x in self.block.items() if dataclasses.is_dataclass(x)}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["mechanism"] = self.model.record.name
        plain: dict[str, Any] = json.loads(
            json.dumps(fields | {"block": {**self.block, **objects}, "growth": dict(self.growth)}, default=_stored)
        )
        return plain


@checked(assignments=[str])
def parse(assignments: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``NAME=VALUE`` texts by name; ``block.NAME=VALUE`` go together under ``"block"``.

    What the model is may be called ``model.NAME``, too.

    A value is read as JSON where it is JSON (``3``, ``1e-3``, ``true``, ``null``), otherwise as a text.
    """
    values: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {name: {} for name in MAPPINGS}
    for text in assignments:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ValueError(f"--set: got {text!r}, needs NAME=VALUE")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        head, _, option = name.partition(".")
        if head == "model" and option in MODEL:
            values[option] = parsed
        elif option and head in MAPPINGS:
            options[head][option] = parsed
        else:
            values[name] = parsed
    for head, own in options.items():
        given = values.get(head, {})
        if not isinstance(given, dict):
            raise ValueError(f"{head}: got {given!r}, needs {head}.NAME=VALUE")
        if given or own:
            values[head] = given | own
    return values


@checked(given=Each(None))
def build(mechanism: str | Mechanism, given: Mapping[str, Any]) -> Settings:
    """Return the settings with the given values in place of the defaults; ValueError names one that there is not."""
    known = [f.name for f in dataclasses.fields(Settings) if f.name != "mechanism"]
    given = expanded(mechanism, given)
    for name in given:
        if name not in known:
            others = [name for name in known if name not in MAPPINGS] + ["preset", *(f"{x}.NAME" for x in MAPPINGS)]
            raise ValueError(f"setting: got {name!r}{meant(name, known)}, needs one of {', '.join(others)}")
    numbers = {f.name for f in dataclasses.fields(Settings) if str(f.type).startswith("float")}
    # 1 is as good as 1.0, as far as it is the same number.
    plain: dict[str, Any] = {
        n: float(x) if n in numbers and type(x) is int and abs(x) <= 2**53 else x for n, x in given.items()
    }
    return Settings(mechanism=mechanism, **plain)


def read_toml(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings that a TOML file holds: those of `parse`, with tables ``[block]``, ``[growth]``, ``[model]``.

    Raises
    ------
    OSError
        Where it cannot be read, or has more than 1 MiB.
    ValueError
        Where it is no TOML, a table has another name, it names a mechanism, or the backend is that of another package.
    """
    try:
        found = tomllib.loads(read_regular(file, MIB).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of the encoding, too, or nested too deeply
        raise ValueError(f"{os.fspath(file)}: is no TOML ({error})") from error
    tables = (*MAPPINGS, "model")
    for name, value in found.items():
        if isinstance(value, dict) is not (name in tables):
            needs = "a table" if name in tables else f"a value; tables are {', '.join(tables)}"
            raise refused(f"{os.fspath(file)}: {name}", value, needs, ValueError)
    try:
        check_backend(found.get("backend", "numpy"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(file)}: {error}") from error
    own = found.pop("model", {})
    for name, value in (found | own).items():
        if name == "mechanism":
            raise refused(f"{os.fspath(file)}: mechanism", value, "none: the command names it", ValueError)
    if wrong := [name for name in own if name not in MODEL or name in found]:
        raise ValueError(f"{os.fspath(file)}: model.{wrong[0]}: got {own[wrong[0]]!r}, which is none or is there twice")
    return found | own


@checked(given=Each(None))
def expanded(mechanism: str | Mechanism, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those that ``preset`` names in its place; one that is given too has the given value.

    >>> from refattn.train.settings import expanded
    >>> given = expanded("sympformer", {"preset": "baseline", "steps": 20})
    >>> given["steps"], given["learning_rate"], given["block"]["integrator"]
    (20, 0.0003, 'classical')
    """
    if "preset" not in given:
        return dict(given)
    record = mechanism if isinstance(mechanism, Mechanism) else registry.listed(mechanism)
    name, known = given["preset"], record.presets
    check("preset", name, str)
    if name not in known:
        has = f"one of {', '.join(known)}" if known else f"none: {record.name} has no presets"
        raise ValueError(f"preset: got {name!r}, needs {has}")
    for head in MAPPINGS:
        check(head, given.get(head, {}), Mapping)
    return merge(known[name], {key: value for key, value in given.items() if key != "preset"})


def from_json(stored: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings that `Settings.to_json` gave; ValueError, TypeError or KeyError where they are none.

    A file names the library's own mechanisms, kinds and backends, and nothing that it names is imported. What else a
    run has comes from `own`, the settings that the user gives: the record of a mechanism and a backend of another
    package, and the objects of the block, which have to be of the same description.
    """
    own = own or {}
    name, record = stored["mechanism"], own.get("mechanism")
    if not isinstance(record, Mechanism) or record.name != name:
        check("mechanism", name, str)
        if name not in registry.list_mechanisms():
            needs = f"one of {', '.join(registry.list_mechanisms())} in a file; the user names another one"
            raise refused("mechanism", name, f"{needs}, in the command or from Python", ValueError)
        record = name
    check_backend(stored.get("backend", "numpy"), own.get("backend"))
    block = stored.get("block", {})
    if isinstance(block, Mapping):
        block = {name: _given(name, x, own.get("block", {}).get(name)) for name, x in block.items()}
    given = {name: x for name, x in stored.items() if name != "mechanism"}
    return build(record, given | {"block": block})


def check_backend(name: Any, own: Any = None) -> None:
    """Raise ValueError where a file names a backend that is neither the library's own nor the one that the user gives.

    That of another package is code that this package brings: the user chooses it, not a file.
    """
    if isinstance(name, str) and name not in (*backends.BUILT_IN, own):
        needs = (
            f"one of {', '.join(backends.BUILT_IN)} in a file; the user gives another one, by --backend or from Python"
        )
        raise refused("backend", name, needs, ValueError)


def _stored(value: Any) -> str:
    """Return the description of an object, for a file."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"settings: got a {type(value).__name__}, needs what JSON has, or an object of an option")
    return f"<{_described(value)}>"


def _described(value: Any) -> str:
    """Return the kind of an object and what it consists of: numbers, and functions by name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_described(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    if is_array(value):
        return str(backend(value).to_numpy(value).tolist())
    return str(getattr(value, "__qualname__", repr(value)))


def _given(name: str, stored: Any, own: Any) -> Any:
    """Return a stored option of the block; in place of the description of an object the user's own object."""
    if not isinstance(stored, str) or not stored.startswith("<"):
        return stored
    if not dataclasses.is_dataclass(own) or _stored(own) != stored:
        needs = "the same object from Python, in the settings of `refattn.train.loop.run` or `continued`"
        raise refused(f"block.{name}", stored, f"{needs}: no file holds it", ValueError)
    return own


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings with the defaults of those that the version that stored them did not have."""
    later = {f.name: f.default for f in dataclasses.fields(Settings) if f.default is not dataclasses.MISSING}
    return later | {name: {} for name in MAPPINGS} | dict(stored)


def merge(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings, but for the mechanism, with the given ones in their place."""
    own = {head: {**stored.get(head, {}), **given.get(head, {})} for head in MAPPINGS}
    return {name: x for name, x in stored.items() if name != "mechanism"} | dict(given) | own


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, or that only one has; those in `MAPPINGS` as ``block.NAME``."""
    a, b = flat(stored), flat(wanted)
    return [name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name]]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those in `MAPPINGS` as ``block.NAME``."""
    own = {f"{head}.{name}": value for head in MAPPINGS for name, value in values.get(head, {}).items()}
    return {name: value for name, value in values.items() if name not in MAPPINGS} | own
