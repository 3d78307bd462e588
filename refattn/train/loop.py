"""The loop: from settings and a folder to a trained model, one step after the other, to the bit.

A step is a pure function of the state before it, the settings and the text: the batch comes from (seed, step), and
there is no other source of chance. So a run that was stopped anywhere goes on from its last checkpoint and ends with
the bytes that it would have ended with. Host side, but for what `step` calls.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from refattn import backends, model, tree
from refattn.args import Maybe, Real, Whole, check_json
from refattn.mechanisms import registry
from refattn.messages import NO_PICTURE, BoundWarning
from refattn.train import baselines, checkpoint, data, diagnose, growing, metrics, plot
from refattn.train.diagnose import DivergedError
from refattn.train.folder import (
    Folder,
    RunError,
    begin,
    check_place,
    compare_with_checkpoint,
    hold,
    of_mechanism,
    stored_config,
)
from refattn.train.interrupt import Stop, interruptible
from refattn.train.optimiser import AdamWState, clip
from refattn.train.progress import Lines
from refattn.train.sample import generate
from refattn.train.settings import Settings, from_json
from refattn.train.step import loss_and_gradients, measured, score, to_tokens
from refattn.xp import Array, dtype_name


class Report(Protocol):
    """Who is told how far a run has come.

    >>> class Lines:
    ...     def __init__(self):
    ...         self.lines = []
    ...     def say(self, text):
    ...         self.lines.append(text)
    ...     def step(self, row, steps):
    ...         self.lines.append(f"{row['step']} of {steps}: {row['loss']:.2f}")
    >>> report = Lines()
    >>> report.say("the text has 400 bytes")
    >>> report.step({"step": 1, "loss": 5.545}, 2)
    >>> report.lines
    ['the text has 400 bytes', '1 of 2: 5.54']
    """

    def say(self, text: str) -> None:
        """Take one line."""

    def step(self, row: Mapping[str, Any], steps: int) -> None:
        """Take the metrics of a step that is done, of so many."""


@dataclass(frozen=True)
class Progress:
    """The state of a run after `step` updates."""

    step: int
    params: model.Params
    moments: AdamWState
    seconds: float
    tokens: int
    history: growing.History = field(default_factory=growing.History)


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes
    ----------
    folder
        Where it is.
    step
        Updates made.
    finished
        Whether these are all; False where the user stopped it.
    facts
        What ``result.json`` holds; empty where it is not finished.
    sample
        The text sample: a beginning from the held-out text, and what the model made of it.
    signal
        The number of the signal by which the user stopped it; 0 if it was not.

    Examples
    --------
    >>> from pathlib import Path
    >>> from refattn.train.loop import Result
    >>> stopped = Result(Path("runs/mine"), step=40, finished=False, facts={}, sample=b"")
    >>> f"{stopped.folder.name} stopped after {stopped.step} steps"
    'mine stopped after 40 steps'
    """

    folder: Path
    step: int
    finished: bool
    facts: dict[str, Any]
    sample: bytes
    signal: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each step, as the folder has them: step, loss (in nats), rate, norm, heldout_bits."""
        return metrics.read(self.folder / "metrics.jsonl")


def run(
    settings: Settings,
    path: str | Path | None = None,
    report: Report | None = None,
    *,
    resume: bool = False,
    exact: bool = False,
) -> Result:
    """Train, or with `resume` go on, in a folder.

    Parameters
    ----------
    settings
        Everything that the run depends on.
    path
        Its folder; runs/MECHANISM by default, or the next free name, and with `resume` the last of them.
    report
        Who is told how far the run has come; lines on standard error by default.
    resume
        Whether it goes on from the newest checkpoint in the folder.
    exact
        With `resume`: only where every bit will be as if it had never stopped.

    Returns
    -------
    Result
        Its `rows` have the loss of each step, its `facts` the scores at the end.

    Raises
    ------
    RunError, ValueError
        Where the settings, the text or the folder do not allow it.
    DivergedError
        Where a loss, a gradient or a parameter is not finite; the last good state is saved.
    OSError
        Where something cannot be read or written; what was saved before is untouched.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import refattn as ra
    >>> small = {"context": 8, "width": 4, "heads": 1, "layers": 1, "steps": 2, "warmup": 1, "batch": 2}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder)
    ...     _ = (path / "text").write_text("to be or not to be, " * 20)
    ...     settings = ra.train.Settings("softmax", data=str(path / "text"), sample_bytes=3, **small)
    ...     result = ra.train.run(settings, path / "run")
    ...     steps = [row["step"] for row in result.rows]
    >>> result.finished, steps
    (True, [1, 2])
    """
    if path is None:
        path = of_mechanism(registry.record_of(settings.mechanism, "run(settings)").name, resume)
    with _precision(settings), _least_bound():
        return _run(settings, Path(path), report or Lines(), resume, exact)


@contextmanager
def _precision(settings: Settings) -> Iterator[None]:
    """Have the library, which has to be usable, compute as precisely as the settings need."""
    owner = backends.usable(settings.backend)
    wide = settings.dtype == "float64" or settings.growing is not None
    with owner.with_float64() if wide else nullcontext(), owner.full_precision():
        yield


@contextmanager
def _least_bound() -> Iterator[None]:
    """Show of all warnings about a bound the one with the least, once, at the end: each batch has its own bound."""
    worst: BoundWarning | None = None
    others = warnings.showwarning

    def show(message: Warning | str, *rest: Any, **named: Any) -> None:
        nonlocal worst
        if not isinstance(message, BoundWarning):
            others(message, *rest, **named)
        elif worst is None or message.bound < worst.bound:
            worst = message

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", BoundWarning)
            warnings.showwarning = show
            yield
    finally:
        if worst is not None:
            warnings.warn(worst, stacklevel=4)


def _run(settings: Settings, path: Path, report: Report, resume: bool, exact: bool) -> Result:
    owner = backends.get(settings.backend)
    if settings.growing is not None and not owner.float64():
        raise ValueError(f"grow: got {settings.grow!r} with {owner.name}, which has no float64 here; growth needs it")
    owner.keep_memory()
    text = data.load(settings.data)
    data.check_length(text, settings.context)
    check_place(path, text)
    state = fresh(settings)  # before anything is written: it finds a device that is not there
    with hold(path) as folder:
        known = begin(folder, settings, text, resume=resume, warn=report.say, exact=exact)
        if resume:
            state = _load(folder, settings, state, report)
            began = f"going on after step {state.step} of {settings.steps}" if state.step else "starting at step 0"
            report.say(began if known else f"there is no run in {path}: {began}")
        metrics.cut(folder.metrics, state.step)
        state, stop = _train(state, settings, text, folder, report)
        if stop.is_set():
            return Result(path, state.step, False, {}, b"", stop.number)
        return _finish(state, settings, text, folder, report)


def _train(
    state: Progress, settings: Settings, text: data.Text, folder: Folder, report: Report
) -> tuple[Progress, Stop]:
    """Make the steps that are left and save on the way; return the state, and whether the user wants an end."""
    saved = state.step
    with interruptible(report.say) as stop, metrics.Metrics(folder.metrics) as record:
        while state.step < settings.steps and not stop.is_set():
            state, row = _advance(state, settings, text, folder)
            record.append(row)
            if "growth" in row:
                report.say(_growth_told(row))
            if state.step % settings.checkpoint_every == 0 or state.step == settings.steps:
                record.sync()
                _save(folder, settings, state)
                saved = state.step
            report.step(row, settings.steps)
        if state.step != saved:
            record.sync()
            _save(folder, settings, state)
    return state, stop


def _advance(state: Progress, settings: Settings, text: data.Text, folder: Folder) -> tuple[Progress, dict[str, Any]]:
    """Make one step, grow and score where it is time to; DivergedError where numbers are not finite."""
    began = time.perf_counter()
    try:
        new, row = step(state, settings, text)
        new, facts = grow(new, settings, text)
        if facts:
            row["growth"] = facts
        if new.step % settings.score_every == 0 or new.step == settings.steps:
            row["heldout_bits"] = _score(new.params, _scored(settings, text), every=16)
            row |= _learned(new.params)
    except DivergedError as error:
        raise DivergedError(f"step {state.step + 1}: {error}; {_keep(state, settings, folder)}") from error
    seconds = state.seconds + time.perf_counter() - began
    row["seconds"] = round(seconds, 6)
    return replace(new, seconds=seconds), row


def _learned(params: model.Params) -> dict[str, Any]:
    """Return what each layer's learned numbers have come to, where the mechanism tells; None where a layer has none."""
    told = params.config.record.learned
    if told is None:
        return {}
    passes, count = params.passes, len(params.layers)  # a number may be one of some passes alone
    layers = [{name: x for layer in passes[n::count] for name, x in told(layer.block).items()} for n in range(count)]
    names = dict.fromkeys(name for each in layers for name in each)
    return {"learned": {n: [float(each[n][0]) if n in each else None for each in layers] for n in names}}


def step(state: Progress, settings: Settings, text: data.Text) -> tuple[Progress, dict[str, Any]]:
    """Return the state after one more update, and what there is to write down of it.

    DivergedError where the loss, the gradients or the new parameters are not finite.

    >>> import pathlib, tempfile
    >>> from refattn.train import data, loop
    >>> from refattn.train.settings import Settings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "text"
    ...     _ = path.write_text("to be or not to be, " * 20)
    ...     text = data.load(path)
    >>> settings = Settings("softmax", context=8, width=4, heads=1, layers=1, warmup=1, steps=2, batch=2)
    >>> progress, row = loop.step(loop.fresh(settings), settings, text)
    >>> progress.step, row["tokens"]
    (1, 16)
    """
    number = state.step + 1
    batch = _batch(state.params, settings, text, number)
    adapts, redrawn = settings.gamma is not None, list[int]()

    def compute() -> tuple[float, float, model.Params, AdamWState, float, float | None]:
        chance = settings.seed, number
        loss, gradients, force = measured(
            state.params, *batch, settings.accumulate, forces=adapts, chance=chance, redrawn=redrawn
        )
        clipped, norm = clip(gradients, settings.clip)
        rate = settings.rate(number, force)
        return loss, float(norm), *settings.optimiser.update(state.moments, state.params, clipped, rate), rate, force

    found = diagnose.watched(state.params, compute, lambda found: diagnose.not_finite(*found[:3]))
    loss, norm, params, moments, rate, force = found
    tokens = state.tokens + settings.batch * settings.context
    row = {"step": number, "loss": loss, "rate": rate, "norm": norm, "tokens": tokens} | (
        {"force": force} if adapts else {}
    )
    row |= {"redrawn": sum(redrawn)} if any(redrawn) else {}
    history = state.history
    if settings.growing is not None:
        history = history.after(loss, settings.growing[0].window)
    return Progress(number, params, moments, state.seconds, tokens, history), row


def grow(state: Progress, settings: Settings, text: data.Text) -> tuple[Progress, dict[str, Any]]:
    """Return the state after a growth and what there is to write down; the same state and nothing where none is due."""
    if settings.growing is None or not growing.due(settings.growing[0], state.history, state.step):
        return state, {}
    schedule, options = settings.growing
    size = schedule.size(settings.width, settings.context)
    # A batch that no step trains on.
    batch = _batch(state.params, settings, text, settings.steps + state.step, size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a search may try what overflows
            params, moments, facts = growing.grow(state.params, state.moments, *batch, schedule, options)
    except ValueError:  # an option that does not fit; or else numbers that are not finite, which tells this:
        diagnose.watched(
            state.params,
            lambda: loss_and_gradients(state.params, *batch)[0],
            _infinite("the loss of the batch of a growth"),
        )
        raise
    if name := diagnose.parameter_not_finite(params):
        raise DivergedError(f"{name} is not finite after a growth")
    if not facts["grown"]:
        return state, facts
    history = replace(state.history, grown=state.step)
    return replace(state, params=params, moments=moments, history=history), facts


def _infinite(what: str) -> Callable[[float], str | None]:
    """Return what tells of a number that it is not finite, by these words."""
    return lambda number: None if math.isfinite(number) else what


def _growth_told(row: Mapping[str, Any]) -> str:
    """Return in one line what came of a look at growth."""
    facts = row["growth"]
    if not facts["grown"]:
        return f"step {row['step']}: nothing to gain by growing, widths {facts['widths']}"
    before, after = (facts[name] / math.log(2.0) for name in ("before", "after"))
    told = f"widths {facts['widths']}, loss {before:.4f} to {after:.4f} bits/byte"
    return f"step {row['step']}: {told}" + (f" at amplitude {facts['amplitude']:g}" if facts["amplitude"] else "")


def _scored(settings: Settings, text: data.Text) -> data.Bytes:
    """Return the held-out text that is scored."""
    return text.heldout[: settings.score_bytes + 1]


def _batch(
    params: model.Params, settings: Settings, text: data.Text, number: int, size: int | None = None
) -> tuple[Array, Array]:
    """Return the inputs and targets of a step."""
    size = settings.batch if size is None else size
    drawn = data.batch(text.train, size=size, context=settings.context, seed=settings.seed, step=number)
    inputs, targets = (to_tokens(params, x) for x in drawn)
    return inputs, targets


def fresh(settings: Settings) -> Progress:
    """Return the state before the first step."""
    owner = backends.get(settings.backend)
    like = owner.from_numpy(np.zeros(1, settings.dtype), device=settings.device)
    params = model.init(settings.model, seed=settings.seed, like=like)
    return Progress(0, params, settings.optimiser.start(params), 0.0, 0)


def continued(
    path: Path,
    prompt: bytes,
    length: int,
    warn: Callable[[str], None],
    *,
    own: Mapping[str, Any] | None = None,
    **choice: Any,
) -> bytes:
    """Return what the model of a run's newest checkpoint continues a prompt with; `choice` is for `generate`.

    `warn` is told of each checkpoint that is passed over. `own` are settings that no file holds, such as ``{"block":
    {"kernel": Own(...)}}``, of a run that has some.

    Raises
    ------
    RunError
        Where the folder holds no run, one without a checkpoint, or one with what neither the library nor `own` has.
    OSError
        Where it cannot be read, has a link in it, or no checkpoint is whole.
    """
    config = stored_config(path, own)
    if config is None:
        raise RunError(f"run: got {path}, needs the folder of a run: there is no config.json")
    settings = from_json(config["settings"], own)
    with _precision(settings):
        first = fresh(settings)
        state = checkpoint.newest_as(lambda found: _restored(found, settings, first), path / "checkpoints", warn)
        if state is None:
            raise RunError(f"run: {path} has no checkpoint yet")
        return generate(state.params, prompt, length, **choice)


def _score(params: model.Params, heldout: data.Bytes, every: int = 1) -> float:
    """Return the score of a text; DivergedError where it is not finite."""
    return diagnose.watched(params, lambda: score(params, heldout, every), _infinite("the held-out score after it"))


def _keep(state: Progress, settings: Settings, folder: Folder) -> str:
    """Save the last state before numbers stopped being finite, and return in words what came of it."""
    if name := diagnose.parameter_not_finite(state.params):
        return f"{name} was not finite before this step"
    try:
        _save(folder, settings, state)
    except (checkpoint.CheckpointError, RunError) as error:
        return str(error)
    return f"the state after step {state.step} is saved"


def _save(folder: Folder, settings: Settings, state: Progress) -> None:
    """Save a state in the run's own folder, wherever that is now; RunError if it is no longer what has its name."""
    leaves = tree.flatten({"params": state.params, "optimiser": state.moments})
    owner = backends.get(settings.backend)
    facts: dict[str, Any] = {"settings": settings.to_json(), "tokens": state.tokens}
    if settings.growing is not None:
        # The arrays tell their shapes; what else a block is after a growth stands in its configuration.
        blocks = [asdict(layer.block.config) for layer in state.params.layers]
        facts["growth"] = asdict(state.history) | {"blocks": blocks}
    try:
        checkpoint.save(folder.checkpoints, state.step, {n: owner.to_numpy(x) for n, x in leaves.items()}, facts)
    finally:
        folder.check_place()


def _load(folder: Folder, settings: Settings, first: Progress, report: Report) -> Progress:
    """Return the state of the newest checkpoint that is whole; the first one where there is none at all."""
    state = checkpoint.newest_as(lambda found: _restored(found, settings, first), folder.checkpoints, report.say)
    if state is None:
        return first
    checkpoint.prune(folder.checkpoints, state.step)  # a process that was killed may have come no further
    try:
        rows = metrics.read(folder.metrics)
    except FileNotFoundError:
        rows = []
    seconds = max((row.get("seconds") or 0.0 for row in rows if row["step"] <= state.step), default=0.0)
    return replace(state, seconds=seconds)


_FACTS = {
    "settings": dict,
    "tokens": Whole(),
    "growth": Maybe({"losses": [Real()], "grown": Whole(), "blocks": [dict]}),
}


def _restored(found: checkpoint.Checkpoint, settings: Settings, first: Progress) -> Progress:
    """Return the state that a checkpoint holds; ValueError where it is none of this run, whatever its sums say."""
    check_json(found.facts, _FACTS, "facts")
    compare_with_checkpoint(found, settings)
    history = growing.History()
    if settings.growing is not None:
        grown = found.facts.get("growth")
        if grown is None:
            raise ValueError("facts.growth: is missing")
        history = growing.History(tuple(grown["losses"]), grown["grown"])
        try:
            first = replace(first, params=_with_blocks(first.params, grown["blocks"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"facts.growth.blocks: {error}") from error
        first = replace(first, moments=settings.optimiser.start(first.params))
    template = tree.flatten({"params": first.params, "optimiser": first.moments})
    for name, x in found.arrays.items():
        if name not in template:
            continue  # which is told below
        shape, dtype = tuple(template[name].shape), dtype_name(template[name])
        # A growth gives counts of updates, which begin as single numbers, the axes of their parameters.
        fits = x.shape == shape or (name.startswith("optimiser.count.") and shape == ())
        if not fits or x.dtype.name != dtype:
            raise ValueError(f"{name}: got {x.dtype.name} {x.shape}, needs {dtype} {shape}")
    owner = backends.get(settings.backend)
    leaves = {name: owner.from_numpy(x, device=settings.device) for name, x in found.arrays.items()}
    whole: Any = tree.unflatten({"params": first.params, "optimiser": first.moments}, leaves)
    return Progress(found.step, whole["params"], whole["optimiser"], 0.0, found.facts["tokens"], history)


def _with_blocks(params: model.Params, configs: list[dict[str, Any]]) -> model.Params:
    """Return parameters whose blocks are fresh ones of other configurations."""
    block = params.config.record.block
    like = params.token_embedding
    blocks = [block.init(block.Config(**config), like=like) for config in configs]
    return replace(params, layers=tuple(replace(a, block=b) for a, b in zip(params.layers, blocks, strict=True)))


def _finish(state: Progress, settings: Settings, text: data.Text, folder: Folder, report: Report) -> Result:
    """Score the model, draw the loss, and write a sample and the result."""
    report.say("scoring the held-out text")
    heldout = _scored(settings, text)
    try:
        bits = _score(state.params, heldout)
    except DivergedError as error:
        raise DivergedError(f"step {state.step}: {error}; the state after it is saved") from error
    facts = {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(state.tokens / state.seconds, 1) if state.seconds else None,
        "parameters": sum(math.prod(x.shape) for x in tree.flatten(state.params).values()),
        "heldout_bytes": len(heldout) - 1,
        "heldout_bits": bits,
        "bigram_bits": baselines.bigram_bits(text.train, heldout),
        "gzip_bits": baselines.gzip_bits(heldout),
    }
    if settings.growing is not None:
        facts["widths"] = growing.widths(state.params)
    prompt = heldout[: settings.context // 4 + 1].tobytes()
    made = generate(state.params, prompt, settings.sample_bytes, seed=settings.seed, temperature=settings.temperature)
    sample = prompt + made
    folder.write_json("result.json", facts)
    folder.write("sample.txt", sample)
    try:
        plot.draw({"this run": metrics.read(folder.metrics)}, folder.held / "loss.png", facts)
    except ImportError as error:
        report.say(f"loss.png is not drawn: {NO_PICTURE} ({error})")
    return Result(folder.path, state.step, True, facts, sample)
