"""
In a notebook
=============

All you need is ``pip install refattn`` and a kernel in a cell. This tutorial goes from there to the name of a fault in
four lines. The page has a link that downloads it as a notebook.
"""

# %%
# A kernel
# --------
# Attention as many would write it, with a causal mask. It has one fault.

import numpy as np

import refattn as ra


def attend(q, k, v, *, causal=False, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[1] != k.shape[1] or 0 in q.shape + k.shape + v.shape:
        return ra.Decline("no grouped heads, no empty arrays")
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(scale)
    if causal:
        seen = np.tril(np.ones(scores.shape[-2:], bool))
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


# %%
# One call
# --------
# ``ra.verify`` calls the kernel with the designed cases, and judges each result by how far the rounding of a correct
# kernel can move it. The report is false if anything disagrees; shown in a cell, it is the diagnosis.

report = ra.verify("softmax", attend, cases=["plain", "scale", "causal", "causal-tail", "one-query"])
report

# %%
# Squares are right. If there are more keys than queries, the mask has to end at the last key, and here it begins at the
# first: the aligned corner is the fault, and the report names it.

assert not report
report.suspects

# %%
# Your own arrays
# ---------------
# ``ra.assert_close`` judges a result that you have, on arrays that you have, of NumPy, PyTorch, JAX or CuPy. There is
# no tolerance to choose. The message says how much of the allowed error was used, where, and what would explain it.

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 24, 16)).astype(np.float32)
print(repr(ra.assert_close("softmax", q, k, v, attend(q, k, v, causal=True), causal=True)))

short = q[:, :, :5]
try:
    ra.assert_close("softmax", short, k, v, attend(short, k, v, causal=True), causal=True)
except AssertionError as error:
    print(error)

# %%
# Right in the cell
# -----------------
# What a forward saves shows its shapes and types, and a trace has every equation of the paper with its value.

out, saved = ra.softmax.forward(q, k, v, causal=True)
saved

# %%

with ra.reading(), ra.trace() as trace:
    ra.softmax.forward(q, k, v)
trace

# %%
# ``ra.explore`` shows a call on small arrays as a page to step through, with the arrow keys, in the cell: select a
# number to see what it is computed from.

small = [x[:, :1, :5, :4] for x in (q, k, v)]
ra.explore("softmax", *small, causal=True)

# %%
# The fault removed
# -----------------


def repaired(q, k, v, *, causal=False, scale=None):
    if causal and q.shape[2] < k.shape[2]:  # attend the past of each query: place it at the end
        before = np.zeros((*q.shape[:2], k.shape[2] - q.shape[2], q.shape[3]), q.dtype)
        return attend(np.concatenate([before, q], axis=2), k, v, causal=True, scale=scale)[:, :, -q.shape[2] :]
    return attend(q, k, v, causal=causal, scale=scale)


report = ra.verify("softmax", repaired, cases=["plain", "scale", "causal", "causal-tail", "one-query"])
report.raise_if_failed()
report
