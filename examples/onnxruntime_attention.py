"""ONNX Runtime's `Attention` operator on the CPU, as an implementation for `refattn verify`.

    refattn verify softmax --impl examples/onnxruntime_attention.py:attend

The operator runs as a model of one node, and everything is asked for through its own attributes and inputs:
nothing is emulated by an explicit mask, and the output is returned as it comes.

What agrees with refattn: the layout (batch, heads, tokens, dim), boolean masks (True = may attend), soft-cap before the
mask, grouped heads (each key head serves consecutive query heads), and a row that may attend nothing gives 0.

What differs (measured with onnxruntime 1.32; opset 23, which has kernels, and opset 25 for windows, which it expands
into the operator's ONNX definition):
- A bound of a window that is not given is -1, and a right bound beside `is_causal` is an error. There are no sinks,
  offsets and dropout: declined. (Sinks, `head_sink`, and a window of W keys are those of GroupQueryAttention.)
- A bias is a floating mask; a boolean one beside it is written into it.
- Causal alignment. `is_causal` lets query i see key j when j <= i + (length of the past), so without a past it aligns
  top-left. Bottom-right, refattn's default, is had by giving the first n_k - n_q keys and values as the past.
  A past of negative length does not exist: bottom-right with n_q > n_k is declined. (`nonpad_kv_seqlen` of opset 24
  reaches it in float32 and float16, but is ignored in float64; it is not used here.)
- Masks have to be full in their last two axes; only batch and heads broadcast. The others are expanded here.
- `scale` and `softcap` are float32 attributes. A scale (absent: 1 / sqrt(d)) has to be positive; the kernels ignore a
  soft-cap that is not. Both are declined then.
- float64 has no kernel of its own: the runtime expands the operator into its ONNX definition, about 60 small nodes.
  There q * sqrt(scale) is formed with a float32 square root, good to 1e-7 only, so q is scaled here and `scale` is 1;
  soft-caps that float32 cannot hold are declined; and a row that may attend nothing gives NaN, which is wrong
  (the kernels, and the operator's definition as corrected since, give 0): such masks are declined.
- float16 rounds the scores and the weights to float16 (products accumulate in float32), so a score beyond 65504 gives
  NaN; a masked score is lowered by the largest finite number, so one that exceeds the others by more is not hidden.
- bfloat16 has no CPU kernel and its expansion does not run. The kernels raise on sizes of 0; no heads kill the process.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

if TYPE_CHECKING:
    import refattn

OPSETS = {False: (23, 10), True: (25, 12)}  # the first with Attention, and with its windows; their file formats
TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


@functools.lru_cache(maxsize=64)
def session(dtype: str, masked: str, past: bool, **attributes: float) -> onnxruntime.InferenceSession:
    """One Attention node; the shapes stay open, so that one session serves all sizes."""

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TYPES[dtype], [None] * 4)

    # The operator takes its optional inputs by place, "" for one that is left out; a past demands the present outputs.
    inputs = ["q", "k", "v", "mask" if masked else "", *(["past_k", "past_v"] if past else [])]
    outputs = ["out", *(["present_k", "present_v"] if past else [])]
    node = helper.make_node("Attention", inputs, outputs, **attributes)
    infos = [value(name) for name in inputs if name not in ("mask", "")]
    if masked:
        kind = TensorProto.BOOL if masked == "bool" else TYPES[masked]
        infos.append(helper.make_tensor_value_info("mask", kind, None))
    opset, version = OPSETS[any("window" in name for name in attributes)]
    graph = helper.make_graph([node], "attention", infos, [value(name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    bias: np.ndarray | None = None,
    scale: float | None = None,
    dtype: str | None = None,
    **options: Any,
) -> np.ndarray | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e), mask like (b, h, n_q, n_k) -> out (b, h, n_q, e)."""
    softcap = options.pop("softcap", None)
    n_q, n_k, d = q.shape[2], k.shape[2], q.shape[3]
    # Query i may see key j when j <= i + shift; windows are counted from there.
    shift = n_k - n_q if causal in (True, "bottom_right") or (causal is False and window is not None) else 0
    double = q.dtype == np.float64
    if options:
        return decline(f"the operator has no option {', '.join(sorted(options))}")
    if dtype == "bfloat16" or q.dtype.name not in TYPES:
        return decline(f"no CPU kernel for {dtype or q.dtype.name}")
    if 0 in q.shape + k.shape + v.shape:
        return decline("the operator does not take axes of size 0")
    if shift < 0:
        return decline("bottom-right with n_q > n_k would need a past of negative length")
    if bias is not None and not np.isfinite(bias).all():
        return decline("an infinite bias: the kernels add finite numbers")
    if double and (window is not None or bias is not None):
        return decline("float64: the expanded operator errs by 1e-7 where it has windows or biases")
    if causal and window is not None and window[1] is not None:
        window = (window[0], None)  # causality is the nearer bound, and the operator wants it alone
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not 0 < np.float32(number) < np.inf:
            return decline(f"{name}={number} is not positive and finite in float32")
    if double and softcap is not None and float(np.float32(softcap)) != softcap:
        return decline(f"softcap={softcap} is a float32 attribute and not exact there")
    if double and mask is not None:
        allowed = np.broadcast_to(mask, mask.shape[:-2] + (n_q, n_k))
        if not (np.tril(allowed, shift) if causal else allowed).any(axis=-1).all():
            return decline("float64 with a row that may attend nothing: the expanded operator gives NaN")

    attributes: dict[str, float] = {}
    for name, bound in zip(("left_window_size", "right_window_size"), window or (None, None), strict=True):
        if bound is not None:
            attributes[name] = bound
    if causal:
        attributes["is_causal"] = 1
    if double:  # in double precision, which the float32 attribute would spoil
        q = q * (1 / math.sqrt(d) if scale is None else scale)
        attributes["scale"] = 1.0
    elif scale is not None:
        attributes["scale"] = float(scale)
    if softcap is not None:
        attributes["softcap"] = float(softcap)

    feed = {"q": q, "k": k[:, :, shift:], "v": v[:, :, shift:]}
    if shift:
        feed |= {"past_k": k[:, :, :shift], "past_v": v[:, :, :shift]}
    given = mask
    if bias is not None:  # which is a floating mask; one beside it is the largest negative number
        given = bias if mask is None else np.where(mask, bias, np.finfo(bias.dtype).min).astype(bias.dtype)
    if given is not None:
        feed["mask"] = np.broadcast_to(given, given.shape[:-2] + (n_q, n_k))
    masked = "" if given is None else given.dtype.name
    return session(q.dtype.name, masked, shift > 0, **attributes).run(["out"], feed)[0]


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)


# What the float16 kernel rounds to float16 beside the weights: the scores, and what soft-cap and bias make of them.
attend.roundings = ("SM.1", "SM.2", "SM.15")  # type: ignore[attr-defined]
