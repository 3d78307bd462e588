"""Golden vectors as models of ONNX's Attention with their test data.

A folder of an ONNX model has what backends test with: ``model.onnx``, and in each ``test_data_set_N`` the inputs and
the output of a case as protocol buffers. Cases whose nodes have the same attributes share a model, its shapes open.
`checked` runs what was written with ONNX Runtime and with ONNX's own reference evaluator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.files import parse_json, read_users
from refattn.golden.storage_types import round_to
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.bugs.fault import MECHANISM
from refattn.verify.outcome import Result, Truth
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import ELEMENT, judge

FORMATS = ("safetensors", "onnx")
"""The first is that of `refattn.golden.vectors`."""

OPSET, FILE = 23, 10
"""The first operators with Attention, and the first version of files that holds them."""

DTYPES = ("float32", "float16")
"""Types that runtimes have kernels for."""

LOW = ("SM.1", "SM.capped", "SM.biased")
"""Equations that a kernel in float16 may round to it, beside those of the record: runtimes do."""

ABOUT = "cases.json"
"""What stands beside a model: its cases, and what each may differ by."""


@dataclass(frozen=True)
class Node:
    """A call of the operator: its attributes, and the arrays that it is fed."""

    attributes: dict[str, float]
    feed: dict[str, NDArray[Any]]


def node(case: Case, inputs: Mapping[str, NDArray[Any]]) -> Node | str:
    """Return a case as a call of Attention, or why it is none."""
    if lacking := sorted(({*case.inputs} - {*"qkv", "mask", "bias"}) | ({*case.options} & {"window", "offset"})):
        return f"the operator has no option {', '.join(lacking)}"
    if {"mask", "bias"} <= {*inputs}:
        return "the operator has one mask, boolean or floating"
    if any(0 in x.shape for x in inputs.values()):
        return "runtimes do not take axes of size 0"
    bias = inputs.get("bias")
    if bias is not None and not np.isfinite(bias).all():
        return "runtimes add finite numbers"
    (queries, keys), causal = (inputs[name].shape[2] for name in "qk"), case.options.get("causal", False)
    shift = keys - queries if causal in (True, "bottom_right") else 0
    if shift < 0:
        return "more queries than keys, aligned at the last"
    attributes: dict[str, float] = {"is_causal": 1} if causal else {}
    for name in ("scale", "softcap"):
        if (given := case.options.get(name)) is not None:
            if not 0.0 < given < np.inf:
                return f"{name}: runtimes take positive numbers"
            attributes[name] = float(given)
    feed = {"q": inputs["q"], "k": inputs["k"][:, :, shift:], "v": inputs["v"][:, :, shift:]}
    mask = inputs.get("mask", bias)
    if mask is not None:
        feed["mask"] = np.broadcast_to(mask, (*mask.shape[:-2], queries, keys))
    if shift:  # is_causal counts queries from the end of the past
        feed |= {"past_k": inputs["k"][:, :, :shift], "past_v": inputs["v"][:, :, :shift]}
    return Node(attributes, {name: np.ascontiguousarray(x) for name, x in feed.items()})


def _model(call: Node) -> Any:
    from onnx import TensorProto, checker, helper

    kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bool": TensorProto.BOOL}

    def value(name: str, x: NDArray[Any]) -> Any:
        return helper.make_tensor_value_info(name, kinds[x.dtype.name], [f"{name}_{axis}" for axis in range(x.ndim)])

    past = ["past_k", "past_v"] if "past_k" in call.feed else []
    places = ["q", "k", "v", "mask" if "mask" in call.feed else "", *past]
    while not places[-1]:
        places.pop()
    outputs = ["out", *(["present_k", "present_v"] if past else [])]
    made = helper.make_node("Attention", places, outputs, **call.attributes)
    infos = [value(name, x) for name, x in call.feed.items()]
    graph = helper.make_graph([made], "attention", infos, [value("out", call.feed["q"])])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=FILE, producer_name="refattn"
    )
    checker.check_model(model)
    return model


def write_onnx(folder: Path, cases: Iterable[tuple[Mechanism, Case]]) -> tuple[int, int, dict[str, list[str]]]:
    """Write cases as models with test data; return the numbers of models and of sets, and by reason what is left out.

    Raises
    ------
    ValueError
        Where a mechanism has no operator.
    """
    from onnx import numpy_helper

    models: dict[str, list[dict[str, Any]]] = {}
    left: dict[str, list[str]] = {}
    for mechanism, case in cases:
        if mechanism.name != MECHANISM:
            raise ValueError(f"{mechanism.name}: ONNX has no operator for it, needs {MECHANISM}")
        for dtype in DTYPES:
            known = _truth(mechanism, case, dtype)
            call = node(case, known.inputs)
            if isinstance(call, str):
                left.setdefault(call, []).append(f"{case.name} {dtype}")
                continue
            kinds = [name for name in call.feed if name not in "qkv"]
            numbers = [f"{name}-{x:g}" for name, x in call.attributes.items() if name != "is_causal"]
            mask = [f"{one}-{call.feed[one].dtype.kind}{call.feed[one].ndim}" for one in kinds if one == "mask"]
            parts = ("attention", dtype, *["causal"] * ("is_causal" in call.attributes), *mask)
            name = "_".join((*parts, *["past"] * ("past_k" in call.feed), *numbers))
            sets = models.setdefault(name, [])
            place = folder / name / f"test_data_set_{len(sets)}"
            place.mkdir(parents=True)
            if not sets:
                (folder / name / "model.onnx").write_bytes(_model(call).SerializeToString())
            held = round_to(known.values["out"], dtype).astype(dtype)
            stored = {f"input_{n}": (one, x) for n, (one, x) in enumerate(call.feed.items())}
            for file, (one, x) in {**stored, "output_0": ("out", held)}.items():
                (place / f"{file}.pb").write_bytes(numpy_helper.from_array(x, one).SerializeToString())
            allowed = ELEMENT * float(np.sqrt(np.max(known.variance["out"])))
            sets.append({"case": case.name, "options": dict(case.options), "dtype": dtype, "allowed": allowed})
    for name, sets in models.items():
        (folder / name / ABOUT).write_text(json.dumps(sets, indent=1) + "\n", encoding="utf-8")
    return len(models), sum(map(len, models.values())), left


def _truth(mechanism: Mechanism, case: Case, dtype: str) -> Truth:
    roundings = dict.fromkeys(LOW, "") if dtype == "float16" else {}
    return truth(mechanism, case, dtype, grad=False, roundings=roundings)


def checked(folder: Path, cases: Mapping[str, Case], mechanism: Mechanism) -> Iterator[tuple[str, str, str]]:
    """Yield of each set and each runtime that disagrees, or runs it not, its folder, the runtime and what is wrong.

    `cases` are those that were written, by name.
    """
    import onnx
    import onnxruntime
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    for about in sorted(folder.glob(f"*/{ABOUT}")):
        data = read_users(about.parent / "model.onnx")
        runtimes = {
            "onnxruntime": lambda data=data: onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]),
            "onnx reference": lambda data=data: ReferenceEvaluator(onnx.load_from_string(data)),
        }
        for runtime, made in runtimes.items():
            session = made()
            for n, one in enumerate(parse_json(read_users(about))):
                place = about.parent / f"test_data_set_{n}"
                files = sorted(place.glob("input_*.pb"), key=lambda file: int(file.stem.partition("_")[2]))
                given = [onnx.TensorProto.FromString(read_users(file)) for file in files]
                feed = {x.name: numpy_helper.to_array(x) for x in given}
                try:
                    with np.errstate(all="ignore"):
                        (out,) = session.run(["out"], feed)
                except Exception as error:  # whatever a runtime raises
                    yield str(place), runtime, f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    continue
                known = _truth(mechanism, cases[one["case"]], one["dtype"])
                (verdict,) = judge(Result({"out": out}, {"out": str(out.dtype)}), known)
                if not verdict.agrees:
                    told = f"out{list(verdict.index)} is {verdict.got}, needs {verdict.expected}"
                    yield str(place), runtime, f"case {one['case']}: {told} ({verdict.share:.3g} of what is allowed)"
