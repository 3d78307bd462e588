"""The gated delta rule beside plain torch: token by token, and in chunks as published code without kernels has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from refattn import counter

HEADS, WIDTH, CHUNK = 4, 64, 64


def arrays(n: int) -> dict[str, Any]:
    """Return q, k, v, log_decay, beta and d_out in float32; keys have length 1, and decays are between 0.9 and 1."""
    shapes = dict.fromkeys(("q", "k", "v", "d_out"), (1, HEADS, n, WIDTH))
    drawn = {x: counter.normal(shape, seed=0, purpose=f"delta.{x}") for x, shape in shapes.items()}
    drawn["k"] /= np.linalg.norm(drawn["k"], axis=-1, keepdims=True)
    gates = {x: counter.normal((1, HEADS, n), seed=0, purpose=f"delta.{x}") for x in ("log_decay", "beta")}
    gates = {
        "log_decay": 0.1 * np.log(1.0 / (1.0 + np.exp(-gates["log_decay"]))),
        "beta": 1.0 / (1.0 + np.exp(-gates["beta"])),
    }
    return {x: array.astype("float32") for x, array in {**drawn, **gates}.items()}


def ours(n: int, run: str) -> Callable[[], Any]:
    """refattn on NumPy, in the form that it chooses itself."""
    import refattn as ra

    given = arrays(n)
    d_out = given.pop("d_out")

    def forward() -> Any:
        return ra.delta.forward(**given)[0]

    def both() -> Any:
        out, saved = ra.delta.forward(**given)
        return out, ra.delta.backward(saved, d_out)

    return forward if run == "forward" else both


def recurrent(n: int, run: str) -> Callable[[], Any]:
    """Torch, one token after the other."""
    import torch

    def rule(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        state, out = q.new_zeros(1, HEADS, WIDTH, WIDTH), []
        for i in range(q.shape[2]):
            state = state * log_decay[:, :, i, None, None].exp()
            key = k[:, :, i]
            error = v[:, :, i] - (state * key[..., None]).sum(-2)
            state = state + key[..., None] * (beta[:, :, i, None] * error)[..., None, :]
            out.append((state * q[:, :, i, :, None]).sum(-2))
        return torch.stack(out, 2) * WIDTH**-0.5

    return _torch(rule, n, run)


def chunked(n: int, run: str) -> Callable[[], Any]:
    """Torch, in chunks: within one a triangular system, between them the state."""
    import torch

    def rule(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        def cut(x: Any) -> Any:
            return x.reshape(1, HEADS, -1, CHUNK, *x.shape[3:])

        q, k, v, log_decay, beta = (cut(x) for x in (q * WIDTH**-0.5, k, v, log_decay, beta))
        total = log_decay.cumsum(-1)
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        system = ((beta[..., None] * k) @ k.transpose(-1, -2) * between).tril(-1) + torch.eye(CHUNK)
        sides = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), -1)
        u, w = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(WIDTH, -1)
        inside = q @ k.transpose(-1, -2) * between
        state, out = q.new_zeros(1, HEADS, WIDTH, WIDTH), []
        for i in range(q.shape[2]):
            new = u[:, :, i] - w[:, :, i] @ state
            out.append((q[:, :, i] * total[:, :, i, :, None].exp()) @ state + inside[:, :, i] @ new)
            left = (total[:, :, i, -1:] - total[:, :, i]).exp()
            state = (
                state * total[:, :, i, -1, None, None].exp() + (k[:, :, i] * left[..., None]).transpose(-1, -2) @ new
            )
        return torch.stack(out, 2).reshape(1, HEADS, -1, WIDTH)

    return _torch(rule, n, run)


def _torch(rule: Callable[..., Any], n: int, run: str) -> Callable[[], Any]:
    import torch

    given = {x: torch.from_numpy(array) for x, array in arrays(n).items()}
    d_out = given.pop("d_out")

    def forward() -> Any:
        with torch.no_grad():
            return rule(**given)

    def both() -> Any:
        leaves = {x: tensor.clone().requires_grad_() for x, tensor in given.items()}
        out = rule(**leaves)
        return out, dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], d_out), strict=True))

    return forward if run == "forward" else both


COMPARISON = Comparison(
    name="delta",
    title="The gated delta rule beside plain torch",
    text=(
        f"{HEADS} heads of width {WIDTH}, a decay for each head, float32. *recurrent* and *chunked* are the same rule "
        f"in plain torch, token by token and in chunks of {CHUNK}, with autograd's backward."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("torch recurrent", f"{__name__}:recurrent"),
        Side("torch chunked", f"{__name__}:chunked"),
    ),
    grid=tuple({"n": n, "run": run} for n in (1024, 4096) for run in ("forward", "both")),
    quick=lambda point: point["n"] == 1024 and point["run"] == "both",
)
