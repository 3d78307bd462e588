"""A kernel by the text that names it: the one door to files, models, interpreters and meshes."""

from __future__ import annotations

import math
from typing import Any

from refattn.shards import mesh
from refattn.verify.adapters import adapter, interpreted, onnx_model, sharded


def load(spec: str, *, interrupts: bool = True) -> Any:
    """Return the kernel that a text names, as `adapter.load` does.

    If it ends in ``@tokens=4``, the kernel runs on a mesh; in ``@triton`` or ``@pallas``, in this interpreter. A file
    that ends in ``.onnx`` is a model: `onnx_model`.
    """
    place, _, text = spec.partition("@")
    if place.endswith(onnx_model.ENDING):
        try:
            return onnx_model.load(place, text)
        except onnx_model.ModelError as error:
            raise adapter.LoadError(f"--impl {place}: {error}") from error
    if not text:
        return adapter.load(spec, interrupts=interrupts)
    try:
        if text.partition("=")[0] in interpreted.NAMES:
            interpreted.start(text)
            return adapter.load(place, interrupts=interrupts)
        sizes = mesh.sizes_of(text)
        sharded.prepare_devices(math.prod(sizes.values()))
        return sharded.over(adapter.load(place, interrupts=interrupts), sizes, place)
    except (ImportError, ValueError, interpreted.NoInterpreterError) as error:
        raise adapter.LoadError(f"--impl {spec}: {error}") from error
