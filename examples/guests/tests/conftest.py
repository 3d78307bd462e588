"""What the tests of both guests share: a wrong kernel as a kernel that `verify` takes."""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.wrong import Call


class Wrong:
    """A wrong kernel of a record: its outputs, and its gradients if outputs are right."""

    def __init__(self, record: Any, name: str) -> None:
        self.record, self.name = record, name

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.call = Call({"q": q, "k": k, "v": v}, options)
        if self.record.wrong[self.name].backward:
            out, self.saved = self.record.core.forward(q, k, v, **options)
            return out
        return self.record.wrong[self.name](q, k, v, **options)[0]

    def backward(self, d_out: Any) -> Any:
        found = self.record.wrong[self.name].results(Call(self.call.inputs, self.call.options, d_out))
        return {name: found[f"d_{name}"] for name in "qkv"}
