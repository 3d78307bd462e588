"""ONNX Runtime's `Attention` operator on the CPU, as a kernel for `refattn verify`.

    refattn verify softmax --impl examples/onnxruntime_attention.py:attend
    refattn verify softmax --impl examples/onnxruntime_attention.py:attend_25 --dtype float32
    refattn verify softmax --impl examples/onnxruntime_attention.py:attend_weights --dtype float32

`attend` takes the newest opset that has a kernel for what is asked, `attend_25` that of opset 25 in any case, which
this runtime expands. `attend_raw`, `attend_capped`, `attend_masked` and `attend_weights` return the scores or weights
beside the output, through `qk_matmul_output_mode`, as the equations that they are.

The operator runs as a model of one node, and everything is asked for through its own attributes and inputs:
nothing is emulated by an explicit mask, and the output is returned as it comes.

What agrees with refattn: the layout (batch, heads, tokens, dim), boolean masks (True = may attend), soft-cap before the
mask, grouped heads (each key head serves consecutive query heads), and a row that may attend nothing gives 0.

What differs (measured with onnxruntime 1.32; opsets 23 and 24, which have kernels, and opset 25 for windows, which it
expands into the operator's ONNX definition):
- A bound of a window that is not given is -1, and a right bound beside `is_causal` is an error. There are no sinks,
  offsets, lengths of queries and dropout: declined. (Sinks are those of GroupQueryAttention: onnxruntime_grouped.py.)
- Lengths of keys are `nonpad_kv_seqlen`, from which `is_causal` and windows count, too: bottom right by sequence. The
  expanded operator ignores them in float64: declined. NaN beyond the lengths comes through; so it is set to 0 here.
- Masked scores of the kernels are the lowest finite number, those of opset 25 are -inf: both are given as -inf.
- A bias is a floating mask; a boolean one beside it is written into it.
- Causal alignment. `is_causal` lets query i see key j when j <= i + (length of the past), so without a past it aligns
  top-left. Bottom-right, refattn's default, is had by giving the first n_k - n_q keys and values as the past.
  A past of negative length does not exist: bottom-right with n_q > n_k is had by `nonpad_kv_seqlen` = n_k.
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

FORMATS = {23: 10, 24: 11, 25: 12}  # the file formats of opsets: the first with Attention, with lengths, with windows
TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


@functools.lru_cache(maxsize=64)
def session(
    dtype: str, masked: str, past: bool, lengths: bool, beside: bool, opset: int, **attributes: float
) -> onnxruntime.InferenceSession:
    """One Attention node; the shapes stay open, so that one session serves all sizes."""

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TYPES[dtype], [None] * 4)

    # The operator takes its optional inputs by place, "" for one that is left out; a past demands the present outputs.
    inputs = ["q", "k", "v", "mask" if masked else "", *(["past_k", "past_v"] if past else [])]
    if lengths:
        inputs += [*([] if past else ["", ""]), "lengths"]
    outputs = ["out", *(["present_k", "present_v"] if past else [])]
    if beside:
        outputs += [*([] if past else ["", ""]), "scores"]
    node = helper.make_node("Attention", inputs, outputs, **attributes)
    infos = [value(name) for name in inputs if name not in ("mask", "lengths", "")]
    if masked:
        kind = TensorProto.BOOL if masked == "bool" else TYPES[masked]
        infos.append(helper.make_tensor_value_info("mask", kind, None))
    if lengths:
        infos.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, [None]))
    graph = helper.make_graph([node], "attention", infos, [value(name) for name in outputs if name])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=FORMATS[opset])
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
    k_lengths: np.ndarray | None = None,
    scale: float | None = None,
    dtype: str | None = None,
    opset: int = 0,
    mode: int | None = None,
    **options: Any,
) -> np.ndarray | dict[str, np.ndarray] | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, e), mask like (b, h, n_q, n_k) -> out (b, h, n_q, e).

    With a `mode` scores or weights come beside the output.
    """
    softcap = options.pop("softcap", None)
    n_q, n_k, d = q.shape[2], k.shape[2], q.shape[3]
    # Query i may see key j when j <= i + shift; windows are counted from there.
    placed = causal in (True, "bottom_right") or (causal is False and window is not None)
    shift = n_k - n_q if placed else 0
    if placed and shift < 0 and k_lengths is None:
        k_lengths = np.full(q.shape[0], n_k)
    double = q.dtype == np.float64
    if options:
        return decline(f"the operator has no option {', '.join(sorted(options))}")
    if dtype == "bfloat16" or q.dtype.name not in TYPES:
        return decline(f"no CPU kernel for {dtype or q.dtype.name}")
    if 0 in q.shape + k.shape + v.shape:
        return decline("the operator does not take axes of size 0")
    if k_lengths is not None:
        if double:
            return decline("float64: the expanded operator ignores lengths, and so more queries than keys")
        if causal == "top_left":
            return decline("with lengths it is aligned bottom right by sequence")
        beyond = (np.arange(n_k) >= k_lengths[:, None])[:, None, :, None]
        k, v = (np.where(beyond, x.dtype.type(0), x) for x in (k, v))
        shift = 0
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
    if k_lengths is not None:
        feed["lengths"] = k_lengths.astype(np.int64)
    opset = opset or (25 if window is not None else 24 if k_lengths is not None else 23)
    wanted = ["out"]
    if mode is not None:
        wanted, attributes["qk_matmul_output_mode"] = ["out", "scores"], mode
    key = (q.dtype.name, masked, shift > 0, k_lengths is not None, mode is not None, opset)
    found = session(*key, **attributes).run(wanted, feed)
    if mode is None:
        return found[0]
    out, scores = found
    if mode == 2:  # the kernels' lowest number is what they have for -inf
        scores = np.where(scores <= np.finfo(scores.dtype).min / 2, scores.dtype.type(-np.inf), scores)
    return {"out": out, MODES[mode]: scores}


MODES = ("SM.1", "SM.capped", "SM.2", "SM.4")
"""What `qk_matmul_output_mode` asks for."""

attend_25 = functools.wraps(attend)(functools.partial(attend, opset=25))
attend_raw, attend_capped, attend_masked, attend_weights = (
    functools.wraps(attend)(functools.partial(attend, mode=mode)) for mode in range(4)
)


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)


# What the float16 kernel rounds to float16 beside the weights: the scores, and what soft-cap and bias make of them.
for function in (attend, attend_25, attend_raw, attend_capped, attend_masked, attend_weights):
    function.roundings = ("SM.1", "SM.capped", "SM.biased")  # type: ignore[attr-defined]
