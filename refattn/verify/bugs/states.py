"""Faults of kernels of the linear recurrences: state, chunks, packed sequences, padding, heads, the backward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, low
from refattn.verify.bugs.fault import fault, wrong
from refattn.verify.bugs.recurrence import Recurrence, Token

OVERFLOWS = 88.7
"""exp of more is no number of float32."""


# The state that comes in, goes on and goes out


@wrong(Recurrence.first_state, "DELTA.1", "state in ignored", link="huggingface/transformers/pull/45513")
def state_for_one_token_alone(self: Recurrence, state: Array) -> Array:
    """The state that comes in is read where a single token comes with it, and dropped where several do."""
    return state if self.q.shape[3] == 1 else state * 0.0


@wrong(Recurrence.first_state, "DELTA.1", "state in ignored", link="vllm-project/vllm/pull/22034")
def state_of_one_sequence_ignored(self: Recurrence, state: Array) -> Array:
    """The state that comes in is dropped where the batch has one sequence."""
    return state * 0.0 if len(state) == 1 else state


@wrong(Recurrence.first_state, "DELTA.1", "state in ignored", link="tile-ai/TileOPs/pull/1963", tiles="chunk")
def state_for_one_chunk_alone(self: Recurrence, state: Array) -> Array:
    """The state that comes in is dropped where there is more than one chunk."""
    return state if self.q.shape[3] <= self.chunk else state * 0.0


@wrong(Recurrence.kept, "DELTA.4", link="ollama/ollama/issues/15865")
def state_in_bfloat16(self: Recurrence, state: Array) -> Array:
    """The state is held in bfloat16 from token to token."""
    return low(state, "bfloat16")


@wrong(Recurrence.kept, "DELTA.4", link="NVIDIA/TensorRT-Model-Connect/pull/725")
def state_in_float16(self: Recurrence, state: Array) -> Array:
    """The state is held in float16 from token to token."""
    return low(state, "float16")


@wrong(Recurrence.carried, "DELTA.4", link="", tiles="chunk")
def chunk_states_in_bfloat16(self: Recurrence, state: Array, before: Array) -> Array:
    """The state that a chunk gives to the next one is rounded to bfloat16."""
    return low(state, "bfloat16")


@wrong(Recurrence.carried, "DELTA.4", link="syv-ai/qwen38-27b-rtx3090/pull/43", tiles="chunk")
def chunks_begin_empty(self: Recurrence, state: Array, before: Array) -> Array:
    """Every chunk but the first begins with a state of 0."""
    return state * 0.0


@wrong(Recurrence.carried, "DELTA.4", link="", tiles="chunk")
def chunks_begin_with_the_first_state(self: Recurrence, state: Array, before: Array) -> Array:
    """Every chunk begins with the state that came in, in place of that of the chunk before."""
    return before


@fault("DELTA.4", link="huggingface/transformers/pull/47250", tiles="chunk")
class ChunkStatesOverWrongAxis(Recurrence):
    """Without a delta rule states of chunks are summed over the wrong axis: a chunk begins with what the one before it
    has written alone, times the sum of the decays to all that follow."""

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        self.at, self.last = first, last
        return super().sequence(first, last, state, momentum)

    def through(self, start: int) -> Any:
        """Return the decay over a chunk."""
        return math.prod(self.gate("log_decay", n) for n in range(start, min(start + self.chunk, self.last)))

    def carried(self, state: Array, before: Array) -> Array:
        if "beta" in self.x or self.moving:
            return state
        own = state - self.through(self.at) * before
        self.at += self.chunk
        decay, times = 1.0, 1.0
        for start in range(self.at, self.last, self.chunk):
            decay = decay * self.through(start)
            times = times + decay
        return own * times


@fault("DELTA.4", link="vllm-project/vllm-ascend/pull/11508", tiles="chunk")
class FirstStateCountedAgain(Recurrence):
    """What is left of the state that came in is added to the state once more at the end of each chunk."""

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        self.alone = state
        return super().sequence(first, last, state, momentum)

    def token(self, n: int, state: Array, momentum: Array) -> Token:
        key, decayed = self.k[:, :, n, :, None], self.decayed(self.alone, n)
        answer = self.predicted(decayed, key) if "beta" in self.x and not self.moving else 0.0 * decayed[:, :, :1]
        self.alone = decayed - key * self.gate("beta", n) * answer
        return super().token(n, state, momentum)

    def carried(self, state: Array, before: Array) -> Array:
        return state + self.alone


@wrong(Recurrence.sequence, "DELTA.4", link="sgl-project/sglang/issues/31833", tiles="chunk")
def state_of_whole_chunks(
    self: Recurrence, first: int, last: int, state: Array, momentum: Array
) -> tuple[Array, Array]:
    """The state that goes out is that before the last chunk, where this one is not full."""
    end = Recurrence.sequence(self, first, last, state, momentum)
    whole = first + (last - first) // self.chunk * self.chunk
    if whole in (first, last):
        return end
    return self.tokens[whole - 1].state, self.tokens[whole - 1].momentum


@wrong(Recurrence.sequence, "DELTA.4", link="", tiles="chunk")
def last_chunk_not_written(
    self: Recurrence, first: int, last: int, state: Array, momentum: Array
) -> tuple[Array, Array]:
    """What the tokens of a last chunk that is not full read is not stored."""
    end = Recurrence.sequence(self, first, last, state, momentum)
    self.out[:, :, :, first + (last - first) // self.chunk * self.chunk : last] = 0.0
    return end


# Decays


@fault("DELTA.fade", "DELTA.1", "DELTA.4", link="openxla/tokamax/pull/1327", tiles="chunk")
class DecaysTakenApart(Recurrence):
    """The decay between two tokens is taken apart into factors about the start of a chunk: strong ones overflow."""

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        if "log_decay" in self.x:
            log = self.x["log_decay"]
            for start in self.starts(first, last):
                sums = np.cumsum(log[:, :, start : min(start + self.chunk, last)], axis=2)
                for n in range(sums.shape[2]):
                    self.lost[start + n] = sums[:, :, n] < -OVERFLOWS
        return super().sequence(first, last, state, momentum)

    def token(self, n: int, state: Array, momentum: Array) -> Token:
        token = super().token(n, state, momentum)
        if n in self.lost:
            lost = self.lost[n]
            token.state = np.where(lost[..., None, None] if lost.ndim == 2 else lost[..., None], np.nan, token.state)
        return token

    def run(self, *given: Any, **more: Any) -> dict[str, Array]:
        self.lost: dict[int, Array] = {}
        return super().run(*given, **more)


@wrong(Recurrence.decayed, "DELTA.fade", "DELTA.1", link="", tiles="chunk")
def first_token_of_chunks_kept(self: Recurrence, state: Array, n: int) -> Array:
    """The decay of the first token of each chunk but the first is left out."""
    first = max(a for a, _ in self.bounds if a <= n)
    return state if n > first and (n - first) % self.chunk == 0 else Recurrence.decayed(self, state, n)


@wrong(Recurrence.begin, "DELTA.fade", "DELTA.1", link="vllm-project/vllm/pull/23279", tiles="chunk")
def decays_of_the_sequence_before(self: Recurrence, first: int) -> Any:
    """Where a sequence begins within a chunk its first state decays by what the sequence before has in this chunk."""
    log = self.x.get("log_decay")
    if log is None or not first % self.chunk:
        return 1.0
    total = np.sum(log[:, :, first - first % self.chunk : first], axis=2)
    return self.exp(total[..., None, None] if total.ndim == 2 else total[..., None])


@wrong(Recurrence.decayed, "DELTA.fade", "DELTA.1", link="")
def decay_of_first_head_beyond_64(self: Recurrence, state: Array, n: int) -> Array:
    """Channels from the 65th on have the decay of the first head."""
    found = Recurrence.decayed(self, state, n)
    gate = self.gate("log_decay", n)
    if state.shape[-2] > 64 and "log_decay" in self.x:
        first = np.broadcast_to(gate, (*state.shape[:-1], 1))[:, :1, 64:]
        found[:, :, 64:] = first * state[:, :, 64:]
    return found


@wrong(Recurrence.sequence, "DELTA.fade", "DELTA.1", "DELTA.4", link="", tiles="chunk")
def last_gate_of_a_part(self: Recurrence, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
    """The state that goes out is relative to the gate at the end of the last chunk, which is not there where this one
    is not full: the decays of its tokens are divided out."""
    end, moved = Recurrence.sequence(self, first, last, state, momentum)
    begin = first + (last - first) // self.chunk * self.chunk
    for n in range(begin, last):
        end = end / self.gate("log_decay", n)
    return end, moved


@wrong(Recurrence.decayed, "DELTA.fade", "DELTA.1", link="")
def decayed_twice(self: Recurrence, state: Array, n: int) -> Array:
    """The state decays twice with each token."""
    return Recurrence.decayed(self, Recurrence.decayed(self, state, n), n)


@wrong(Recurrence.given, "DELTA.3", "DELTA.predicted", link="")
def beta_twice(self: Recurrence, inputs: dict[str, Array]) -> dict[str, Array]:
    """The write of a token is multiplied by beta twice."""
    return inputs | {name: x * x for name, x in inputs.items() if name == "beta"}


# Packed sequences, padding, heads


@fault("DELTA.1", "DELTA.4", link="")
class SequencesBeginLate(Recurrence):
    """A packed sequence begins one token late: its first token still belongs to the one before it."""

    end: tuple[Array, Array]

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        if first > 0 and last > first:
            super().sequence(first, first + 1, *self.end)
            first += 1
        self.end = super().sequence(first, last, state, momentum)
        return self.end


@wrong(Recurrence.gate, "DELTA.fade", "DELTA.1", "DELTA.3", link="vllm-project/vllm/pull/51812")
def gates_of_other_sequences(self: Recurrence, name: str, n: int) -> Any:
    """In a packed batch the gates stay in another order than q, k and v: that of the last sequence comes first."""
    if self.packed:
        tokens = [token for first, last in self.bounds[::-1] for token in range(first, last)]
        n = tokens[n] if n < len(tokens) else n
    return Recurrence.gate(self, name, n)


@wrong(Recurrence.first_state, "DELTA.1", "state in ignored", link="")
def first_state_for_all_sequences(self: Recurrence, state: Array) -> Array:
    """Every sequence begins with the state of the first one."""
    return np.broadcast_to(state[:1], state.shape).copy()


@fault("DELTA.1", "DELTA.4", link="")
class SequencesRunOn(Recurrence):
    """A packed sequence begins with the state that the one before it ended with."""

    end: tuple[Array, Array]

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        self.end = super().sequence(first, last, *((state, momentum) if first == 0 else self.end))
        return self.end


@wrong(
    Recurrence.shown,
    "mask of values alone",
    "DELTA.unit_k",
    "DELTA.1",
    link="fla-org/flash-linear-attention/issues/1272",
)
def padding_decays(self: Recurrence, x: Array, mask: Array, name: str) -> Array:
    """Padding has values of 0, and lets the state decay."""
    return x if name.startswith("log") else Recurrence.shown(self, x, mask, name)


@wrong(Recurrence.shown, "DELTA.unit_k", "mask of values alone", link="huggingface/transformers/pull/46773")
def padding_of_one_sequence_seen(self: Recurrence, x: Array, mask: Array, name: str) -> Array:
    """Padding counts as tokens where the batch has one sequence."""
    return x if len(mask) == 1 else Recurrence.shown(self, x, mask, name)


@wrong(Recurrence.given, "DELTA.unit_k", "mask of values alone", link="huggingface/transformers/issues/47086")
def padding_seen_after_a_state(self: Recurrence, inputs: dict[str, Array]) -> dict[str, Array]:
    """Padding counts as tokens where a state comes in."""
    return {name: x for name, x in inputs.items() if name != "key_mask" or "state" not in inputs}


@wrong(Recurrence.head_of, "keys tiled", "DELTA.unit_k", link="")
def key_heads_by_remainder(self: Recurrence, heads: int, groups: int) -> Array:
    """State head g has key head g mod f, in place of floor(g f / g_total): of keys alone, queries are right."""
    return np.arange(heads) % max(groups, 1)


@wrong(Recurrence.written_out, "DELTA.5", link="ohdearquant/lattice/issues/262")
def heads_of_keys_alone(self: Recurrence, out: Array, state: Array) -> tuple[Array, Array]:
    """As many heads are computed as there are key heads: the outputs and states of the others are 0."""
    keys, states = self.raw["k"].shape[1], state.shape[1]
    heads = keys * out.shape[1] // states
    out[:, heads:], state[:, keys:] = 0.0, 0.0
    return out, state


@fault("DELTA.predicted", link="NeuraLegion/shainet/pull/170", tiles="chunk")
class StateOfTheChunkDecaysTwice(Recurrence):
    """What is asked of the state before the chunk decays twice where the error is computed."""

    def sequence(self, first: int, last: int, state: Array, momentum: Array) -> tuple[Array, Array]:
        self.first = first
        return super().sequence(first, last, state, momentum)

    def token(self, n: int, state: Array, momentum: Array) -> Token:
        if (n - self.first) % self.chunk == 0:
            self.old, self.through = state, 1.0
        self.old, self.through = self.decayed(self.old, n), self.gate("log_decay", n) * self.through
        token = super().token(n, state, momentum)
        if "beta" in self.x:
            self.old = self.old - self.k[:, :, n, :, None] * self.gate("beta", n) * super().predicted(
                self.old, self.k[:, :, n, :, None]
            )
        return token

    def predicted(self, decayed: Array, key: Array) -> Array:
        return super().predicted(decayed - self.old + self.through * self.old, key)


# The backward


@wrong(Recurrence.carried_back, "dDELTA.4", "dDELTA.1", link="NX-AI/mlstm_kernels/pull/10", tiles="chunk")
def gradient_of_state_stops(self: Recurrence, d_state: Array) -> Array:
    """The gradient of the state does not go on to the chunk before."""
    return d_state * 0.0


@wrong(Recurrence.carried_back, "dDELTA.4", "dDELTA.1", link="fla-org/flash-linear-attention/pull/37", tiles="chunk")
def gradient_of_state_in_bfloat16(self: Recurrence, d_state: Array) -> Array:
    """The gradient of the state is rounded to bfloat16 from chunk to chunk."""
    return low(d_state, "bfloat16")


@wrong(Recurrence.state_of, "dDELTA.unit_q", "states of the second sweep begin at 0", link="", tiles="chunk")
def queries_of_their_chunk_alone(self: Recurrence, n: int) -> Array:
    """The gradient of a query is of what its own chunk has written."""
    start = max(a for a, _ in self.bounds if a <= n)
    first = start + (n - start) // self.chunk * self.chunk
    if first == start:
        return Recurrence.state_of(self, n)
    left = self.tokens[first - 1].state
    for at in range(first, n + 1):
        left = self.gate("log_decay", at) * left
    return Recurrence.state_of(self, n) - left


@wrong(
    Recurrence.d_key_of,
    "dDELTA.unit_k",
    "keys without the gradient of the prediction",
    link="fla-org/flash-linear-attention/issues/984",
    tiles="chunk",
)
def keys_without_the_system(self: Recurrence, token: Token, d_write: Array, d_error: Array, target: Array) -> Array:
    """The gradient of a key has that of its prediction from the first token of its chunk alone."""
    n = next(n for n, one in self.tokens.items() if one is token)
    start = max(a for a, _ in self.bounds if a <= n)
    if (n - start) % self.chunk:
        return token.write @ np.swapaxes(target, -1, -2)
    return Recurrence.d_key_of(self, token, d_write, d_error, target)


@wrong(
    Recurrence.d_rate, "dDELTA.beta", "gradient of beta with the write", link="fla-org/flash-linear-attention/pull/43"
)
def beta_of_values(self: Recurrence, token: Token, d_write: Array) -> Array:
    """The gradient of beta is that of the value, without what was predicted."""
    if self.moving:
        return Recurrence.d_rate(self, token, d_write)
    n = next(n for n, one in self.tokens.items() if one is token)
    return np.sum(d_write * self.x["v"][:, :, n, None, :], axis=(-2, -1))


@wrong(Recurrence.back, "dDELTA.v", link="fla-org/flash-linear-attention/pull/6")
def values_without_decay(
    self: Recurrence, n: int, d_out: Array, d_state: Array, d_momentum: Array
) -> tuple[Array, Array]:
    """Without a decay the gradient of v has what the token itself reads alone."""
    found = Recurrence.back(self, n, d_out, d_state, d_momentum)
    if "log_decay" not in self.x and "beta" not in self.x:
        own = self.scale * (np.swapaxes(self.q[:, :, :, n], -1, -2) @ d_out[:, :, :, n])
        self.d["v"][:, :, n] = (np.swapaxes(self.k[:, :, n, :, None], -1, -2) @ own)[:, :, 0]
    return found


@fault("dDELTA.log_decay", link="", tiles="chunk")
class GradientOfDecayStops(Recurrence):
    """The gradient of a decay has what its own chunk reads alone."""

    stops = False

    def carried_back(self, d_state: Array) -> Array:
        return d_state * 0.0 if self.stops else d_state

    def backward(self, d_out: Array, shape: tuple[int, ...], heads: tuple[int, int]) -> dict[str, Array]:
        found = super().backward(d_out, shape, heads)
        if "d_log_decay" not in found:
            return found
        self.stops = True
        return found | {"d_log_decay": super().backward(d_out, shape, heads)["d_log_decay"]}


@wrong(Recurrence.d_unit, "dDELTA.q", "normalisation without its projection", link="")
def norm_held_fast(self: Recurrence, x: Array, d_y: Array, eps: float) -> Array:
    """The norm that queries and keys are divided by is held fast in the backward, for queries alone."""
    return d_y * self.inverse_norm(x, eps) if x is self.raw["q"] else Recurrence.d_unit(self, x, d_y, eps)
