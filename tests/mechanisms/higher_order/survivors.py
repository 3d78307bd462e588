"""The mutants of higher-order attention that verification cannot catch, and why, by storage type."""

from __future__ import annotations

SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        **{
            f"{id} rounded one type lower": "the result is stored in bfloat16 right after"
            for id in ("HOL.6", "dHOL.1", "dHOL.2", "dHOL.q", "dHOL.k", "dHOL.v")
        },
        **{
            f"{id} rounded one type lower": "the weights, or their adjoint, are rounded to bfloat16 in any case"
            for id in ("HOL.3", "HOL.taylor", "dHOL.taylor", "dHOL.5")
        },
    },
}
