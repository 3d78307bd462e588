"""Laws of a core that maps q, k, v: what holds whatever the numbers are, forward and backward.

A law calls one form of a core on a sample, and on the same sample changed in a way whose effect is known exactly. It
returns the largest used share of the allowed error, at most 1 where it holds; a law "to the bit" returns 0 or infinity.

Allowed errors are derived. What rounding does to a result is measured on the dense form in float64: the value of every
equation is disturbed by random errors of the size ``unit roundoff * size of the terms that it sums``, as the record
tells (scale * sum_d |q_d k_d| for a score, through whose exponential it reaches all that follows), and the largest root
mean square of the effect on an element of the result is its noise. Both sides of a law have this noise, and `ELEMENT`
times the root of the sum of their squares is allowed. The noise is linear in the unit roundoff, hence measured once in
units of it. Elements of samples are multiples of 2^-16 below 4: their sums are exact in float32 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends, counter, equations
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage import TYPES
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.ops.masks import causal_offset
from refattn.verify.compare import ELEMENT

Values = dict[str, NDArray[Any]]

DRAWS = 4
"""Disturbed runs for each noise; the largest over a tensor is known well from few."""

HUGE = 1e6
"""What is added to numbers that must not matter."""

_ALIGNMENTS = ("bottom_right", "top_left")


@dataclass(frozen=True)
class Sample:
    """Arguments for a law, on the host in float64: inputs, numbers, and upstream gradients of all outputs."""

    name: str
    inputs: Values
    options: Mapping[str, float]
    upstream: Values


@dataclass(frozen=True)
class Core:
    """One form of a core on a backend in a dtype, as a function of host arrays; NumPy is given read-only ones.

    `known` holds the noises that were measured; cores of one mechanism may share it.
    """

    mechanism: Mechanism
    form: str
    backend: backends.Backend
    dtype: str
    known: dict[bytes, dict[str, float]] = field(default_factory=dict)

    def __call__(self, inputs: Values, options: Mapping[str, Any], upstream: Values) -> Values:
        """Return outputs ("out", "lse", ...) and gradients ("d_q", ...) on the host."""
        values, saved = self.forward(inputs, options)
        return values | self.backward(saved, upstream)

    def forward(self, inputs: Values, options: Mapping[str, Any]) -> tuple[Values, Any]:
        """Return the outputs and what the backward reads."""
        assert self.mechanism.core is not None
        out, saved = self.mechanism.core.forward(**self._given(inputs), **options, form=self.form)
        outputs = {"out": out, **{name: getattr(saved, name) for name in self.mechanism.outputs}}
        return {name: self.backend.to_numpy(x) for name, x in outputs.items()}, saved

    def backward(self, saved: Any, upstream: Values) -> Values:
        """Return the gradients."""
        assert self.mechanism.core is not None
        gradients = self.mechanism.core.backward(saved, **self._given(upstream))
        return {f"d_{name}": self.backend.to_numpy(x) for name, x in gradients.items()}

    def noise(self, inputs: Values, options: Mapping[str, Any], upstream: Values) -> dict[str, float]:
        """Return by result the largest root mean square of what rounding in this dtype does to one of its elements."""
        arrays = {**inputs, **upstream}
        text = repr((sorted(options.items()), [(n, x.shape) for n, x in arrays.items()]))
        key = text.encode() + b"".join(sha256(np.ascontiguousarray(x)).digest() for x in arrays.values())
        if key not in self.known:
            self.known[key] = measure_noise(self.mechanism, inputs, options, upstream)
        return {name: TYPES[self.dtype].unit * x for name, x in self.known[key].items()}

    def _given(self, arrays: Values) -> dict[str, Any]:
        return {
            name: on_backend(self.backend, x if x.dtype == np.bool_ else x.astype(self.dtype))
            for name, x in arrays.items()
        }


def measure_noise(
    mechanism: Mechanism, inputs: Values, options: Mapping[str, Any], upstream: Values
) -> dict[str, float]:
    """Return by result, and by id of equation, the noise of the dense form in units of the unit roundoff."""
    dense = Core(mechanism, mechanism.forms[0], backends.get("numpy"), "float64")
    unit = TYPES["float32"].unit  # large against the rounding of the measurement itself, small enough to be linear
    with equations.trace() as traced:
        exact = dense(inputs, options, upstream)
    exact |= traced
    sizes = {}
    for id, value in traced.items():
        terms = mechanism.magnitudes.get(id, lambda given, values, own=value: np.abs(own))
        sizes[id] = unit * _finite(terms({**inputs, **options, **upstream}, traced))
    squares = {name: np.zeros(value.shape) for name, value in exact.items()}
    for draw in range(DRAWS):

        def disturb(id: str, name: str, value: Any, draw: int = draw) -> Any:
            chance = counter.uniform(value.shape, seed=0, purpose=f"laws.{id}", step=draw)
            return value + (2.0 * chance - 1.0) * sizes[id]

        with equations.trace() as disturbed, equations.apply(disturb):
            results = dense(inputs, options, upstream)
        for name, value in (results | dict(disturbed)).items():
            squares[name] += (_finite(value) - _finite(exact[name])) ** 2
    return {name: math.sqrt(float(np.max(x, initial=0.0)) / DRAWS) / unit for name, x in squares.items()}


def on_backend(backend: backends.Backend, x: NDArray[Any]) -> Any:
    """Return a copy of a host array as an array of a backend; NumPy's is read-only."""
    fresh = np.array(x)
    fresh.flags.writeable = backend.name != "numpy"
    return backend.from_numpy(fresh)


def samples(mechanism: Mechanism, pools: bool) -> tuple[Sample, ...]:
    """Return two samples of one tile, without and with mask and numbers, and one of several tiles where tiles are small.

    A backend that pools has small tiles: of at most 256 rows and 512 keys on NumPy.
    """
    small = (2, 4, 2, 11, 17, 8, 6)
    plain = _sample(mechanism, "plain", small, {})
    masked = _sample(mechanism, "masked", small, {"scale": 0.5, "softcap": 2.0}, keep=0.6)
    return (plain, masked, _sample(mechanism, "long", (1, 2, 1, 140, 530, 8, 6), {})) if pools else (plain, masked)


def _sample(
    mechanism: Mechanism, name: str, sizes: tuple[int, ...], options: dict[str, float], keep: float | None = None
) -> Sample:
    b, h, g, queries, keys, d, e = sizes
    shapes = {"q": Input((b, h, queries, d)), "k": Input((b, g, keys, d)), "v": Input((b, g, keys, e))}
    if keep is not None and "mask" in mechanism.defaults:
        shapes["mask"] = Input((b, h, queries, keys), "mask", {"keep": keep})
    case = Case(f"law.{name}", "law", shapes, {n: x for n, x in options.items() if n in mechanism.defaults})
    inputs = make(mechanism.name, case, "float64")
    outputs, _ = Core(mechanism, mechanism.forms[0], backends.get("numpy"), "float64").forward(inputs, case.options)
    upstream = {
        f"d_{output}": make_upstream(mechanism.name, case, output, x.shape, "float64") for output, x in outputs.items()
    }
    return Sample(name, inputs, case.options, upstream)


def permutation(core: Core, s: Sample) -> float:
    """Keys, values and columns of the mask in another order: d_k and d_v follow, nothing else changes."""
    order = counter.permutation(s.inputs["k"].shape[2], seed=0, purpose="laws.keys")
    expected = _keys(core(s.inputs, s.options, s.upstream), order)
    return used_share(core(_keys(s.inputs, order), s.options, s.upstream), expected, _noise(core, s))


def query_permutation(core: Core, s: Sample) -> float:
    """Queries and rows of the mask in another order: their outputs and d_q follow, d_k and d_v do not change."""
    order = counter.permutation(s.inputs["q"].shape[2], seed=0, purpose="laws.queries")
    expected = _queries(core(s.inputs, s.options, s.upstream), order)
    moved = core(_queries(s.inputs, order), s.options, _queries(s.upstream, order))
    return used_share(moved, expected, _noise(core, s))


def linear_in_v(core: Core, s: Sample) -> float:
    """For v + v' out is out + out', and so are d_q and d_k for one d_out; d_v and the other outputs do not change."""
    upstream = {"d_out": s.upstream["d_out"]}
    parts = [s.inputs, {**s.inputs, "v": np.flip(s.inputs["v"], axis=2)}]
    a, b = (core(x, s.options, upstream) for x in parts)
    added = {n for n in a if n == "out" or n.startswith("d_")} - {"d_v"}
    whole = core({**s.inputs, "v": parts[0]["v"] + parts[1]["v"]}, s.options, upstream)
    noises = [core.noise(x, s.options, s.upstream) for x in parts]
    return used_share(whole, {n: a[n] + b[n] if n in added else a[n] for n in a}, *noises)


def constant_value(core: Core, s: Sample) -> float:
    """Where all keys have one value, out is that value for every row that may attend, and no gradient of q or k."""
    value = np.broadcast_to(s.inputs["v"][:, :, :1], s.inputs["v"].shape)
    x, upstream = {**s.inputs, "v": value}, {"d_out": s.upstream["d_out"]}
    got = core(x, s.options, upstream)
    out = np.repeat(value[:, :, :1], x["q"].shape[1] // value.shape[1], axis=1)
    alive = x["mask"].any(axis=-1) if "mask" in x else np.ones(x["q"].shape[:3], dtype=bool)
    expected = {"out": np.where(alive[..., None], out, 0.0), "d_q": np.zeros(x["q"].shape), "d_k": np.zeros(x["k"].shape)}
    return used_share(got, expected, core.noise(x, s.options, upstream))


def key_shift(core: Core, s: Sample) -> float:
    """A vector c added to all keys adds scale q.c to a row's scores: to lse, and to nothing else (without softcap)."""
    options = {n: x for n, x in s.options.items() if n != "softcap"} | {"scale": 0.5}
    upstream = {"d_out": s.upstream["d_out"]}
    c = s.inputs["k"][:, :, :1]
    moved = {**s.inputs, "k": s.inputs["k"] + c}
    expected = core(s.inputs, options, upstream)
    if "lse" in expected:
        c_heads = np.repeat(c, s.inputs["q"].shape[1] // c.shape[1], axis=1)
        expected["lse"] = expected["lse"] + 0.5 * np.sum(s.inputs["q"] * c_heads, axis=-1)
    noises = [core.noise(x, options, upstream) for x in (s.inputs, moved)]
    return used_share(core(moved, options, upstream), expected, *noises)


def split_and_merge(core: Core, s: Sample) -> float:
    """Two sets of keys, attended apart, merge by their lse to the whole, forward and backward."""
    keys = s.inputs["k"].shape[2]
    halves = [_keys(s.inputs, slice(0, keys // 3)), _keys(s.inputs, slice(keys // 3, keys))]
    whole = core(s.inputs, s.options, s.upstream)
    forwards = [core.forward(half, s.options) for half in halves]
    lse = np.logaddexp(*(outputs["lse"] for outputs, _ in forwards))
    shares = [_finite(np.exp(o["lse"] - np.where(np.isfinite(lse), lse, 0.0)))[..., None] for o, _ in forwards]
    out = sum(share * outputs["out"] for share, (outputs, _) in zip(shares, forwards, strict=True))
    gradients = []
    for half, share, (outputs, saved) in zip(halves, shares, forwards, strict=True):
        # out = sum of share * out_part and share = exp(lse_part - lse), so lse_part moves out by share (out_part - out)
        d_out = share * s.upstream["d_out"]
        d_lse = np.sum(d_out * (outputs["out"] - out), axis=-1) + share[..., 0] * s.upstream["d_lse"]
        gradients.append(core.backward(saved, {"d_out": d_out, "d_lse": d_lse}))
    merged = {"out": out, "lse": lse} | {
        n: np.concatenate([g[n] for g in gradients], axis=2) if n in ("d_k", "d_v") else gradients[0][n] + gradients[1][n]
        for n in gradients[0]
    }
    return used_share(merged, whole, _noise(core, s))  # the parts sum the same terms as the whole


def padding(core: Core, s: Sample) -> float:
    """A masked key is as good as deleted, whatever it holds, and its gradients are exactly 0."""
    b, _, keys, _ = s.inputs["k"].shape
    keep = counter.uniform((keys,), seed=0, purpose="laws.padding") < 0.7
    if "mask" in core.mechanism.defaults:
        mask = {"mask": s.inputs.get("mask", np.ones((1, 1, 1, 1), dtype=bool)) & keep}
    else:
        mask = {"key_mask": np.broadcast_to(keep, (b, keys))}
    hidden = (slice(None), slice(None), ~keep)
    got = core({**_raised(s.inputs, k=hidden, v=hidden), **mask}, s.options, s.upstream)
    short = _keys(s.inputs, keep)
    zero = max((_zero(got[n][hidden]) for n in ("d_k", "d_v")))
    noise = core.noise(short, s.options, s.upstream)
    return max(zero, used_share(_keys(got, keep), core(short, s.options, s.upstream), noise))


def empty(core: Core, s: Sample) -> float:
    """A row that may attend nothing gives 0 (lse: -inf) and passes no gradient on, however large: to the bit."""
    shape = (*s.inputs["q"].shape[:3], s.inputs["k"].shape[2])
    mask = np.array(np.broadcast_to(s.inputs.get("mask", True), shape))
    dead = (slice(None), slice(None), slice(0, None, 3))
    mask[dead] = False
    x = {**s.inputs, "mask": mask}
    got = core(x, s.options, _raised(s.upstream, **dict.fromkeys(s.upstream, dead)))
    lse = 0.0 if "lse" not in got or np.all(got["lse"][dead] == -math.inf) else math.inf
    zero = max(_zero(got["out"][dead]), _zero(got["d_q"][dead]))
    return max(lse, zero, same_bits(got, core(x, s.options, s.upstream)))


def causal(core: Core, s: Sample) -> float:
    """Later tokens do not change the past, nor the gradients of what only it reaches: to the bit, both alignments."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    worst = 0.0
    for alignment in _ALIGNMENTS:
        for now in sorted({1, queries // 2, queries - 1}):
            seen = now + (causal_offset(alignment, queries, keys) or 0)
            after, unseen = ((slice(None), slice(None), slice(at, None)) for at in (now, seen))
            upstream = _zeroed(s.upstream, now)
            changed = _raised(s.inputs, q=after, k=unseen, v=unseen)
            a, b = (core(x, {**s.options, "causal": alignment}, upstream) for x in (s.inputs, changed))
            unreached = max(_zero(x[n][unseen]) for x in (a, b) for n in ("d_k", "d_v"))
            worst = max(worst, unreached, same_bits(*(_keys(_queries(x, slice(now)), slice(seen)) for x in (a, b))))
    return worst


def truncation(core: Core, s: Sample) -> float:
    """Without the later tokens a causal core gives the same for the earlier ones."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    cut = queries // 3
    rows, columns = slice(queries - cut), slice(keys - cut)
    short, upstream = _keys(_queries(s.inputs, rows), columns), _zeroed(s.upstream, queries - cut)
    worst = 0.0
    for alignment in _ALIGNMENTS:
        options = {**s.options, "causal": alignment}
        expected = _keys(_queries(core(s.inputs, options, upstream), rows), columns)
        got = core(short, options, _queries(s.upstream, rows))
        worst = max(worst, used_share(got, expected, core.noise(s.inputs, options, s.upstream)))
    return worst


def causal_mask(core: Core, s: Sample) -> float:
    """Causality is the mask of all pairs j <= i + offset."""
    queries, keys = s.inputs["q"].shape[2], s.inputs["k"].shape[2]
    worst = 0.0
    for alignment in _ALIGNMENTS:
        past = np.tri(queries, keys, {"bottom_right": keys - queries, "top_left": 0}[alignment], dtype=bool)
        x = {**s.inputs, "mask": s.inputs.get("mask", True) & past}
        options = {**s.options, "causal": alignment}
        got = core(s.inputs, options, s.upstream)
        worst = max(worst, used_share(got, core(x, s.options, s.upstream), core.noise(s.inputs, options, s.upstream)))
    return worst


def independent(core: Core, s: Sample) -> float:
    """No batch element and no key/value head with its query heads changes another one: to the bit."""
    (batch, heads, *_), groups = s.inputs["q"].shape, s.inputs["k"].shape[1]
    results = core(s.inputs, s.options, s.upstream)
    worst = 0.0
    for axis, own, others in (
        (0, {n: 1 for n in "qkv"}, {n: slice(1, None) for n in results}),
        (1, {"q": heads // groups, "k": 1, "v": 1}, {n: slice(1 if n in ("d_k", "d_v") else heads // groups, None) for n in results}),
    ):
        at = {n: (slice(None),) * axis + (slice(size),) for n, size in own.items()}
        changed = core(_raised(s.inputs, **at), s.options, s.upstream)
        kept = {n: (slice(None),) * axis + (rest,) for n, rest in others.items() if results[n].ndim > 2}
        worst = max(worst, same_bits(*({n: x[n][rest] for n, rest in kept.items()} for x in (results, changed))))
    return worst


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
    return max(same_bits(first, second), same_bits(*(core.backward(saved, s.upstream) for _ in range(2))))


LAWS: dict[str, Callable[[Core, Sample], float]] = {
    law.__name__: law
    for law in (
        permutation,
        query_permutation,
        linear_in_v,
        constant_value,
        key_shift,
        split_and_merge,
        padding,
        empty,
        causal,
        truncation,
        causal_mask,
        independent,
        workers,
        repeatable,
    )
}
"""The laws by the names that records list."""


def _noise(core: Core, s: Sample) -> dict[str, float]:
    return core.noise(s.inputs, s.options, s.upstream)


def _keys(arrays: Values, at: Any) -> Values:
    """Index the keys of inputs, upstream gradients or results."""
    axes = {"k": 2, "v": 2, "d_k": 2, "d_v": 2, "mask": 3}
    return {n: x[(slice(None),) * axes[n] + (at,)] if n in axes else x for n, x in arrays.items()}


def _queries(arrays: Values, at: Any) -> Values:
    """Index the queries of inputs, upstream gradients or results."""
    return {n: x if n in ("k", "v", "d_k", "d_v") or x.ndim < 3 else x[:, :, at] for n, x in arrays.items()}


def _raised(arrays: Values, **at: Any) -> Values:
    """Add `HUGE` to the given parts."""
    changed = {n: arrays[n].copy() for n in at}
    for n, part in at.items():
        changed[n][part] += HUGE
    return {**arrays, **changed}


def _zeroed(upstream: Values, now: int) -> Values:
    """Return upstream gradients that are 0 from row `now` on."""
    rows = np.arange(upstream["d_out"].shape[2]) < now
    return {n: np.where(rows.reshape((-1,) + (1,) * (x.ndim - 3)), x, 0.0) for n, x in upstream.items()}


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, 0.0)


def _zero(x: NDArray[Any]) -> float:
    return 0.0 if not np.any(x != 0.0) else math.inf


def same_bits(a: Values, b: Values) -> float:
    """Return 0 where all arrays of `a` have the bits of those in `b`, otherwise infinity."""
    return 0.0 if all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a) else math.inf


def used_share(got: Values, expected: Values, *noises: Mapping[str, float]) -> float:
    """Return the largest used share of the allowed error; where one noise is given, both sides have it."""
    noises = noises if len(noises) > 1 else noises * 2
    worst = 0.0
    for name, wanted in expected.items():
        a, b = got[name].astype(np.float64), wanted.astype(np.float64)
        if a.shape != b.shape:
            return math.inf
        odd = ~(np.isfinite(a) & np.isfinite(b))
        if np.any(a[odd] != b[odd]):
            return math.inf
        error = float(np.max(np.abs(a[~odd] - b[~odd]), initial=0.0))
        allowed = ELEMENT * math.hypot(*(noise[name] for noise in noises))
        worst = max(worst, error / allowed if allowed > 0.0 else (math.inf if error > 0.0 else 0.0))
    return worst
