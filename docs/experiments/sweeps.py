"""A sweep in place of one number, for each mechanism that moves, remembers, grows or fits.

    python -m docs.experiments.sweeps run     # some 10 minutes of one core; goes on where it was stopped
    python -m tools.draw sweeps               # the pictures, from the results

- `Agreement`: Kuramoto's order parameter over kappa, of his own system and of nodes with two wells.
- `Capacity`: how many pairs of random keys and values attention tells apart, without any training.
- `Widths`: the bottleneck over a training whose queries and keys, or whose values, grow.
- `Spectra`: eigenvalues of the operators that a layer of a trained model fits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import refattn as ra
from docs.experiments import koopman, teacher
from docs.experiments.runs import Job, Run, trains
from docs.experiments.training import fresh, trained
from refattn import model, philox
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import graph_of
from refattn.analysis.order import kuramoto, order_at_rest, order_in_time
from refattn.analysis.spectrum import spectrum_of
from refattn.mechanisms.growing.growth.bottleneck import bottleneck
from refattn.train import growing
from refattn.train.optimiser import AdamW, Group

RESULTS = Path(__file__).with_name("sweeps.jsonl")

Facts = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One measurement: its fields are all that it depends on."""

    text = False

    def to_json(self) -> Facts:
        """Return all that it depends on."""
        return {type(self).__name__.lower(): asdict(self)}

    def told(self, result: Mapping[str, Any]) -> str:
        """Return what came of it in a few words."""
        short = {name: x for name, x in result.items() if not isinstance(x, list)}
        return f"{self}: {short}"

    def result(self) -> Facts:
        """Measure."""
        began = time.process_time()
        return self.measured() | {"seconds": round(time.process_time() - began, 2)}

    def measured(self) -> Facts:
        """Return what came of it."""
        raise NotImplementedError


# --- the order parameter over kappa

NODES, TIME = 200, 60.0
FREQUENCIES = (0.5, 1.0, 1.4, 1.5, 1.6, 1.7, 1.8, 2.0, 2.5, 3.0, 4.0)
WELLS = tuple(round(0.02 * n, 2) for n in range(36))
GRAPHS = ("path:2", "cycle:9", "complete:9")
STARTS, AGREED, TOLERANCE = 200, 1e-6, 1e-3
"""Starts of a flow in wells; R of scores that agree is at least 1 less that; how finely the last kappa is found."""


@dataclass(frozen=True)
class Agreement(Sweep):
    """R over kappa: of Kuramoto's system ("frequencies"), or of double wells on a graph where they come to rest."""

    of: str

    def measured(self) -> Facts:
        """Return R for each kappa, and for wells the share of starts that agree and the kappa from which all do."""
        if self.of == "frequencies":
            late = [order_in_time(kuramoto(NODES, kappa), TIME) for kappa in FREQUENCIES]
            return {"order": [round(float(np.mean(x[len(x) // 2 :])), 4) for x in late]}
        order = order_at_rest(self.flow, WELLS, starts=STARTS)
        low, high = 0.0, max(WELLS)
        while high - low > TOLERANCE:
            middle = 0.5 * (low + high)
            agreed = np.all(order_at_rest(self.flow, [middle], starts=STARTS) >= 1.0 - AGREED)
            low, high = (low, middle) if agreed else (middle, high)
        share = np.mean(order >= 1.0 - AGREED, axis=1)
        rounded = [[round(float(x), 4) for x in values] for values in (np.mean(order, axis=1), share)]
        return {"order": rounded[0], "share": rounded[1], "all agree from": round(high, 3)}

    @property
    def flow(self) -> GraphFlow:
        """The wells on the graph."""
        return GraphFlow(graph_of(self.of), "identity", "double_well")


# --- recall without training

HEADS, QUERIES, RIGHT = 16, 64, 0.95
SIZES = tuple(round(2.0 ** (0.25 * n)) for n in range(8, 41))
"""How many pairs are tried: 4 to 1024, each number about 1.2 times the last."""


@dataclass(frozen=True)
class Capacity(Sweep):
    """Random keys with random values of one width: the query is a key, the answer the stored value that is nearest.

    Order None is softmax attention of the same normalised queries and keys, with the same scores.
    """

    width: int
    order: int | None
    alpha: float = 1.0
    delta: float = 0.0

    def measured(self) -> Facts:
        """Return the share of right answers by the number of pairs, and what has to be kept for the next query."""
        shares = [self.share(pairs) for pairs in SIZES]
        held = [pairs for pairs, share in zip(SIZES, shares, strict=True) if share >= RIGHT]
        return {
            "shares": [round(x, 4) for x in shares],
            "pairs": max(held, default=0),
            "bytes": self.bytes(max(held, default=0)),
        }

    def share(self, pairs: int) -> float:
        """Return the share of right answers among so many pairs."""
        k, v = (philox.normal((1, HEADS, pairs, self.width), seed=pairs, purpose=f"capacity.{n}") for n in "kv")
        k = (k - k.mean(-1, keepdims=True)) / k.std(-1, keepdims=True)
        asked = min(QUERIES, pairs)
        q = k[:, :, :asked]
        if self.order is None:
            out, _ = ra.softmax.forward(q / self.alpha, k, v)
        else:
            out, _ = ra.higher_order.forward(q, k, v, implementation="dense", **self.options)
        apart = np.sum(v**2, -1)[:, :, None] - 2.0 * out @ np.swapaxes(v, -1, -2)
        return float(np.mean(np.argmin(apart, axis=-1) == np.arange(asked)))

    def bytes(self, pairs: int) -> int:
        """Return the bytes of float32 that a head keeps: the state of sums, or all keys and values."""
        if self.order is None:
            return 4 * pairs * 2 * self.width
        k, v = np.zeros((2, 1, 1, 1, self.width), np.float32)
        state = ra.higher_order.empty_state(k, v, **self.options)
        return int(state.products.nbytes + state.values.nbytes)

    @property
    def options(self) -> Facts:
        """The options of higher-order attention."""
        normaliser = f"signed(delta={self.delta})" if self.delta else "signed"
        return {"order": self.order, "alpha": self.alpha, "normaliser": normaliser}


# --- the bottleneck over a training

STEPS, EVERY, GROWS = 1200, 100, (300, 600, 900)
FIRST = {"queries and keys": 2, "values": 4}
LAST = {"queries and keys": teacher.HEAD_WIDTH, "values": teacher.WIDTH}
WAYS = ("narrow", "scratch", "random", "optimal")


@dataclass(frozen=True)
class Widths(Sweep):
    """A training on the teacher task whose queries and keys, or whose values, begin narrow; the others are whole."""

    side: str
    way: str
    seed: int
    condition: float = 10.0

    def measured(self) -> Facts:
        """Return psi and the loss of the training sequences over the steps, the growths, and the last loss."""
        given, held_out = (teacher.task(self.seed, self.condition, 512, part) for part in ("x", "held out"))
        params = self.fresh(LAST[self.side] if self.way == "scratch" else FIRST[self.side])
        adam = AdamW(3e-3, 0.9, 0.999, 1e-8, (Group("*"),))
        moments, curve, growths = adam.start(params), [], []
        for step in range(STEPS + 1):
            if step % EVERY == 0:
                curve.append([step, _short(self.psi(params, given)), _short(teacher.loss(params, given))])
            if step in GROWS and self.way in ("random", "optimal"):
                grown = self.grown(params, given, step)
                growths.append(_short(teacher.loss(grown, given) / teacher.loss(params, given)))
                params, moments = grown, growing.widened(moments, grown)
                curve.append([step, _short(self.psi(params, given)), _short(teacher.loss(params, given))])
            if step < STEPS:
                part = teacher.batch(given, 64, self.seed, step)
                _, saved, d_state = teacher.gradient(params, part)
                params, moments = adam.update(moments, params, teacher.BLOCK.backward(params, saved, d_state)[1])
        return {"curve": curve, "growths": growths, "loss": _short(teacher.loss(params, held_out))}

    @property
    def columns(self) -> int:
        """How many columns a growth adds."""
        return (LAST[self.side] - FIRST[self.side]) // len(GROWS)

    def fresh(self, width: int) -> Any:
        """Return a fresh block."""
        sizes = {"head_width": teacher.HEAD_WIDTH, "value_width": teacher.WIDTH}
        sizes["value_width" if self.side == "values" else "head_width"] = width
        config = teacher.BLOCK.Config(width=teacher.WIDTH, heads=1, **sizes)
        return teacher.BLOCK.init(config, seed=self.seed, like=np.zeros(1))

    def psi(self, params: Any, given: teacher.Data) -> float:
        """Return the part of the gradient that the width hides."""
        if self.side == "values":
            return ValuesBottleneck(params, given).psi
        return bottleneck(params, teacher.observe(params, given)).psi

    def grown(self, params: Any, given: teacher.Data, step: int) -> Any:
        """Return the block with new columns."""
        if self.way == "random":
            return self._random(params, step)
        if self.side == "values":
            return ValuesBottleneck(params, given).grown(self.columns)
        options = teacher.GROWTH.Options(damping=0.01, seed=self.seed)
        found = teacher.observe(params, given, options.keeps)
        return teacher.GROWTH.grow(params, found, lambda p: teacher.loss(p, given), options, columns=self.columns)[0]

    def _random(self, params: Any, step: int) -> Any:
        def drawn(name: str, *shape: int) -> Any:
            scale = np.sqrt(teacher.WIDTH)
            return philox.normal(shape, seed=self.seed, purpose=f"widths.{name}", step=step) / scale

        if self.side == "values":
            return widened_values(params, drawn("w_v", teacher.WIDTH, self.columns), drawn("w_o", self.columns, 16))
        wide = {
            name: np.concatenate([getattr(params, name), drawn(name, 1, teacher.WIDTH, self.columns)], axis=2)
            for name in ("w_q", "w_k")
        }
        config = replace(params.config, head_width=wide["w_q"].shape[2], scale=params.config.factor)
        return replace(params, config=config, **wide)


class ValuesBottleneck:
    """The bottleneck of values: what the width of values keeps the product K = w_v w_o of one head from following.

    The block gives x + z K, where z are the tokens as they are attended. With the gradient G = z^T d of the loss with
    respect to K, W^2 = z^T z, and the projectors P_v on the columns of W w_v and P_o on the rows of w_o::

        H = (1 - P_v) W^-1 G (1 - P_o)          psi = |H|^2 / |W^-1 G|^2

    The block is linear in K, so that the length of a step along -H is the best one.
    """

    def __init__(self, params: Any, given: teacher.Data) -> None:
        out, _ = teacher.run(params, given.x)
        q, k = ((given.x @ w[0])[:, None] for w in (params.w_q, params.w_k))
        attended, _ = ra.softmax.forward(q, k, given.x[:, None], scale=params.config.factor)
        z, self.off = (x.reshape(-1, teacher.WIDTH) for x in (attended, out - given.wanted))
        sizes, vectors = np.linalg.eigh(z.T @ z)
        root, self.back = (vectors * sizes**power @ vectors.T for power in (0.5, -0.5))
        whole = self.back @ z.T @ self.off
        rows = np.linalg.qr(params.w_o.T)[0]
        columns = np.linalg.qr(root @ params.w_v[0])[0]
        self.normal = whole - columns @ (columns.T @ whole)
        self.normal = self.normal - self.normal @ rows @ rows.T
        psi = float(np.sum(self.normal**2) / np.sum(whole**2))
        self.psi = psi if psi > 1e-12 else 0.0  # rounding, where the width is whole
        self.params, self.z = params, z

    def grown(self, columns: int) -> Any:
        """Return the block with new columns along the first singular pairs of H, as long as lowers the loss most."""
        u, sigma, v = np.linalg.svd(self.normal)
        w_v, w_o = (
            self.back @ u[:, :columns] * np.sqrt(sigma[:columns]),
            -np.sqrt(sigma[:columns])[:, None] * v[:columns],
        )
        change = self.z @ w_v @ w_o
        length = float(-np.sum(self.off * change) / np.sum(change**2))
        return widened_values(self.params, np.sqrt(length) * w_v, np.sqrt(length) * w_o)


def widened_values(params: Any, w_v: Any, w_o: Any) -> Any:
    """Return a block of one head with columns w_v (m, columns) and rows w_o (columns, m) more."""
    wide = np.concatenate([params.w_v, w_v[None]], axis=2)
    config = replace(params.config, value_width=wide.shape[2])
    return replace(params, config=config, w_v=wide, w_o=np.concatenate([params.w_o, w_o]))


# --- the operators of a trained layer

SPECTRA = ("Koopman, 4 updates", "Tie")
LONGER, SEQUENCES, DRAWN = 4, 16, 160
"""How many times as long as `koopman.SMALLER` they are trained; sequences that are read; of so many queries or more the
largest eigenvalue is kept."""


@dataclass(frozen=True)
class Spectra(Sweep):
    """Eigenvalues of the operators of all layers of a model of the text, before and after its training."""

    name: str
    seed: int = 0

    text = True

    @property
    def run(self) -> Run:
        """The training."""
        (task, plan), (mechanism, options) = koopman.SMALLER["text"], koopman.UPDATES[self.name]
        return Run(mechanism, task, replace(plan, steps=LONGER * plan.steps), self.seed, options)

    def to_json(self) -> Facts:
        """Return the training."""
        return {"spectra": self.run.to_json()}

    def measured(self) -> Facts:
        """Return what the eigenvalues are, of each layer."""
        run = self.run
        first = fresh(run.mechanism, run.options, run.task, run.plan, run.seed)
        last, found = trained(run.mechanism, run.options, run.task, run.plan, run.seed)
        return {"bits": found["bits"], "fresh": self.layers(first), "trained": self.layers(last)}

    def layers(self, params: Any) -> list[Facts]:
        """Return of the last operator of every query in each layer how large its eigenvalues are, and some of them."""
        with ra.trace():
            _, saved = model.forward(params, next(iter(self.run.task.held_out())).inputs[:SEQUENCES])
        layers = []
        for layer in saved.layers:
            values = spectrum_of(layer.block.core).eigenvalues[-1]
            first, flat = values[..., 0].reshape(-1), values.reshape(-1)
            largest, some = np.abs(first), first[:: max(1, first.size // DRAWN)]
            layers.append(
                {
                    "largest": [_short(x) for x in np.quantile(largest, (0.1, 0.5, 0.9))],
                    "outside": _short(np.mean(largest > 1.0)),
                    "turning": _short(np.mean(np.abs(flat.imag) > 1e-6)),
                    "some": [[round(float(x.real), 3), round(float(x.imag), 3)] for x in some],
                }
            )
        return layers


def _short(x: Any) -> float:
    return float(f"{float(x):.4g}")


def every() -> list[Job]:
    """Return all of them."""
    return [*agreements(), *capacities(), *widths(), *spectra()]


def agreements() -> list[Agreement]:
    """Return Kuramoto's system, then wells on each graph."""
    return [Agreement(of) for of in ("frequencies", *GRAPHS)]


Kind = tuple[int | None, float, float]
"""Order, alpha and delta; order None is softmax attention."""

ONE: Kind = (2, 1.0, 0.0)
THREE: Kind = (2, 3.0, 0.0)
HALF: Kind = (2, 3.0, 0.5)
WHOLE: Kind = (2, 3.0, 1.0)
"""Order 2 with alpha 1, with the default of 3, and with the default where 1/2 or 1 is subtracted from the weights."""

READ: tuple[Kind, ...] = (
    (1, 1.0, 0.0),
    *(ONE, THREE, HALF, WHOLE),
    (4, 1.0, 0.0),
    *((None, 1.0, 0.0), (None, 3.0, 0.0)),
)
"""All that is measured."""


def capacities() -> list[Capacity]:
    """Return all of `READ` for each width."""
    return [Capacity(width, *kind) for width in (8, 16, 32, 64) for kind in READ]


def widths(seeds: Sequence[int] = (0, 1, 2)) -> list[Widths]:
    """Return all ways of both sides."""
    return [Widths(side, way, seed) for side in FIRST for way in WAYS for seed in seeds]


def spectra() -> list[Spectra]:
    """Return the models."""
    return [Spectra(name) for name in SPECTRA]


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Measure all that has no line in the results yet.")
def run() -> list[Job]:
    """Measure all that has no line in the results yet."""
    return every()


if __name__ == "__main__":
    main()
