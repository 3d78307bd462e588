"""
From nothing to a verified kernel
=================================

You have written an attention kernel and want to know whether it is right. This tutorial goes from the first line to the
answer, in NumPy, PyTorch, JAX and C, by way of a bug that every author of a flash kernel has had once.
"""

# %%
# A kernel that reads its keys tile by tile
# -----------------------------------------
# The kernel keeps three things for each query: the largest score so far, the sum of exponentials, and the weighted sum
# of values. Its adapter, ``attend``, gets the arrays from refattn. Cases with arguments that its signature does not
# name (masks, a soft-cap, a window, ...) are declined and counted apart, never as agreement.

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
KERNEL = """
import numpy as np
import refattn

TILE = 16


def attend(q, k, v, *, scale=None):
    if 0 in (*q.shape, *k.shape, *v.shape) or q.shape[1] != k.shape[1]:
        return refattn.Decline("no empty arrays, no grouped heads")
    scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    largest = np.full((*q.shape[:3], 1), -np.inf, q.dtype)
    total = np.zeros_like(largest)
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    for start in range(0, k.shape[2], TILE):
        keys, values = k[:, :, start : start + TILE], v[:, :, start : start + TILE]
        scores = q @ keys.swapaxes(-1, -2) * scale
        higher = np.maximum(largest, scores.max(-1, keepdims=True))
        exponentials = np.exp(scores - higher)
        shrink = np.exp(largest - higher)
        total = total * shrink + exponentials.sum(-1, keepdims=True)
        out = out + exponentials @ values
        largest = higher
    return out / total
"""
(folder / "mine.py").write_text(KERNEL)


def run(*words: str, lines: int = 12) -> str:
    """Run a command as you would in a shell, and show the first lines of what it prints."""
    command = [sys.executable, "-m", "refattn", *words]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print("$ refattn", *words)
    print("\n".join(result.stdout.splitlines()[:lines]))
    return result.stdout


# %%
# The first answer
# ----------------
# The report says what is wrong, where, by how many times the tolerance, and which known bug or equation explains it.

found = run("verify", "softmax", "--impl", "mine.py:attend", "--dtype", "float32")
assert "disagrees" in found and "the accumulator is not rescaled when the running maximum moves" in found

# %%
# When the largest score changes, earlier sums are on another scale: ``total`` is rescaled, ``out`` is not. This line
# fixes it:

right = KERNEL.replace("out = out + exponentials", "out = out * shrink + exponentials")
(folder / "mine.py").write_text(right)
found = run("verify", "softmax", "--impl", "mine.py:attend", "--dtype", "float32")
assert "disagrees" not in found and " 0 failed" in found

# %%
# Gradients: PyTorch
# ------------------
# If a function returns a tensor, its library differentiates it; ``framework`` asks for tensors as inputs. So the same
# kernel with torch's functions has both its outputs and its gradients verified. The largest score is detached: what
# passes through it adds up to 0, but rounding leaves more than an honest kernel's error, as verify finds with 16,389
# keys.

TORCH = right + 'attend.framework = "torch"\n'
for numpy, torch in {
    "import numpy as np": "import torch",
    "q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)": "q.shape[-1] ** -0.5 if scale is None else scale",
    "q.dtype": "dtype=q.dtype",
    "scores.max(-1, keepdims": "scores.detach().amax(-1, keepdim",
    "sum(-1, keepdims": "sum(-1, keepdim",
    "np.": "torch.",
}.items():
    TORCH = TORCH.replace(numpy, torch)
print(TORCH)
if importlib.util.find_spec("torch"):
    (folder / "mine_torch.py").write_text(TORCH)
    found = run("verify", "softmax", "--impl", "mine_torch.py:attend", "--grad", "--dtype", "float32")
    assert "disagrees" not in found and " 0 failed" in found

# %%
# JAX
# ---
# The same with ``jax.numpy``, whose functions have NumPy's names.

JAX = right.replace("import numpy as np", "import jax.numpy as np") + 'attend.framework = "jax"\n'
if importlib.util.find_spec("jax"):
    (folder / "mine_jax.py").write_text(JAX)
    found = run("verify", "softmax", "--impl", "mine_jax.py:attend", "--dtype", "float32")
    assert "disagrees" not in found and " 0 failed" in found

# %%
# C
# -
# A compiled kernel is called through ``ctypes``. It runs in a process of its own, so a crash is one line of the report
# and does not end it. With ``--exec`` instead of ``--impl`` you can run a program of any language.

C = """
#include <math.h>

/* q (n, d), k (m, d), v (m, e), out (n, e), all of one head, row by row */
void attend(const float *q, const float *k, const float *v, float *out, int n, int m, int d, int e, float scale) {
    for (int i = 0; i < n; i++) {
        float largest = -INFINITY, total = 0;
        for (int c = 0; c < e; c++) out[i * e + c] = 0;
        for (int j = 0; j < m; j++) {
            float score = 0;
            for (int c = 0; c < d; c++) score += q[i * d + c] * k[j * d + c];
            score *= scale;
            float higher = fmaxf(largest, score), weight = expf(score - higher), shrink = expf(largest - higher);
            total = total * shrink + weight;
            for (int c = 0; c < e; c++) out[i * e + c] = out[i * e + c] * shrink + weight * v[j * e + c];
            largest = higher;
        }
        for (int c = 0; c < e; c++) out[i * e + c] /= total;
    }
}
"""
ADAPTER = """
import ctypes
from pathlib import Path

import numpy as np
import refattn

attend_c = ctypes.CDLL(str(Path(__file__).with_name("attend.so"))).attend


def pointer(x):
    return x.ctypes.data_as(ctypes.c_void_p)


def attend(q, k, v, *, scale=None):
    if q.dtype != np.float32 or 0 in (*q.shape, *k.shape, *v.shape) or q.shape[1] != k.shape[1]:
        return refattn.Decline("float32 alone, no empty arrays, no grouped heads")
    (b, h, n, d), (m, e) = q.shape, v.shape[2:]
    out = np.empty((b, h, n, e), np.float32)
    scale = ctypes.c_float(d**-0.5 if scale is None else scale)
    for at in np.ndindex(b, h):
        one = [np.ascontiguousarray(x[at]) for x in (q, k, v)]
        attend_c(*map(pointer, one), pointer(out[at]), n, m, d, e, scale)
    return out
"""
if compiler := shutil.which("cc"):
    (folder / "attend.c").write_text(C)
    (folder / "mine_c.py").write_text(ADAPTER)
    flags = ["-O2", "-shared", "-fPIC", "-o", "attend.so", "attend.c", "-lm"]
    subprocess.run([compiler, *flags], cwd=folder, check=True)
    found = run("verify", "softmax", "--impl", "mine_c.py:attend", "--dtype", "float32")
    assert "disagrees" not in found and " 0 failed" in found

shutil.rmtree(folder)

# %%
# Next: :doc:`/verifying/function` describes everything that an adapter may declare, :doc:`/verifying/cases` your own
# sizes and sizes too large for a reference result, and :doc:`/verifying/pytest` tests.
