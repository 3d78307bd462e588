"""What one more token of Koopman attention costs after n others: by a matrix of constant size, and by all keys again.

python -m tools.measure_koopman_stream        # the table of docs/blocks.md, in ms of CPU time; half a minute
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import refattn as ra
from refattn import Context, philox
from refattn.backends.blas import one_thread
from refattn.mechanisms.cache import KeysAndValues, KeyValueStream

WIDTH, TOKENS, CAUSAL = 32, 5, Context(causal=True)
LENGTHS, MOST = (64, 256, 1024, 2048), 1024
"""Tokens before, and how many of them all keys are fitted to again."""


def milliseconds(stream: Any, params: Any, cache: Any, x: Any) -> tuple[float, Any]:
    """Return the median time of some tokens, one after the other, and what they became."""
    block, found, times = ra.mechanism("koopman").block, [], []
    for n in range(x.shape[1]):
        state, began = block.start(params, x[:, n : n + 1], CAUSAL), time.process_time()
        state, cache = stream.step(params, cache, state, CAUSAL)
        times.append(time.process_time() - began)
        found.append(state.x)
    return 1e3 * float(np.median(times)), np.concatenate(found, axis=1)


def main() -> None:
    """Print the table."""
    record = ra.mechanism("koopman")
    block, by_keys, by_matrix = record.block, KeyValueStream(record.block), record.stream
    assert by_matrix is not None
    print("| tokens before it | linear, S | linear, all keys | polynomial, S | polynomial, all keys | apart |")
    for n in LENGTHS:
        row, apart = [str(n)], 0.0
        x = philox.normal((1, n + TOKENS, WIDTH), seed=1, purpose="measure")
        for kernel in ("linear", "polynomial"):
            params = block.init(block.Config(width=WIDTH, heads=2, kernel=kernel, updates=3), seed=3, like=np.zeros(1))
            state = block.start(params, x[:, :n], CAUSAL)
            _, cache = by_matrix.prefill(params, by_matrix.start(params, 1), state, CAUSAL)
            cost, found = milliseconds(by_matrix, params, cache, x[:, n:])
            row.append(f"{cost:.1f}")
            if n > MOST:
                row.append("")
                continue
            cost, other = milliseconds(by_keys, params, KeysAndValues(cache.k, cache.v), x[:, n:])
            row.append(f"{cost:.1f}")
            apart = max(apart, float(np.max(np.abs(found - other))))
        row.append(f"{apart:.0e}" if n <= MOST else "")
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    with one_thread():
        main()
