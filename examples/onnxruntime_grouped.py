"""ONNX Runtime's `GroupQueryAttention` (com.microsoft) on the CPU, as a kernel for `refattn verify`.

    refattn verify softmax --impl examples/onnxruntime_grouped.py:attend

It is the operator that exported language models decode with: causal, with a cache, windows, sinks and a soft-cap. It
runs as a model of one node; nothing is emulated, and the output is returned as it comes.

What agrees with refattn: grouped heads (each key head serves consecutive query heads), the soft-cap before the bias, a
bias unscaled, and sinks (`head_sink`), which are neither scaled nor capped.

What differs (measured with onnxruntime 1.32):
- It is causal alone, bottom right: the queries are the last of the tokens, those before come as the past. Calls that
  are not causal, and more queries than keys, are declined.
- `local_window_size` W counts keys: it is the window (W - 1, 0) here. -1 is none.
- `seqlens_k` is the length minus 1. It is of the whole cache, and so queries have no lengths of their own: declined.
- There are no boolean masks, offsets and dropout, one sink a head, and no lse: declined, or not returned.
- `scale` and `softcap` are float32 attributes that have to be positive: 0 means their default.
- Beside a past it takes several queries of one sequence alone: it is called once for each.
- Keys and values are equally wide, a multiple of 8. Layouts are (b, n, heads d) for what is new, (b, heads, n, d) for
  the past.
- float16 is computed in float32 but for its products, whose scores are rounded to float16; there are no other types.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

if TYPE_CHECKING:
    import refattn

TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}
INPUTS = ("q", "k", "v", "past_k", "past_v", "last", "total", "cos", "sin", "positions", "bias", "sink")
"""By place; "" stands for one that is left out."""


@functools.lru_cache(maxsize=64)
def session(dtype: str, given: tuple[str, ...], **attributes: float) -> onnxruntime.InferenceSession:
    """One node; the shapes stay open, so that one session serves all sizes."""
    kinds = dict.fromkeys(INPUTS, TYPES[dtype]) | dict.fromkeys(("last", "total"), TensorProto.INT32)
    infos = [helper.make_tensor_value_info(name, kinds[name], None) for name in given]
    outputs = ("out", "present_k", "present_v")
    listed = [name if name in given else "" for name in INPUTS]
    node = helper.make_node("GroupQueryAttention", listed, outputs, domain="com.microsoft", **attributes)
    found = [helper.make_tensor_value_info(name, TYPES[dtype], None) for name in outputs]
    graph = helper.make_graph([node], "attention", infos, found)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    bias: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: str | None = None,
    **options: Any,
) -> np.ndarray | refattn.Decline:
    """q (b, h, n_q, d), k (b, g, n_k, d), v (b, g, n_k, d) -> out (b, h, n_q, d)."""
    (b, h, n_q, d), (g, n_k) = q.shape, k.shape[1:3]
    past = n_k - n_q
    if options:
        return decline(f"the operator has no option {', '.join(sorted(options))}")
    if dtype == "bfloat16" or q.dtype.name not in TYPES:
        return decline(f"no CPU kernel for {dtype or q.dtype.name}")
    if causal is False or (causal == "top_left" and past):
        return decline("it is causal alone, bottom right")
    if 0 in q.shape + k.shape or past < 0:
        return decline("it needs a query at least, and no more queries than keys")
    if v.shape[3] != d or d % 8:
        return decline(f"it needs d_v = d, a multiple of 8, not d = {d} and d_v = {v.shape[3]}")
    if sink is not None and sink.ndim == 2:
        return decline("it has one sink a head")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not 0 < np.float32(number) < np.inf:
            return decline(f"{name}={number} is not positive and finite in float32")
    attributes: dict[str, float] = {"num_heads": h, "kv_num_heads": g}
    attributes |= {n: float(x) for n, x in (("scale", scale), ("softcap", softcap)) if x is not None}
    if window is not None and window[0] is not None:
        attributes["local_window_size"] = window[0] + 1
    feed = {"q": flat(q), "k": flat(k[:, :, past:]), "v": flat(v[:, :, past:])}
    feed |= {"past_k": k[:, :, :past], "past_v": v[:, :, :past]}
    feed |= {"last": np.full(b, n_k - 1, np.int32), "total": np.asarray(n_k, np.int32)}
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        feed["bias"] = np.broadcast_to(bias, (*bias.shape[:2], n_q, n_k))
    if sink is not None:
        feed["sink"] = sink
    run = session(q.dtype.name, tuple(name for name in INPUTS if name in feed), **attributes).run
    if past and n_q > 1:  # several queries beside a past: one sequence at a time
        found = np.concatenate([run(["out"], {name: one(name, x, n) for name, x in feed.items()})[0] for n in range(b)])
    else:
        found = run(["out"], feed)[0]
    return found.reshape(b, n_q, h, d).transpose(0, 2, 1, 3)


def one(name: str, x: np.ndarray, n: int) -> np.ndarray:
    """Return an input of one batch element."""
    shared = name in ("total", "sink") or (name == "bias" and len(x) == 1)
    return x if shared else x[n : n + 1]


def flat(x: np.ndarray) -> np.ndarray:
    """(b, heads, n, d) -> (b, n, heads d)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows `attend` for another purpose does not need it

    return refattn.Decline(reason)


# What the float16 kernel rounds to float16 beside the weights.
attend.roundings = ("SM.1", "SM.capped", "SM.biased")  # type: ignore[attr-defined]
