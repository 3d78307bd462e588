"""The mutants of Koopman attention that verification cannot catch, and why, by storage type."""

from __future__ import annotations

LOWER = "rounded one type lower"
SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        **{
            f"dKOOP.{name} {LOWER}": "the result is stored in bfloat16 right after"
            for name in ("q", "k", "v", "ridge", "epsilon", "bandwidth", "weight", "mix")
        },
        **{
            f"KOOP.{n} {LOWER}": "the weights that it makes are rounded to bfloat16 in any case, and what they attend"
            for n in ("2", "masked")
        },
        **{
            f"KOOP.{n} {LOWER}": "what the update starts from, the attended vector, is rounded to bfloat16 in any case"
            for n in (14, 15)
        },
        **{
            f"dKOOP.{n} {LOWER}": "a gradient that is stored in bfloat16, or acts through rounded weights"
            for n in (2, 3, 4, 15)
        },
        **{
            f"dKOOP.{name} scaled by 1.02": "one number: 2 % of it is less than the roundings of all weights add up to"
            for name in ("bandwidth", "weight", "ridge")
        },
    },
}
