"""Verify kernels that run on a GPU: PyTorch's attention through each of its four kernels, a Triton kernel, and others.

    python tools/gpu_verify.py [--short] [NAME]...

Prints a row for each kernel and type, and every case that disagrees with how far it is off.
"""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import refattn as ra
from refattn.verify import load
from refattn.verify.run import verify

SHORT = "--short" in sys.argv
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "kernels")]
CASES = ("tiny", "plain") if SHORT else None
COMPILED = ("tiny", "plain", "causal", "mask-heads", "window-causal", "softcap", "unequal", "tile")
"""Cases of a kernel that is compiled for each."""


def sdpa(name: str) -> Any:
    """Return PyTorch's attention on the device, held to one of its kernels."""
    import torch_sdpa
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return torch_sdpa.attend(q, k, v, **options)
        except RuntimeError as error:
            if "vailable kernel" in str(error):  # no kernel of this name for the shapes, the type or the mask
                return ra.Decline(f"no kernel of {name}")
            raise

    attend.framework, attend.device = "torch", "cuda:0"  # type: ignore[attr-defined]
    return attend


def flex() -> Any:
    """Return FlexAttention, compiled."""
    import torch
    import torch_flex

    torch_flex.flex_attention = torch.compile(torch_flex.flex_attention, dynamic=True)

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        with torch.device("cuda"):  # the adapter is for the CPU, and makes its places there
            return torch_flex.attend(q, k, v, **options)

    attend.framework, attend.device = "torch", "cuda:0"  # type: ignore[attr-defined]
    return attend


def triton_kernel() -> Any:
    """Return the flash kernel of `refattn init-adapter --triton`, compiled."""
    text = resources.files("refattn.verify.adapters.templates").joinpath("triton.txt").read_text(encoding="utf-8")
    file = Path(tempfile.mkdtemp(prefix="refattn-triton-")) / "flash.py"  # Triton reads its kernels from a file
    file.write_text(text.replace('attend.interpret = "triton"', ""), encoding="utf-8")
    kernel = load(f"{file}:attend")
    kernel.device = "cuda:0"
    return kernel


def own(library: str, device: str | None) -> Any:
    """Return refattn itself on a device, forward and backward."""

    class Own:
        framework = library

        def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            options.pop("dtype", None)
            out, self.saved = ra.softmax.forward(q, k, v, **options)
            return out, self.saved.lse

        def backward(self, d_out: Any) -> Any:
            return ra.softmax.backward(self.saved, d_out)

    kernel = Own()
    kernel.device = device  # type: ignore[attr-defined]
    return kernel


def other(module: str, name: str) -> Any:
    """Return an adapter of examples/kernels, compiled on the device where it is interpreted otherwise."""
    kernel = getattr(importlib.import_module(module), name)
    kernel.device = "cuda:0"
    return kernel


KERNELS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "cupy": ("softmax", lambda: own("cupy", "cuda:0"), ("float32", "float64")),
    "efficient": ("softmax", lambda: sdpa("EFFICIENT_ATTENTION"), ("float32", "float16", "bfloat16")),
    "math": ("softmax", lambda: sdpa("MATH"), ("float32", "bfloat16")),
    "flash": ("softmax", lambda: sdpa("FLASH_ATTENTION"), ("float16", "bfloat16")),
    "cudnn": ("softmax", lambda: sdpa("CUDNN_ATTENTION"), ("float16", "bfloat16")),
    "torch": ("softmax", lambda: own("torch", "cuda:0"), ("float32",)),
    "triton": ("softmax", triton_kernel, ("float32", "float16")),
    "flex": ("softmax", flex, ("float32",)),
    "fla": ("delta", lambda: other("fla_delta", "chunked"), ("float32", "bfloat16")),
    "sage": ("softmax", lambda: other("sage_attention", "attend"), ("float16",)),
}
"""The mechanism, what makes the kernel, and the types, by name."""


def verified(name: str) -> tuple[list[str], list[str]]:
    """Return rows of the table, and lines about cases that disagree."""
    mechanism, make, dtypes = KERNELS[name]
    rows: list[str] = []
    lines: list[str] = []
    try:
        kernel = make()
    except Exception as error:
        return [f"| {name} | | not run: {type(error).__name__}: {' '.join(str(error).split())[:80]} | | | |"], []
    record = ra.mechanism(mechanism)
    names = CASES or (COMPILED if name == "flex" else None)
    chosen = tuple(map(record.case, names)) if names else (*record.cases, *record.kernel_sizes)
    for dtype in dtypes:
        report = verify(record.changed(cases=chosen, kernel_sizes=()), kernel, dtypes=[dtype], grad=True)
        counts, worst = report.counts()["all"], [("", 0.0, "")]
        for outcome in report.outcomes:
            worst += [(verdict.tensor, verdict.share, outcome.case) for verdict in outcome.verdicts]
            wrong = [f"{v.tensor} {v.share:.3g} of the allowed error" for v in outcome.verdicts if not v.share <= 1.0]
            if outcome.status in ("disagrees", "raises"):
                detail = (outcome.detail.splitlines() or [""])[-1]
                lines.append(f"{name}, {dtype}, {outcome.case}: {'; '.join(wrong) or detail}")
        tensor, share, case = max(worst, key=lambda one: math.inf if math.isnan(one[1]) else one[1])
        rows.append(
            f"| {name} | {dtype} | {counts['agreed']} | {counts['failed']} | {counts['declined']} "
            f"| {share:.3g}, {tensor}, {case} |"
        )
    return rows, lines


def main() -> None:
    """Print the rows, then what disagrees."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(KERNELS)
    lines = []
    print("| kernel | type | agree | disagree | declined | worst share of the allowed error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        rows, more = verified(name)
        print(*rows, sep="\n", flush=True)
        lines += more
    print()
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
