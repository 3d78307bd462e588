"""ONNX's own test cases of Attention, FlexAttention and RotaryEmbedding, answered by refattn.

    python examples/onnx_cases.py

The other examples judge a library by refattn; here refattn is judged, by the numbers that ONNX publishes for its
operators (`onnx.backend.test.case.node`). onnx 1.23 has 93 cases of Attention, 11 of FlexAttention (a preview) and 8 of
RotaryEmbedding. What refattn has no option for is a layout, and is done here:

- inputs (b, n, heads width) are brought to (b, heads, n, width), outputs back;
- past keys and values are put in front; queries then stand at `offset` = the length of the past;
- `nonpad_kv_seqlen` is `k_lengths`, whose alignment is ONNX's, too; without a past and it queries stand top left;
- a floating `attn_mask` is a bias, a boolean one a mask; a shorter one hides the keys that it does not reach;
- -1 for a bound of a window is None; a soft-cap of 0 is none; `qk_matmul_output_mode` names an equation.

A `score_mod` is run by onnx on a few scores, which tell whether it is a bias or a soft-cap; a `prob_mod` is `keep`.
`softmax_precision` says how a result is rounded, and so is no option. bfloat16 is computed in float32 here.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper
from onnx.backend.test.case import node as cases_of_onnx
from onnx.reference import ReferenceEvaluator

import refattn as ra
from refattn.ops.rotary import rotary_forward

Array = np.ndarray

MODULES = ("attention", "flexattention", "rotaryembedding")
MODES = ("SM.1", "SM.capped", "SM.2", "SM.4")
"""What `qk_matmul_output_mode` asks for, and the equation that it is."""
TOLERANCES = {"float64": 1e-6, "float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""Allowed differences, of the largest number or 1; those of float64 are of numbers that were made in float32."""


class Case(NamedTuple):
    """One case: an operator with its attributes, its inputs by name, and what ONNX says comes out."""

    name: str
    operator: str
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    @property
    def dtype(self) -> str:
        """The name of the type of its first input."""
        return str(next(iter(self.inputs.values())).dtype.name)


def cases() -> list[Case]:
    """Return the cases of the onnx that is installed; those that write an operator out in smaller ones are the same."""
    for module in MODULES:
        name = f"onnx.backend.test.case.node.{module}"
        if importlib.util.find_spec(name) is not None:  # an older onnx has fewer operators
            importlib.import_module(name)  # which registers its cases
    found = []
    for case in cases_of_onnx._NodeTestCases:
        first = case.model.graph.node[0]
        if first.op_type not in ("Attention", "FlexAttention", "RotaryEmbedding") or len(case.model.graph.node) > 1:
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in first.attribute}
        for inputs, outputs in case.data_sets:
            names = [[name for name in listed if name] for listed in (first.input, first.output)]
            given, expected = (
                dict(zip(listed, map(np.asarray, arrays), strict=True))
                for listed, arrays in zip(names, (inputs, outputs), strict=True)
            )
            found.append(Case(case.name, first.op_type, attributes, given, expected))
    return found


def answer(case: Case) -> dict[str, Array]:
    """Return the outputs of a case as refattn computes them."""
    inputs = {n: x.astype("float32") if x.dtype.name == "bfloat16" else x for n, x in case.inputs.items()}
    run = {"Attention": attention, "FlexAttention": flex_attention, "RotaryEmbedding": rotary_embedding}
    return run[case.operator](inputs, case.attributes, tuple(case.outputs))


def attention(inputs: Mapping[str, Array], given: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Array]:
    """Return the outputs of `Attention`, of those that are wanted by name."""
    q, k, v = (inputs[name] for name in "QKV")
    flat = q.ndim == 3
    if flat:
        q = to_heads(q, given["q_num_heads"])
        k, v = (to_heads(x, given["kv_num_heads"]) for x in (k, v))
    past = 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        k = np.concatenate([inputs["past_key"], k], axis=2)
        v = np.concatenate([inputs["past_value"], v], axis=2)
    options: dict[str, Any] = {"causal": bool(given.get("is_causal", 0))}
    bounds = (given.get("left_window_size", -1), given.get("right_window_size", -1))
    if bounds != (-1, -1):
        options["window"] = tuple(None if n < 0 else n for n in bounds)
    if "nonpad_kv_seqlen" in inputs:
        options["k_lengths"] = inputs["nonpad_kv_seqlen"]
    else:
        options["offset"] = past
    mask = inputs.get("attn_mask")
    if mask is not None:
        mask = reaching(mask, k.shape[2])
        options["mask" if mask.dtype == np.bool_ else "bias"] = mask if mask.dtype == np.bool_ else mask.astype(q.dtype)
    if given.get("softcap", 0.0):
        options["softcap"] = given["softcap"]
    with ra.trace() as traced:
        out, _ = ra.softmax.forward(q, k, v, scale=given.get("scale"), **options)
    asked = MODES[given.get("qk_matmul_output_mode", 0)]
    while asked not in traced:  # of an option that was not given: what stood before it
        asked = ra.mechanism("softmax").fallback_equation[asked]
    found = {"Y": from_heads(out) if flat else out, "present_key": k, "present_value": v}
    found["qk_matmul_output"] = traced[asked]
    return {name: found[name] for name in wanted}


def flex_attention(inputs: Mapping[str, Array], given: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Array]:
    """Return the output of `FlexAttention`."""
    q, k, v = (inputs[name] for name in "QKV")
    plane = (*q.shape[:3], k.shape[2])
    options: dict[str, Any] = {}
    if "score_mod" in given:
        options |= option_of(graph(given["score_mod"], plane))
    if "prob_mod" in given:
        options["keep"] = graph(given["prob_mod"], plane)(1.0).astype(q.dtype)
    out, _ = ra.softmax.forward(q, k, v, scale=given.get("scale"), **options)
    return dict.fromkeys(wanted, out)


def graph(body: onnx.GraphProto, plane: tuple[int, ...]) -> Any:
    """Return a graph of scores as a function of a number, which all of them are."""
    model = helper.make_model(helper.make_graph(body.node, "mod", body.input, body.output, body.initializer))
    evaluator = ReferenceEvaluator(model)
    return lambda number: evaluator.run(None, {body.input[0].name: np.full(plane, number, np.float32)})[0]


def option_of(changed: Any) -> dict[str, Any]:
    """Return the option that changes scores as this function does: what is added, or a soft-cap."""
    added, again = changed(0.0), changed(1.0)
    shift = np.where(np.isfinite(added), again, 1.0) - np.where(np.isfinite(added), added, 0.0)
    if np.allclose(shift, 1.0):
        return {"bias": added}
    cap = float(changed(1e30).max())
    if not np.allclose(changed(3.0), cap * math.tanh(3.0 / cap)):
        raise ValueError("score_mod: neither a bias nor a soft-cap")
    return {"softcap": cap}


def rotary_embedding(inputs: Mapping[str, Array], given: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Array]:
    """Return the output of `RotaryEmbedding`."""
    x, cos, sin = inputs["input"], inputs["cos_cache"], inputs["sin_cache"]
    flat = x.ndim == 3
    if flat:
        x = to_heads(x, given["num_heads"])
    if "position_ids" in inputs:
        cos, sin = cos[inputs["position_ids"]], sin[inputs["position_ids"]]
    out = rotary_forward(x, cos, sin, interleaved=bool(given.get("interleaved", 0)))
    return dict.fromkeys(wanted, from_heads(out) if flat else out)


def to_heads(x: Array, heads: int) -> Array:
    """Return (b, heads, n, width) of (b, n, heads width)."""
    b, n, _ = x.shape
    return x.reshape(b, n, heads, -1).transpose(0, 2, 1, 3)


def from_heads(x: Array) -> Array:
    """Return (b, n, heads width) of (b, heads, n, width)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def reaching(mask: Array, keys: int) -> Array:
    """Return a mask of all keys: what it does not reach it hides."""
    short = 0 if mask.shape[-1] in (1, keys) else keys - mask.shape[-1]
    hidden = False if mask.dtype == np.bool_ else -np.inf
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=hidden)


def difference(case: Case) -> float:
    """Return the largest difference of a case, of the largest number or 1; infinite where other numbers are finite."""
    worst, found = 0.0, answer(case)
    for name, expected in case.outputs.items():
        got, wide = found[name].astype(np.float64), expected.astype(np.float64)
        finite = np.isfinite(wide)
        if got.shape != wide.shape or not np.array_equal(
            np.where(finite, 0.0, wide), np.where(np.isfinite(got), 0.0, got)
        ):
            return math.inf
        largest = max(1.0, float(np.abs(wide[finite]).max(initial=0.0)))
        worst = max(worst, float(np.abs(got[finite] - wide[finite]).max(initial=0.0)) / largest)
    return worst


def agrees(case: Case) -> bool:
    """Tell whether refattn gives what ONNX says."""
    return difference(case) <= TOLERANCES[case.dtype]


def main() -> None:
    """Print how many cases of each operator agree, and the largest difference of each type."""
    found = [(case, difference(case)) for case in cases()]
    for operator in sorted({case.operator for case, _ in found}):
        own = [x <= TOLERANCES[case.dtype] for case, x in found if case.operator == operator]
        print(f"{operator:16} {sum(own)} of {len(own)} agree")
    for dtype in TOLERANCES:
        print(f"{dtype:16} {max((x for case, x in found if case.dtype == dtype), default=0.0):.1e}")
    for case, x in found:
        if x > TOLERANCES[case.dtype]:
            print(f"{case.name}: {x:.2g}")


if __name__ == "__main__":
    main()
