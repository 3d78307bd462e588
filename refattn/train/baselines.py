"""What a loss in bits per byte is compared with: counts of bytes and of pairs of bytes, and gzip. Host side: NumPy.

Unigram: with n(y) the count of byte y among the N bytes of the training text,

    p(y) = (n(y) + 1) / (N + 256)

Bigram: with n(x, y) the count of y directly after x, n(x) their sum over y, and t(x) the number of different y seen
after x, an interpolation with the unigram model (Witten and Bell 1991, method C):

    p(y | x) = (n(x, y) + t(x) p(y)) / (n(x) + t(x))        t(x) > 0
    p(y | x) = p(y)                                         otherwise

Both are distributions: they sum to 1 over y, since sum_y n(x, y) = n(x) and sum_y p(y) = 1. And both are above 0
everywhere, since p(y) is, so what was never seen costs finitely many bits. A byte that is new after x is given the
probability t(x) / (n(x) + t(x)) in all, which is how often a byte after x was new in the training text itself.
"""

from __future__ import annotations

import gzip

import numpy as np
from numpy.typing import NDArray

from refattn.train.data import Bytes


def bigram_bits(train: Bytes, heldout: Bytes) -> float:
    """Return the bits per byte of the bigram model of `train` on each byte of `heldout` after the first.

    Both are uint8 (length,); ValueError where `heldout` has less than two bytes.
    """
    _check(heldout)
    pairs = np.bincount(_pairs(train), minlength=256 * 256).reshape(256, 256)
    kinds = np.sum(pairs > 0, axis=1, keepdims=True)
    kinds = np.where(kinds == 0, 1, kinds)  # nothing was seen after x: n(x, y) = 0, and any t(x) gives p(y)
    probabilities = (pairs + kinds * _unigram(train)) / (np.sum(pairs, axis=1, keepdims=True) + kinds)
    return float(-np.mean(np.log2(probabilities).reshape(-1)[_pairs(heldout)]))


def gzip_bits(heldout: Bytes) -> float:
    """Return 8 times the size of `heldout` (uint8, at least one byte) after gzip at level 9, per byte.

    The last digits depend on the version of zlib.
    """
    if not len(heldout):
        raise ValueError("heldout: got 0 bytes, needs at least 1")
    return 8.0 * len(gzip.compress(heldout.tobytes(), 9, mtime=0)) / len(heldout)


def _unigram(train: Bytes) -> NDArray[np.float64]:
    return np.asarray((np.bincount(train, minlength=256) + 1.0) / (len(train) + 256.0))


def _pairs(part: Bytes) -> NDArray[np.int64]:
    """Return 256 x + y for each byte x and the byte y after it."""
    return part[:-1].astype(np.int64) * 256 + part[1:]


def _check(heldout: Bytes) -> None:
    if len(heldout) < 2:
        raise ValueError(f"heldout: got {len(heldout)} bytes, needs at least 2")
