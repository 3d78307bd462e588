"""The gated delta rule and KDA beside plain torch: token by token, and in chunks as code without kernels has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from refattn import philox

HEADS, WIDTH, CHUNK = 4, 64, 64


def arrays(n: int, rule: str) -> dict[str, Any]:
    """Return q, k, v, log_decay, beta and d_out in float32; keys have length 1, and decays are between 0.9 and 1."""
    shapes = dict.fromkeys(("q", "k", "v", "d_out"), (1, HEADS, n, WIDTH))
    drawn = {x: philox.normal(shape, seed=0, purpose=f"delta.{x}") for x, shape in shapes.items()}
    drawn["k"] /= np.linalg.norm(drawn["k"], axis=-1, keepdims=True)
    of_gates = {"log_decay": (1, HEADS, n, WIDTH) if rule == "KDA" else (1, HEADS, n), "beta": (1, HEADS, n)}
    gates = {x: philox.normal(shape, seed=0, purpose=f"delta.{x}") for x, shape in of_gates.items()}
    gates = {
        "log_decay": 0.1 * np.log(1.0 / (1.0 + np.exp(-gates["log_decay"]))),
        "beta": 1.0 / (1.0 + np.exp(-gates["beta"])),
    }
    return {x: array.astype("float32") for x, array in {**drawn, **gates}.items()}


def ours(n: int, run: str, rule: str, form: str = "auto") -> Callable[[], Any]:
    """refattn on NumPy, in the form that it chooses itself."""
    import refattn as ra

    given = arrays(n, rule)
    d_out = given.pop("d_out")

    def forward() -> Any:
        return ra.delta.forward(**given, implementation=form)[0]

    def both() -> Any:
        out, saved = ra.delta.forward(**given, implementation=form)
        return out, ra.delta.backward(saved, d_out)

    return forward if run == "forward" else both


def ours_recurrent(n: int, run: str, rule: str) -> Callable[[], Any]:
    """refattn on NumPy, token by token."""
    return ours(n, run, rule, "recurrent")


def recurrent(n: int, run: str, rule: str) -> Callable[[], Any]:
    """Torch, one token after the other."""
    import torch

    def computed(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        state, out = q.new_zeros(1, HEADS, WIDTH, WIDTH), []
        decay = (log_decay if rule == "KDA" else log_decay[..., None]).exp()
        for i in range(q.shape[2]):
            state = state * decay[:, :, i, :, None]
            key = k[:, :, i]
            error = v[:, :, i] - (state * key[..., None]).sum(-2)
            state = state + key[..., None] * (beta[:, :, i, None] * error)[..., None, :]
            out.append((state * q[:, :, i, :, None]).sum(-2))
        return torch.stack(out, 2) * WIDTH**-0.5

    return _torch(computed, n, run, rule)


def chunked(n: int, run: str, rule: str) -> Callable[[], Any]:
    """Torch, in chunks: within one a triangular system, between them the state."""
    import torch

    def computed(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        def cut(x: Any) -> Any:
            return x.reshape(1, HEADS, -1, CHUNK, *x.shape[3:])

        q, k, v, beta = (cut(x) for x in (q * WIDTH**-0.5, k, v, beta))
        total = cut(log_decay if rule == "KDA" else log_decay[..., None]).cumsum(-2)  # a channel, or all of them
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
        heads = (total - total.transpose(-1, -2)).masked_fill(~lower, -torch.inf).exp() if rule != "KDA" else None

        def scores(x: Any) -> Any:
            if heads is not None:
                return x @ k.transpose(-1, -2) * heads
            columns = [
                (x[..., j:, :] * (total[..., j:, :] - total[..., j : j + 1, :]).exp() * k[..., j : j + 1, :]).sum(-1)
                for j in range(CHUNK)
            ]
            return torch.stack([torch.nn.functional.pad(x, (j, 0)) for j, x in enumerate(columns)], -1)

        system = (beta[..., None] * scores(k)).tril(-1) + torch.eye(CHUNK)
        sides = torch.cat((beta[..., None] * v, beta[..., None] * total.exp() * k), -1)
        u, w = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(WIDTH, -1)
        inside = scores(q)
        state, out = q.new_zeros(1, HEADS, WIDTH, WIDTH), []
        for i in range(q.shape[2]):
            new = u[:, :, i] - w[:, :, i] @ state
            out.append((q[:, :, i] * total[:, :, i].exp()) @ state + inside[:, :, i] @ new)
            left = k[:, :, i] * (total[:, :, i, -1:] - total[:, :, i]).exp()
            state = state * total[:, :, i, -1, :, None].exp() + left.transpose(-1, -2) @ new
        return torch.stack(out, 2).reshape(1, HEADS, -1, WIDTH)

    return _torch(computed, n, run, rule)


def _torch(computed: Callable[..., Any], n: int, run: str, rule: str) -> Callable[[], Any]:
    import torch

    given = {x: torch.from_numpy(array) for x, array in arrays(n, rule).items()}
    d_out = given.pop("d_out")

    def forward() -> Any:
        with torch.no_grad():
            return computed(**given)

    def both() -> Any:
        leaves = {x: tensor.clone().requires_grad_() for x, tensor in given.items()}
        out = computed(**leaves)
        return out, dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], d_out), strict=True))

    return forward if run == "forward" else both


COMPARISON = Comparison(
    name="delta",
    title="The gated delta rule and KDA beside plain torch",
    text=(
        f"{HEADS} heads of width {WIDTH}, float32; the gated delta rule has a decay for each head, KDA one for each "
        "channel. *torch recurrent* and *torch chunked* are the same rule in plain torch, token by token and in chunks "
        f"of {CHUNK}, with autograd's backward; *refattn recurrent* is its own recurrence, where it chooses chunks."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("refattn recurrent", f"{__name__}:ours_recurrent"),
        Side("torch recurrent", f"{__name__}:recurrent"),
        Side("torch chunked", f"{__name__}:chunked"),
    ),
    grid=tuple(
        {"rule": rule, "n": n, "run": run}
        for rule in ("gated delta", "KDA")
        for n in (1024, 4096)
        for run in ("forward", "both")
    ),
    quick=lambda point: point["n"] == 1024 and point["run"] == "both",
)
