"""The mutants of softmax attention that verification cannot catch, and why, by storage type."""

from __future__ import annotations

SURVIVORS = {
    "float32": {
        "SM.top rounded one type lower": "softmax does not depend on what is subtracted from all scores of a row",
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        "SM.top rounded one type lower": "softmax does not depend on what is subtracted from all scores of a row",
        **{
            f"{id} rounded one type lower": "the result is stored in bfloat16 right after"
            for id in ("SM.5", *(f"dSM.{name}" for name in (*"qkv", "scale", "softcap", "bias", "sink", "keep")))
        },
        "dSM.kept rounded one type lower": "its products with the weights are rounded to bfloat16 in any case",
        **{
            f"{id} rounded one type lower": "its product with the weights is rounded to bfloat16 in any case"
            for id in ("dSM.4", "dSM.3")
        },
        **{
            f"{id} scaled by 1.02": "one number: 2 % of it is less than the roundings of all weights add up to"
            for id in ("dSM.scale", "dSM.softcap")
        },
    },
}
