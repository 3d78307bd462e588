"""Properties of a core that maps q, k, v: what holds whatever the numbers are, forward and backward.

A property calls one implementation of a core on a sample, and on the same sample changed in a way whose effect is known
exactly. It returns the largest used share of the allowed error, at most 1 if it holds; a property "to the bit" returns
0 or infinity. How allowed errors are derived stands in `refattn.verify.selfcheck.probe`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends, philox
from refattn.ops.masks import Causal, causal_offset
from refattn.verify.selfcheck.option_properties import OPTION_PROPERTIES
from refattn.verify.selfcheck.probe import Core, Values, same_bits, used_share
from refattn.verify.selfcheck.samples import Sample
from refattn.verify.tolerance.budget import finite

_ALIGNMENTS: tuple[Causal, ...] = ("bottom_right", "top_left")


def permutation(core: Core, s: Sample) -> float:
    """Keys, values and columns of the mask in another order: d_k and d_v follow, nothing else changes."""
    order = philox.permutation(s.inputs["k"].shape[2], seed=0, purpose="laws.keys")
    expected = _keys(core(s.inputs, s.options, s.upstream), order)
    return used_share(
        core(_keys(s.inputs, order), s.options, s.upstream), expected, core.noise(s.inputs, s.options, s.upstream)
    )


def query_permutation(core: Core, s: Sample) -> float:
    """Queries and rows of the mask in another order: their outputs and d_q follow, d_k and d_v do not change."""
    order = philox.permutation(s.inputs["q"].shape[2], seed=0, purpose="laws.queries")
    expected = _queries(core(s.inputs, s.options, s.upstream), order)
    moved = core(_queries(s.inputs, order), s.options, _queries(s.upstream, order))
    return used_share(moved, expected, core.noise(s.inputs, s.options, s.upstream))


def token_permutation(core: Core, s: Sample) -> float:
    """Tokens, as queries and as keys, in another order: everything follows. Where lengths differ, the first ones."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    both = min(queries, keys)
    order = philox.permutation(both, seed=0, purpose="laws.tokens")
    rows, columns = (np.concatenate([order, np.arange(both, n)]) for n in (queries, keys))
    expected = _keys(_queries(core(s.inputs, s.options, s.upstream), rows), columns)
    moved = core(_keys(_queries(s.inputs, rows), columns), s.options, _queries(s.upstream, rows))
    return used_share(moved, expected, core.noise(s.inputs, s.options, s.upstream))


def linear_in_v(core: Core, s: Sample) -> float:
    """For v + v' out is out + out', and so are the gradients for one d_out, but for those that do not change.

    These are d_v, and the gradient of a first state, which v is added to.
    """
    upstream = {"d_out": s.upstream["d_out"]}
    parts = [s.inputs, {**s.inputs, "v": np.flip(s.inputs["v"], axis=2)}]
    a, b = (core(x, s.options, upstream) for x in parts)
    whole = core({**s.inputs, "v": parts[0]["v"] + parts[1]["v"]}, s.options, upstream)
    still, further = {"d_v", *(f"d_{n}" for n in core.mechanism.tokenless)}, core.mechanism.tokenless
    added = {n for n in a if n == "out" or n in further or n.startswith("d_")} - still
    noises = [core.noise(x, s.options, s.upstream) for x in parts]
    return used_share(whole, {name: a[name] + b[name] if name in added else a[name] for name in a}, *noises)


def constant_value(core: Core, s: Sample) -> float:
    """Where all keys have one value, a row that may attend gives that value, and q and k have no gradient from it."""
    value = np.repeat(s.inputs["v"][:, :, :1], s.inputs["v"].shape[2], axis=2)
    x, upstream = {**s.inputs, "v": value}, {"d_out": s.upstream["d_out"]}
    got = core(x, s.options, upstream)
    alive: Any = np.any(x["mask"], axis=-1, keepdims=True) if "mask" in x else True
    if "key_mask" in x:
        alive = alive & np.any(x["key_mask"], axis=-1)[:, None, None, None]
    out = np.where(alive, _per_query_head(value[:, :, :1], x), np.zeros(got["out"].shape))
    expected = {"out": out, "d_q": np.zeros(x["q"].shape), "d_k": np.zeros(x["k"].shape)}
    expected = {name: value for name, value in expected.items() if name in got}
    return used_share(got, expected, core.noise(x, s.options, upstream))


def key_shift(core: Core, s: Sample) -> float:
    """A vector c added to all keys adds scale q.c to a row's scores: to lse, and to nothing else (without softcap)."""
    options = {name: x for name, x in s.options.items() if name != "softcap"} | {"scale": 0.5}
    upstream = {"d_out": s.upstream["d_out"]}
    c = s.inputs["k"][:, :, :1]
    moved = {**s.inputs, "k": s.inputs["k"] + c}
    expected = core(s.inputs, options, upstream)
    if "lse" in expected:
        shift = 0.5 * np.sum(s.inputs["q"] * _per_query_head(c, s.inputs), axis=-1)
        expected |= {name: expected[name] + shift for name in ("lse", "max") if name in expected}
    noises = [core.noise(x, options, upstream) for x in (s.inputs, moved)]
    return used_share(core(moved, options, upstream), expected, *noises)


def split_and_merge(core: Core, s: Sample) -> float:
    """Two sets of keys, attended apart, merge by their lse to the whole, forward and backward; one brings the sinks.

    Long samples have none: they are of rows that do without a maximum, which a sink would end.
    """
    share = _merged(core, s, {})
    if s.long or "sink" not in core.mechanism.defaults:
        return share
    heads = s.inputs["q"].shape[1]
    return max(share, _merged(core, s, {"sink": philox.normal((heads,), seed=0, purpose="laws.sink")}))


def _merged(core: Core, s: Sample, sinks: Values) -> float:
    """Return the used share of two parts that are merged; the sinks are given to the first."""
    keys, x = s.inputs["k"].shape[2], {**s.inputs, **sinks}
    noise = core.noise(x, s.options, s.upstream)  # the parts sum the terms of the whole
    whole = core(x, s.options, s.upstream)
    cut = ({**_keys(s.inputs, slice(keys // 3)), **sinks}, _keys(s.inputs, slice(keys // 3, keys)))
    parts = [core.forward(part, s.options) for part in cut]
    lse = np.logaddexp(*(outputs["lse"] for outputs, _ in parts))
    shares = [finite(np.exp(outputs["lse"] - finite(lse)))[..., None] for outputs, _ in parts]
    out = np.sum([share * outputs["out"] for share, (outputs, _) in zip(shares, parts, strict=True)], axis=0)
    merged, gradients = {"out": out, "lse": lse}, []
    if "max" in whole:
        merged["max"] = np.maximum(*(outputs["max"] for outputs, _ in parts))
    for share, (outputs, saved) in zip(shares, parts, strict=True):
        if "d_lse" not in s.upstream:  # the gradient of lse cannot be asked for
            return used_share(merged, {name: whole[name] for name in merged}, noise)
        # out = sum of share * out_part with share = exp(lse_part - lse): d out / d lse_part = share (out_part - out)
        d_out = share * s.upstream["d_out"]
        d_lse = np.sum(d_out * (outputs["out"] - out), axis=-1) + share[..., 0] * s.upstream["d_lse"]
        gradients.append(core.backward(saved, {"d_out": d_out, "d_lse": d_lse}))
    for name, first in gradients[0].items():
        second = gradients[1].get(name, 0.0)  # the sinks are of the first part alone
        merged[name] = np.concatenate([first, second], axis=2) if name in ("d_k", "d_v") else first + second
    return used_share(merged, whole, noise)


def padding(core: Core, s: Sample) -> float:
    """A masked key is as good as deleted, whatever it holds, and its gradients are exactly 0."""
    b, _, keys, _ = s.inputs["k"].shape
    keep = philox.uniform((keys,), seed=0, purpose="laws.padding") < 0.7
    mask = {"key_mask": s.inputs.get("key_mask", np.ones((b, 1), dtype=np.bool_)) & keep}
    if "mask" in core.mechanism.defaults:
        mask = {"mask": s.inputs.get("mask", np.ones((1, 1, 1, 1), dtype=np.bool_)) & keep}
    hidden = np.s_[:, :, ~keep]
    got = core({**raised(core, s.inputs, k=hidden, v=hidden), **mask}, s.options, s.upstream)
    short = _keys(s.inputs, keep)
    noise = core.noise(short, s.options, s.upstream)
    share = used_share(_keys(got, keep), core(short, s.options, s.upstream), noise)
    return max(share, *(_zero(got[name][hidden]) for name in ("d_k", "d_v") if name in got), 0.0)


def sequence_padding(core: Core, s: Sample) -> float:
    """A masked token of a sequence is as good as deleted, whatever it holds; the gradients of what it holds are 0."""
    keep = philox.uniform((s.inputs["k"].shape[2],), seed=0, purpose="laws.padding") < 0.7
    masked = s.inputs.get("key_mask", np.ones((len(s.inputs["k"]), 1), dtype=np.bool_)) & keep
    upstream = {n: x.copy() for n, x in s.upstream.items()}
    for x in _with_tokens(core, upstream).values():
        x[:, :, ~keep] = 0.0  # its query may read
    hidden = np.s_[:, :, ~keep]
    got = core({**raised(core, s.inputs, k=hidden, v=hidden), "key_mask": masked}, s.options, upstream)
    short, short_upstream = (_tokens(core, x, keep) for x in (s.inputs, upstream))
    noise = core.noise(short, s.options, short_upstream)
    share = used_share(_tokens(core, got, keep), core(short, s.options, short_upstream), noise)
    return max(share, *(_zero(x[hidden]) for n, x in _with_tokens(core, got).items() if n.startswith("d_")))


def token_padding(core: Core, s: Sample) -> float:
    """Tokens that are masked as queries and as keys are as good as deleted, and so are the gradients of both: 0."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    keep = philox.uniform((max(queries, keys),), seed=0, purpose="laws.padding") < 0.7
    rows, columns = keep[:queries], keep[:keys]
    mask = s.inputs.get("mask", np.ones((1, 1, 1, 1), dtype=np.bool_)) & rows[:, None] & columns
    changed = raised(core, s.inputs, q=np.s_[:, :, ~rows], k=np.s_[:, :, ~columns], v=np.s_[:, :, ~columns])
    got = core({**changed, "mask": mask}, s.options, s.upstream)
    short, upstream = _keys(_queries(s.inputs, rows), columns), _queries(s.upstream, rows)
    noise = core.noise(short, s.options, upstream)
    share = used_share(_keys(_queries(got, rows), columns), core(short, s.options, upstream), noise)
    hidden = [got[name][:, :, ~rows] for name in ("out", "d_q")] + [
        got[name][:, :, ~columns] for name in ("d_k", "d_v")
    ]
    return max(share, *map(_zero, hidden))


def empty(core: Core, s: Sample) -> float:
    """A row that may attend nothing gives 0 and an lse of -inf, and passes no gradient on: to the bit."""
    mask = np.ones((*s.inputs["q"].shape[:3], s.inputs["k"].shape[2]), dtype=np.bool_) & s.inputs.get("mask", True)
    dead = np.s_[:, :, ::3]
    mask[dead] = False
    x = {**s.inputs, "mask": mask}
    got = core(x, s.options, s.upstream)
    louder = core(x, s.options, raised(core, s.upstream, **dict.fromkeys(s.upstream, dead)))
    infinite = 0.0 if np.all(got.get("lse", np.full(mask.shape, -math.inf))[dead] == -math.inf) else math.inf
    return max(infinite, _zero(got["out"][dead]), _zero(got["d_q"][dead]), same_bits(got, louder))


def causal(core: Core, s: Sample) -> float:
    """Later tokens change neither the past nor the gradients of what only it reaches: to the bit."""
    queries = s.inputs["q"].shape[2]
    worst = 0.0
    for options, offset in _causalities(core, s):
        for now in sorted({1, queries // 2, queries - 1}):
            seen = now + offset
            unseen = np.s_[:, :, seen:]
            changed = raised(core, s.inputs, q=np.s_[:, :, now:], k=unseen, v=unseen)
            upstream = silent_from(now, _with_tokens(core, s.upstream))
            results = [_with_tokens(core, core(x, options, upstream)) for x in (s.inputs, changed)]
            worst = max(worst, same_bits(*(_keys(_queries(x, slice(now)), slice(seen)) for x in results)))
            worst = max(worst, *(_zero(x[name][unseen]) for x in results for name in ("d_k", "d_v")))
    return worst


def truncation(core: Core, s: Sample) -> float:
    """Without the later tokens a causal core gives the same for the earlier ones."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    cut = queries // 3
    rows, columns = slice(queries - cut), slice(keys - cut)
    worst = 0.0
    upstream = _with_tokens(core, s.upstream)
    for options, _ in _causalities(core, s):
        long = core(s.inputs, options, silent_from(queries - cut, upstream))
        short = core(_keys(_queries(s.inputs, rows), columns), options, _queries(upstream, rows))
        noise = core.noise(s.inputs, options, s.upstream)
        expected = _with_tokens(core, _keys(_queries(long, rows), columns))
        worst = max(worst, used_share(short, expected, noise))
    return worst


def causal_mask(core: Core, s: Sample) -> float:
    """Causality is the mask of all pairs j <= i + offset."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    worst = 0.0
    for alignment in _ALIGNMENTS:
        past = np.tri(queries, keys, 0 if alignment == "top_left" else keys - queries, dtype=np.bool_)
        options = {**s.options, "causal": alignment}
        masked = core({**s.inputs, "mask": s.inputs.get("mask", True) & past}, s.options, s.upstream)
        noise = core.noise(s.inputs, options, s.upstream)
        worst = max(worst, used_share(core(s.inputs, options, s.upstream), masked, noise))
    return worst


def independent(core: Core, s: Sample) -> float:
    """No batch element, and no key/value head with its query heads, changes another one: to the bit."""
    shared = s.inputs["q"].shape[1] // s.inputs["k"].shape[1]
    results = core(s.inputs, s.options, s.upstream)
    tensors = {name: x for name, x in results.items() if x.ndim > 2}
    batch = core(raised(core, s.inputs, **dict.fromkeys("qkv", np.s_[:1])), s.options, s.upstream)
    heads = core(raised(core, s.inputs, q=np.s_[:, :shared], k=np.s_[:, :1], v=np.s_[:, :1]), s.options, s.upstream)
    first = {name: 1 if x.shape[1] == s.inputs["k"].shape[1] else shared for name, x in tensors.items()}
    return max(
        same_bits({name: x[1:] for name, x in tensors.items()}, {name: batch[name][1:] for name in tensors}),
        same_bits(
            {name: x[:, first[name] :] for name, x in tensors.items()},
            {name: heads[name][:, first[name] :] for name in tensors},
        ),
    )


def workers(core: Core, s: Sample) -> float:
    """Any number of workers gives the same bits."""
    results = []
    for n in (1, 2, 3, 7):
        with backends.use_workers(n):
            results.append(core(s.inputs, s.options, s.upstream))
    return max(same_bits(results[0], x) for x in results[1:])


def repeatable(core: Core, s: Sample) -> float:
    """The same call gives the same bits, and so does a second backward of one forward."""
    (first, saved), (second, _) = (core.forward(s.inputs, s.options) for _ in range(2))
    once, twice = (core.backward(saved, s.upstream) for _ in range(2))
    return max(same_bits(first, second), same_bits(once, twice))


PROPERTIES: dict[str, Callable[[Core, Sample], float]] = {
    invariant.__name__: invariant
    for invariant in (
        permutation,
        query_permutation,
        linear_in_v,
        constant_value,
        key_shift,
        split_and_merge,
        padding,
        empty,
        token_permutation,
        token_padding,
        sequence_padding,
        causal,
        truncation,
        causal_mask,
        independent,
        workers,
        repeatable,
        *OPTION_PROPERTIES,
    )
}
"""The properties by the names that records list."""


def _keys(arrays: Values, at: Any) -> Values:
    """Index the keys of inputs, upstream gradients or results."""
    where = dict.fromkeys(("k", "v", "d_k", "d_v"), np.s_[:, :, at]) | dict.fromkeys(
        ("mask", "key_mask"), np.s_[..., at]
    )
    return {name: x[where[name]] if name in where else x for name, x in arrays.items()}


def _queries(arrays: Values, at: Any) -> Values:
    """Index the queries of inputs, upstream gradients or results."""
    others = ("k", "v", "d_k", "d_v")
    return {name: x if name in others or x.ndim < 3 else x[:, :, at] for name, x in arrays.items()}


def _with_tokens(core: Core, arrays: Values) -> Values:
    """Leave out what has no axis of tokens, and the gradients of that."""
    named = core.mechanism.tokenless
    return {name: x for name, x in arrays.items() if x.ndim > 1 and name.removeprefix("d_") not in named}


def _tokens(core: Core, arrays: Values, at: Any) -> Values:
    """Index the tokens of a sequence, of all that has them."""
    return {**arrays, **_keys(_queries(_with_tokens(core, arrays), at), at)}


def _causalities(core: Core, s: Sample) -> list[tuple[Any, int]]:
    """Return the options that make a core causal, with what token 0 sees beside itself; one may be nothing else."""
    if "causal" not in core.mechanism.defaults:
        return [(s.options, 0)]
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    return [({**s.options, "causal": at}, causal_offset(at, queries, keys) or 0) for at in _ALIGNMENTS]


def _per_query_head(x: NDArray[Any], inputs: Values) -> NDArray[Any]:
    """Repeat what each key/value head has for its consecutive query heads."""
    return np.repeat(x, inputs["q"].shape[1] // x.shape[1], axis=1)


def raised(core: Core, arrays: Values, **at: Any) -> Values:
    """Add what must not matter to parts of the named arrays."""
    changed = {name: arrays[name].copy() for name in at}
    for name, part in at.items():
        changed[name][part] += core.mechanism.perturbation
    return {**arrays, **changed}


def silent_from(now: int, upstream: Values) -> Values:
    """Return upstream gradients that are 0 from row `now` on."""
    changed = {name: x.copy() for name, x in upstream.items()}
    for x in changed.values():
        x[:, :, now:] = 0.0
    return changed


def _zero(x: NDArray[Any]) -> float:
    return 0.0 if not np.any(x != 0.0) else math.inf
