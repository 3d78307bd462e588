"""Four mechanisms as their equations stand, in plain PyTorch, as kernels for `refattn verify`.

    refattn verify sympformer --impl examples/torch_mechanisms.py:sympformer --grad
    refattn verify graph_energy --impl examples/torch_mechanisms.py:graph_energy --grad
    refattn verify growing --impl examples/torch_mechanisms.py:growing --grad
    refattn verify koopman --impl examples/torch_mechanisms.py:koopman --grad

Every pair at once, and PyTorch differentiates: for checking, not for training. Arithmetic is float32 for float16 and
bfloat16, with one rounding at the end.

What differs from refattn:
- `sympformer` takes exponentials of scores as they come, where refattn takes the largest score of a row out: those
  above 88 overflow in float32. It gives no `log_z`.
- `graph_energy` has the state "token", a fixed step that is given, and explicit integrators; it declines the rest.
- `growing` is PyTorch's own attention: growth is in the block, and the core is that of softmax attention. It declines a
  soft-cap and gives no `lse`.
- `koopman` has the kernels "linear" and "rbf"; it declines the others, and what its signature leaves out.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import refattn

COUPLINGS = {"sin": torch.sin, "tanh": torch.tanh, "identity": lambda x: x, "arctan": torch.arctan, "sinh": torch.sinh}

# What links tokens, from their scores and their attention.
LINKS = {
    "kernel": lambda scores, weights: torch.softmax((scores + scores.mT) / 2.0, dim=-1),
    "mean": lambda scores, weights: (weights + weights.mT) / 2.0,
    "none": lambda scores, weights: weights,
}

JITTER = {torch.float64: 1e-8, torch.float32: 1e-4}

# Weights of the stages before, of each stage; and of all in a step.
TABLEAUS = {
    "euler": (((),), (1.0,)),
    "heun": (((), (1.0,)), (0.5, 0.5)),
    "rk4": (((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}


def in_float32(function: Any) -> Any:
    """Compute in float32 what comes in less, and round once."""

    @functools.wraps(function)
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        kept, wide = q.dtype, (lambda x: x if x.dtype in (torch.float64, torch.bool) else x.float())
        options = {name: wide(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        groups = q.shape[1] // k.shape[1]
        k, v = (wide(x).repeat_interleave(groups, dim=1) for x in (k, v))
        out = function(wide(q), k, v, **options)
        return out.to(kept) if isinstance(out, torch.Tensor) else out

    run.framework = "torch"  # type: ignore[attr-defined]
    return run


@in_float32
def sympformer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kinetic: torch.Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
) -> torch.Tensor:
    """q, k (b, h, n, d), v (b, h, n, e), kinetic energies (b, h, n, 1) -> forces (b, h, n, e)."""
    n = q.shape[2]
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    seen = torch.ones(n, n, dtype=q.dtype).tril() if causal else torch.ones(n, n, dtype=q.dtype)
    growth, count = torch.exp(scores) * seen, seen.sum(-1, keepdim=True)
    z = growth.sum(-1, keepdim=True) / count
    u = torch.zeros_like(z) if kinetic is None else kinetic / z**2
    return growth * (u + u.mT + 2.0) @ v / (2.0 * count)


@in_float32
def graph_energy(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mu: float = 1.0,
    kappa: float = 1.0,
    step: float | None = None,
    steps: int = 10,
    integrator: str = "euler",
    coupling: str = "sin",
    graph: str = "kernel",
    threshold: str = "hard",
    **options: Any,
) -> torch.Tensor | refattn.Decline:
    """q, k (b, h, n, d), v (b, h, n, e) -> out (b, h, n, e): scores of tokens flow, and weigh attention."""
    known = re.fullmatch(r"(hard|soft)(?:\(tau=([\d.]+)\))?", threshold)
    if options or known is None or integrator not in TABLEAUS or coupling not in COUPLINGS or graph not in LINKS:
        return decline("state token without a mask, explicit integrators, simple couplings")
    if step is None and steps:
        return decline("the step has to be given")
    scores = q @ k.mT / math.sqrt(q.shape[3])
    weights = torch.softmax(scores, dim=-1)
    links = LINKS[graph](scores, weights) * (1.0 - torch.eye(q.shape[2], dtype=q.dtype))
    start = torch.sigmoid(scores.diagonal(dim1=-2, dim2=-1))
    x = start
    for _ in range(steps):
        rates: list[torch.Tensor] = []
        stages, shares = TABLEAUS[integrator]
        for stage in stages:
            y = x + step * sum((a * rate for a, rate in zip(stage, rates, strict=True)), torch.zeros_like(x))
            pull = (links * COUPLINGS[coupling](y[..., None, :] - y[..., :, None])).sum(-1)
            rates.append(mu * (start - y) + kappa * pull)
        x = x + step * sum((share * rate for share, rate in zip(shares, rates, strict=True)), torch.zeros_like(x))
    kind, tau = known[1], float(known[2] or 0.4)
    kept = torch.where(x >= tau, x, 0.0) if kind == "hard" else torch.where(x > tau, x - tau, 0.0)
    shares_of = weights * kept[..., None, :]
    total = shares_of.sum(-1, keepdim=True)
    emptied = torch.nn.functional.one_hot((weights * x[..., None, :]).argmax(-1), x.shape[-1]).to(x.dtype)
    return torch.where(total > 0.0, shares_of / torch.where(total > 0.0, total, 1.0), emptied) @ v


@in_float32
def growing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor | refattn.Decline:
    """q (b, h, n_q, d), k (b, h, n_k, d), v (b, h, n_k, e), mask like (b, h, n_q, n_k) -> out (b, h, n_q, e)."""
    if softcap is not None:
        return decline("scaled_dot_product_attention has no soft-cap")
    n_q, n_k = q.shape[2], k.shape[2]
    if causal:
        past = torch.ones(n_q, n_k, dtype=torch.bool).tril(0 if causal == "top_left" else n_k - n_q)
        mask = past if mask is None else mask & past
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def family(text: str) -> tuple[str, dict[str, Any]]:
    """Take apart an option such as "rbf(bandwidth=2.0)": the name, and the numbers that are given.

    A path to a function, "MODULE:NAME", is a name.
    """
    if ":" in text:
        return text, {}
    call = ast.parse(text, mode="eval").body
    if isinstance(call, ast.Call):
        return ast.unparse(call.func), {str(given.arg): ast.literal_eval(given.value) for given in call.keywords}
    return text, {}


@in_float32
def koopman(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    updates: int = 2,
    kernel: str = "rbf",
    fit: str = "stein",
    perturbation: str = "identity",
    jitter: float | None = None,
    mask: torch.Tensor | None = None,
    causal: bool | str = False,
    **options: Any,
) -> torch.Tensor | refattn.Decline:
    """q (b, h, i, d), k, v (b, h, j, d), mask like (b, h, i, j) -> the last query (b, h, i, d)."""
    (kernel, own), (fit, fitted), (perturbation, perturbed) = family(kernel), family(fit), family(perturbation)
    if options or kernel not in ("linear", "rbf") or set(fitted) - {"ridge", "tau"}:
        return decline("kernels linear and rbf, operators on their sections at the keys, fitted to all points")
    shape, second = (*q.shape[:3], k.shape[2]), 0.0 if kernel == "linear" else own.get("weight", 1.0)
    width = own.get("bandwidth", math.sqrt(q.shape[3]))
    ridge, tau = fitted.get("ridge", 0.1), fitted.get("tau", 0.0)
    epsilon, mix = perturbed.get("epsilon", 0.1), perturbed.get("mix", 1.0)
    a, b = {"shift": (epsilon, 1.0), "identity": (1.0, epsilon), "pencil": (mix, epsilon)}[perturbation]
    seen = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    if causal:
        seen = seen & torch.ones_like(seen).tril(0 if causal == "top_left" else shape[3] - shape[2])

    def section(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
        return x @ y.mT + second * torch.exp(squares / (-2.0 * width**2))

    def observed(x: torch.Tensor) -> torch.Tensor:  # (b, h, i, l, d) -> (b, h, i, l, j)
        return section(x, k[:, :, None]) * seen[..., None, :]

    def at(x: torch.Tensor, columns: torch.Tensor, dual: torch.Tensor) -> torch.Tensor:
        return (observed(x[..., None, :]) @ dual.mT @ columns)[..., 0, :]  # columns^T kappa(x) [KOOP.section]

    def attend(x: torch.Tensor) -> torch.Tensor:
        scores = x @ k.mT / math.sqrt(x.shape[3])  # [KOOP.2]
        masked = scores.masked_fill(~seen, torch.finfo(x.dtype).min)  # [KOOP.masked]
        return (torch.softmax(masked, dim=-1) * seen) @ v  # [KOOP.3] [KOOP.4]

    between = section(k, k)  # [KOOP.1] but for the jitter
    delta = (JITTER[q.dtype] if jitter is None else jitter) * (second + 1.0)
    pairs = (seen[..., :, None] & seen[..., None, :]) * between[:, :, None]
    gram = pairs + torch.diag_embed(delta + (~seen).to(q.dtype))  # [KOOP.visible]
    points = [q, attend(q)]
    while len(points) <= updates:
        attended, path = attend(points[-1]), torch.stack(points, dim=3)
        starts = observed(path[..., :-1, :])  # [KOOP.5]
        targets = observed(path[..., 1:, :]) - tau * starts  # [KOOP.6]
        dual = torch.linalg.solve(gram, starts.mT).mT  # [KOOP.dual]
        inner = dual @ starts.mT  # [KOOP.8]
        if fit == "stein":  # [KOOP.9], of all elements of A, row by row
            system = torch.einsum("...lm,...po->...lomp", inner, gram).flatten(-2).flatten(-3, -2)
            system = system + ridge * torch.eye(system.shape[-1], dtype=q.dtype)
            found = torch.linalg.solve(system, targets.flatten(-2)).unflatten(-1, targets.shape[-2:])
        else:
            ridged = inner + ridge * torch.eye(inner.shape[-1], dtype=q.dtype)
            found = torch.linalg.solve(gram, torch.linalg.solve(ridged, targets).mT).mT
        modes = found @ k[:, :, None]  # [KOOP.modes]
        lifted = (a + 2.0 * tau * b) * modes + b * found @ starts.mT @ modes  # [KOOP.operator] [KOOP.lifted]
        image = (a + b) * tau * attended + at(attended, lifted, dual)  # [KOOP.14]
        begin = (tau * attended + at(attended, modes, dual), attended, points[-1])
        psi = functools.partial(lambda m, n, x: (a + b * tau) * x + b * at(x, m, n), modes, dual)
        points.append(invert(psi, image, begin))  # [KOOP.15]
    return points[-1]


def invert(psi: Any, image: torch.Tensor, starts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """x with psi(x) = image by damped Newton steps, from the first start that leads to one; differentiable in psi."""

    def look(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # the size of what is left, Newton's step
        left = psi(x) - image
        slope = torch.autograd.functional.jacobian(lambda x: psi(x).sum((0, 1, 2)), x).permute(1, 2, 3, 0, 4)
        return left.norm(dim=-1, keepdim=True), torch.linalg.solve_ex(slope, left[..., None])[0][..., 0]

    enough = 100.0 * torch.finfo(image.dtype).eps * (1.0 + image.detach().norm(dim=-1, keepdim=True))
    best, least = starts[0].detach(), torch.full_like(enough, math.inf)
    for start in starts:
        with torch.no_grad():
            x, length, (size, step) = start.detach(), torch.ones_like(enough), look(start.detach())
            for _ in range(100):
                if not ((size > enough) & (length > 2.0**-30)).any():
                    break
                new_size, new_step = look(x - length * step)
                better = new_size <= (1.0 - 1e-4 * length) * size
                x = torch.where(better, x - length * step, x)
                size, step = torch.where(better, new_size, size), torch.where(better, new_step, step)
                length = torch.where(better, 1.0, length / 2.0)
            other = (least > 100.0 * enough) & (size <= 100.0 * enough)
            best, least = torch.where(other, x, best), torch.where(other, size, least)
        if (least <= 100.0 * enough).all():
            return best - look(best)[1]  # one more step, whose slope is that of the root
    raise ArithmeticError("the perturbation was not inverted")


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows a function for another purpose does not need it

    return refattn.Decline(reason)
