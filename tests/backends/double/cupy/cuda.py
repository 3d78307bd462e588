"""Devices, streams and memory."""

from __future__ import annotations

import sys
import types
from typing import Any

from ._double import current, held, note


class runtime:  # noqa: N801 (a module of CuPy)
    is_hip = False

    class CUDARuntimeError(RuntimeError):
        """CuPy's, whose message begins with CUDA's name of the error."""

    @staticmethod
    def getDeviceCount() -> int:
        from . import _double

        return _double.devices

    @staticmethod
    def getDevice() -> int:
        return current[-1]

    @staticmethod
    def runtimeGetVersion() -> int:
        return 13020

    @staticmethod
    def getDeviceProperties(device: int) -> dict[str, Any]:
        return {"name": b"a test double", "totalGlobalMem": TOTAL}


TOTAL = 80 << 30


class Device:
    """A device by its number; by default the current one."""

    def __init__(self, device: Any = None) -> None:
        self.id = current[-1] if device is None else int(getattr(device, "id", device))
        if not 0 <= self.id < runtime.getDeviceCount():
            raise runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def __enter__(self) -> Device:
        current.append(self.id)
        return self

    def __exit__(self, *_: Any) -> None:
        current.pop()

    def synchronize(self) -> None:
        note("waits", "Device.synchronize")

    @property
    def mem_info(self) -> tuple[int, int]:
        return TOTAL - held["now"], TOTAL

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class Stream:
    """The one stream of the current device."""

    ptr = 0

    def synchronize(self) -> None:
        note("waits", "Stream.synchronize")


def get_current_stream(device_id: int = -1) -> Stream:
    return Stream()


class MemoryPool:
    """What arrays hold, without the pool's blocks."""

    def total_bytes(self) -> int:
        return held["most"]

    def used_bytes(self) -> int:
        return held["now"]

    def free_all_blocks(self, stream: Any = None) -> None:
        held["most"] = held["now"]


device = types.ModuleType(__name__ + ".device")
device.Device = Device  # type: ignore[attr-defined]
sys.modules[device.__name__] = device
