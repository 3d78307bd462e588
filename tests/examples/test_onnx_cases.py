"""ONNX's own cases of attention and rotary positions: all agree, and wrong readings of an option would not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import refattn as ra
from tests.examples.test_adapters import load


@pytest.fixture(scope="module")
def own() -> Any:
    return load("onnx_cases", "onnx")


def test_all_agree(own: Any) -> None:
    found = [(case.operator, case.name, own.agrees(case)) for case in own.cases()]
    assert [name for _, name, agrees in found if not agrees] == []
    if own.onnx.__version__.startswith("1.23."):
        assert Counter(operator for operator, *_ in found) == {
            "Attention": 93,
            "FlexAttention": 11,
            "RotaryEmbedding": 8,
        }


def test_where_the_reference_of_onnx_errs() -> None:
    """A mask of one row beside is_causal, and raw scores beside a soft-cap: ONNX Runtime has them right."""
    onnx = pytest.importorskip("onnx.reference")
    runtime = pytest.importorskip("onnxruntime")
    from onnx import TensorProto, defs, helper

    if defs.onnx_opset_version() < 25:
        pytest.skip("an onnx without opset 25, which takes masks of one row")

    def both(feed: Any, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
        kinds = {name: TensorProto.BOOL if name == "mask" else TensorProto.FLOAT for name in (*inputs, *outputs)}
        infos = [[helper.make_tensor_value_info(n, kinds[n], None) for n in x if n] for x in (inputs, outputs)]
        graph = helper.make_graph([helper.make_node("Attention", inputs, outputs, **attributes)], "attention", *infos)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12)
        session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return onnx.ReferenceEvaluator(model).run(None, feed)[-1], session.run(None, feed)[-1]

    r = np.random.default_rng(0)
    q, k, v = (r.normal(size=(1, 1, 3, 4)).astype(np.float32) for _ in range(3))
    mask = np.asarray([[True, True, False]])
    right, _ = ra.softmax.forward(q, k, v, mask=mask, causal="top_left")
    for rows, errs in ((3, False), (1, True)):
        given = {"q": q, "k": k, "v": v, "mask": np.broadcast_to(mask, (rows, 3))}
        reference, runtimes = both(given, ["q", "k", "v", "mask"], ["out"], is_causal=1)
        assert np.abs(runtimes - right).max() < 1e-6
        assert (np.abs(reference - right).max() > 0.1) == errs
    with ra.trace() as traced:
        ra.softmax.forward(q, k, v, softcap=0.5)
    given = {"q": q, "k": k, "v": v}
    reference, runtimes = both(given, ["q", "k", "v"], ["out", "", "", "scores"], softcap=0.5, qk_matmul_output_mode=0)
    assert np.abs(runtimes - traced["SM.1"]).max() < 1e-6
    assert np.abs(reference - traced["SM.capped"]).max() < 1e-6 < np.abs(reference - traced["SM.1"]).max()
