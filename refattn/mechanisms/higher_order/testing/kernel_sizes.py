"""Designed calls in which options meet sizes and each other: every pair that the designed cases leave out.

They stand beside the cases of golden vectors, and `refattn verify` runs both. Each size has a case with few options.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.case_builders import mask
from refattn.mechanisms.case_builders import qkv as _case

_KIND = "pairs"
_ONE: dict[str, Any] = {"h": 4, "g": 2, "n_q": 1, "n_k": 131, "d": 8, "e": 12}
_FEW: dict[str, Any] = {"h": 4, "g": 2, "n_q": 5, "n_k": 131, "d": 8, "e": 6}
_TILES: dict[str, Any] = {"h": 2, "g": 1, "n_q": 67, "n_k": 131, "d": 8, "e": 6}
_PADDED = mask(2, 131, keep=0.7)

KERNEL_SIZES = (
    _case("one-padded", _KIND, "decoding over padded keys", **_ONE, causal=True, alpha=1.0, key_mask=_PADDED),
    _case("one-order", _KIND, "decoding by the cube", **_ONE, order=3, normaliser="add(eps=20.0)"),
    _case("one-mask", _KIND, "decoding over any keys", **{**_ONE, "e": 6}, mask=mask(2, 1, 1, 131)),
    _case("few-padded", _KIND, "a few queries over padded keys", **_FEW, causal=True, alpha=1.0, key_mask=_PADDED),
    _case("few-order", _KIND, "a few queries, the cube", **_FEW, causal=True, order=3, normaliser="add(eps=0.5)"),
    _case(
        "few-mask",
        _KIND,
        "a few queries over any keys",
        **{**_FEW, "e": 12},
        causal=True,
        mask=mask(2, 4, 5, 131),
        normaliser="add(eps=0.5)",
    ),
    _case("tiles-padded", _KIND, "tiles of padded keys", **_TILES, alpha=1.0, key_mask=_PADDED),
    _case(
        "tiles-order",
        _KIND,
        "the cube over tiles of padded keys",
        **_TILES,
        order=3,
        normaliser="add(eps=20.0)",
        key_mask=_PADDED,
    ),
    _case(
        "tiles-mask", _KIND, "a mask for each tile", **{**_TILES, "e": 12}, mask=mask(2, 1, 67, 131), order=3, alpha=2.0
    ),
    _case("one-given", _KIND, "decoding, not normalised", **_ONE, layer_norm=False, normaliser="add(eps=0.5)"),
    _case("few-given", _KIND, "a few queries, the cube, not normalised", **_FEW, layer_norm=False, order=3, alpha=2.0),
    _case("tiles-given", _KIND, "a mask for each tile, not normalised", **_TILES, layer_norm=False, mask=mask(67, 131)),
)
