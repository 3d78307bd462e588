"""Designed calls in the sizes that kernels have: widths and lengths around tiles, groups, and what lies beyond a tile.

They stand beside the cases that are small enough for golden vectors, and `refattn verify` runs both. Pairs of what a
kernel is specialised for come together in some case: a width with a length, a length with a group, a group with a mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refattn.mechanisms.case_builders import alibi, bias, counts, dropout, listed, mask
from refattn.mechanisms.case_builders import qkv as _case
from refattn.mechanisms.record import Case, Input
from refattn.mechanisms.softmax.testing.meetings import MEETINGS


def _moved(case: Case, q: dict[str, float], k: dict[str, float]) -> Case:
    """Return the case with queries and keys that have a part in common, so that its scores lie around some number."""
    shapes = {name: case.inputs[name].shape for name in "qk"}
    moved = {name: Input(shapes[name], "shifted", numbers) for name, numbers in (("q", q), ("k", k))}
    return replace(case, inputs={**case.inputs, **moved})


def _ones(case: Case) -> Case:
    """Return the case with values near 1: errors of weights that share a sign do not cancel in the output."""
    v = case.inputs["v"]
    return replace(case, inputs={**case.inputs, "v": Input(v.shape, "shifted", {"scale": 0.125, "shift": 1.0})})


def _padded(case: Case, *first: int) -> Case:
    """Return the case with so many hidden keys at the start of each sequence."""
    keys = case.inputs["k"].shape[2]
    seen = tuple((((*(j >= n for j in range(keys)),),),) for n in first)  # (b, 1, 1, j)
    return replace(case, inputs={**case.inputs, "mask": mask(len(first), 1, 1, keys)}, given={"mask": seen})


def _hidden(case: Case) -> Case:
    """Return the case with a mask that hides key 0 and every fifth after it."""
    keys = case.inputs["k"].shape[2]
    return replace(
        case,
        inputs={**case.inputs, "mask": mask(1, 1, 1, keys)},
        given={"mask": ((((*(j % 5 > 0 for j in range(keys)),),),),)},  # (1, 1, 1, j)
    )


def _low(case: Case, v: Input | None = None) -> Case:
    """Return the case with scores near -128 in every third row, and with other values.

    A kernel that clamps its scores after the mask, to -50 for instance, attends hidden keys in these rows.
    """
    low = _moved(case, {"scale": 0.25, "shift": -4.0, "every": 3}, {"scale": 0.25, "shift": 4.0})
    return low if v is None else replace(low, inputs={**low.inputs, "v": v})


_KIND = "kernel"

# Each option beside each class of sizes that kernels compile apart, with as few other options as can be: one query,
# which is wide, over parts of the keys; a few queries, with values of another width; and tiles of queries.
_ONE: dict[str, Any] = {"b": 2, "h": 4, "g": 2, "n_q": 1, "n_k": 513, "d": 66, "e": 34}
_FEW: dict[str, Any] = {"b": 2, "h": 4, "g": 2, "n_q": 5, "n_k": 131, "d": 80, "e": 96}
_TILES: dict[str, Any] = {"b": 2, "h": 2, "g": 1, "n_q": 67, "n_k": 70, "d": 66, "e": 34}
_ONES, _FEWS, _TILED = (2, 4, 1, 513), (2, 4, 5, 131), (2, 2, 67, 70)
_ENDS = {"one": counts(513, 130), "few": counts(131, 66), "tiles": counts(70, 31)}
_PAIRS = (
    _case("sink-one", _KIND, "a sink in decoding: once, not in each part of the keys", **_ONE, sink=Input((4,))),
    _case("sink-few", _KIND, "a sink beside a few queries", **_FEW, causal=True, sink=Input((4,))),
    _case("sink-tiles", _KIND, "a sink: once, not in each tile", **_TILES, causal=True, sink=Input((2,))),
    _case("softcap-one", _KIND, "a soft-cap in decoding", **_ONE, logits=4.0, softcap=5.0),
    _case("softcap-few", _KIND, "a soft-cap beside a few queries", **_FEW, logits=4.0, causal=True, softcap=5.0),
    _case("softcap-tiles", _KIND, "a soft-cap in each tile", **_TILES, logits=4.0, softcap=5.0),
    _case("bias-one", _KIND, "a bias of keys in decoding", **_ONE, bias=bias(2, 1, 1, 513)),
    _case("bias-few", _KIND, "slopes for a few queries at the end", **_FEW, bias=alibi(1, 4, 5, 131, offset=126)),
    _case("bias-tiles", _KIND, "a bias for each tile", **_TILES, bias=bias(*_TILED)),
    _case("mask-one", _KIND, "a mask in decoding", **_ONE, mask=mask(*_ONES)),
    _case("mask-few", _KIND, "a mask of a few queries", **_FEW, mask=mask(*_FEWS)),
    _case("mask-tiles", _KIND, "a mask for each tile", **_TILES, mask=mask(*_TILED)),
    _case("window-one", _KIND, "decoding: parts of the keys lie before the window", **_ONE, window=(200, None)),
    _case("window-few", _KIND, "a few queries, no whole tile", **_FEW, causal=True, window=(66, None)),
    _case("window-tiles", _KIND, "bounds on both sides, across tiles", **_TILES, window=(20, 9)),
    _case("lengths-one", _KIND, "decoding in sequences of other lengths", **_ONE, k_lengths=_ENDS["one"]),
    _case(
        "lengths-few",
        _KIND,
        "a few queries in sequences of other lengths",
        **_FEW,
        causal=True,
        q_lengths=counts(5, 2),
        k_lengths=_ENDS["few"],
    ),
    _case(
        "lengths-tiles",
        _KIND,
        "a sequence that fills no tile",
        **_TILES,
        causal=True,
        q_lengths=counts(67, 3),
        k_lengths=_ENDS["tiles"],
        slack="nan",
    ),
    _case("scale-one", _KIND, "a scale of the caller's in decoding", **_ONE, causal=True, scale=0.3),
    _case("scale-few", _KIND, "a few queries over parts of the keys", **{**_FEW, "n_k": 513}, scale=0.3),
    _case("dropout-few", _KIND, "dropout over tiles", **_FEW, keep=dropout(*_FEWS, p=0.5)),
    _case("dropout-tiles", _KIND, "dropout for each tile", **_TILES, keep=dropout(*_TILED, p=0.5)),
    _case("offset-one", _KIND, "decoding into a cache that is not full", **{**_ONE, "e": 68}, causal=True, offset=300),
    _case("offset-few", _KIND, "chunks of prompts, at another place each", **_FEW, causal=True, offset=counts(70, 31)),
    _case("offset-tiles", _KIND, "tiles on another diagonal", **_TILES, causal=True, offset=-2),
    _case(
        "offset-lengths",
        _KIND,
        "one query or none in a paged cache: places before the end of its sequence, and after it",
        **{**_ONE, "b": 3},
        causal=True,
        q_lengths=counts(1, 0, 1),
        k_lengths=counts(400, 130, 130),
        offset=counts(300, 129, 200),
    ),
    _case(
        "offset-window",
        _KIND,
        "sinks, a soft-cap and a window from another place",
        **_ONE,
        causal=True,
        window=(127, None),
        softcap=5.0,
        scale=0.2,
        sink=Input((4,)),
        offset=400,
    ),
    _case(
        "offset-dropped",
        _KIND,
        "all that belongs to pairs, from another place",
        **_ONE,
        causal=True,
        mask=mask(2, 1, 1, 513),
        bias=bias(4, 1, 513),
        keep=dropout(2, 4, 1, 513, p=0.5),
        q_lengths=counts(1, 0),
        offset=450,
    ),
)

KERNEL_SIZES = (
    _case("tile", _KIND, "one whole tile", b=1, h=1, n_q=128, d=64),
    _case("tile-and-one", _KIND, "a key and a query too many", b=1, h=1, n_q=129, d=64),
    _case("tile-less-one", _KIND, "a key and a query too few", b=1, h=1, n_q=127, d=128, causal=True),
    _case("tile-32", _KIND, "a short tile", b=3, h=2, n_q=32, d=80, causal=True),
    _case("tile-33", _KIND, "a short tile and one", b=1, h=2, n_q=65, n_k=33, d=64, e=128),
    _case("tile-63", _KIND, "half a tile less one", b=1, h=4, g=2, n_q=65, n_k=63, d=96),
    _case("tile-64", _KIND, "half a tile, a wide head", b=1, h=2, n_q=33, n_k=64, d=256),
    _case("tile-65", _KIND, "half a tile and one", b=3, h=2, n_q=8, n_k=65, d=128, causal=True),
    _case("tile-97", _KIND, "an odd number of short tiles", b=1, h=2, n_q=97, d=80, scale=0.07),
    _case("tile-192", _KIND, "a tile and a half", b=1, h=2, g=1, n_q=63, n_k=192, d=128, causal=True),
    _case("wide-96", _KIND, "narrower values", b=1, h=2, n_q=130, n_k=129, d=96, e=64, causal=True),
    _case("wide-192", _KIND, "latent attention", b=1, h=2, n_q=17, n_k=129, d=192, e=128, causal=True),
    _case("wide-256", _KIND, "a wide head, soft-capped", b=1, h=2, n_q=17, n_k=127, d=256, causal=True, softcap=30.0),
    _case("few-2", _KIND, "two queries", b=2, h=4, g=1, n_q=2, n_k=192, d=128, causal=True),
    _case("few-5", _KIND, "five queries", b=3, h=2, n_q=5, n_k=127, d=64, causal=True),
    _case("few-8", _KIND, "eight queries, peaked", b=1, h=4, n_q=8, n_k=193, d=96, logits=4.0),
    _case("decode-long", _KIND, "one query over tiles", b=1, h=4, g=1, n_q=1, n_k=321, d=256, causal=True),
    _case("decode-1029", _KIND, "keys beyond 1,024 of two sequences", b=2, h=4, g=2, n_q=1, n_k=1029, d=64),
    _case(
        "decode-2053",
        _KIND,
        "keys beyond 2,048, and half of them",
        b=2,
        h=4,
        g=2,
        n_q=1,
        n_k=2053,
        d=32,
        causal=True,
        k_lengths=counts(2053, 1031),
    ),
    _case("decode-16389", _KIND, "keys beyond 16,384 of two sequences", b=2, h=2, g=1, n_q=1, n_k=16389, d=8),
    _case("groups-8", _KIND, "eight heads share one", b=3, h=8, g=1, n_q=2, n_k=129, d=128, causal=True),
    _case("groups-16", _KIND, "sixteen heads share one", b=1, h=16, g=1, n_q=3, n_k=65, d=64),
    _case("groups-32", _KIND, "32 heads share one, twice", b=1, h=64, g=2, n_q=4, n_k=33, d=80, causal=True),
    _case("groups-tile", _KIND, "a group larger than a tile", b=1, h=32, g=1, n_q=5, n_k=97, d=64, causal=True),
    _case("beyond", _KIND, "more keys than queries by over a tile", b=1, h=2, n_q=65, n_k=257, d=64, causal=True),
    _case("beyond-head", _KIND, "more queries by over a tile", b=1, h=2, n_q=200, n_k=65, d=64, causal=True),
    _case("beyond-top", _KIND, "the same, top-left", b=1, h=1, n_q=97, n_k=300, d=64, causal="top_left"),
    _case("beyond-window", _KIND, "no tile is whole", b=1, h=2, n_q=161, d=64, causal=True, window=(127, None)),
    _padded(_case("padded-left", _KIND, "more than a tile is padding", b=3, h=2, n_q=9, n_k=200, d=64), 150, 0, 199),
    _padded(
        _case("padded-causal", _KIND, "the same: rows are empty", b=3, h=1, n_q=140, d=64, causal=True), 130, 3, 64
    ),
    _case(
        "padded-right",
        _KIND,
        "a tile that exists by one key",
        b=3,
        h=2,
        n_q=7,
        n_k=192,
        d=128,
        k_lengths=counts(128, 1, 129),
    ),
    _case("scale-negative", _KIND, "a scale below 0", b=1, h=2, n_q=33, n_k=129, d=96, scale=-0.37),
    _case("scale-odd", _KIND, "neither is a power of two", b=1, h=2, n_q=33, n_k=65, d=80, scale=0.13, causal=True),
    # Gradients of the scores are some 1e-4, 64 times the scaled ones: these are no normal numbers of float16.
    _case(
        "faint",
        _KIND,
        "a small scale: what is scaled before it is rounded loses digits",
        b=1,
        h=2,
        n_q=97,
        d=64,
        logits=8.0,
        values=2.0**-10,
        scale=1.0 / 64.0,
    ),
    # Near -65,000, with differences of some units: a maximum that starts at -5e4 shows.
    _moved(
        _case("low", _KIND, "all scores below -5e4", b=1, h=2, n_q=33, n_k=97, d=64),
        {"scale": 0.03125, "shift": 90.0},
        {"scale": 0.03125, "shift": -90.0},
    ),
    _low(_case("low-rows", _KIND, "scores near -128 in every third row", b=1, h=2, n_q=8, n_k=131, d=64)),
    _low(
        _hidden(_case("low-mask", _KIND, "such scores, and large values that nothing attends", n_q=8, n_k=131, d=64)),
        Input((2, 4, 131, 64), "shifted", {"shift": 1024.0, "every": 5}),
    ),
    _low(
        _case("low-causal", _KIND, "the same: the last three queries see them", b=1, h=2, n_q=67, d=64, causal=True),
        Input((1, 2, 67, 64), "shifted", {"shift": 1024.0, "first": 64}),
    ),
    _moved(
        _case(
            "high", _KIND, "scores near 128: parts merged without a maximum overflow", b=1, h=2, n_q=3, n_k=261, d=64
        ),
        {"scale": 0.25, "shift": 4.0},
        {"scale": 0.25, "shift": 4.0},
    ),
    _moved(
        _case("high-one", _KIND, "the same in decoding", b=1, h=4, g=2, n_q=1, n_k=261, d=66),
        {"scale": 0.25, "shift": 4.0},
        {"scale": 0.25, "shift": 4.0},
    ),
    _padded(_case("empty-one", _KIND, "decoding: a query that may attend nothing", h=2, n_q=1, n_k=67), 67, 3),
    _ones(
        _case(
            "mass",
            _KIND,
            "values near 1: what rounding takes from small weights",
            b=1,
            h=2,
            g=1,
            n_q=8,
            n_k=2053,
            d=16,
            e=4,
            logits=2.0,
        )
    ),
    _case(
        "sink-above", _KIND, "sinks of 95 and 120: no weight is left", b=1, n_q=5, n_k=67, sink=listed(120, 95, -120, 2)
    ),
    _case("sink-above-one", _KIND, "the same in decoding", b=1, n_q=1, n_k=67, sink=listed(120, 95, -120, 2)),
    *_PAIRS,
    *MEETINGS,
)
