"""The mutants of growing attention that verification cannot catch, and why, by storage type."""

from __future__ import annotations

SHIFT = "the weights are its values divided by their sum: a factor of all cancels"

SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        "GROW.3 scaled by 1.02": SHIFT,
        "GROW.3 sign flipped": SHIFT,
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        "GROW.3 scaled by 1.02": SHIFT,
        "GROW.3 sign flipped": SHIFT,
        **{
            f"{id} rounded one type lower": "the result is stored in bfloat16 right after"
            for id in ("GROW.6", "dGROW.q", "dGROW.k", "dGROW.v", "dGROW.scale")
        },
        **{
            f"{id} rounded one type lower": "the weights, or their adjoint, are rounded to bfloat16 in any case"
            for id in ("GROW.3", "GROW.4", "dGROW.5")
        },
        "dGROW.scale scaled by 1.02": "one number: 2 % of it is less than the roundings of all weights add up to",
    },
}
