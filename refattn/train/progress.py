"""The default report of a training: lines on standard error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any


class Speed:
    """Tokens per second since this process began to train."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def of(self, row: Mapping[str, Any]) -> str:
        first = self.first = self.first or (row["seconds"], row["tokens"])
        seconds = row["seconds"] - first[0]
        speed = f"{(row['tokens'] - first[1]) / seconds:.0f} tokens/s" if seconds > 0.0 else ""
        heldout = f"held out {row['heldout_bits']:.3f} bits/byte" if "heldout_bits" in row else ""
        loss = f"loss {row['loss'] / math.log(2.0):.3f} bits/byte"  # the row has it in nats
        redrawn = f"redrawn {row['redrawn']}" if "redrawn" in row else ""
        return "  ".join(part for part in (loss, heldout, redrawn, speed) if part)


class Lines:
    """Lines at the first and the last step, at each score, and every ten seconds."""

    def __init__(self) -> None:
        self.said, self.speed = time.monotonic(), Speed()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, row: Mapping[str, Any], steps: int) -> None:
        """Say a line at the first and the last step, at each score, and every ten seconds."""
        told = self.speed.of(row)
        due = row["step"] in (1, steps) or "heldout_bits" in row or time.monotonic() - self.said > 10.0
        if due:
            self.said = time.monotonic()
            self.say(f"step {row['step']} of {steps}: {told}")
