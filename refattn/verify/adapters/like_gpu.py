"""A machine that looks as if it had a GPU, for kernels that are interpreted on the CPU.

Wrappers of such kernels assert ``q.is_cuda``, ask for the capability, allocate on "cuda" and wait for streams. In the
``with`` block of `torch_world` or `jax_world` they find one GPU; their arrays stay where they are, on the CPU.
Afterwards all is as it was. `load` and `call` enter it: while the file of an adapter is imported, and for each call.

One thread has it: what asks for a device in another thread gets the answer of the machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

NAME, CAPABILITY = "NVIDIA A100-SXM4-80GB", (8, 0)
"""No newer one: for those wrappers choose what no interpreter has, such as inline assembly."""

PROPERTIES = {
    "name": NAME,
    "major": CAPABILITY[0],
    "minor": CAPABILITY[1],
    "multi_processor_count": 108,
    "total_memory": 80 << 30,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 166912,
    "shared_memory_per_multiprocessor": 167936,
    "max_threads_per_multi_processor": 2048,
    "L2_cache_size": 40 << 20,
}
DRIVER_PROPERTIES = {
    "max_shared_mem": PROPERTIES["shared_memory_per_block_optin"],
    "max_num_regs": PROPERTIES["regs_per_multiprocessor"],
    "multiprocessor_count": PROPERTIES["multi_processor_count"],
    "warpSize": PROPERTIES["warp_size"],
}
"""What Triton's driver says of it."""

PLATFORMS = {"gpu": NAME, "tpu": "TPU v5 lite"}
"""Platforms of JAX with the kind of their device."""


class Stream:
    """A stream or an event: on the CPU everything has happened already."""

    cuda_stream = stream_id = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a stream or an event takes."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it."""

    def wait(self, *_: Any) -> None:
        """Wait for nothing."""

    synchronize = record = wait_stream = wait_event = wait

    def record_event(self, *_: Any) -> Stream:
        """Return an event."""
        return Stream()

    def query(self) -> bool:
        """Return whether it has ended."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return the milliseconds between two events."""
        return 0.0


class Event(Stream):
    """An event: `Stream`."""


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


TORCH: dict[str, Any] = {
    "cuda.is_available": lambda: True,
    "cuda.device_count": lambda: 1,
    "cuda.current_device": lambda: 0,
    "cuda.get_device_capability": lambda *_: CAPABILITY,
    "cuda.get_device_name": lambda *_: NAME,
    "cuda.get_device_properties": lambda *_: SimpleNamespace(**PROPERTIES),
    "cuda.get_arch_list": lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
    "cuda.is_bf16_supported": lambda *_, **__: True,
    "cuda.is_current_stream_capturing": lambda: False,
    "cuda.mem_get_info": lambda *_: (PROPERTIES["total_memory"], PROPERTIES["total_memory"]),
    "cuda.device": lambda *_: nullcontext(),
    "cuda.device_of": lambda *_: nullcontext(),
    "cuda.stream": lambda *_: nullcontext(),
    "cuda.Stream": Stream,
    "cuda.Event": Event,
    **dict.fromkeys(("cuda.current_stream", "cuda.default_stream"), lambda *_: Stream()),
    **dict.fromkeys(("cuda.init", "cuda.set_device", "cuda.set_stream"), _nothing),
    **dict.fromkeys(("cuda.synchronize", "cuda.empty_cache", "set_default_device"), _nothing),
    "compile": lambda model=None, **_: (lambda model: model) if model is None else model,  # which asks by itself
    "accelerator.is_available": lambda: True,
    "accelerator.device_count": lambda: 1,
    "accelerator.synchronize": _nothing,
}
"""Functions of torch by their names -> what they are."""

TENSOR: dict[str, Any] = {
    "is_cuda.__get__": lambda x: True,
    "get_device": lambda x: 0,
    "cuda": lambda x, *_, **__: x,
    "pin_memory": lambda x, *_, **__: x,
    "record_stream": lambda x, *_, **__: None,
}
"""What tensors have by their names -> what it gives."""


def _attribute(at: Any, name: str) -> Any:
    for part in name.split("."):
        at = getattr(at, part)
    return at


@contextmanager
def torch_world() -> Iterator[None]:
    """Let torch have a GPU in the ``with`` block."""
    import torch
    from torch.overrides import TorchFunctionMode

    gpu, plain = torch.device("cuda", 0), torch.device
    given = {_attribute(torch.Tensor, name): value for name, value in TENSOR.items()}
    place = torch.Tensor.device.__get__

    def on_cpu(x: Any) -> Any:
        here = isinstance(x, plain) and x.type == "cuda" or isinstance(x, str) and re.fullmatch(r"cuda(:\d+)?", x)
        return "cpu" if here else x

    class World(TorchFunctionMode):
        """Arrays of the GPU lie on the CPU, and say that they do not."""

        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in given:
                return given[function](*args, **(kwargs or {}))
            if function is plain:
                return function(*args, **(kwargs or {}))
            if function == place:
                found = function(*args)
                return gpu if found.type == "cpu" else found
            named = {name: on_cpu(x) for name, x in (kwargs or {}).items() if name != "pin_memory"}
            if isinstance(named.get("device"), int):
                named["device"] = "cpu"
            args = [on_cpu(x) for x in args]
            if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
                args[1] = "cpu"
            return function(*args, **named)

    engine = torch.autograd._engine_run_backward

    def backward(*given: Any, **named: Any) -> Any:
        with World():  # which torch leaves for as long as a function of its own runs, such as this one's caller
            return engine(*given, **named)

    more = {"accelerator.current_accelerator": lambda *_, **__: gpu, "autograd._engine_run_backward": backward}
    with ExitStack() as stack:
        for name, value in {**TORCH, **more}.items():
            _put(stack, torch, name, value)
        stack.enter_context(World())
        yield


@contextmanager
def jax_world(platform: str) -> Iterator[None]:
    """Let JAX run on a platform in the ``with`` block, for all modules but its own."""
    import jax

    devices, local = jax.devices, jax.local_devices
    kind = type(devices()[0])

    def said(name: str, value: str) -> property:
        plain = getattr(kind, name)

        def read(self: Any) -> Any:
            asks = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            return plain.__get__(self) if asks in ("jax", "jaxlib") else value

        return property(read)

    def known(name: str | None) -> str | None:
        return None if name in (platform, {"gpu": "cuda"}.get(platform)) else name

    with ExitStack() as stack:
        _put(stack, jax, "default_backend", lambda: platform)
        _put(stack, jax, "devices", lambda backend=None: devices(known(backend)))
        _put(
            stack,
            jax,
            "local_devices",
            lambda process_index=None, backend=None, **named: local(process_index, known(backend), **named),
        )
        for name, value in (("platform", platform), ("device_kind", PLATFORMS[platform])):
            _put(stack, kind, name, said(name, value))
        yield


def _put(stack: ExitStack, home: Any, name: str, value: Any) -> None:
    """Replace an attribute until the stack is left; one that this version of the library lacks stays absent."""
    *path, last = name.split(".")
    at = _attribute(home, ".".join(path)) if path else home
    if hasattr(at, last):
        stack.callback(setattr, at, last, getattr(at, last))
        setattr(at, last, _own(value) if isinstance(value, FunctionType) else value)


def _own(function: Any) -> Any:
    """Return another function that does the same: torch.compile keeps what it knows of functions by these."""
    return lambda *given, **named: function(*given, **named)
