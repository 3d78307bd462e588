"""Known bugs of which all is that a kernel reads other arguments: those of a convention that the record has."""

from __future__ import annotations

from refattn.mechanisms.registry import mechanism
from refattn.verify.bugs.fault import MECHANISM, reading

READINGS = (
    ("ScaleLeftOut", "scale left out", ("SM.1", "scale"), "google/torchax/issues/39"),
    ("ScaleOfModelWidth", "scale of the model's width", ("SM.1", "scale"), "karpathy/ng-video-lecture/pull/6"),
    ("SoftcapDropped", "soft-cap left out", ("SM.capped", "soft-cap"), "sgl-project/sglang/issues/33915"),
    ("CausalTopLeft", "top-left causality", ("SM.2", "causal mask"), "tinygrad/tinygrad/pull/15949"),
    ("CausalBottomRight", "bottom-right causality", ("SM.2", "causal mask"), "ml-explore/mlx/issues/2835"),
    ("MaskIgnored", "mask ignored", ("SM.2", "mask"), "pacman100/LLM-Workshop/issues/1"),
    ("MaskInverted", "mask inverted", ("SM.2", "mask"), "rasbt/LLMs-from-scratch/issues/1061"),
    ("WindowOneLessLeft", "left bound of the window excluded", ("SM.2", "window"), "sgl-project/sglang/pull/32087"),
    ("WindowIgnored", "window left out", ("SM.2", "window"), "proger/hippogriff/issues/7"),
    ("WindowTopLeft", "window aligned top left", ("SM.2", "window"), "Dao-AILab/flash-attention/issues/2199"),
    ("OffsetIgnored", "offset ignored", ("SM.2", "offset", "causal mask"), "vllm-project/vllm/pull/945"),
    ("BiasScaled", "bias scaled with the scores", ("SM.biased", "bias"), "HKUSTDial/flash-sparse-attention/pull/199"),
    ("BiasIgnored", "bias ignored", ("SM.biased", "bias"), "Dao-AILab/flash-attention/issues/907"),
    ("SinkTwice", "sink counted twice", ("SM.sunk", "SM.total", "sink"), "ROCm/rocm-libraries/issues/12227"),
    ("DropoutNotScaled", "dropout not scaled", ("SM.kept", "dropout"), "intel/torch-xpu-ops/pull/3766"),
    ("DropoutIgnored", "dropout left out", ("SM.kept", "dropout"), "Dao-AILab/flash-attention/issues/1251"),
)
"""Its name, the convention, what else it is an error of, and the report."""

_WRONG = mechanism(MECHANISM).wrong

for _name, _convention, _of, _link in READINGS:
    reading(__name__, _name, _WRONG[_convention], _of, _link)
