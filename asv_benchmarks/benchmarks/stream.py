"""The time of decoding: one more token after others, for each mechanism that is given its tokens one by one."""

from __future__ import annotations

from .common import BACKENDS, MECHANISMS, Timed, stream_call


class Stream(Timed):
    """A step, and the prefill of all tokens before it."""

    param_names = ["mechanism", "n", "width", "dtype", "backend"]
    params = [MECHANISMS, [64, 512], [256], ["float32"], BACKENDS]

    def setup(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.step, self.prefill, self.timer = stream_call(mechanism, n, width, dtype, backend)

    def time_step(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.step()

    def time_prefill(self, mechanism: str, n: int, width: int, dtype: str, backend: str) -> None:
        self.prefill()
