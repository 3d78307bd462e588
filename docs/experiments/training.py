"""One small training: a mechanism, a task and a seed in, scores, losses and gradient norms out.

The steps are those of `refattn.train`, the loss is weighted: a task says which tokens are asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from docs.experiments.baselines import RECORDS
from docs.experiments.tasks import Batch, Task
from refattn import model, tree
from refattn.ops.losses import cross_entropy_backward, cross_entropy_forward
from refattn.train import diagnose
from refattn.train.optimiser import AdamW, clip, default_groups
from refattn.train.schedule import WarmupCosine

PIECES = 10
"""Into so many pieces of equal length a training is cut for its curves."""

QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""What is kept of the norms of the gradients of a piece."""


@dataclass(frozen=True)
class Plan:
    """What a training is given beside its mechanism, its task and its seed.

    Attributes
    ----------
    width, heads, layers, mlp
        The model, as in `refattn.model.Config`.
    embedding
        The standard deviation of fresh embeddings.
    steps, batch
        Updates, and sequences of each.
    learning_rate, warmup, weight_decay, clip
        The schedule (half a cosine down to a twentieth) and AdamW, as in `refattn.train.settings`.
    """

    width: int
    heads: int
    layers: int
    mlp: bool
    embedding: float
    steps: int
    batch: int
    learning_rate: float
    warmup: int
    weight_decay: float
    clip: float = 1.0


def train(mechanism: str, options: Mapping[str, Any], task: Task, plan: Plan, seed: int) -> dict[str, Any]:
    """Return what came of a training.

    Returns
    -------
    dict
        - ``bits``, ``accuracy``: of what the task holds out; None after numbers that are not finite;
        - ``losses``: the mean, in nats, of each of the `PIECES` pieces of the training;
        - ``norms``: of each piece the `QUANTILES` of the norm of the gradients, before they are clipped;
        - ``clipped``: the part of all steps whose norm was above the limit;
        - ``diverged``: where and how numbers stopped being finite, or None;
        - ``seconds``: time of the CPU;
        - ``redrawn``: of blocks with a law, how often they drew again.
    """
    return trained(mechanism, options, task, plan, seed)[1]


def trained(
    mechanism: str, options: Mapping[str, Any], task: Task, plan: Plan, seed: int
) -> tuple[model.Params, dict[str, Any]]:
    """Return the parameters after a training, the last finite ones, and what came of it.

    Blocks with a law draw their numbers for every step. The result then has ``redrawn``, too, how often they drew again
    in all the steps, and is judged by batches as large as those of the training: a draw serves all queries of a call.
    """
    began = time.process_time()
    params = fresh(mechanism, options, task, plan, seed)
    law = getattr(params.at(0).block.config, "law", None)
    redrawn: list[int] = []
    optimiser = AdamW(plan.learning_rate, beta1=0.9, beta2=0.95, groups=default_groups(plan.weight_decay))
    schedule = WarmupCosine(plan.learning_rate, min(plan.warmup, plan.steps - 1), plan.steps, 0.05)
    moments = optimiser.start(params)
    losses: list[float] = []
    norms: list[float] = []
    found: dict[str, Any] = {"bits": None, "accuracy": None}
    diverged = None
    try:
        for step in range(1, plan.steps + 1):
            batch = task.batch(plan.batch, seed=seed, step=step)

            def compute(step: int = step, batch: Batch = batch, state: Any = (params, moments)) -> Any:
                loss, gradients = loss_and_gradients(state[0], batch, chance=(seed, step), redrawn=redrawn)
                clipped, norm = clip(gradients, plan.clip)
                return loss, float(norm), *optimiser.update(state[1], state[0], clipped, schedule(step))

            loss, norm, params, moments = diagnose.watched(params, compute, lambda x: diagnose.not_finite(*x[:3]))
            losses.append(loss)
            norms.append(norm)
        found = score(params, task, plan.batch if law else None)
    except (diagnose.DivergedError, ArithmeticError) as error:  # the second: no inverse was found, or a division
        diverged = f"{f'step {len(losses) + 1}' if len(losses) < plan.steps else 'judged'}: {error}"
    pieces = [piece for piece in np.array_split(np.asarray(norms), PIECES) if len(piece)]
    return params, found | {
        "losses": [round(float(np.mean(piece)), 4) for piece in np.array_split(losses, PIECES) if len(piece)],
        "norms": [[float(f"{x:.3g}") for x in np.quantile(piece, QUANTILES)] for piece in pieces],
        "clipped": round(sum(norm > plan.clip for norm in norms) / plan.steps, 4),
        "diverged": diverged,
        "seconds": round(time.process_time() - began, 2),
        **({"redrawn": sum(redrawn)} if law else {}),
    }


def fresh(mechanism: str, options: Mapping[str, Any], task: Task, plan: Plan, seed: int) -> model.Params:
    """Return the parameters before the first step, float32 on NumPy."""
    config = model.Config(
        RECORDS.get(mechanism, mechanism),
        vocabulary=task.vocabulary,
        context=task.context,
        width=plan.width,
        heads=plan.heads,
        layers=plan.layers,
        mlp=plan.mlp,
        options=options,
    )
    params = model.init(config, seed=seed, like=np.zeros(1, np.float32))
    leaves = tree.flatten(params)
    factor = np.float32(plan.embedding / model.params.SPREAD)
    scaled = {name: leaves[name] * factor for name in ("token_embedding", "position_embedding")}
    return tree.unflatten(params, leaves | scaled)


def loss_and_gradients(
    params: model.Params, batch: Batch, chance: tuple[int, int] | None = None, redrawn: list[int] | None = None
) -> tuple[float, model.Params]:
    """Return the mean loss of the tokens that are asked for, in nats, and its gradients.

    `chance` and `redrawn` are those of `refattn.train.step.measured`.
    """
    logits, saved = model.forward(params, batch.inputs, training=True, chance=chance)
    if redrawn is not None and (count := params.config.record.redrawn) is not None:
        redrawn.extend(count(layer.block) for layer in saved.layers)
    losses, loss_saved = cross_entropy_forward(logits, batch.targets)
    # forward: loss = sum(losses * shares)
    shares = batch.weights / np.sum(batch.weights)
    return float(np.sum(losses * shares)), model.backward(params, saved, cross_entropy_backward(loss_saved, shares))


def score(params: model.Params, task: Task, size: int | None = None) -> dict[str, float]:
    """Return the mean loss in bits, and how often the likeliest token is the right one, of what the task holds out.

    It is judged in batches as the task cuts them, or of at most `size` sequences.
    """
    bits = right = count = 0.0
    for batch in (part for whole in task.held_out() for part in cut(whole, size or len(whole.inputs))):
        logits, _ = model.forward(params, batch.inputs)
        losses, _ = cross_entropy_forward(logits, batch.targets)
        bits += float(np.sum(losses * batch.weights, dtype=np.float64)) / math.log(2.0)
        right += float(np.sum((np.argmax(logits, axis=-1) == batch.targets) * batch.weights))
        count += float(np.sum(batch.weights))
    return {"bits": round(bits / count, 5), "accuracy": round(right / count, 5)}


def cut(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield the sequences of a batch, at most so many at a time."""
    for first in range(0, len(batch.inputs), size):
        rows = slice(first, first + size)
        yield Batch(batch.inputs[rows], batch.targets[rows], batch.weights[rows])
