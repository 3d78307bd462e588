"""
A training run, read from its trace
===================================

A loss curve shows that something happened. The trace of a step shows what: the value of every equation of every layer.
"""

# %%
# A small run
# -----------
# ``refattn train`` writes a folder. This run is small enough to take seconds. The settings determine every number in
# it: the same command gives the same bytes, even if it is killed and resumed.

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import refattn as ra
from refattn.train import checkpoint, metrics

folder = Path(tempfile.mkdtemp())
(folder / "text").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(2000)))
settings = dict(context=32, width=32, heads=2, layers=2, batch=8, warmup=10, learning_rate=1e-2, score_bytes=2048)
words = [f"--set={name}={value}" for name, value in (settings | dict(steps=120, sample_bytes=60)).items()]
command = ["train", "softmax", f"--data={folder / 'text'}", f"--out={folder / 'run'}", *words]
subprocess.run([sys.executable, "-m", "refattn", *command], check=True, capture_output=True)

rows = metrics.read(folder / "run" / "metrics.jsonl")
for row in rows[::20]:
    print(f"step {row['step']:4}: loss {row['loss']:.3f}")
assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]

# %%
# What the trained model does
# ---------------------------
# The newest checkpoint has the parameters. Within ``ra.trace()`` a forward pass records each equation as it runs. The
# equations of the second layer have the index 1.

from refattn import model, tree  # noqa: E402
from refattn.train import step  # noqa: E402

config = model.Config("softmax", vocabulary=256, context=32, width=32, layers=2, heads=2)
fresh = model.init(config, like=np.zeros(1, np.float32))
newest = checkpoint.newest(folder / "run" / "checkpoints", print)
names = tree.flatten(fresh)
trained = tree.unflatten(fresh, {name: newest.arrays[f"params.{name}"] for name in names})
line = np.frombuffer(b"1234 and 1235 make 2469.\n1235 an", np.uint8).astype(np.int64)[None]

entropies = {}
for label, params in (("fresh", fresh), ("trained", trained)):
    with ra.trace() as values:
        loss, gradients = step.loss_and_gradients(params, line[:, :-1], line[:, 1:])
    for layer, id in enumerate(("SM.4", "SM.4[1]")):
        weights = values[id]
        logarithms = np.log2(weights, where=weights > 0, out=np.zeros_like(weights))
        entropies[label, layer] = float(-(weights * logarithms).sum(-1).mean())
        print(f"{label}, layer {layer}: a query spreads over 2^{entropies[label, layer]:.2f} keys")

# %%
# Fresh queries spread over all visible keys; trained ones have chosen. The same trace has the backward. In which layer
# do scores still get a gradient?

for id in ("dSM.2", "dSM.2[1]"):
    print(id, f"largest gradient of a score: {np.abs(values[id]).max():.1e}")
assert entropies["trained", 1] < entropies["fresh", 1]
shutil.rmtree(folder)

# %%
# ``refattn trace softmax --html page.html`` steps through one layer in a browser. :doc:`/trace` shows how to substitute
# or mutate an equation while it runs.
