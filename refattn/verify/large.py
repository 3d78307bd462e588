"""Properties of a kernel on one large case, for which a truth would cost too much.

The properties are those that the record of the mechanism claims and that need nothing but the kernel itself: both
sides of each equality are computed by it. What rounding may do is measured on the definition, on a window of the first
tokens, and grows with the root of the number of tokens, as the sums that it comes from do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refattn import backends
from refattn.args import Whole, checked
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage_types import TYPES, has_gradient, stored
from refattn.mechanisms.record import Case, Input, Mechanism
from refattn.verify.adapters.adapter import CallError
from refattn.verify.invariances import answered, report
from refattn.verify.outcome import CheckReport
from refattn.verify.selfcheck import properties
from refattn.verify.selfcheck.probe import Core, Values, used_share
from refattn.verify.selfcheck.samples import Sample
from refattn.verify.selfcheck.sections import NotRun
from refattn.verify.tolerance.budget import disturbances, finite, wide

DTYPES = ("float32", "float64", "float16", "bfloat16")

WINDOW = 64
"""Tokens that the noise is measured on."""

NUDGE = 10.0
"""What is added to numbers that must not matter."""

Law = Callable[[Core, Sample], float]


@dataclass(frozen=True)
class Foreign(Core):
    """A foreign kernel in place of an implementation of a core."""

    kernel: Any = None
    grad: bool = False

    def __call__(self, inputs: Values, options: Mapping[str, Any], upstream: Values) -> Values:
        """Return what it gives: `out`, and what it has of further outputs and gradients."""
        wide = {**inputs, **({"d_out": upstream["d_out"]} if self.grad and upstream else {})}
        arrays = {n: stored(x.astype(np.float64), self.dtype) if has_gradient(x) else x for n, x in wide.items()}
        d_out = arrays.pop("d_out", None)
        named = ("out", *self.mechanism.outputs)
        found = answered(self.kernel, arrays, options, self.dtype, d_out, named)
        shapes = {"out": (*inputs["q"].shape[:3], inputs["v"].shape[3])}
        shapes |= {f"d_{name}": x.shape for name, x in inputs.items()}
        for name, x in found.tensors.items():
            if x.shape != shapes.get(name, x.shape):
                raise CallError(f"{name} has shape {x.shape}, needs {shapes[name]}")
            needed = "float32" if name in self.mechanism.outputs and self.dtype != "float64" else self.dtype
            if found.dtypes[name] not in (needed, "float32" if needed == "bfloat16" else needed):
                raise CallError(f"{name} is {found.dtypes[name]}, needs {needed}")
        return found.tensors

    def forward(self, inputs: Values, options: Mapping[str, Any]) -> tuple[Values, Any]:
        """Return the outputs alone."""
        found = self(inputs, options, {})
        if missing := [name for name in self.mechanism.pulled if name not in found]:
            raise NotRun(f"it returns no {', '.join(missing)}")
        return found, None

    def noise(self, inputs: Values, options: Mapping[str, Any], upstream: Values) -> dict[str, float]:
        """Return the noise on the first tokens, times the root of how many times as many there are."""
        tokens = max(inputs["q"].shape[2], inputs["k"].shape[2])
        growth = math.sqrt(max(1.0, tokens / WINDOW))
        given, pulled = _window(inputs), _window({"d_out": upstream["d_out"]})
        if self.dtype in ("float16", "bfloat16"):
            return self._low(given, options, pulled["d_out"], growth)
        return {name: growth * x for name, x in super().noise(given, options, pulled).items()}

    def _low(self, inputs: Values, options: Mapping[str, Any], d_out: Any, growth: float) -> dict[str, float]:
        """Return the noise in a type of few digits, to which they round what they change of q, k and v, too."""
        record, case = self.mechanism, Case("large", "law", {}, options)
        given = case, self.dtype, wide(inputs), {"d_out": d_out}, dict.fromkeys("qkv", "")
        found, (values, noises) = {}, disturbances(record, *given)
        for name, errors in noises.items():
            size = 0.0 if name in record.outputs else float(np.max(np.abs(finite(values[name])), initial=0.0))
            noise = math.sqrt(float(np.max(np.mean(errors**2, axis=0), initial=0.0)))
            found[name] = math.hypot(growth * noise, TYPES[self.dtype].unit * size)
        return found


def _window(arrays: Values) -> Values:
    """Return the arrays with the first tokens alone; none of those here has masks."""
    return {name: x[:, :, :WINDOW] for name, x in arrays.items()}


def causal(core: Core, s: Sample) -> float:
    """Later tokens change neither the past nor the gradients of what only it reaches."""
    tokens = s.inputs["q"].shape[2]
    options, worst = {**s.options, "causal": True}, 0.0
    for now in sorted({1, tokens // 2, tokens - 1}):
        changed = properties.raised(core, s.inputs, **dict.fromkeys(s.inputs, np.s_[:, :, now:]))
        upstream = properties.silent_from(now, s.upstream)
        a, b = ({n: y[:, :, :now] for n, y in core(x, options, upstream).items()} for x in (s.inputs, changed))
        worst = max(worst, used_share(a, b, core.noise(s.inputs, options, upstream)))
    return worst


def independent(core: Core, s: Sample) -> float:
    """The first head changes no other one."""
    changed = properties.raised(core, s.inputs, **dict.fromkeys(s.inputs, np.s_[:, :1]))
    a, b = ({n: y[:, 1:] for n, y in core(x, s.options, s.upstream).items()} for x in (s.inputs, changed))
    return used_share(a, b, core.noise(s.inputs, s.options, s.upstream))


def rows(core: Core, s: Sample) -> float:
    """Some of the queries alone give what they give among the others."""
    some = np.s_[:, :, 1 :: max(1, s.inputs["q"].shape[2] // 7)]
    whole = core(s.inputs, s.options, s.upstream)
    part = core({**s.inputs, "q": s.inputs["q"][some]}, s.options, {"d_out": s.upstream["d_out"][some]})
    names = [name for name in whole if name not in ("d_k", "d_v")]
    expected = {name: whole[name][some] for name in names}
    return used_share({name: part[name] for name in names}, expected, core.noise(s.inputs, s.options, s.upstream))


_SHARED = ("permutation", "query_permutation", "token_permutation", "linear_in_v", "constant_value", "key_shift")
_MORE = ("split_and_merge", "padding", "truncation")


def properties_of(mechanism: Mechanism) -> dict[str, Law]:
    """Return what is checked: properties that the record claims, and `rows` if queries do not see each other."""
    known: dict[str, Law] = {name: properties.PROPERTIES[name] for name in (*_SHARED, *_MORE)} | {
        "causal": causal,
        "independent": independent,
    }
    found = {name: known[name] for name in mechanism.properties if name in known}
    return found | ({"rows": rows} if "query_permutation" in mechanism.properties else {})


@checked(mechanism=Mechanism, tokens=Whole(8))
def verify_large(
    mechanism: Mechanism,
    kernel: Any,
    tokens: int,
    *,
    label: str = "",
    dtype: str = "float32",
    grad: bool = False,
    heads: int = 2,
    width: int = 16,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> CheckReport:
    """Check the properties of a mechanism on a kernel, with as many queries and keys as are asked.

    Parameters
    ----------
    mechanism, kernel, label, grad, progress
        As for `refattn.verify.run.verify`.
    tokens, heads, width
        Sizes of the one case: q, k and v are (1, heads, tokens, width).
    dtype
        float32, float64, float16 or bfloat16.

    Returns
    -------
    CheckReport
        One row for each property; what the kernel declines is "not run".

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import verify_large
    >>> def attend(q, k, v, **options):
    ...     return ra.softmax.forward(q, k, v, **options)[0]
    >>> report = verify_large(ra.mechanism("softmax"), attend, 32)
    >>> report.exit_code, report.counts()["disagrees"]
    (0, 0)
    """
    # Beyond some size what must not matter would be lost to rounding where a kernel masks after it has looked.
    record = replace(mechanism, perturbation=min(mechanism.perturbation, NUDGE))
    core = Foreign(record, "", backends.get("numpy"), dtype, {}, kernel, grad)
    given = {name: Input((1, heads, tokens, width)) for name in "qkv"}
    case = Case("large", "law", given, mechanism.sampled)
    held = dtype if dtype in ("float16", "bfloat16") else "float64"
    inputs = wide(make(mechanism.name, case, held))
    upstream = wide({"d_out": make_upstream(mechanism.name, case, "out", (1, heads, tokens, width), held)})
    subject = Sample(case.name, inputs, case.options, upstream, long=True)
    told = f"{tokens} tokens"
    tasks = [(name, lambda law=law: (law(core, subject), told)) for name, law in properties_of(mechanism).items()]
    return report(mechanism, label or repr(kernel), "properties", tasks, progress)
