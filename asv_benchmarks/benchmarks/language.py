"""A small language model of each mechanism: how fast it trains, and how long one more token takes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from refattn import philox
from refattn.model import decode
from refattn.train import data, loop
from refattn.train.settings import Settings
from refattn.train.step import to_tokens

from .common import BACKENDS, MECHANISMS, Timed, timer, usable

STEPS = 3
"""Steps of training that are timed, the first one aside; the fastest counts."""


def settings_of(mechanism: str, backend: str, context: int) -> Settings:
    """Return the settings of a model of two layers."""
    usable(backend)
    return Settings(mechanism, backend=backend, context=context, width=64, heads=4, layers=2, batch=4, warmup=1)


@functools.lru_cache(maxsize=1)
def text_of() -> data.Text:
    """Return bytes that are not all alike."""
    made = philox.integers((1 << 16,), 0, 96, seed=0, purpose="benchmarks.text").astype(np.uint8)
    return data.Text("made", made, made, data.Counts(), "")


class Train:
    """Tokens per CPU second of one thread, or second of a device: batch, loss, gradients, clipping and AdamW."""

    version = "1"
    timeout = 300.0
    unit = "tokens per second"
    kind = "rate"
    param_names = ["mechanism", "backend"]
    params = [MECHANISMS, BACKENDS]

    def setup(self, mechanism: str, backend: str) -> None:
        self.settings = settings_of(mechanism, backend, 64)

    def track_tokens(self, mechanism: str, backend: str) -> float:
        owner, state, least = usable(backend), loop.fresh(self.settings), float("inf")
        clock = timer(owner)
        owner.keep_memory()  # as the trainer does
        for n in range(STEPS + 1):
            start = clock()
            state, _ = loop.step(state, self.settings, text_of())
            owner.synchronize()
            least = min(least, clock() - start) if n else least
        return self.settings.batch * self.settings.context / least


class Step(Timed):
    """A training step of sixteen tokens: what is no arithmetic in it shows."""

    param_names = ["mechanism", "backend"]
    params = [MECHANISMS, BACKENDS]

    def setup(self, mechanism: str, backend: str) -> None:
        self.owner, self.settings = usable(backend), settings_of(mechanism, backend, 16)
        self.timer, self.state = timer(self.owner), loop.fresh(self.settings)

    def time_step(self, mechanism: str, backend: str) -> None:
        loop.step(self.state, self.settings, text_of())
        self.owner.synchronize()


class Decode(Timed):
    """The latency of a token: the logits of the next one, after n others in the cache."""

    param_names = ["mechanism", "n", "backend"]
    params = [MECHANISMS, [64, 255], BACKENDS]

    def setup(self, mechanism: str, n: int, backend: str) -> None:
        self.timer, self.params_of, self.cache, self.token = decoding(mechanism, n, backend)
        self.owner = usable(backend)

    def time_token(self, mechanism: str, n: int, backend: str) -> None:
        decode.extend(self.params_of, self.cache, self.token)
        self.owner.synchronize()


@functools.lru_cache(maxsize=1)  # setup runs before every sample
def decoding(mechanism: str, n: int, backend: str) -> tuple[Any, ...]:
    """Return the clock, the parameters, the cache after n tokens and the next token."""
    settings = settings_of(mechanism, backend, 256)
    params = loop.fresh(settings).params
    tokens = to_tokens(params, text_of().train[None, : n + 1].astype("int64"))
    _, cache = decode.extend(params, decode.start(params, 1), tokens[:, :n])
    return timer(usable(backend)), params, cache, tokens[:, n:]
