"""The time of each mechanism's block: projections, the core, and their backward."""

from __future__ import annotations

from .common import BACKENDS, MECHANISMS, Timed, block_call


class Block(Timed):
    """Forward, backward, and both."""

    param_names = ["mechanism", "n", "width", "dtype", "backend"]
    params = [MECHANISMS, [64, 512], [64, 256], ["float32", "float64"], BACKENDS]

    def setup(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.call = block_call(mechanism, n, width, dtype, backend)
        self.timer = self.call.timer

    def time_forward(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.call.forward()

    def time_backward(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.call.backward()

    def time_both(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.call.both()
