"""The mutants of growing attention that verification cannot catch, and why, by storage type."""

from __future__ import annotations

from tests.mechanisms.softmax.survivors import SURVIVORS as OF_SOFTMAX

SHIFT = {"SM.top scaled by 1.02": "softmax does not depend on what is subtracted from all scores of a row"}

SURVIVORS: dict[str, dict[str, str]] = {dtype: {**known, **SHIFT} for dtype, known in OF_SOFTMAX.items()}
