"""The mutants of SympFormer that verification cannot catch, and why, by storage type."""

from __future__ import annotations

_SHIFT = {
    f"SYMP.largest {kind}": "what is subtracted from the scores of a row cancels"
    for kind in ("scaled by 1.02", "sign flipped", "heads swapped", "one row zeroed", "shifted by one")
}

_SHIFT["SYMP.largest rounded one type lower"] = _SHIFT["SYMP.largest sign flipped"]

SURVIVORS: dict[str, dict[str, str]] = {
    "float32": {
        **_SHIFT,
        "output truncated": "a float32 kernel computes in the type that it stores: there is nothing to cut off",
    },
    "bfloat16": {
        **_SHIFT,
        **{
            f"dSYMP.{name} rounded one type lower": "the result is stored in bfloat16 right after"
            for name in ("q", "k", "v", "kinetic")
        },
        **{
            f"dSYMP.{name} rounded one type lower": "the adjoint of the scores is rounded to bfloat16 in any case"
            for name in ("4", "5", "6", "7")
        },
    },
}
