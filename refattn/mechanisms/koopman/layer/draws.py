"""Ridge and epsilon as random numbers: each from Beta(1, b), on (0, 1], concentrated at 0, with mean 1 / (1 + b).

One pair belongs to an update of a layer, and is shared by batch, heads and queries, which keeps the mechanism
equivariant. The numbers are a pure function of the seed, the step and the layer.
"""

from __future__ import annotations

from refattn import counter
from refattn.mechanisms.arguments import check_number, check_whole
from refattn.mechanisms.koopman.core import CANDIDATES
from refattn.xp import Array, backend, device, namespace


def draw(
    updates: int, *, seed: int, step: int, layer: int, like: Array, candidates: int = 1, b: float = 9.0
) -> dict[str, Array]:
    """Return "ridge" and "epsilon", (candidates, updates - 1) each, for `context.draws`.

    Without a block the one is a number of the fit, the other of the perturbation. `like` gives the array library, the
    dtype and the device. ValueError where a number is none that fits; the core tries at most 8 candidates.
    """
    check_whole("updates", updates, 1, rounds=True)
    check_whole("candidates", candidates, 1)
    if candidates > CANDIDATES:
        raise ValueError(f"candidates: got {candidates}, needs at most {CANDIDATES}")
    check_number("b", b, positive=True)
    xp = namespace(like)
    found = {}
    for name in ("ridge", "epsilon"):
        uniform = counter.uniform(
            (candidates, updates - 1), seed=seed, purpose=f"koopman.{name}", step=step, layer=layer
        )
        values = (1.0 - uniform ** (1.0 / b)).clip(1e-12)
        values = values if backend(like).float64() else values.astype("float32")
        found[name] = xp.astype(backend(like).from_numpy(values, device=device(like)), like.dtype)
    return found
