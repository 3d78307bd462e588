"""What a test suite is worth: wrong kernels served to it in place of torch's ``scaled_dot_product_attention``.

`score` runs the command of a suite once as it is and once for each known bug. In every Python that the suite
starts, `install` puts the kernel with the fault in the place of ``torch.nn.functional.scaled_dot_product_attention``,
forward and backward, and notes whether it was called, and whether what it gave was wrong: a fault that never shows in
what a suite calls says nothing of its checks, but something of its shapes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import TYPES
from refattn.mechanisms.wrong import Call, WrongKernel
from refattn.verify.bugs.emulator import Flash
from refattn.verify.bugs.fault import faults
from refattn.workers import EndedError, Process

FAULT, SIZES, LOG = "REFATTN_SHIM_FAULT", "REFATTN_SHIM_SIZES", "REFATTN_SHIM_LOG"
"""What the processes of a suite are told: the name of a fault, its tiles, and the file that they note in."""

PATCHED = "torch.nn.functional"

FUNCTION = "scaled_dot_product_attention"

NONE = "none"
"""The fault of a kernel that is right, which the suite has to accept."""

ROUNDINGS = 64.0
"""A result is wrong where it is off by more, in roundings of its largest element."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Fate:
    """What a suite made of a wrong kernel.

    Attributes
    ----------
    status
        "killed"; "survived"; "never wrong": what it gave was right in every call; or "not called".
    """

    fault: WrongKernel
    size: str
    status: str


class SuiteError(Exception):
    """A suite that fails with a kernel that is right, or that never calls it."""


def chosen(mechanism: str, only: str = "", every: int = 1) -> list[WrongKernel]:
    """Return the faults that the function can have: none of options that it has not, and none of lse."""
    lacking = ("window", "sink", "k_lengths", "offset", "dropout", "lse", "soft-cap")
    found = [one for one in faults(mechanism) if not {*lacking} & {*one.of} and only.lower() in one.name.lower()]
    return found[::every]


def score(command: str, kernels: Iterable[WrongKernel], *, timeout: float = 600.0) -> Iterator[Fate]:
    """Yield what a suite, a command of the shell, makes of each wrong kernel; it passes where its exit code is 0.

    Raises
    ------
    SuiteError
        Where it does not pass with the right kernel, or does not call it.
    """
    with tempfile.TemporaryDirectory(prefix="refattn-suite-") as folder:
        place = Path(folder)
        (place / "sitecustomize.py").write_text("from refattn.verify.mutated import install\n\ninstall()\n")

        def run(fault: str, sizes: tuple[int, int]) -> tuple[bool, set[str]]:
            log = place / "log"
            log.write_text("")
            root = str(Path(__file__).resolve().parents[2])
            paths = [folder, root, *filter(None, [os.environ.get("PYTHONPATH")])]
            told = {FAULT: fault, SIZES: f"{sizes[0]},{sizes[1]}", LOG: str(log), "PYTHONPATH": os.pathsep.join(paths)}
            try:
                with Process(["sh", "-c", command], environment=told) as process:
                    return process.wait(timeout) == 0, {*log.read_text().split()}
            except EndedError:
                return False, {"called", "wrong"}

        passes, said = run(NONE, (64, 64))
        if not passes:
            raise SuiteError("the suite fails with a kernel that is right: it passes with exit code 0")
        if "called" not in said:
            raise SuiteError(f"the suite never calls {PATCHED}.{FUNCTION}")
        for fault in kernels:
            passes, said = run(fault.name, fault.sizes[fault.usual])
            status = "survived" if "wrong" in said else "never wrong" if "called" in said else "not called"
            yield Fate(fault, fault.usual, status if passes else "killed")


def worth(fates: Iterable[Fate]) -> tuple[int, int]:
    """Return how many wrong kernels were killed, of how many whose results were wrong."""
    statuses = [fate.status for fate in fates]
    killed = statuses.count("killed")
    return killed, killed + statuses.count("survived")


def install() -> None:
    """Put the kernel that the environment names in the place of torch's, once torch is imported."""
    if FAULT in os.environ:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module that is patched, and patches it when it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != PATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def patched(module: ModuleType) -> None:
                run(module)
                setattr(module, FUNCTION, served(getattr(module, FUNCTION)))

            spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def served(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrong kernel with the arguments of torch's function; with dropout it is the original."""
    name = os.environ[FAULT]
    size = tuple(int(size) for size in os.environ[SIZES].split(","))
    wrong = next((one for one in faults() if one.name == name), None)

    def computed(
        inputs: dict[str, Array], options: dict[str, Any], d_out: Array | None, unit: float
    ) -> Mapping[str, Array]:
        right = Flash(64, 64).run(inputs, options, d_out, np.float64)
        found = right if wrong is None else wrong.run(Call(inputs, options, d_out, size=size))
        apart = any(_apart(found[one], right[one], unit) for one in ("out", "d_q", "d_k", "d_v") if one in found)
        with open(os.environ[LOG], "a", encoding="utf-8") as log:
            log.write("called wrong\n" if apart else "called\n")
        return found

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        import torch

        if dropout_p:
            given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return original(query, key, value, **given, enable_gqa=enable_gqa)
        leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        arrays = [_planes(x, leading) for x in (query, key, value)]
        mask = attn_mask if attn_mask is None or attn_mask.ndim <= 4 else attn_mask.flatten(0, -4)
        options: dict[str, Any] = {"causal": "top_left" if is_causal else False}
        options |= {} if scale is None else {"scale": scale}

        def host(x: Any) -> Array:
            return np.asarray(x.detach().to("cpu", torch.float64 if x.is_floating_point() else x.dtype))

        unit = TYPES[str(query.dtype).removeprefix("torch.")].unit

        def inputs(*given: Any) -> dict[str, Array]:
            extra = {} if mask is None else {"bias" if mask.is_floating_point() else "mask": host(mask)}
            return {**dict(zip("qkv", map(host, given), strict=True)), **extra}

        class Kernel(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                ctx.save_for_backward(*given)
                out = computed(inputs(*given), options, None, unit)["out"]
                return torch.as_tensor(out).to(given[0].device, given[0].dtype)

            @staticmethod
            def backward(ctx: Any, *d_out: Any) -> Any:
                given = ctx.saved_tensors
                found = computed(inputs(*given), options, host(d_out[0]), unit)
                return tuple(
                    torch.as_tensor(np.ascontiguousarray(found[f"d_{one}"])).to(x.device, x.dtype)
                    for one, x in zip("qkv", given, strict=True)
                )

        out = Kernel.apply(*arrays)
        shape = (*leading, *query.shape[-3:-1], value.shape[-1])
        return out.reshape(shape if query.ndim > 2 else shape[-2:])

    return attention


def _apart(found: Array, right: Array, unit: float) -> bool:
    """Tell whether a result is off by more than rounding."""
    most = float(np.max(np.abs(right[np.isfinite(right)]), initial=0.0))
    return not np.allclose(found, right, rtol=0.0, atol=ROUNDINGS * unit * most, equal_nan=True)


def _planes(x: Any, leading: Sequence[int]) -> Any:
    """Return a tensor of at least two axes as (b, h, n, w)."""
    while x.ndim < 3:
        x = x[None]
    return x.expand(*leading, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
