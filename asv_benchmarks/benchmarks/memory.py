"""The peak of memory."""

from __future__ import annotations

from .common import BACKENDS, FORMS, MECHANISMS, OTHERS, block_call, core_call, usable


class Core:
    """Of a process that runs a form of a core: libraries and inputs included."""

    version = "1"
    timeout = 120.0
    param_names = ["form", "n", "dtype", "backend"]
    params = [FORMS, [512, 2048], ["float32"], BACKENDS]

    def setup(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.call = core_call(form, n, 64, dtype, backend)

    def peakmem_forward(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.call.forward()

    def peakmem_both(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.call.both()


class Block:
    """Of a process that runs a block."""

    version = "1"
    timeout = 120.0
    param_names = ["mechanism", "n", "dtype", "backend"]
    params = [MECHANISMS, [512], ["float32"], BACKENDS]

    def setup(self, mechanism: str, n: int, dtype: str, backend: str) -> None:
        self.call = block_call(mechanism, n, 256, dtype, backend)

    def peakmem_both(self, mechanism: str, n: int, dtype: str, backend: str) -> None:
        self.call.both()


class Device:
    """On a device whose library counts: what `peak_memory` of the backend tells."""

    version = "1"
    timeout = 120.0
    unit = "bytes"
    kind = "memory"
    param_names = ["form", "n", "dtype", "backend"]
    params = [FORMS, [2048], ["float32"], OTHERS]

    def setup(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.owner = usable(backend)
        if self.owner.peak_memory() is None:
            raise NotImplementedError(f"{backend} does not count the memory of its devices here")
        self.call = core_call(form, n, 64, dtype, backend)

    def track_peak_both(self, form: str, n: int, dtype: str, backend: str) -> int:
        self.owner.reset_peak_memory()
        self.call.both()
        return self.owner.peak_memory() or 0


if not OTHERS:
    del Device  # asv would show a panel of nothing
