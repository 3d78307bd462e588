"""The mutants of graph energy attention that verification cannot catch, and why, by storage type."""

from __future__ import annotations

NUMBERS = ("bias", "scale", "mu", "kappa", "step", "tau", "coefficients", "start")

SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        **{
            f"{id} rounded one type lower": "the result is stored in bfloat16 right after"
            for id in ("GE.13", "dGE.q", "dGE.k", "dGE.v", *(f"dGE.{name}" for name in NUMBERS))
        },
        **{
            f"{id} rounded one type lower": "its sum with other parts is rounded to bfloat16 right after"
            for id in ("dGE.11", "dGE.4", "dGE.3", "dGE.masked")
        },
        "GE.11 rounded one type lower": "the sum that weights are divided by: they are rounded to bfloat16 right after",
        "dGE.scale scaled by 1.02": "one number: 2 % of it is less than the roundings of all weights add up to",
    },
}
