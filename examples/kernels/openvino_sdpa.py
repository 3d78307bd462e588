"""OpenVINO's ScaledDotProductAttention (opset 13) on its CPU plugin, told to compute in float32. openvino 2026.4.1.

Boolean masks; causal masks are aligned top left, so that bottom right is a mask here; heads are not grouped.
"""

import functools

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from common import empty, four, seen

import refattn


@functools.cache
def compiled(causal, *shapes):
    given = [ops.parameter(shape, np.dtype(kind), name=name) for name, kind, shape in shapes]
    named = {x.get_friendly_name(): x for x in given}
    scale, mask = named.pop("scale", None), named.pop("mask", None)
    node = ops.scaled_dot_product_attention(*named.values(), mask, scale, causal=causal)
    return ov.Core().compile_model(ov.Model([node], given), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def attend(q, k, v, *, mask=None, causal=False, scale=None, bias=None):
    if declined := empty(q, k, v):
        return declined
    if q.shape[1] != k.shape[1]:
        return refattn.Decline("no grouped heads")
    if causal and (mask is not None or bias is not None or (causal != "top_left" and q.shape[2] != k.shape[2])):
        mask, causal = seen(np, q, k, mask, causal), False
    if bias is not None:
        mask = bias if mask is None else np.where(mask, bias, bias.dtype.type(-np.inf))
    if scale is not None and mask is None:  # its inputs have places: no scale without a mask
        mask = np.zeros((1, 1), q.dtype)
    arrays = {"q": q, "k": k, "v": v}
    if mask is not None:
        mask = four(mask)
        arrays["mask"] = np.ascontiguousarray(np.broadcast_to(mask, (*mask.shape[:2], q.shape[2], k.shape[2])))
    if scale is not None:
        arrays["scale"] = np.asarray(scale, q.dtype)
    model = compiled(bool(causal), *((name, x.dtype.str, x.shape) for name, x in arrays.items()))
    return model(list(arrays.values()))[0].copy()


attend.supports = {"dtypes": ["float32", "float16"]}
