"""Designed calls in the sizes that kernels have: widths and lengths around tiles, groups, and what lies beyond a tile.

They stand beside the cases that are small enough for golden vectors, and `refattn verify` runs both. Pairs of what a
kernel is specialised for come together in some case: a width with a length, a length with a group, a group with a mask.
"""

from __future__ import annotations

from dataclasses import replace

from refattn.mechanisms.calls import counts, mask
from refattn.mechanisms.calls import qkv as _case
from refattn.mechanisms.record import Case, Input


def _low(case: Case) -> Case:
    """Return the case with scores near -65,000, which differ by some units: a maximum that starts at -5e4 shows."""
    q, k = case.inputs["q"], case.inputs["k"]
    low = {"scale": 0.03125, "shift": 90.0}
    moved = {"q": Input(q.shape, "shifted", low), "k": Input(k.shape, "shifted", {**low, "shift": -90.0})}
    return replace(case, inputs={**case.inputs, **moved})


def _padded(case: Case, *first: int) -> Case:
    """Return the case with so many hidden keys at the start of each sequence."""
    keys = case.inputs["k"].shape[2]
    seen = tuple((((*(j >= n for j in range(keys)),),),) for n in first)  # (b, 1, 1, j)
    return replace(case, inputs={**case.inputs, "mask": mask(len(first), 1, 1, keys)}, given={"mask": seen})


_KIND = "kernel"

KERNEL_SIZES = (
    _case("tile", _KIND, "one whole tile", b=1, h=1, n_q=128, d=64),
    _case("tile-and-one", _KIND, "a key and a query too many", b=1, h=1, n_q=129, d=64),
    _case("tile-less-one", _KIND, "a key and a query too few", b=1, h=1, n_q=127, d=128, causal=True),
    _case("tile-32", _KIND, "a short tile", b=3, h=2, n_q=32, d=80, causal=True),
    _case("tile-33", _KIND, "a short tile and one", b=3, h=2, n_q=64, n_k=33, d=64, e=128),
    _case("tile-63", _KIND, "half a tile less one", b=1, h=4, g=2, n_q=65, n_k=63, d=96),
    _case("tile-64", _KIND, "half a tile, a wide head", b=1, h=2, n_q=33, n_k=64, d=256),
    _case("tile-65", _KIND, "half a tile and one", b=3, h=2, n_q=8, n_k=65, d=128, causal=True),
    _case("tile-97", _KIND, "an odd number of short tiles", b=1, h=2, n_q=97, d=80, scale=0.07),
    _case("tile-192", _KIND, "a tile and a half", b=1, h=2, g=1, n_q=63, n_k=192, d=128, causal=True),
    _case("wide-96", _KIND, "narrower values", b=1, h=2, n_q=130, n_k=129, d=96, e=64, causal=True),
    _case("wide-192", _KIND, "latent attention", b=1, h=2, n_q=17, n_k=129, d=192, e=128, causal=True),
    _case("wide-256", _KIND, "a wide head, soft-capped", b=1, h=2, n_q=17, n_k=127, d=256, causal=True, softcap=30.0),
    _case("few-2", _KIND, "two queries", b=3, h=4, g=2, n_q=2, n_k=192, d=128, causal=True),
    _case("few-5", _KIND, "five queries", b=3, h=2, n_q=5, n_k=127, d=64, causal=True),
    _case("few-8", _KIND, "eight queries, peaked", b=1, h=4, n_q=8, n_k=193, d=96, logits=4.0),
    _case("decode-long", _KIND, "one query over tiles", b=3, h=4, g=1, n_q=1, n_k=321, d=256, causal=True),
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
        _case("padded-causal", _KIND, "the same: rows are empty", b=3, h=2, n_q=140, d=64, causal=True), 130, 3, 64
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
    _low(_case("low", _KIND, "all scores below -5e4", b=1, h=2, n_q=33, n_k=97, d=64)),
)
