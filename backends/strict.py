"""array-api-strict: NumPy cut down to what the standard promises. What runs here runs on every library; it is slow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.backends.base import Array, Backend


class StrictBackend(Backend):
    """array-api-strict, with the devices that it makes up to catch mixtures."""

    name = "strict"
    package = "array_api_strict"
    array_type = "Array"
    install = "pip install array-api-strict"

    def devices(self) -> tuple[str, ...]:
        return tuple(self._devices())

    def owns(self, x: object) -> bool:
        # The class has no public name, but every array says which namespace it is from.
        return type(x).__module__.partition(".")[0] == self.package and hasattr(x, "__array_namespace__")

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> Array:
        if isinstance(device, str):
            self.check_device(device)
            device = self._devices()[device]
        return self.library().asarray(x, device=device, copy=True)

    def to_numpy(self, x: Array) -> NDArray[Any]:
        return np.asarray(x.to_device(self._devices()["CPU_DEVICE"]))

    def _devices(self) -> dict[str, Any]:
        devices = self.library().__array_namespace_info__().devices()
        return {str(device).split("'")[1]: device for device in devices}


backend = StrictBackend()
