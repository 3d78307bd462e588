"""Properties of options that a core may have: windows, offsets, biases, sinks, lengths and dropout.

Each says of an option what it does in terms of the others, forward and backward. As in
`refattn.verify.selfcheck.properties` they return the largest used share of the allowed error; a property "to the bit"
returns 0 or infinity.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn import philox
from refattn.verify.selfcheck.probe import Core, Values, same_bits, used_share
from refattn.verify.selfcheck.samples import Sample
from refattn.verify.tolerance.budget import finite

_BANDS: tuple[dict[str, Any], ...] = (
    {"window": (2, 1)},
    {"window": (3, None), "causal": True},
    {"window": (None, 2), "offset": -3},
    {"window": (4, 7), "causal": "top_left"},
    {"window": (0, 0), "offset": 5},
)


def band(core: Core, s: Sample) -> float:
    """A window is the mask of all p - left <= j <= p + right with p = i + offset, and causality that of all j <= p."""
    worst, noise = 0.0, core.noise(s.inputs, s.options, s.upstream)
    for given in _BANDS:
        options = {**s.options, **given}
        masked = core({**s.inputs, "mask": s.inputs.get("mask", True) & _pairs(s, given)}, s.options, s.upstream)
        found = core(s.inputs, options, s.upstream)
        worst = max(worst, used_share(found, masked, noise))
    return worst


def far(core: Core, s: Sample) -> float:
    """Keys outside of every window, whatever they hold, change nothing: to the bit."""
    worst = 0.0
    for given in _BANDS:
        unseen = ~np.any(_pairs(s, given), axis=0)
        changed = dict(s.inputs)
        for name in "kv":
            changed[name] = s.inputs[name].copy()
            changed[name][:, :, unseen] += core.mechanism.perturbation
        options = {**s.options, **given}
        worst = max(worst, same_bits(*(core(x, options, s.upstream) for x in (s.inputs, changed))))
    return worst


def bias_shift(core: Core, s: Sample) -> float:
    """A number added to a whole row of scores moves lse by it, and nothing else; its gradient is that of lse."""
    b, _, queries, _ = s.inputs["q"].shape
    shift = philox.normal((b, 1, queries, 1), seed=0, purpose="laws.bias")
    expected = core(s.inputs, s.options, s.upstream)
    alive = np.isfinite(expected["lse"])
    expected |= {name: expected[name] + shift[..., 0] for name in ("lse", "max")}
    expected["d_bias"] = np.sum(np.where(alive, s.upstream["d_lse"], 0.0), axis=1, keepdims=True)[..., None]
    x = {**s.inputs, "bias": shift}
    noise = core.noise(x, s.options, s.upstream)
    return used_share(core(x, s.options, s.upstream), expected, noise)


def sink_key(core: Core, s: Sample) -> float:
    """A sink is a key of value 0 that every query sees, with the sink for its score."""
    b, h, queries, _ = s.inputs["q"].shape
    keys = s.inputs["k"].shape[2]
    sink = philox.normal((h,), seed=0, purpose="laws.sink")
    got = core({**s.inputs, "sink": sink}, s.options, s.upstream)
    x = {n: np.concatenate([y, 0.0 * y[:, :, :1]], axis=2) if n in "kv" else y for n, y in s.inputs.items()}
    column = np.arange(keys + 1) == keys
    bias = np.where(column, sink[:, None, None], np.zeros((1, h, queries, keys + 1)))
    if "mask" in s.inputs:
        whole = np.broadcast_to(s.inputs["mask"], (b, h, queries, keys))
        x["mask"] = np.concatenate([whole, np.ones((b, h, queries, 1), dtype=np.bool_)], axis=3)
    x["bias"] = bias
    expected = core(x, s.options, s.upstream)
    expected["d_sink"] = np.sum(expected.pop("d_bias")[..., keys], axis=(0, 2))
    expected |= {name: expected[name][:, :, :keys] for name in ("d_k", "d_v")}
    del expected["max"]  # in which sinks take no part
    return used_share(got, expected, core.noise({**s.inputs, "sink": sink}, s.options, s.upstream))


def sinks(core: Core, s: Sample) -> float:
    """Several sinks are one, the logarithm of the sum of their exponentials; its gradient is theirs by their shares."""
    several = philox.normal((s.inputs["q"].shape[1], 3), seed=0, purpose="laws.sinks")
    one = np.log(np.sum(np.exp(several), axis=1))
    expected = core({**s.inputs, "sink": one}, s.options, s.upstream)
    expected["d_sink"] = np.exp(several - one[:, None]) * expected["d_sink"][:, None]
    x = {**s.inputs, "sink": several}
    return used_share(core(x, s.options, s.upstream), expected, core.noise(x, s.options, s.upstream))


def lengths(core: Core, s: Sample) -> float:
    """Sequences with lengths are each alone, and what is beyond them may hold NaN: that to the bit."""
    (b, _, queries, _), keys = s.inputs["q"].shape, s.inputs["k"].shape[2]
    given = {"q_lengths": np.resize([queries - 2, 1], b), "k_lengths": np.resize([keys - 3, keys], b)}
    options = {**s.options, "causal": True}
    zero, poisoned = ({**s.inputs, **given}, dict(s.upstream)), ({**s.inputs, **given}, dict(s.upstream))
    for (x, upstream), value in ((zero, 0.0), (poisoned, math.nan)):
        pulled = tuple(upstream)
        for arrays, names, of in (
            (x, ("q",), "q_lengths"),
            (x, ("k", "v"), "k_lengths"),
            (upstream, pulled, "q_lengths"),
        ):
            for name in names:
                beyond = np.arange(arrays[name].shape[2]) >= given[of][:, None]
                axes = (b, 1, -1, *(1,) * (arrays[name].ndim - 3))
                arrays[name] = np.where(beyond.reshape(axes), value, arrays[name])
    found = core(zero[0], options, zero[1])
    worst = same_bits(found, core(poisoned[0], options, poisoned[1]))
    noise = core.noise(zero[0], options, zero[1])
    sums: dict[str, Any] = {}
    for n in range(b):
        rows, columns = int(given["q_lengths"][n]), int(given["k_lengths"][n])
        one = {name: x[n : n + 1] for name, x in s.inputs.items()}
        one |= {"q": one["q"][:, :, :rows], **{name: one[name][:, :, :columns] for name in "kv"}}
        if "mask" in one:
            one["mask"] = one["mask"][..., :rows, :columns]
        alone = core(one, options, {name: x[n : n + 1, :, :rows] for name, x in s.upstream.items()})
        for name, y in alone.items():
            if y.ndim < 3:
                sums[name] = sums.get(name, 0.0) + y
                continue
            size = columns if name in ("d_k", "d_v") else rows
            worst = max(worst, used_share({name: found[name][n : n + 1, :, :size]}, {name: y}, noise))
    return max(worst, used_share(found, sums, noise))


def dropout_in_two(core: Core, s: Sample) -> float:
    """Dropout is attention over the keys that stay, times what these weigh together: exp(lse_kept - lse) / (1 - p)."""
    plane = (*s.inputs["q"].shape[:3], s.inputs["k"].shape[2])
    stays = philox.uniform(plane, seed=0, purpose="laws.keep") < 0.5
    x = {**s.inputs, "keep": np.where(stays, 2.0, 0.0)}
    got = core(x, s.options, s.upstream)
    whole, saved_whole = core.forward(s.inputs, s.options)
    kept, saved_kept = core.forward({**s.inputs, "mask": s.inputs.get("mask", True) & stays}, s.options)
    share = finite(2.0 * np.exp(kept["lse"] - finite(whole["lse"])))[..., None]
    expected: Values = {"out": share * kept["out"], "lse": whole["lse"]}
    pull = np.sum(s.upstream["d_out"] * expected["out"], axis=-1)
    parts = (
        core.backward(saved_kept, {"d_out": share * s.upstream["d_out"], "d_lse": pull}),
        core.backward(saved_whole, {"d_out": 0.0 * s.upstream["d_out"], "d_lse": s.upstream["d_lse"] - pull}),
    )
    expected |= {name: parts[0][name] + parts[1][name] for name in parts[0]}
    return used_share(got, expected, core.noise(x, s.options, s.upstream))


def _pairs(s: Sample, given: dict[str, Any]) -> Any:
    """Return which query may attend which key (i, j), from the words of the property."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    usual = 0 if given.get("causal") == "top_left" else keys - queries
    place = np.arange(queries)[:, None] + given.get("offset", usual)
    key, (left, right) = np.arange(keys), given["window"]
    seen = key <= place if given.get("causal", False) is not False else np.ones((queries, keys), dtype=np.bool_)
    seen = seen if left is None else seen & (key >= place - left)
    return seen if right is None else seen & (key <= place + right)


OPTION_PROPERTIES = (band, far, bias_shift, sink_key, sinks, lengths, dropout_in_two)
