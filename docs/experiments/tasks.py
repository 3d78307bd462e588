"""What the small models of the experiments learn: the next byte or token of a text, associative recall, and parity."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.train import data

Tokens = NDArray[np.int64]


class Batch(NamedTuple):
    """Sequences (b, n), what follows each token, and how much each of these counts: 0 where nothing is asked."""

    inputs: Tokens
    targets: Tokens
    weights: NDArray[np.float32]


class Task(Protocol):
    """Something to learn; batches are pure functions of a seed and a step."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""

    @property
    def context(self) -> int:
        """Tokens of a sequence."""

    def batch(self, size: int, *, seed: int, step: int) -> Batch:
        """Return so many sequences to learn from."""

    def held_out(self) -> Iterator[Batch]:
        """Yield the sequences that a model is judged by: the same ones whatever the seed."""


@functools.cache
def standard_library() -> data.Text:
    """Return the source of Python's standard library, read once in a process."""
    return data.load("stdlib")


@dataclass(frozen=True)
class Text:
    """The next byte of the source of Python's standard library, of which a tenth of the files is held out.

    Attributes
    ----------
    context
        Bytes of a sequence.
    scored, every
        Of so many held-out bytes, the first of every so many sequences is scored.
    """

    context: int = 64
    scored: int = 1 << 20
    every: int = 16

    @property
    def vocabulary(self) -> int:
        """All bytes."""
        return 256

    def batch(self, size: int, *, seed: int, step: int) -> Batch:
        """Return sequences that start anywhere in the text."""
        return _all(*data.batch(standard_library().train, size=size, context=self.context, seed=seed, step=step))

    def held_out(self) -> Iterator[Batch]:
        """Yield sequences of the held-out files."""
        part = standard_library().heldout[: self.scored + 1]
        return (_all(*cut) for cut in data.windows(part, context=self.context, size=64, every=self.every))


@dataclass(frozen=True)
class TokenFiles:
    """The next token of a text that another program cut into tokens: `train.bin` and `val.bin` of a folder.

    Attributes
    ----------
    folder
        Where the files are: tokens of 16 bits, the lower byte first.
    vocabulary, context
        How many different tokens there are; tokens of a sequence.
    scored
        Of so many tokens of `val.bin` all sequences are scored.
    """

    folder: str
    vocabulary: int = 50304
    context: int = 128
    scored: int = 1 << 18

    def batch(self, size: int, *, seed: int, step: int) -> Batch:
        """Return sequences that start anywhere in `train.bin`."""
        part = self._part("train.bin")
        starts = philox.integers((size, 1), 0, len(part) - self.context, purpose="token files", seed=seed, step=step)
        return self._cut(part[starts + np.arange(self.context + 1)])

    def held_out(self) -> Iterator[Batch]:
        """Yield sequences of `val.bin`."""
        part = self._part("val.bin")[: self.scored + 1]
        for first in range(0, len(part) - self.context, 64 * self.context):
            starts = np.arange(first, min(first + 64 * self.context, len(part) - self.context), self.context)
            yield self._cut(part[starts[:, None] + np.arange(self.context + 1)])

    def _part(self, name: str) -> NDArray[np.uint16]:
        path = Path(self.folder, name)
        part = np.memmap(path, np.dtype("<u2"), mode="r")
        if len(part) <= self.context:
            raise ValueError(f"{path}: got {len(part)} tokens, needs more than the context of {self.context}")
        return part

    def _cut(self, tokens: NDArray[np.uint16]) -> Batch:
        if (most := int(tokens.max())) >= self.vocabulary:
            raise ValueError(f"{self.folder}: got a token {most}, needs tokens below {self.vocabulary}")
        whole = tokens.astype(np.int64)
        return _all(whole[:, :-1], whole[:, 1:])


@dataclass(frozen=True)
class Drawn:
    """A task whose sequences are drawn, those that are held out for no seed of a training.

    Attributes
    ----------
    judged
        Sequences that are held out.
    """

    judged: int = field(default=1024, kw_only=True)

    def batch(self, size: int, *, seed: int, step: int) -> Batch:
        """Return sequences drawn for this seed and step."""
        return self._drawn(size, "learnt", seed, step)

    def held_out(self) -> Iterator[Batch]:
        """Yield sequences drawn for no seed of a training."""
        yield self._drawn(self.judged, "judged", 0, 0)

    def _drawn(self, size: int, part: str, seed: int, step: int) -> Batch:
        raise NotImplementedError


@dataclass(frozen=True)
class Pairs(Drawn):
    """Associative recall: after a key its value is asked for.

    Attributes
    ----------
    pairs
        Different keys of a sequence.
    keys, values
        How many different keys and values there are; tokens 0 to keys - 1 are keys, those after them values.
    """

    pairs: int = 4
    keys: int = field(default=16, kw_only=True)
    values: int = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(f"pairs: got {self.pairs}, needs 1 to the number of keys, {self.keys}")

    @property
    def vocabulary(self) -> int:
        """Keys and values."""
        return self.keys + self.values


@dataclass(frozen=True)
class Recall(Pairs):
    """Associative recall with several queries: pairs of a key and a value, then every key again, in another order.

    A sequence is ``k_1 v_1 ... k_P v_P`` and then the keys once more, shuffled; after each of these its value is asked
    for, and nothing before. Keys of a sequence differ from each other, values need not. Which value belongs to a key is
    drawn for every sequence anew, so that no weight can know it. Source: the multi-query associative recall of Arora
    et al. 2023 (arXiv:2312.04927), without the gaps between the queries.

    A sequence has P = `pairs` pairs, 3 P tokens in all.
    """

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return 3 * self.pairs

    def _drawn(self, size: int, part: str, seed: int, step: int) -> Batch:
        name: dict[str, Any] = {"seed": seed, "step": step}
        shape = (size, self.pairs)
        keys = _shuffled((size, self.keys), purpose=f"recall.{part}.keys", **name)[:, : self.pairs]
        values = self.keys + philox.integers(shape, 0, self.values, purpose=f"recall.{part}.values", **name)
        order = _shuffled(shape, purpose=f"recall.{part}.order", **name)
        pairs = np.stack([keys, values], axis=-1).reshape(size, -1)
        asked, answers = (np.take_along_axis(x, order, axis=1) for x in (keys, values))
        weights = np.concatenate([np.zeros(pairs.shape), np.ones(shape)], axis=1).astype(np.float32)
        return Batch(np.concatenate([pairs, asked], 1), np.concatenate([np.zeros_like(pairs), answers], 1), weights)


@dataclass(frozen=True)
class Overwriting(Pairs):
    """Associative recall of keys that are assigned again: what is asked for is the last value of each.

    A sequence is ``rounds`` times every key of it with a value drawn anew, all in a random order, and then the keys
    once more, shuffled; after each of these the value is asked for that it was given last, and nothing before. A memory
    that only adds holds the sum of all values of a key.

    Attributes
    ----------
    rounds
        How often each key is assigned; a sequence has (2 rounds + 1) pairs tokens.
    """

    rounds: int = 3

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return (2 * self.rounds + 1) * self.pairs

    def _drawn(self, size: int, part: str, seed: int, step: int) -> Batch:
        name: dict[str, Any] = {"seed": seed, "step": step}
        writes, rows = self.rounds * self.pairs, np.arange(size)[:, None]
        chosen = _shuffled((size, self.keys), purpose=f"overwriting.{part}.keys", **name)[:, : self.pairs]
        which = _shuffled((size, writes), purpose=f"overwriting.{part}.writes", **name) % self.pairs
        shape = (size, writes)
        values = self.keys + philox.integers(shape, 0, self.values, purpose=f"overwriting.{part}.values", **name)
        last = np.zeros((size, self.pairs), np.int64)
        for n in range(writes):
            last[rows, which[:, n : n + 1]] = values[:, n : n + 1]
        asked = _shuffled((size, self.pairs), purpose=f"overwriting.{part}.order", **name)
        written = np.stack([chosen[rows, which], values], axis=-1).reshape(size, -1)
        inputs = np.concatenate([written, chosen[rows, asked]], axis=1)
        targets = np.concatenate([np.zeros_like(written), last[rows, asked]], axis=1)
        weights = np.concatenate([np.zeros(written.shape), np.ones(asked.shape)], axis=1).astype(np.float32)
        return Batch(inputs, targets, weights)


@dataclass(frozen=True)
class Parity(Drawn):
    """Whether the bits so far have an odd sum, asked for after every bit.

    Attributes
    ----------
    context
        Bits of a sequence; those that are held out are judged by the bits of their second half.
    """

    context: int = 32

    @property
    def vocabulary(self) -> int:
        """Two bits."""
        return 2

    def _drawn(self, size: int, part: str, seed: int, step: int) -> Batch:
        bits = philox.integers((size, self.context), 0, 2, purpose=f"parity.{part}", seed=seed, step=step)
        first = self.context // 2 if part == "judged" else 0
        asked = np.broadcast_to(np.arange(self.context) >= first, bits.shape)
        return Batch(bits, np.cumsum(bits, axis=1) % 2, asked.astype(np.float32))


def _all(inputs: Tokens, targets: Tokens) -> Batch:
    return Batch(inputs, targets, np.ones(targets.shape, np.float32))


def _shuffled(shape: tuple[int, int], **name: Any) -> Tokens:
    """Return rows of the numbers 0, 1, ..., each in a random order."""
    return np.argsort(philox.uniform(shape, **name), axis=1, kind="stable")
