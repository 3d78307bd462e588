"""The loop: from settings and a folder to a trained model, one step after the other, to the bit.

A step is a pure function of the state before it, the settings and the text: the batch comes from (seed, step), and
there is no other source of chance. So a run that was stopped anywhere goes on from its last checkpoint and ends with
the bytes that it would have ended with. Host side, but for what `step` calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from refattn import backends, model, tree
from refattn.train import baselines, checkpoint, data, diagnose, metrics, plot
from refattn.train.diagnose import DivergedError
from refattn.train.folder import Folder, begin, check_place, compare_with_checkpoint, hold
from refattn.train.interrupt import interruptible
from refattn.train.optimiser import AdamWState, clip
from refattn.train.sample import generate
from refattn.train.settings import Settings
from refattn.train.step import loss_and_gradients, score, to_tokens
from refattn.xp import Array


class Report(Protocol):
    """Who is told how far a run has come."""

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
    """

    folder: Path
    step: int
    finished: bool
    facts: dict[str, Any]
    sample: bytes


def run(settings: Settings, path: Path, report: Report, *, resume: bool = False) -> Result:
    """Train, or with `resume` go on, in a folder.

    Raises
    ------
    RunError, ValueError
        Where the settings, the text or the folder do not allow it.
    DivergedError
        Where a loss, a gradient or a parameter is not finite; the last good state is saved.
    OSError
        Where something cannot be read or written; what was saved before is untouched.
    """
    owner = backends.get(settings.backend)
    if settings.dtype == "float64":
        owner.enable_float64()
    owner.keep_memory()
    text = data.load(settings.data)
    data.check_length(text, settings.context)
    check_place(path, text)
    state = fresh(settings)  # before anything is written: it finds a device that is not there
    with hold(path) as folder:
        known = begin(folder, settings, text, resume=resume, warn=report.say)
        if resume:
            state = _load(folder, settings, state, report)
            began = f"going on after step {state.step} of {settings.steps}" if state.step else "starting at step 0"
            report.say(began if known else f"there is no run in {path}: {began}")
        metrics.cut(folder.metrics, state.step)
        state, stopped = _train(state, settings, text, folder, report)
        if stopped:
            return Result(path, state.step, False, {}, b"")
        return _finish(state, settings, text, folder, report)


def _train(
    state: Progress, settings: Settings, text: data.Text, folder: Folder, report: Report
) -> tuple[Progress, bool]:
    """Make the steps that are left and save on the way; return the state, and whether the user wants an end."""
    saved = state.step
    with interruptible(report.say) as stop, metrics.Metrics(folder.metrics) as record:
        while state.step < settings.steps and not stop.requested:
            state, row = _advance(state, settings, text, folder)
            record.append(row)
            if state.step % settings.checkpoint_every == 0 or state.step == settings.steps:
                record.sync()
                _save(folder, settings, state)
                saved = state.step
            report.step(row, settings.steps)
        if state.step != saved:
            record.sync()
            _save(folder, settings, state)
    return state, stop.requested


def _advance(state: Progress, settings: Settings, text: data.Text, folder: Folder) -> tuple[Progress, dict[str, Any]]:
    """Make one step, and score it where it is time to; DivergedError where numbers are not finite."""
    began = time.perf_counter()
    try:
        new, row = step(state, settings, text)
        if new.step % settings.score_every == 0 or new.step == settings.steps:
            row["heldout_bits"] = _score(new.params, _scored(settings, text), every=16)
    except DivergedError as error:
        raise DivergedError(f"step {state.step + 1}: {error}; {_keep(state, settings, folder)}") from error
    seconds = state.seconds + time.perf_counter() - began
    row["seconds"] = round(seconds, 6)
    return Progress(new.step, new.params, new.moments, seconds, new.tokens), row


def step(state: Progress, settings: Settings, text: data.Text) -> tuple[Progress, dict[str, Any]]:
    """Return the state after one more update, and what there is to write down of it.

    DivergedError where the loss, the gradients or the new parameters are not finite.
    """
    number = state.step + 1
    batch = _batch(state.params, settings, text, number)
    rate = settings.schedule(number)

    def compute() -> tuple[float, float, model.Params, AdamWState]:
        loss, gradients = loss_and_gradients(state.params, *batch, settings.accumulate)
        clipped, norm = clip(gradients, settings.clip)
        return loss, float(norm), *settings.optimiser.update(state.moments, state.params, clipped, rate)

    loss, norm, params, moments = diagnose.watched(state.params, compute, lambda found: diagnose.not_finite(*found[:3]))
    tokens = state.tokens + settings.batch * settings.context
    row = {"step": number, "loss": loss, "rate": rate, "norm": norm, "tokens": tokens}
    return Progress(number, params, moments, state.seconds, tokens), row


def _scored(settings: Settings, text: data.Text) -> data.Bytes:
    """Return the held-out text that is scored."""
    return text.heldout[: settings.score_bytes + 1]


def _batch(params: model.Params, settings: Settings, text: data.Text, number: int) -> tuple[Array, Array]:
    """Return the inputs and targets of a step."""
    drawn = data.batch(text.train, size=settings.batch, context=settings.context, seed=settings.seed, step=number)
    inputs, targets = (to_tokens(params, x) for x in drawn)
    return inputs, targets


def fresh(settings: Settings) -> Progress:
    """Return the state before the first step."""
    owner = backends.get(settings.backend)
    like = owner.from_numpy(np.zeros(1, settings.dtype), device=settings.device)
    params = model.init(settings.model, seed=settings.seed, like=like)
    return Progress(0, params, settings.optimiser.start(params), 0.0, 0)


def _score(params: model.Params, heldout: data.Bytes, every: int = 1) -> float:
    """Return the score of a text; DivergedError where it is not finite."""
    return diagnose.watched(
        params,
        lambda: score(params, heldout, every),
        lambda bits: None if math.isfinite(bits) else "the held-out score after it",
    )


def _keep(state: Progress, settings: Settings, folder: Folder) -> str:
    """Save the last state before numbers stopped being finite, and return in words what came of it."""
    if name := diagnose.parameter_not_finite(state.params):
        return f"{name} was not finite before this step"
    try:
        _save(folder, settings, state)
    except checkpoint.CheckpointError as error:
        return str(error)
    return f"the state after step {state.step} is saved"


def _save(folder: Folder, settings: Settings, state: Progress) -> None:
    leaves = tree.flatten({"params": state.params, "optimiser": state.moments})
    owner = backends.get(settings.backend)
    facts = {"settings": settings.to_json(), "tokens": state.tokens}
    checkpoint.save(folder.checkpoints, state.step, {n: owner.to_numpy(x) for n, x in leaves.items()}, facts)


def _load(folder: Folder, settings: Settings, first: Progress, report: Report) -> Progress:
    """Return the state of the newest checkpoint that is whole; the first one where there is none at all."""
    found = checkpoint.newest(folder.checkpoints, report.say)
    if found is None:
        return first
    compare_with_checkpoint(found, settings)
    checkpoint.prune(folder.checkpoints, found.step)  # a process that was killed may have come no further
    owner = backends.get(settings.backend)
    leaves = {name: owner.from_numpy(x, device=settings.device) for name, x in found.arrays.items()}
    whole: Any = tree.unflatten({"params": first.params, "optimiser": first.moments}, leaves)
    rows = metrics.read(folder.metrics) if folder.metrics.exists() else []
    seconds = max((row.get("seconds", 0.0) for row in rows if row["step"] <= found.step), default=0.0)
    return Progress(found.step, whole["params"], whole["optimiser"], seconds, found.facts["tokens"])


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
    prompt = heldout[: settings.context // 4 + 1].tobytes()
    made = generate(state.params, prompt, settings.sample_bytes, seed=settings.seed, temperature=settings.temperature)
    sample = prompt + made
    folder.write_json("result.json", facts)
    checkpoint.write_atomically(folder.path / "sample.txt", sample)
    try:
        plot.draw_loss(metrics.read(folder.metrics), facts, folder.path / "loss.png")
    except ImportError:
        report.say('loss.png is not drawn: pip install "refattn[plot]"')
    return Result(folder.path, state.step, True, facts, sample)
