"""Random numbers without a generator: each one is a pure function of (seed, purpose, step, layer) and its position.

The bits are those of Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011),
computed on the host in integer arithmetic, so they are the same on every machine. They are fixed for good by what
follows; everything is unsigned, ``^`` is the exclusive or, ``hi`` and ``lo`` are the upper and the lower 32 bits.

1. The block function takes a counter (c0, c1, c2, c3) and a key (k0, k1) of 32-bit words. It does ten rounds::

       p = 0xD2511F53 * c0        q = 0xCD9E8D57 * c2        (64 bits each)
       (c0, c1, c2, c3) = (hi(q) ^ c1 ^ k0, lo(q), hi(p) ^ c3 ^ k1, lo(p))

   and between two rounds ``k0 += 0x9E3779B9`` and ``k1 += 0xBB67AE85``, both modulo 2**32.
2. A stream is named by a seed below 2**64, a purpose (a text), a step and a layer (both below 2**32). Its block
   number b has the key ``(lo(seed), hi(seed))`` and the counter ``(b, crc32(purpose), step, layer)``, where crc32 is
   the CRC-32 of zlib, PNG and IEEE 802.3 over the purpose in UTF-8.
3. `words`: word i of a stream is entry ``i % 4`` of block ``i // 4``. A stream has 2**34 words.
4. `uniform`: element e is ``(w >> 8) * 2**-24`` for w = word e: a multiple of 2**-24 in [0, 1), exact in float32.
5. `normal`: element e takes the words w = word 2e and v = word 2e + 1; it is
   ``(2 * ((w & 0xFFFF) + (w >> 16) + (v & 0xFFFF)) - 196605) * 2**-16``, the scaled sum of three uniform variables
   (Irwin-Hall): mean 0, variance 1 - 2**-32, between -3 and 3, exact in float32. It needs no logarithm or cosine,
   whose last bits differ between machines.
6. `integers`: element e is ``low + hi((high - low) * w)`` for w = word e. The probability of a value is off by less
   than 2**-32.
7. `permutation`: the numbers 0 ... n - 1, sorted by (word i, i).

Elements are numbered in C order, so the first elements do not depend on how many are drawn or in which shape.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from refattn.args import check_whole

Shape: TypeAlias = int | Iterable[int]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

_BLOCKS = 1 << 14
"""Blocks of four words that are computed at once: what they need fits in a cache, however many words are asked for."""


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the blocks of Philox4x32-10 for the given counters and keys.

    Parameters
    ----------
    counter
        uint32, (..., 4).
    key
        uint32, (..., 2); its leading axes broadcast against those of `counter`.

    Returns
    -------
    NDArray[np.uint32]
        (..., 4).
    """
    # In 64 bits a product of two words is exact and no sum overflows.
    c0, c1, c2, c3 = _split("counter", counter, 4)
    k0, k1 = _split("key", key, 2)
    for _ in range(10):
        p, q = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (q >> _HALF) ^ c1 ^ k0, q & _LOW, (p >> _HALF) ^ c3 ^ k1, p & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def words(count: int, *, seed: int, purpose: str, step: int = 0, layer: int = 0) -> NDArray[np.uint32]:
    """Return the first `count` words of a stream, uint32 (count,).

    Parameters
    ----------
    count
        How many, at most 2**34.
    seed, purpose, step, layer
        The name of the stream: whole numbers from 0, `seed` below 2**64, `step` and `layer` below 2**32, and a text.
        Streams of different names are independent.

    Examples
    --------
    >>> from refattn import philox
    >>> philox.words(2, seed=0, purpose="example").tolist()
    [1971229658, 3844930742]
    >>> philox.words(3, seed=0, purpose="example").tolist()[:2]
    [1971229658, 3844930742]
    """
    return words_of_steps(count, [step], seed=seed, purpose=purpose, layer=layer)[0]


def words_of_steps(count: int, steps: Sequence[int], *, seed: int, purpose: str, layer: int = 0) -> NDArray[np.uint32]:
    """Return the first `count` words of the streams of several steps at once, uint32 (steps, count): see `words`."""
    count = check_whole("count", count, 0, 2**34)
    seed = check_whole("seed", seed, 0, 2**64 - 1)
    if not isinstance(purpose, str):
        raise TypeError(f"purpose: got {type(purpose).__name__}, needs a text")
    found = np.empty((len(steps), -(-count // 4), 4), dtype=np.uint32)
    counter = np.empty((len(steps), min(found.shape[1], _BLOCKS), 4), dtype=np.uint32)
    counter[..., 1] = zlib.crc32(purpose.encode("utf-8"))
    counter[..., 2] = [[check_whole("step", step, 0, 2**32 - 1)] for step in steps]
    counter[..., 3] = check_whole("layer", layer, 0, 2**32 - 1)
    key = np.asarray([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)
    for first in range(0, found.shape[1], _BLOCKS):
        some = found[:, first : first + _BLOCKS]
        counter[:, : some.shape[1], 0] = np.arange(first, first + some.shape[1], dtype=np.uint32)
        some[...] = philox4x32(counter[:, : some.shape[1]], key)
    return found.reshape(len(steps), 4 * found.shape[1])[:, :count]


def uniform(shape: Shape, *, seed: int, purpose: str, step: int = 0, layer: int = 0) -> NDArray[np.float64]:
    """Return numbers in [0, 1), multiples of 2**-24, float64 of the given shape. The keywords are those of `words`.

    >>> from refattn import philox
    >>> philox.uniform((2,), seed=0, purpose="example").round(4).tolist()
    [0.459, 0.8952]
    >>> philox.uniform((2,), seed=0, purpose="example", step=1).round(4).tolist()
    [0.2557, 0.8085]
    """
    shape = _shape(shape)
    w = words(math.prod(shape), seed=seed, purpose=purpose, step=step, layer=layer)
    return ((w >> np.uint32(8)).astype(np.float64) * 2.0**-24).reshape(shape)


def normal(shape: Shape, *, seed: int, purpose: str, step: int = 0, layer: int = 0) -> NDArray[np.float64]:
    """Return nearly normal numbers of mean 0 and variance 1, float64 of the given shape.

    They lie between -3 and 3 and are exact in float32 (see the top of this file). The keywords are those of `words`.

    >>> from refattn import philox
    >>> philox.normal((2, 2), seed=0, purpose="example").round(4).tolist()
    [[1.0473, -0.5794], [1.0153, -1.073]]
    """
    shape = _shape(shape)
    w = words(2 * math.prod(shape), seed=seed, purpose=purpose, step=step, layer=layer)
    low, half = np.uint32(0xFFFF), np.uint32(16)
    halves = (w[0::2] & low) + (w[0::2] >> half) + (w[1::2] & low)
    return ((2.0 * halves - 196605.0) * 2.0**-16).reshape(shape)


def integers(
    shape: Shape, low: int, high: int, *, seed: int, purpose: str, step: int = 0, layer: int = 0
) -> NDArray[np.int64]:
    """Return whole numbers from `low` to ``high - 1``, int64 of the given shape. The keywords are those of `words`.

    ``high - low`` is at most 2**32.

    >>> from refattn import philox
    >>> philox.integers((6,), 1, 7, seed=0, purpose="dice").tolist()
    [1, 5, 4, 1, 1, 2]
    """
    shape = _shape(shape)
    low = check_whole("low", low, -(2**63), 2**63 - 1)
    high = check_whole("high", high, -(2**63), 2**63 - 1)
    if not low < high <= low + 2**32:
        raise ValueError(f"high: got {high} with low = {low}, needs low < high <= low + 2**32")
    w = words(math.prod(shape), seed=seed, purpose=purpose, step=step, layer=layer).astype(np.uint64)
    return (((w * np.uint64(high - low)) >> _HALF).astype(np.int64) + low).reshape(shape)


def permutation(n: int, *, seed: int, purpose: str, step: int = 0, layer: int = 0) -> NDArray[np.int64]:
    """Return the numbers from 0 to ``n - 1`` in a random order, int64 (n,). The keywords are those of `words`.

    >>> from refattn import philox
    >>> philox.permutation(5, seed=0, purpose="example").tolist()
    [2, 0, 4, 3, 1]
    """
    w = words(check_whole("n", n, 0, 2**34), seed=seed, purpose=purpose, step=step, layer=layer)
    return np.argsort(w, kind="stable").astype(np.int64)


def _split(name: str, x: NDArray[np.uint32], size: int) -> list[NDArray[np.uint64]]:
    if type(x) is not np.ndarray or x.dtype != np.uint32:
        raise TypeError(f"{name}: got {getattr(x, 'dtype', type(x).__name__)}, needs a NumPy array of dtype uint32")
    if x.ndim == 0 or x.shape[-1] != size:
        raise ValueError(f"{name}: got the shape {x.shape}, needs (..., {size})")
    return [x[..., i].astype(np.uint64) for i in range(size)]


def _shape(shape: Shape) -> tuple[int, ...]:
    given: Any = shape
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) != 0
    sizes: Iterable[Any] = given if several else (given,)
    return tuple(check_whole("shape", size, 0, 2**34) for size in sizes)
