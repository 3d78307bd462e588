"""The first half minute on a GPU: what CuPy answers where it is known to differ from NumPy, and every implementation.

    python tools/gpu_first.py

Prints a table of all implementations and definitions, forward and backward, beside NumPy's; fails where one differs.
"""

from __future__ import annotations

import importlib.metadata as metadata
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

import refattn as ra
from refattn import backends, tree
from refattn.mechanisms.record import Unsupported

LIMIT = 1e-8
"""The largest difference from NumPy in float64, relative to 1 plus the largest number, that is a rounding error."""


def line(name: str, function: Callable[[], Any]) -> None:
    """Print what a call gives or raises, and how long it took."""
    start = time.perf_counter()
    try:
        found = str(function())
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:110]}"
    print(f"{name:<42} {1e3 * (time.perf_counter() - start):8.1f} ms  {' '.join(found.split())}", flush=True)


def versions() -> Iterator[str]:
    """Yield the versions of what runs here."""
    for name in ("numpy", "cupy", "array-api-compat", "torch", "triton", "scipy"):
        for package in (name, *(f"cupy-cuda{n}x" for n in (12, 13) if name == "cupy")):
            try:
                yield f"{name} {metadata.version(package)}"
                break
            except metadata.PackageNotFoundError:
                continue


def probes(backend: backends.Backend) -> None:
    """Print CuPy's answers."""
    xp: Any = backend.namespace()
    draw = np.random.default_rng(0)

    def made(*shape: int) -> Any:
        return backend.from_numpy(draw.standard_normal(shape))

    eye, large, square = xp.eye(3), made(1 << 20), made(64, 64)
    nan = xp.asarray([xp.nan, 1.0])
    line("solve: batches broadcast", lambda: xp.linalg.solve(made(2, 1, 3, 3), made(2, 4, 3, 1)).shape)
    line("solve: singular, one", lambda: xp.linalg.solve(0.0 * eye, eye[:, :1]))
    line("solve: singular, in a batch", lambda: xp.linalg.solve(0.0 * made(2, 3, 3), made(2, 3, 1)))
    line("slogdet: singular", lambda: xp.linalg.slogdet(0.0 * made(2, 3, 3)))
    line("cholesky: not positive", lambda: xp.linalg.cholesky(-1.0 * eye))
    line("eigh, a batch of 64: the error", lambda: eigh_error(xp, made(4, 64, 64)))
    line("svd, a batch of 64: the error", lambda: svd_error(xp, made(4, 64, 64)))
    line("eigh, svd: not finite", lambda: (xp.linalg.eigh(eye * xp.nan)[0], xp.linalg.svdvals(eye * xp.nan)))
    line("qr, a wide batch", lambda: [x.shape for x in xp.linalg.qr(made(2, 3, 5))])
    line("max, sign, minimum of NaN", lambda: (xp.max(nan), xp.sign(nan), xp.minimum(nan, xp.asarray(2.0))))
    line("logaddexp(-inf, -inf)", lambda: xp.logaddexp(xp.asarray(-xp.inf), xp.asarray(-xp.inf)))
    line("take outside", lambda: xp.take(xp.arange(3), xp.asarray([5])))
    line("np.asarray(x)", lambda: type(np.asarray(eye)))
    line("a list as an index", lambda: type(eye[[0, 1]]))
    line("np.float64 * x", lambda: type(np.float64(2) * eye))
    line("0-d as a whole number", lambda: range(xp.asarray(3)))
    line("float32 products: error / eps", lambda: product_errors(backend))
    line("same bits: rows alone and together", lambda: bool(xp.all((square @ square)[:32] == square[:32] @ square)))
    line("same bits: twice", lambda: bool(xp.sum(large) == xp.sum(large)))


def eigh_error(xp: Any, x: Any) -> float:
    """Return the error of a matrix that is put together again."""
    x = x + xp.matrix_transpose(x)
    values, vectors = xp.linalg.eigh(x)
    return float(xp.max(xp.abs(vectors * values[..., None, :] @ xp.matrix_transpose(vectors) - x)))


def svd_error(xp: Any, x: Any) -> float:
    """Return the error of a matrix that is put together again."""
    u, s, v = xp.linalg.svd(x, full_matrices=False)
    return float(xp.max(xp.abs(u * s[..., None, :] @ v - x)))


def product_errors(backend: backends.Backend) -> list[str]:
    """Return errors of a batch of products, of one product, and of one whose operand is a transpose; TF32 has 1e3."""
    a, b = (np.random.default_rng(n).standard_normal((2, 256, 256)).astype(np.float32) for n in (0, 1))
    x, y = backend.from_numpy(a), backend.from_numpy(b)
    pairs = [
        (x @ y, a.astype(np.float64) @ b),
        (x[0] @ y[0], a[0].astype(np.float64) @ b[0]),
        (backend.product(x, y.mT), a.astype(np.float64) @ b.swapaxes(1, 2)),
    ]
    eps = float(np.finfo(np.float32).eps)
    return [f"{np.max(np.abs(backend.to_numpy(p) - truth)) / np.max(np.abs(truth)) / eps:.1f}" for p, truth in pairs]


def row(mechanism: str, implementation: str, causal: bool, backend: backends.Backend) -> str | None:
    """Return a line of the table, None where NumPy has no such call either."""
    module: Any = getattr(ra, mechanism)
    draw = np.random.default_rng(1)
    arrays = [draw.standard_normal((1, 2, 24, 8)) / 2 for _ in range(4)]
    options: dict[str, Any] = {"causal": True} if causal else {}
    options |= {} if implementation == "definition" else {"implementation": implementation}
    try:
        out, saved = module.forward(*arrays[:3], **options)
    except (NotImplementedError, TypeError, ValueError, Unsupported):
        return None
    truths = tree.flatten({"out": out, **module.backward(saved, arrays[3])})
    times: list[float] = []
    name = f"{mechanism} | {implementation}{' causal' * causal}"
    try:
        for _ in range(2):
            start = time.perf_counter()
            q, k, v, d_out = (backend.from_numpy(x) for x in arrays)
            with ra.reading() if implementation == "definition" else nullcontext():
                out, saved = module.forward(q, k, v, **options)
                found = tree.flatten({"out": out, **module.backward(saved, d_out)})
            backend.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        errors = {
            n: float(np.max(np.abs(backend.to_numpy(found[n]) - x)) / (1.0 + np.max(np.abs(x))))
            for n, x in truths.items()
        }
    except Exception as error:
        traceback.print_exc(limit=-2)
        return f"| {name} | {type(error).__name__}: {str(error)[:80]} | differs | | |"
    backward = max(x for n, x in errors.items() if n != "out")
    wrong = "" if all(x <= LIMIT for x in errors.values()) else " differs"
    return f"| {name} | {errors['out']:.0e} | {backward:.0e}{wrong} | {times[0]:.0f} | {times[1]:.1f} |"


def main() -> None:
    """Print it; the last line counts what differs."""
    backend = backends.get("cupy")
    if (reason := backend.why_unavailable()) is not None:
        raise SystemExit(reason)
    runtime = backend.library().cuda.runtime
    properties = runtime.getDeviceProperties(0)
    memory = f"{properties['totalGlobalMem'] >> 30} GiB"
    print(
        f"device: {properties['name'].decode()}, {memory}, CUDA {runtime.runtimeGetVersion()}, {', '.join(versions())}"
    )
    probes(backend)
    wrong = 0
    print("\n| mechanism | implementation | forward | backward | ms, first | ms, second |")
    print("| --- | --- | --- | --- | --- | --- |")
    for mechanism in ra.list_mechanisms():
        for implementation in (*ra.mechanism(mechanism).implementations, "definition"):
            for causal in (False, True):
                if (found := row(mechanism, implementation, causal, backend)) is not None:
                    wrong += "differs" in found
                    print(found, flush=True)
    print(f"result: {wrong} of the implementations differ from NumPy's or raise")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
