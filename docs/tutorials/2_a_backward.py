"""
A backward pass: derived, checked four ways, broken and caught
==============================================================

refattn does not differentiate automatically: somebody derived each adjoint line. This tutorial derives one, of the
softmax over keys, and shows four checks that catch a wrong line.
"""

# %%
# The derivation
# --------------
# Forward, for one query: :m:`w_j = exp(s_j) / z` with :m:`z = sum_j exp(s_j)`. Let the scores move by :m:`ds_j`. Then
#
#     :m:`dw_j = w_j (ds_j - sum_l w_l ds_l)`
#
# If g is the gradient of the loss with respect to the weights, the loss moves by :m:`sum_j g_j dw_j`. The factor of
# :m:`ds_j` in it is the gradient with respect to the scores:
#
#     :m:`w_j (g_j - sum_l g_l w_l)`
#
# That is all; the rest of attention is matrix products.

import importlib.util

import numpy as np

import refattn as ra


def forward(q, k, v, scale):
    """Return out (i, e) of q (i, d), k (j, d), v (j, e), and what the backward reads."""
    scores = q @ k.T * scale  # (i, j)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))  # (i, j)
    weights = exponentials / exponentials.sum(-1, keepdims=True)  # (i, j)
    return weights @ v, (q, k, v, scale, weights)


def backward(saved, d_out, forgotten=False):
    q, k, v, scale, weights = saved
    d_v = weights.T @ d_out  # forward: out = weights @ v
    d_weights = d_out @ v.T
    inner = (d_weights * weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - (0.0 if forgotten else inner))  # forward: weights = exponentials / sum
    d_q = d_scores @ k * scale  # forward: scores = q @ k.T * scale
    d_k = d_scores.T @ q * scale
    return {"q": d_q, "k": d_k, "v": d_v}


draw = np.random.default_rng(0)
q, k, v, d_out = (draw.standard_normal(shape) for shape in ((5, 4), (6, 4), (6, 3), (5, 3)))
out, saved = forward(q, k, v, 0.5)
gradients = backward(saved, d_out)

# %%
# One: by hand, by somebody else
# ------------------------------
# Somebody else derived refattn's own backward; yours has to agree with it.

lift = lambda x: x[None, None]  # noqa: E731 (batch and heads of 1)
core_out, core_saved = ra.softmax.forward(lift(q), lift(k), lift(v), scale=0.5)
reference = ra.softmax.backward(core_saved, lift(d_out))
by_hand = max(float(np.abs(gradients[name] - reference[name][0, 0]).max()) for name in "qkv")
print(f"largest difference from refattn: {by_hand:.1e}")
assert by_hand < 1e-14

# %%
# Two: by differences
# -------------------
# Along a random direction the loss changes by the inner product of the gradient with that direction. The error of a
# step of 1e-5 is about its square, plus rounding divided by the step: some 1e-10.

direction = {name: draw.standard_normal(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}


def loss(step):
    moved = [x + step * direction[name] for name, x in (("q", q), ("k", k), ("v", v))]
    return float((forward(*moved, 0.5)[0] * d_out).sum())


def along(found):
    """Return the gradient's inner product with the direction."""
    return sum(float((found[name] * direction[name]).sum()) for name in "qkv")


differences = abs((loss(1e-5) - loss(-1e-5)) / 2e-5 - along(gradients))
print(f"by differences: {differences:.1e}")
assert differences < 1e-8

# %%
# Three: by tangents
# ------------------
# Arrays that carry a tangent run the same forward once and give its derivative along the direction, without the error
# of a step: ``<d_out, J t> = <J^T d_out, t>`` holds to the last digits.

_, moved = ra.tangent(
    lambda q, k, v: ra.softmax.forward(q, k, v, scale=0.5)[0],
    {"q": lift(q), "k": lift(k), "v": lift(v)},
    {name: lift(x) for name, x in direction.items()},
)
tangents = abs(float((moved * d_out).sum()) - along(gradients))
print(f"by tangents: {tangents:.1e}")
assert tangents < 1e-13

# %%
# Four: by a library that differentiates
# --------------------------------------

if importlib.util.find_spec("torch"):
    import torch

    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    weights = torch.softmax(tensors[0] @ tensors[1].T * 0.5, -1)
    (weights @ tensors[2]).backward(torch.tensor(d_out))
    autograd = max(
        float(np.abs(gradients[name] - x.grad.numpy()).max()) for name, x in zip("qkv", tensors, strict=True)
    )
    print(f"largest difference from autograd: {autograd:.1e}")
    assert autograd < 1e-14

# %%
# Broken on purpose
# -----------------
# Forget the sum that is subtracted, as if the denominator were a constant. The outputs are right, so no test of outputs
# can see the error. Differences and tangents can:

wrong = backward(saved, d_out, forgotten=True)
print(f"by differences: {abs((loss(1e-5) - loss(-1e-5)) / 2e-5 - along(wrong)):.1e}")
print(f"by tangents: {abs(float((moved * d_out).sum()) - along(wrong)):.1e}")
assert abs(float((moved * d_out).sum()) - along(wrong)) > 1e-2

# %%
# ``refattn verify --grad`` does the same for a kernel. In Python call `refattn.verify.verify`, here on one case of the
# mechanism, with an object that has ``forward`` and ``backward``:

from dataclasses import replace  # noqa: E402

from refattn.verify import verify  # noqa: E402


class Mine:
    def forward(self, q, k, v, *, scale=None):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, self.saved = np.empty((*q.shape[:3], v.shape[3])), {}
        for at in np.ndindex(*q.shape[:2]):
            out[at], self.saved[at] = forward(q[at], k[at], v[at], scale)
        return out

    def backward(self, d_out):
        heads = {at: backward(saved, d_out[at], forgotten=True) for at, saved in self.saved.items()}
        return {
            name: np.stack([one[name] for one in heads.values()]).reshape(*d_out.shape[:2], -1, width)
            for name, width in (("q", 16), ("k", 16), ("v", d_out.shape[3]))
        }


softmax = ra.mechanism("softmax")
few = replace(softmax, cases=(softmax.case("plain"),))
report = verify(few, Mine(), dtypes=["float64"], grad=True)
for outcome in report.outcomes:
    for verdict in outcome.verdicts:
        print(outcome.case, verdict.tensor, "agrees" if verdict.agrees else f"{verdict.share:.2g} of the allowed error")
assert {v.tensor for o in report.outcomes for v in o.verdicts if not v.agrees} == {"d_q", "d_k"}
