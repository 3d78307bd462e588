"""A whole training step of a small language model beside the same model in PyTorch's eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Point, Side
from refattn import philox, tree
from refattn.train import data
from refattn.train.settings import Settings

SHOWN = 3
"""Losses of the first so many steps are what the sides are compared by: they depend on all gradients and updates."""


def settings_of(width: int, layers: int, context: int, batch: int) -> Settings:
    """Return the settings of a run with a head for each 64 of the width."""
    return Settings("softmax", width=width, layers=layers, context=context, batch=batch, heads=width // 64, warmup=1)


def text_of() -> data.Text:
    """Return bytes that are not all alike."""
    made = philox.integers((1 << 20,), 0, 96, seed=0, purpose="comparison.train").astype(np.uint8)
    return data.Text("made", made, made, data.Counts(), "")


def ours(width: int, layers: int, context: int, batch: int) -> Callable[[], Any]:
    """refattn on NumPy: data, loss, gradients, clipping and AdamW."""
    from refattn.train import loop

    settings, text = settings_of(width, layers, context, batch), text_of()
    state = loop.fresh(settings)
    losses: list[float] = []

    def run() -> Any:
        nonlocal state
        state, row = loop.step(state, settings, text)
        losses.append(row["loss"])
        return np.asarray(losses[:SHOWN])

    return run


def eager(width: int, layers: int, context: int, batch: int) -> Callable[[], Any]:
    """The same in PyTorch: its modules, its attention kernel, autograd, its clipping and its AdamW."""
    import torch
    from torch.nn import functional

    from refattn.train import loop

    settings, text = settings_of(width, layers, context, batch), text_of()
    start = {name: torch.from_numpy(x.copy()) for name, x in tree.flatten(loop.fresh(settings).params).items()}
    model = _torch_model(settings, start)
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "embedding" not in n]
    plain = [p for n, p in model.named_parameters() if p.ndim < 2 or "embedding" in n]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    betas = settings.beta1, settings.beta2
    optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon)
    losses: list[float] = []

    def run() -> Any:
        number = len(losses) + 1
        drawn = data.batch(text.train, size=batch, context=context, seed=settings.seed, step=number)
        inputs, targets = (torch.from_numpy(x) for x in drawn)
        for group in optimiser.param_groups:
            group["lr"] = settings.schedule(number)
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))
        optimiser.step()
        losses.append(loss.item())
        return np.asarray(losses[:SHOWN])

    return run


def products(width: int, layers: int, context: int, batch: int) -> Callable[[], Any]:
    """The matrix products of all linear maps, forward and backward, in NumPy and nothing else: a bound for refattn."""
    from refattn import backends
    from refattn.train.step import SHARD_TOKENS

    def draw(*shape: int) -> Any:
        return philox.normal(shape, seed=0, purpose="comparison.train.products").astype(np.float32)

    block = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    maps = [(draw(SHARD_TOKENS, i), draw(i, o), draw(SHARD_TOKENS, o)) for i, o in (*block * layers, (width, 256))]

    def shard(_: int) -> None:
        for x, w, d_y in maps:
            x @ w, d_y @ w.T, x.T @ d_y

    return lambda: backends.get("numpy").map(shard, range(batch * context // SHARD_TOKENS))


def _torch_model(settings: Settings, start: dict[str, Any]) -> Any:
    """Return the model as one writes it in PyTorch, with queries, keys and values from one product."""
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = settings.width, settings.heads

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            b, n, _ = x.shape
            q, k, v = (
                part.view(b, n, heads, width // heads).transpose(1, 2)
                for part in self.qkv(self.norm_1(x)).split(width, dim=2)
            )
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(b, n, width))
            return x + self.narrow(functional.gelu(self.wide(self.norm_2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding = nn.Embedding(256, width)
            self.position_embedding = nn.Embedding(settings.context, width)
            self.layers, self.norm = nn.ModuleList(Layer() for _ in range(settings.layers)), nn.LayerNorm(width)

        def forward(self, tokens: Any) -> Any:
            x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) @ self.token_embedding.weight.T

    model = Model()
    given = {
        "token_embedding.weight": start["token_embedding"],
        "position_embedding.weight": start["position_embedding"],
    }
    norms = {"norm": "norm"} | {
        f"layers.{n}.norm_{i}": f"layers.{n}.norm_{i}" for n in range(settings.layers) for i in (1, 2)
    }
    for name, own in norms.items():
        given |= {f"{name}.weight": start[f"{own}.gain"], f"{name}.bias": start[f"{own}.bias"]}
    for n in range(settings.layers):
        w = {name: start[f"layers.{n}.block.w_{name}"].T for name in "qkvo"}
        given[f"layers.{n}.qkv.weight"] = torch.cat([w["q"], w["k"], w["v"]])
        given[f"layers.{n}.out.weight"] = w["o"]
        for name, own in (("wide", "in"), ("narrow", "out")):
            given[f"layers.{n}.{name}.weight"] = start[f"layers.{n}.mlp.w_{own}"].T
            given[f"layers.{n}.{name}.bias"] = start[f"layers.{n}.mlp.b_{own}"]
    model.load_state_dict(given)
    return model


def tokens(point: Point) -> float:
    """Return the tokens of a step."""
    return float(point["batch"] * point["context"])


COMPARISON = Comparison(
    name="train",
    title="A training step beside PyTorch",
    text=(
        "One step of `refattn train`: a batch of the text, loss, gradients of all parameters, clipping and AdamW, "
        "beside the same model from the same parameters in PyTorch's eager mode, with its attention kernel, autograd "
        "and AdamW. *products* are those of the linear maps alone, forward and backward, in NumPy."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("products", f"{__name__}:products", bound=True),
        Side("eager", f"{__name__}:eager"),
    ),
    grid=(
        {"width": 256, "layers": 4, "context": 256, "batch": 16},
        {"width": 128, "layers": 4, "context": 128, "batch": 16},
    ),
    quick=lambda point: point["width"] == 128,
    agree=1e-4,  # float32, and three steps that each build on the last
    work=tokens,
    unit="tokens",
)
