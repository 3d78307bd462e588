"""Kernels for many devices: each is given its shards, and what comes back is put together and judged as ever.

``FILE.py:NAME@heads=2,tokens=4`` names one that runs on a mesh. A function of JAX (``framework = "jax"``) is called
once, with sharded arrays, and with ``mesh=`` where it has such a parameter; on a CPU the devices are virtual ones.

A function of PyTorch (``framework = "torch"``) is called in as many processes as the mesh has `tokens`, a group of
`torch.distributed` with gloo. Each is given the tokens of its rank and returns what belongs to its queries; its
gradients are those of autograd. Its attribute ``layout`` says which tokens a rank has: "contiguous" ones, or "zigzag"
for the chunks r and 2 n - 1 - r of 2 n, so that a causal mask leaves each rank as much to do. Masks and biases have the
rows of the rank's queries and all columns, in the order of the sequence.
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn.shards import mesh
from refattn.verify.adapters import adapter
from refattn.verify.outcome import Decline
from refattn.workers import Pipes, Worker

LAYOUTS = ("contiguous", "zigzag")
PLANE = ("mask", "bias", "keep")


def prepare_devices(count: int) -> None:
    """See to virtual devices of a CPU before a file is loaded that may begin with JAX."""
    if "jax" not in sys.modules and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flags = os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def over(kernel: Any, sizes: Mapping[str, int], spec: str) -> Any:
    """Return a kernel that runs on a mesh of these sizes; `spec` names it for other processes."""
    framework = adapter.Adapter.of(kernel).framework
    if framework == "jax":
        return OnDevices(kernel, sizes)
    if framework != "torch":
        raise ValueError(f'--mesh: got framework = {framework!r}, needs "jax" or "torch"')
    if set(sizes) != {"tokens"}:
        raise ValueError(f"--mesh: got {', '.join(sizes)}, needs tokens alone for processes of torch.distributed")
    return Ranks(kernel, sizes["tokens"], spec)


class _Over:
    """A kernel whose attributes are those of another one."""

    _implementation: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._implementation, name)

    def __dir__(self) -> list[str]:
        return dir(self._implementation)


class OnDevices(_Over):
    """A function of JAX that is given arrays on a mesh of devices."""

    def __init__(self, kernel: Any, sizes: Mapping[str, int]) -> None:
        mesh.use_devices(math.prod(sizes.values()))
        self._implementation, self._mesh = kernel, mesh.make(sizes)
        forward = getattr(kernel, "forward", kernel)
        more = {"mesh": self._mesh} if "mesh" in inspect.signature(forward).parameters else {}

        @functools.wraps(forward)
        def placed(**arguments: Any) -> Any:
            arrays = {n: mesh.place(self._mesh, n, x) if hasattr(x, "shape") else x for n, x in arguments.items()}
            return forward(**arrays, **more)

        self.forward = placed
        if hasattr(kernel, "backward"):
            self.backward = kernel.backward


class Ranks(_Over):
    """A function of PyTorch in as many local processes, a group of `torch.distributed`."""

    def __init__(self, kernel: Any, size: int, spec: str) -> None:
        self._implementation, self._size, self._spec = kernel, size, spec
        self._layout = getattr(kernel, "layout", "contiguous")
        if self._layout not in LAYOUTS:
            raise ValueError(f"layout: got {self._layout!r}, needs {' or '.join(LAYOUTS)}")
        self._ranks: list[Worker] = []
        self._given: dict[str, Any] = {}

        @functools.wraps(kernel)
        def forward(**arguments: Any) -> Any:
            self._given = arguments
            parts = self._ask(None)
            return parts if isinstance(parts, Decline) else self._gathered(parts, dict.fromkeys(parts[0], "q"))

        self.forward = forward

    def backward(self, d_out: Any) -> Any:
        """Return the gradients of q, k and v for that of the output of the last call."""
        import torch

        parts = self._ask(torch.tensor(np.array(d_out)).to(self._given["q"].dtype))
        return parts if isinstance(parts, Decline) else self._gathered(parts, {name: name for name in "qkv"})

    def tokens_of(self, rank: int, count: int) -> Any:
        """Return the places in the sequence of the tokens that a rank has."""
        return places(self._layout, rank, self._size, count)

    def _gathered(self, parts: list[dict[str, Any]], along: Mapping[str, str]) -> dict[str, Any]:
        """Put together what ranks returned; `along` says of which argument's tokens each array is."""
        import torch

        found = {}
        for name, whose in along.items():
            first, count = parts[0][name], self._given[whose].shape[2]
            whole = first.new_empty((*first.shape[:2], count, *first.shape[3:]))
            for rank, part in enumerate(parts):
                whole[:, :, torch.as_tensor(self.tokens_of(rank, count))] = part[name]
            found[name] = whole
        return found

    def _shards(self, rank: int, d_out: Any) -> dict[str, Any]:
        """Return the arguments of a rank."""
        queries, found = self._given["q"].shape[2], dict(self._given)
        for name, x in self._given.items():
            axis = 2 if name in ("q", "k", "v") else x.ndim - 2 if name in PLANE and x.ndim > 1 else None
            if axis is not None and (name not in PLANE or x.shape[axis] == queries):
                found[name] = _taken(x, self.tokens_of(rank, x.shape[axis]), axis)
        return found if d_out is None else {**found, "d_out": _taken(d_out, self.tokens_of(rank, queries), 2)}

    def _ask(self, d_out: Any) -> Any:
        """Call the function in all ranks; return what each returns, or Decline."""
        if not self._ranks:
            self._start()
        for rank, worker in enumerate(self._ranks):
            worker.send(_packed(self._shards(rank, d_out)))
        answers: dict[int, Any] = {}
        while len(answers) < self._size:
            worker, answer = self._pipes.next()
            rank = self._ranks.index(worker)
            kind, found = ("error", "its process ended") if answer is None else _unpacked(answer)
            if kind == "joined":
                continue
            if kind == "error":  # the others may wait for it for ever
                self.close()
                raise RuntimeError(f"rank {rank}: {found}")
            answers[rank] = (kind, found)
        if answers[0][0] == "decline":
            return Decline(answers[0][1])
        return [answers[rank][1] for rank in range(self._size)]

    def _start(self) -> None:
        self._store, self._pipes = tempfile.TemporaryDirectory(), Pipes()
        self._ranks = [Worker(f"{__name__}:answer", self._pipes) for _ in range(self._size)]
        for rank, worker in enumerate(self._ranks):
            place = os.path.join(self._store.name, "store")
            worker.send(_packed({"spec": self._spec, "rank": rank, "size": self._size, "store": place}))

    def close(self) -> None:
        """End the processes."""
        for worker in self._ranks:
            worker.close()
        if self._ranks:
            self._store.cleanup()
        self._ranks = []


def places(layout: str, rank: int, size: int, count: int) -> Any:
    """Return the places in a sequence of `count` tokens of those that a rank of `size` has, in its order."""
    if layout == "contiguous":
        return np.split(np.arange(count), size)[rank]
    chunks = np.split(np.arange(count), 2 * size)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


def _taken(x: Any, places: Any, axis: int) -> Any:
    import torch

    return x.index_select(axis, torch.as_tensor(places)).contiguous()


def _packed(x: Any) -> bytes:
    import torch

    torch.save(x, data := io.BytesIO())
    return data.getvalue()


def _unpacked(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


# --- one of the processes


_functions: list[Any] = []


def answer(question: bytes) -> bytes:
    """Answer for a rank, whose first question says which it is."""
    given = _unpacked(question)
    try:
        if not _functions:
            _functions.append(_joined(**given))
            return _packed(("joined", None))
        return _packed(_answer(_functions[0], given))
    except Exception as error:  # foreign code may raise anything
        traceback.print_exc()
        return _packed(("error", f"{type(error).__name__}: {error}"))


def _joined(spec: str, rank: int, size: int, store: str) -> Any:
    """Join the group of ranks, and return the function."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # as many processes as there are cores, or more
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return adapter.load(spec)


def _answer(function: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    import torch

    d_out, learned = arguments.pop("d_out", None), [arguments[name] for name in "qkv"]
    for x in learned:
        x.requires_grad_(d_out is not None)
    found = function(**arguments)
    if isinstance(found, Decline):
        return "decline", str(found.reason)
    named = found if isinstance(found, dict) else dict(zip(("out", "lse"), _tuple(found), strict=False))
    if d_out is None:
        return "found", {name: x.detach() for name, x in named.items()}
    return "found", dict(zip("qkv", torch.autograd.grad(named["out"], learned, d_out), strict=True))


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
