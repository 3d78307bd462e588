"""Dropout with given masks: some elements of what an oracle says are left out, the others made larger.

In place of y, the force (SYMP.13 and its like), the velocity (SYMP.17 and its like) or what the MLP adds
(SYMP.mlp_out),
stands keep y, and its gradient is keep times that of keep y. An element of keep is 0 or 1 / (1 - rate).

Axes: b batch, h head, i token as a query, j token as a key, m width.

Source: the authors' first program: the force of softmax attention, the velocity of linear attention, what the MLP adds,
and the weights of attention of the baselines (SM.kept). It draws a mask for each call of the oracle; here all calls
of a step have one.

The weights of the oracle are kept whole, as there: their sum z divides velocities and energies besides, and a force of
fewer weights would be that of no z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from refattn.args import check_floating
from refattn.mechanisms.sympformer.layer.mlp import Momentum, Velocity
from refattn.mechanisms.sympformer.oracles.softmax import Softmax
from refattn.mechanisms.sympformer.params import Layer
from refattn.xp import Array, raised


@dataclass(frozen=True)
class Dropped:
    """An oracle, or the attention of a baseline, of whose force and velocity elements are left out."""

    oracle: Any
    keep: Mapping[str, Array]

    def forward(self, layer: Layer, *given: Any) -> tuple[Any, Any]:
        """Return the answer with what is left of the force, and what was saved."""
        answer, saved = self.oracle.forward(layer, *given)
        if layer.params.config.integrator.baseline:
            return self.drop("force", answer), saved
        return replace(answer, g=self.drop("force", answer.g)), saved

    def backward(self, layer: Layer, saved: Any, d_force: Array | None, *rest: Any) -> Any:
        """Return the gradients that the oracle returns."""
        return self.oracle.backward(layer, saved, self.drop("force", d_force), *rest)

    def velocity(self, moved: Array, context: Any) -> Array:
        """Return what is left of the velocity."""
        return self.drop("velocity", self.oracle.velocity(moved, context))

    def velocity_backward(self, moved: Array, speed: Array, context: Any, d_speed: Array) -> tuple[Array, Any]:
        """Return the gradients of B p and of what the velocity needs beside it."""
        whole = self.oracle.velocity(moved, context) if "velocity" in self.keep else speed  # (b, i, m): y
        return self.oracle.velocity_backward(moved, whole, context, self.drop("velocity", d_speed))

    def drop(self, name: str, y: Any) -> Any:
        """Return keep y for y or a gradient: all of it where there is no mask of this name."""
        keep = self.keep.get(name)
        return y if keep is None or y is None else keep * y


def masks_of(config: Any, draws: Mapping[str, Array], x: Array) -> dict[str, Array]:
    """Return the masks and the noise of a context; raise where a block of this configuration has no use for one.

    "weights" broadcasts to (b, h, i, j), the others to (b, i, m): "force", "velocity" and "mlp", and those of `noise`.
    """
    b, n, m = x.shape
    baseline, attends = config.integrator.baseline, config.integrator.baseline and type(config.oracle) is Softmax
    takes = {
        "force": not config.matrices,
        "velocity": not baseline,
        "weights": attends,
        "mlp": hasattr(config.mlp, "ratio"),
        "noise_start": not config.rests and not config.matrices,
        **dict.fromkeys(("noise_ahead", "noise_force", "noise_momentum"), hasattr(config.integrator, "connection")),
        **{f"noise_mlp_{name}": isinstance(config.mlp, Momentum | Velocity) for name in ("ahead", "force", "momentum")},
    }
    if getattr(config.integrator, "connection", "none") != "none":
        # A connection is that of all weights, and of the force as it is.
        takes |= dict.fromkeys(("force", "weights", "noise_force", "noise_momentum"), False)
    found = {}
    for name, keep in draws.items():
        if not takes.get(name, False):
            needs = ", ".join(each for each, there in takes.items() if there)
            raise ValueError(f"context.draws: got {name!r}, a block of this configuration takes {needs}")
        check_floating(x=x, **{f"context.draws[{name!r}]": keep})
        plane = (b, config.heads, n, n) if name == "weights" else (b, n, m)
        shape = tuple(keep.shape)
        if len(shape) != len(plane) or any(one not in (1, size) for one, size in zip(shape, plane, strict=True)):
            raise ValueError(f"context.draws[{name!r}]: got shape {shape}, needs one that broadcasts to {plane}")
        found[name] = raised(keep)
    return found
