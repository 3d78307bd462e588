"""A kernel in a process of its own: one that hangs or crashes fails its case, and the rest still runs.

A question and its answer are a line of JSON and plain arrays, of which nothing is ever unpickled. What foreign code
prints, in C too, ends up in `Isolated.said` and in no report.
"""

from __future__ import annotations

import io
import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.files import parse_json
from refattn.verify.adapters import adapter, interpreted
from refattn.verify.adapters.adapter import DECLARED, LARGEST, Adapter, CallError, LateCallError, LoadError, call
from refattn.verify.adapters.load import load
from refattn.verify.outcome import Decline, Result
from refattn.workers import SAID, EndedError, LateError, Worker

Arrays = Mapping[str, NDArray[Any]]
Message = tuple[dict[str, Any], dict[str, NDArray[Any]]]


class Isolated:
    """A kernel, given as ``MODULE:NAME`` or ``FILE.py:NAME``, in a process of its own.

    The process is started at once, and again for the case after one that ended it. Close it, or use it as a context.

    Parameters
    ----------
    spec
        What `refattn.verify.adapters.load.load` takes.
    seconds
        How long each call, with its gradients, may take.
    loading
        How long loading it may take; if absent a minute, or as long as a call.

    Raises
    ------
    LoadError
        Where it cannot be loaded.

    Examples
    --------
    >>> import pathlib, tempfile, refattn as ra
    >>> from refattn.verify import Isolated, verify_case
    >>> record = ra.mechanism("softmax")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "kernel.py"
    ...     _ = file.write_text("attend = lambda q, k, v: exit('gone')")
    ...     with Isolated(f"{file}:attend") as kernel:
    ...         verify_case(record, kernel, record.case("tiny"), "float32").status
    'raises'
    """

    def __init__(self, spec: str, seconds: float = 60.0, loading: float | None = None) -> None:
        self.spec, self.seconds, self.loading = spec, seconds, max(60.0, seconds) if loading is None else loading
        self.reference = False  # whether its process has loaded a definition of refattn
        self.interpreted = ""  # what interprets it, and what that does not see
        self._said = ""
        self._worker: Worker | None = None
        try:
            self._start()
        except CallError as error:
            raise LoadError(f"--impl {spec}: loading it: {error}") from error

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def said(self) -> str:
        """The end of what it has printed, with the tracebacks of what it raised."""
        return (self._said + ("" if self._worker is None else self._worker.err.text()))[-SAID:]

    def call_case(self, question: adapter.Question) -> Result | Decline:
        """Do what `refattn.verify.adapters.adapter.call` does, over there."""
        if self._worker is None:
            try:
                self._start()
            except LoadError as error:
                raise CallError(f"cannot be started again: {error}") from error
        pulls = {} if question.upstream is None else {"d_out": question.upstream, **question.further}
        groups: dict[str, Arrays] = {"inputs": question.inputs, "pulls": pulls, "along": question.along}
        groups |= {name: dict(zip("012", each, strict=False)) for name, each in question.factors.items()}
        arrays = {f"{group}/{name}": x for group, named in groups.items() for name, x in named.items()}
        about = {name: getattr(question, name) for name in ("dtype", "outputs", "derivatives", "manner")}
        about["options"] = dict(question.options)
        answer, found = self._ask("call", about, arrays)
        self.reference = self.reference or bool(answer["reference"])
        self.interpreted = answer["interpreted"]
        if "decline" in answer:
            return Decline(answer["decline"])
        return Result(found, answer["dtypes"], answer["declined"], tuple(answer["judged"]))

    def close(self) -> None:
        """End the process, and what it has started."""
        if self._worker is not None:
            self._worker.close()
            self._said, self._worker = self.said, None

    def _start(self) -> None:
        self._worker = Worker(f"{__name__}:answer")
        told, _ = self._ask("load", {"spec": self.spec}, {})
        told |= {"keep": self._keep if told["keep"] else None, "pulls": frozenset(told["pulls"])}
        if isinstance(told["roundings"], list):
            told["roundings"] = tuple(told["roundings"])
        self.adapter = Adapter(self, **told)

    def _keep(self, case: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the factors that it draws for a case."""
        return self._ask("keep", {"case": case, "shape": shape}, {})[1]["keep"]

    def _ask(self, what: str, about: Mapping[str, Any], arrays: Arrays) -> Message:
        """Ask one of `ASKED`, and wait for the answer no longer than the time limit."""
        worker = self._worker
        assert worker is not None
        limit = worker.limit = LARGEST + 64 * sum(x.nbytes for x in arrays.values())
        question = _packed({**about, "what": what, "limit": limit}, arrays)
        try:
            answer, found = _unpacked(worker.ask(question, self.loading if what == "load" else self.seconds))
        except EndedError as error:
            self.close()
            raise (LateCallError if isinstance(error, LateError) else CallError)(str(error)) from None
        except BaseException:  # the user's interrupt, too
            self.close()
            raise
        if "error" not in answer:
            return answer, found
        worker.err.add(answer["trace"].encode(errors="backslashreplace"))
        if what == "load":
            self.close()
            raise LoadError(answer["error"]) from RuntimeError(f"over there:\n{answer['trace']}")
        raise CallError(answer["error"])


def _packed(about: Mapping[str, Any], arrays: Arrays) -> bytes:
    body = io.BytesIO()
    body.write(json.dumps({**about, "arrays": list(arrays)}).encode() + b"\n")
    for x in arrays.values():
        np.save(body, x, allow_pickle=False)
    return body.getvalue()


def _unpacked(message: bytes) -> Message:
    body = io.BytesIO(message)
    about = parse_json(body.readline())
    return about, {name: np.load(body, allow_pickle=False) for name in about.pop("arrays")}


# --- the other process

_adapter: Adapter


def answer(question: bytes) -> bytes:
    """Answer a question of `Isolated`; what foreign code raises is an answer, too."""
    about, arrays = _unpacked(question)
    try:
        return _packed(*ASKED[about["what"]](about, arrays))
    except (LoadError, CallError) as error:
        return _packed({"error": str(error), "trace": _trace(error)}, {})


def _loaded(about: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    global _adapter
    _adapter = Adapter.of(load(about["spec"], interrupts=False))
    told = {name: _plain(getattr(_adapter, name)) for name in DECLARED if name != "keep"}
    return {**told, "keep": callable(_adapter.keep), "pulls": [*_adapter.pulls]}, {}


def _kept(about: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    return {}, {"keep": _adapter.drawn(about["case"], tuple(about["shape"]))}


def _plain(x: Any) -> Any:
    """Return what an adapter declares as JSON has it; its text where that cannot be."""
    try:
        return json.loads(json.dumps(x, default=list))
    except (TypeError, ValueError):
        return str(x)[:300]


def _called(about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, Any], Arrays]:
    groups: dict[str, dict[str, NDArray[Any]]] = {"inputs": {}, "pulls": {}, "along": {}}
    for place, x in arrays.items():
        group, _, name = place.partition("/")
        groups.setdefault(group, {})[name] = x
    inputs, pulls, along = (groups.pop(group) for group in ("inputs", "pulls", "along"))
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in about["options"].items()}
    found = call(
        _adapter,
        inputs,
        options,
        about["dtype"],
        pulls.pop("d_out", None),
        tuple(about["outputs"]),
        factors={name: tuple(each.values()) for name, each in groups.items()},
        further=pulls,
        along=along,
        asked=tuple(about["derivatives"]),
        manner=about["manner"],
        interrupts=False,
    )
    if isinstance(found, Decline):
        return {"decline": found.reason, **_process()}, {}
    size = sum(x.nbytes for x in found.tensors.values())
    if size > about["limit"] - 4096 * len(found.tensors):
        raise CallError(f"returned {size} bytes, needs at most {about['limit']}")
    told = {"dtypes": found.dtypes, "declined": found.declined, "judged": list(found.judged)}
    return {**told, **_process()}, found.tensors


ASKED = {"load": _loaded, "keep": _kept, "call": _called}


def _process() -> dict[str, Any]:
    """Tell whether this process, which only calls others, has loaded a definition of refattn, and what interprets."""
    loaded = any(
        name.startswith("refattn.mechanisms.") and name.endswith((".dense", ".general")) for name in sys.modules
    )
    return {"reference": loaded, "interpreted": interpreted.told()}


def _trace(error: Exception) -> str:
    """Return the end of the traceback of what foreign code raised; nothing where the error is not its own."""
    cause = error.__cause__
    try:
        return "".join(traceback.format_exception(cause))[-SAID:] if cause is not None else ""
    except Exception:  # an error whose own text cannot be had
        return ""
