"""
Your own mechanism in an hour
=============================

Sigmoid attention computes each weight separately, :m:`w_ij = sigma(s_ij)`, without normalisation. It is not in the
library. Here a folder of three short files makes it a mechanism like the others, which can be checked, verified against
and trained, without any change of the library.
"""

# %%
# The definition
# --------------
# ``docs/tutorials/sigmoid/definition.py`` has the equations with their ids, each on one line, forward and backward side
# by side. refattn refers to equations by these ids.

import sys
from pathlib import Path

import numpy as np

here = Path(__file__).parent if "__file__" in globals() else Path.cwd()
sys.path.insert(0, str(here))

import sigmoid  # noqa: E402

print((here / "sigmoid" / "definition.py").read_text())

# %%
# The record
# ----------
# ``loops.py`` computes everything a second time, in loops over numbers, derived from the paper again. ``__init__.py``
# joins the two, with designed cases and properties: a permutation of the keys changes nothing, masked keys do not
# matter. The rest has defaults, which you may replace: a core that checks and casts its arguments, with masks and
# causality, and a multi-head block around it.

print((here / "sigmoid" / "__init__.py").read_text())

# %%
# Does it certify itself?
# -----------------------
# These are the checks of ``refattn check``: loops against definition, equation by equation; properties; gradients of
# the core and of the block, by differences and by tangents; and agreement of docstrings, code lines and traces.

from refattn.verify import check, verify  # noqa: E402

report = check(sigmoid.record)
for row in report.rows:
    print(f"{row.section:10} {row.name:34} {row.status}")
assert report.exit_code == 0

# %%
# Break it
# --------
# Here is a wrong adjoint, w in place of w (1 - w). Verification says which gradients are wrong:

from refattn.equations import mutate  # noqa: E402

q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 1, 2, 5, 4))
core = sigmoid.record.core
out, saved = core.forward(q, k, v)
*_, weights, scale = saved.inner
right = core.backward(saved, d_out)
with mutate("dSIG.1", lambda d_scores: d_scores / (1.0 - weights)):
    wrong = core.backward(saved, d_out)
print({name: float(np.abs(wrong[name] - right[name]).max()) for name in "qkv"})
assert np.array_equal(wrong["v"], right["v"]) and not np.allclose(wrong["q"], right["q"])


class Forgetful:
    """An implementation with that error."""

    def forward(self, q, k, v, *, scale=None):
        out, self.saved = core.forward(q, k, v, scale=scale)
        return out

    def backward(self, d_out):
        *_, weights, scale = self.saved.inner
        with mutate("dSIG.1", lambda d_scores: d_scores / (1.0 - weights)):
            return core.backward(self.saved, d_out)


found = verify(sigmoid.record, Forgetful(), dtypes=["float32"], grad=True)
bad = sorted({v.tensor for outcome in found.outcomes for v in outcome.verdicts if not v.agrees})
print("verify: wrong are", ", ".join(bad))
assert bad == ["d_k", "d_q"]

# %%
# Train it
# --------
# A model takes any record in place of a name. It learns by plain gradient descent along the hand-written gradients.
# Each text counts on from a first letter, and after some steps the model can do this.

from refattn import model, tree  # noqa: E402
from refattn.train.step import loss_and_gradients  # noqa: E402

config = model.Config(sigmoid.record, vocabulary=16, context=8, width=16, layers=1, heads=2)
params = model.init(config, like=np.zeros(1, np.float32))
texts = (np.random.default_rng(1).integers(0, 16, (64, 1)) + np.arange(9)) % 16
losses = []
for _ in range(60):
    loss, gradients = loss_and_gradients(params, texts[:, :-1], texts[:, 1:])
    params = tree.map_leaves(lambda x, d_x: x - np.float32(0.5) * d_x, params, gradients)
    losses.append(float(loss))
print(f"loss {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}")
assert losses[-1] < 0.2 * losses[0]

# %%
# Every command takes the record in place of a name: in the folder of this script, ``refattn trace sigmoid:record``.
# :doc:`/adding` says how a package declares it, so that its name is enough, and how to bring it into the library. There
# it also needs a page that derives it, wrong readings for the census of wrong kernels, more cases, and a line in the
# registry.
