"""The operator LinearAttention of ONNX (opset 27), as onnx's own reference evaluates it, for `refattn verify delta`.

    refattn verify delta --impl examples/onnx_linear_attention.py:attend --dtype float32

It has (batch, tokens, heads * width), as many key heads as state heads, no norm, no mask and no momentum; it computes
in float32, and takes a scale of 0 for 1 / sqrt(width).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import refattn as ra

INPUTS = ("query", "key", "value", "past_state", "decay", "beta")


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    beta: Any = None,
    log_decay: Any = None,
    state: Any = None,
    scale: float | None = None,
    **options: Any,
) -> Any:
    """Return (out, state) of the operator, or say what it has not."""
    if options:
        return ra.Decline(f"it has no {', '.join(options)}")
    if q.dtype != np.float32:
        return ra.Decline("it computes in float32")
    heads, groups, tokens = q.shape[1], v.shape[1], v.shape[2]
    if k.shape[1] != groups or heads % groups:
        return ra.Decline("it has as many key heads as state heads, and a multiple of query heads")
    if tokens == 0:
        return ra.Decline("it is given a token at least")
    rule = ("gated_" if log_decay is not None else "") + ("delta" if beta is not None else "")
    given = {"query": merged(q), "key": merged(k), "value": merged(v), "past_state": state}
    given |= {"decay": None if log_decay is None else merged(log_decay)}
    given |= {"beta": None if beta is None else merged(beta)}
    numbers = {"q_num_heads": heads, "kv_num_heads": groups, "update_rule": rule.rstrip("_") or "linear"}
    numbers["scale"] = 1.0 / np.sqrt(q.shape[3]) if scale is None else scale
    out, last = evaluate({name: x for name, x in given.items() if x is not None}, numbers)
    split = out.reshape(*out.shape[:2], heads, v.shape[3])
    return split.transpose(0, 2, 1, 3), last


def merged(x: Any) -> Any:
    """(b, h, n, d) -> (b, n, h*d), and (b, h, n) -> (b, n, h)."""
    x = x if x.ndim == 4 else x[..., None]
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)


def evaluate(given: dict[str, Any], numbers: dict[str, Any]) -> tuple[Any, Any]:
    """Run a model of the one node."""
    names = [name if name in given else "" for name in INPUTS]
    node = helper.make_node("LinearAttention", names, ["output", "present_state"], **numbers)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in given.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, outputs), opset_imports=[helper.make_opsetid("", 27)]
    )
    out, last = ReferenceEvaluator(model).run(None, given)
    return out, last
