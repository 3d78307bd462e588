"""Reports as JSON are what their schema says, by a reader of the few words that the schema uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

import refattn as ra
from refattn.verify import locate, verify, verify_bitwise
from refattn.verify.tolerance.precision import explained

SCHEMA = json.loads(resources.files("refattn.verify.report").joinpath("report.schema.json").read_text())
RECORD = ra.mechanism("softmax")
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
}


def wrong(x: Any, schema: Any, at: str = "") -> list[str]:
    """Return what of some JSON is not as a schema says."""
    found: list[str] = []
    for word, says in schema.items() if isinstance(schema, dict) else ():
        if word == "$ref":
            found += wrong(x, SCHEMA["$defs"][says.rpartition("/")[2]], at)
        elif word in ("oneOf", "anyOf"):
            each = [wrong(x, one, at) for one in says]
            count = sum(not one for one in each)
            found += [] if count == 1 or (count and word == "anyOf") else [f"{at}: {count} fit: {each}"]
        elif word == "type":
            names = [says] if isinstance(says, str) else says
            found += [] if any(TYPES[name](x) for name in names) else [f"{at}: {x!r} is no {says}"]
        elif word in ("const", "enum"):
            found += [] if x in ([says] if word == "const" else says) else [f"{at}: {x!r} is not {says}"]
        elif word == "minimum":
            found += [f"{at}: {x}"] if x < says else []
        elif word == "required" and isinstance(x, dict):
            found += [f"{at}: has no {name}" for name in says if name not in x]
        elif word == "items" and isinstance(x, list):
            found += [line for n, one in enumerate(x) for line in wrong(one, says, f"{at}/{n}")]
        elif word == "properties" and isinstance(x, dict):
            found += [line for name in says if name in x for line in wrong(x[name], says[name], f"{at}/{name}")]
        elif word == "additionalProperties" and isinstance(x, dict):
            more = [name for name in x if name not in schema.get("properties", {})]
            found += [f"{at}: has {more}"] if says is False and more else []
            found += [line for name in more for line in wrong(x[name], says, f"{at}/{name}")]
        else:
            known = ("$schema", "$defs", "title", "description", "properties", "required", "items")
            assert word in (*known, "additionalProperties"), word
    return found


def nearly(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out = ra.softmax.forward(q, k, v, **options)[0]
    return out * q.dtype.type(1.0001) if "causal" in options else out[..., :1] if "softcap" in options else out


def test_reports_are_as_the_schema_says() -> None:
    record = replace(RECORD, cases=tuple(RECORD.case(name) for name in ("tiny", "causal", "softcap", "mask-keys")))
    report = explained(record, verify(record, nearly, dtypes=["float32"]), {})
    data = json.loads(json.dumps(locate(record, report).to_json(), allow_nan=False))
    assert wrong(data, SCHEMA) == []
    assert (data["schema_version"], data["kind"], data["exit_code"]) == (1, "cases", 1)
    verdict = {one["case"]: one for one in data["outcomes"]}["causal"]["verdicts"][0]
    assert verdict["got"] == pytest.approx(1.0001 * verdict["expected"]) and not verdict["agrees"]
    (shape,) = [one["verdicts"][0] for one in data["outcomes"] if one["case"] == "softcap"]
    assert (shape["share"], shape["got"][0]) == (None, "(")
    assert {place["tensor"] for place in data["suspects"]["places"]} == {"out"}
    data["outcomes"][0]["verdicts"][0]["share"] = "much"
    assert wrong(data, SCHEMA)


def test_reports_on_laws_are_as_the_schema_says() -> None:
    assert wrong(json.loads(json.dumps(verify_bitwise(RECORD, nearly).to_json())), SCHEMA) == []
