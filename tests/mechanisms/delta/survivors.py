"""The mutants of the linear recurrences that verification cannot catch, and why, by storage type."""

from __future__ import annotations

SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        "output truncated": "what a token reads is rounded to bfloat16 already: there is nothing to cut off",
        **{
            f"dDELTA.{name} rounded one type lower": "the result is stored in bfloat16 right after"
            for name in ("q", "k", "v", "state", "scale", "beta", "log_momentum", "step", "log_decay", "1", "2")
        },
        "dDELTA.2 rounded one type lower": "the gradient of v, rounded to bfloat16 as what is predicted",
        "dDELTA.momentum rounded one type lower": "what is read from it is rounded to bfloat16 next",
    },
}
