"""A kernel of the linear recurrences in plain NumPy: tokens in chunks, a state that goes from chunk to chunk, and back.

It is right for any chunk. Each step is a method, so that a fault is a few lines: another step. States
are (b, g, d, e), with keys repeated for each state head and queries, by state head, (b, g, r, n, d).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, Kernel

GATES = ("beta", "log_decay", "log_momentum", "step")


@dataclass
class Token:
    """What the backward reads of one token: D, S, e, u, and with a momentum M of the token before, and M."""

    decayed: Array
    state: Array
    error: Array
    write: Array
    before: Array
    momentum: Array


class Recurrence(Kernel):
    """The kernel, with the tokens of a chunk."""

    options = frozenset({*"qkv", *GATES, "state", "scale", "qk_norm", "norm_eps", "key_mask", "lengths", "chunk"})

    # What is read

    def given(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs as the kernel reads them."""
        return inputs

    def shown(self, x: Array, mask: Array, name: str) -> Array:
        """Return keys, values or a gate with 0 where a token is padding."""
        return np.where(mask.reshape(mask.shape[0], 1, -1, *[1] * (x.ndim - 3)), x, 0.0)

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0 / math.sqrt(max(d, 1)) if scale is None else scale

    def inverse_norm(self, x: Array, eps: float) -> Array:
        squared = np.sum(x * x, axis=-1, keepdims=True) + eps
        return np.where(squared == 0.0, 0.0, 1.0 / np.sqrt(np.where(squared == 0.0, 1.0, squared)))

    def first_state(self, state: Array) -> Array:
        """Return the state before the first token as the kernel reads it."""
        return state

    def begin(self, first: int) -> Any:
        """Return the factor of the state that comes in before token number `first`, where a sequence begins."""
        return 1.0

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def gate(self, name: str, n: int) -> Any:
        """Return what token n has of a gate, to be multiplied with a state; 1 without it."""
        if name not in self.x:
            return 1.0
        x = self.x[name][:, :, n]
        x = x[..., None, None] if x.ndim == 2 else x[..., None]
        return self.exp(x) if name.startswith("log") else x

    # A token

    def decayed(self, state: Array, n: int) -> Array:
        return self.gate("log_decay", n) * state

    def predicted(self, decayed: Array, key: Array) -> Array:
        return np.swapaxes(key, -1, -2) @ decayed

    def written(self, decayed: Array, key: Array, write: Array) -> Array:
        return decayed + key * write

    def moved(self, momentum: Array, key: Array, write: Array, n: int) -> Array:
        return self.gate("log_momentum", n) * momentum + key * write

    def kept(self, state: Array) -> Array:
        """Return the state as it is held from token to token."""
        return state

    def read(self, state: Array, n: int) -> Array:
        return self.scale * (self.q[:, :, :, n] @ state)

    def token(self, n: int, state: Array, momentum: Array) -> Token:
        key, value = self.k[:, :, n, :, None], self.x["v"][:, :, n, None, :]
        decayed = self.decayed(state, n)
        error = value - self.predicted(decayed, key) if "beta" in self.x else value
        write = self.gate("step" if self.moving else "beta", n) * error
        if not self.moving:
            return Token(decayed, self.kept(self.written(decayed, key, write)), error, write, momentum, momentum)
        moved = self.moved(momentum, key, write, n)
        return Token(decayed, self.kept(decayed + self.gate("beta", n) * moved), error, write, momentum, moved)

    # Chunks of a sequence

    def carried(self, state: Array, before: Array) -> Array:
        """Return the state that a chunk gives to the next one; `before` is the state before it."""
        return state

    def starts(self, first: int, last: int) -> Iterable[int]:
        """Return where chunks of a sequence begin."""
        return range(first, last, self.chunk)

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        """Compute the tokens of a sequence, and return the last state and momentum."""
        for start in self.starts(first, last):
            before = state
            for n in range(start, min(start + self.chunk, last)):
                self.tokens[n] = token = self.token(n, state, momentum)
                self.out[:, :, :, n] = self.read(token.state, n)
                state, momentum = token.state, token.momentum
            if start + self.chunk < last:
                state = self.carried(state, before)
        return state, momentum

    def written_out(self, out: Array, state: Array) -> tuple[Array, Array]:
        """Return the results as the kernel stores them."""
        return out, state

    # The backward

    def state_of(self, n: int) -> Array:
        """Return the state after a token as the backward reads it."""
        return self.tokens[n].state

    def carried_back(self, d_state: Array) -> Array:
        """Return the gradient of the state that a chunk gives to the one before it."""
        return d_state

    def d_state_in(self, d_state: Array) -> Array:
        """Return the gradient of the state that came in."""
        return d_state

    def d_key_of(self, token: Token, d_write: Array, d_error: Array, target: Array) -> Array:
        """Return the gradient of a key, (b, g, 1, d)."""
        d_key = token.write @ np.swapaxes(target, -1, -2)
        return d_key - d_error @ np.swapaxes(token.decayed, -1, -2) if "beta" in self.x else d_key

    def d_rate(self, token: Token, d_write: Array) -> Array:
        """Return the gradient of beta, or of the step with a momentum."""
        return np.sum(d_write * token.error, axis=(-2, -1))

    def d_decay(self, token: Token, d_decayed: Array) -> Array:
        """Return the gradient of the logarithm of the decay, of each row of the state."""
        return np.sum(d_decayed * token.decayed, axis=-1)

    def d_value(self, d_error: Array) -> Array:
        return d_error

    def d_unit(self, x: Array, d_y: Array, eps: float) -> Array:
        r = self.inverse_norm(x, eps)
        return r * (d_y - x * r * np.sum(d_y * x * r, axis=-1, keepdims=True))

    def back(self, n: int, d_out: Array, d_state: Array, d_momentum: Array) -> tuple[Array, Array]:
        """Take a token back: return the gradients of the state and momentum before it."""
        token, key, query = self.tokens[n], self.k[:, :, n, :, None], self.q[:, :, :, n]
        d_row = d_out[:, :, :, n]
        self.d["q"][:, :, :, n] = self.scale * (d_row @ np.swapaxes(self.state_of(n), -1, -2))
        d_state = d_state + self.scale * (np.swapaxes(query, -1, -2) @ d_row)
        target, rate = d_state, "step" if self.moving else "beta"
        if self.moving:
            self.d["beta"][:, :, n] = np.sum(d_state * token.momentum, axis=(-2, -1))
            target = d_momentum + self.gate("beta", n) * d_state
            d_momentum = self.gate("log_momentum", n) * target
            self.d["log_momentum"][:, :, n] = np.sum(d_momentum * token.before, axis=(-2, -1))
        d_write = np.swapaxes(key, -1, -2) @ target
        if rate in self.x:
            self.d[rate][:, :, n] = self.d_rate(token, d_write)
        d_error = self.gate(rate, n) * d_write
        self.d["v"][:, :, n] = self.d_value(d_error)[:, :, 0]
        self.d["k"][:, :, n] = self.d_key_of(token, d_write, d_error, target)[:, :, 0]
        d_decayed = d_state - key * d_error if "beta" in self.x else d_state
        if "log_decay" in self.x:
            self.d["log_decay"][:, :, n] = self.d_decay(token, d_decayed)
        return self.gate("log_decay", n) * d_decayed, d_momentum

    def backward(self, d_out: Array, shape: tuple[int, ...], heads: tuple[int, int]) -> dict[str, Array]:
        """Return the gradients by name: of a state of this shape, of so many query and key heads."""
        self.d = {name: np.zeros_like(x) for name, x in {**self.x, "q": self.q, "k": self.k}.items()}
        if "log_decay" in self.x:
            self.d["log_decay"] = np.zeros(self.k.shape, self.k.dtype)
        d_start = np.zeros(shape, d_out.dtype)
        d_out = d_out.reshape(*self.q.shape[:4], d_out.shape[-1])
        for number, (first, last) in enumerate(self.bounds):
            rows = slice(number, number + 1) if self.packed else slice(None)
            d_state = np.zeros_like(self.state_in[rows])
            d_momentum = np.zeros_like(d_state)
            for start in reversed(list(self.starts(first, last))):
                for n in reversed(range(start, min(start + self.chunk, last))):
                    d_state, d_momentum = self.back(n, d_out, d_state, d_momentum)
                d_state = self.carried_back(d_state) if start > first else d_state
            d_state = self.d_state_in(self.begin(first) * d_state)
            d_start[rows] = np.stack([d_state, d_momentum], axis=2) if self.moving else d_state
        found, (queries, keys) = dict(self.d), heads
        d_q = found["q"].reshape(len(d_out), d_out.shape[1] * d_out.shape[2], *self.q.shape[3:])
        found["q"] = d_q.reshape(d_q.shape[0], queries, d_q.shape[1] // queries, *d_q.shape[2:]).sum(2)
        found["k"] = self.per_group(found["k"], keys)
        if self.eps is not None:
            found |= {name: self.d_unit(self.raw[name], found[name], self.eps) for name in ("q", "k")}
        if "log_decay" in self.x and self.x["log_decay"].ndim == 3:
            found["log_decay"] = found["log_decay"].sum(-1)
        if self.mask is not None:
            found |= {name: self.shown(x, self.mask, name) for name, x in found.items() if name != "q"}
        return {f"d_{name}": x for name, x in found.items()} | {"d_state": d_start}

    # All of it

    def run(
        self, inputs: Mapping[str, Array], options: Mapping[str, Any], d_out: Array | None, working: Any = np.float64
    ) -> dict[str, Array]:
        """Return out, state and, where there is an upstream gradient, the gradients, by name."""
        self.known(inputs, options)
        wide = {name: x.astype(working) if x.dtype.kind == "f" else x for name, x in inputs.items()}
        x = self.given(wide)
        self.mask, lengths = x.pop("key_mask", None), options.get("lengths")
        q, k, state = x.pop("q"), x.pop("k"), x.pop("state", None)
        self.moving = "log_momentum" in x
        if self.mask is not None:
            x, k = {name: self.shown(one, self.mask, name) for name, one in x.items()}, self.shown(k, self.mask, "k")
        self.x, self.raw = x, {"q": q, "k": k}
        (batch, queries, n, d), keys, (states, e) = q.shape, k.shape[1], x["v"].shape[1::2]
        self.scale, heads = self.scale_of(options.get("scale"), d), max(queries, states)
        self.eps = options.get("norm_eps", 1e-6) if options.get("qk_norm") else None
        with np.errstate(all="ignore"):
            if self.eps is not None:
                q, k = q * self.inverse_norm(q, self.eps), k * self.inverse_norm(k, self.eps)
            q = np.repeat(q, heads // max(queries, 1), axis=1)
            self.q, self.k = q.reshape(batch, states, heads // states, n, d), k[:, self.head_of(states, keys)]
            self.packed = lengths is not None
            ends = np.cumsum([0, *lengths]) if lengths is not None else np.asarray([0, n])
            self.bounds = [(int(a), int(b)) for a, b in zip(ends, ends[1:], strict=False)]
            count = len(self.bounds) if self.packed else batch
            shape = (count, states, *((2,) if self.moving else ()), d, e)
            start = np.zeros(shape, working) if state is None else self.first_state(state)
            moment = start[:, :, 1] if self.moving else np.zeros_like(start)
            self.state_in: Array = start[:, :, 0] if self.moving else start
            self.tokens: dict[int, Token] = {}
            self.out = np.zeros((*self.q.shape[:4], e), working)
            last = np.zeros_like(start)
            for number, (first, end) in enumerate(self.bounds):
                rows = slice(number, number + 1) if self.packed else slice(None)
                came = self.begin(first) * self.state_in[rows]
                final, momentum = self.sequence(first, end, came, moment[rows])
                last[rows] = np.stack([final, momentum], axis=2) if self.moving else final
            out, last = self.written_out(self.out.reshape(batch, heads, n, e), last)
            found = {"out": self.store(out), "state": last}
            if d_out is not None:
                gradients = self.backward(d_out.astype(working), shape, (queries, keys))
                found |= {name: g for name, g in gradients.items() if name[2:] in inputs}
        return found
