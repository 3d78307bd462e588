"""An ONNX model with q, k and v as a kernel: ``attn.onnx``, run by ONNX Runtime on the CPU.

Its inputs are found by their names (`refattn.verify.names`), or by what ``attn.onnx@query=q,x=mask`` says. Arrays are
(b, h, n, d); an input of three axes is given (b, n, h d). Fixed sizes of its inputs are what it can run, and the
attributes of its one Attention node are its fixed options.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.messages import install, meant, shown
from refattn.verify.names import meaning, renamed
from refattn.verify.outcome import Decline

ENDING = ".onnx"

TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}
"""Types of q that the CPU and NumPy have -> their names here."""

NEUTRAL = {"mask": True, "bias": 0.0, "causal": False}
"""What stands for an argument that a case does not have, where the model must be given one."""

ARGUMENTS = ("q", "k", "v", "mask", "bias", "sink", "causal", "scale", "softcap", "q_lengths", "k_lengths", "keep")
RESULTS = ("out", "lse")


class ModelError(Exception):
    """A file is no model that can be run as a kernel; the message says why."""


def load(path: str, names: str = "") -> OnnxModel:
    """Return a model as a kernel; `names` says what its inputs and outputs are, THEIRS=OURS,...

    Raises
    ------
    ModelError
        Where there is no such file, ONNX Runtime cannot run it, or its inputs and outputs are not known.
    """
    if not Path(path).is_file():
        raise ModelError(f"there is no file {path}")
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ModelError(f"a model needs onnx and onnxruntime{install(error)}") from error
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # it raises what it logs
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        nodes = [node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type == "Attention"]
        attributes = {one.name: onnx.helper.get_attribute_value(one) for one in nodes[0].attribute} if nodes else {}
    except Exception as error:  # of whatever kind: the file may be anything
        raise ModelError(f"ONNX Runtime does not load it: {shown(' '.join(str(error).split()), 300)}") from error
    try:
        theirs = renamed(names)
    except ValueError as error:
        raise ModelError(f"--rename: {error}") from error
    return OnnxModel(session, theirs, attributes if len(nodes) == 1 else {})


class OnnxModel:
    """A model that takes q, k and v.

    Parameters
    ----------
    session
        Of ONNX Runtime.
    names
        Its names -> those here; others are guessed.
    attributes
        Of its one Attention node, if it has one.
    """

    def __init__(self, session: Any, names: Mapping[str, str], attributes: Mapping[str, Any]) -> None:
        self.session = session
        self.inputs = _by_meaning(session.get_inputs(), names, ARGUMENTS)
        outputs = _by_meaning(session.get_outputs(), names, RESULTS)
        theirs = {one.name for one in (*session.get_inputs(), *session.get_outputs())}
        if unknown := [name for name in names if name not in theirs]:
            raise ModelError(
                f"--rename: got {unknown[0]!r}{meant(unknown[0], theirs)}, needs one of {', '.join(theirs)}"
            )
        if missing := [name for name in "qkv" if name not in self.inputs]:
            got = ", ".join(f"{one.name} {one.shape}" for one in session.get_inputs())
            raise ModelError(
                f"has no input {', '.join(missing)}, needs --rename THEIRS={missing[0]}; its inputs are {got}"
            )
        only = session.get_outputs()
        self.outputs = outputs if "out" in outputs else {"out": only[0], **outputs} if len(only) == 1 else {}
        if not self.outputs:
            raise ModelError(f"has the outputs {', '.join(one.name for one in only)}, needs --rename THEIRS=out")
        if (kind := self.inputs["q"].type) not in TYPES:
            raise ModelError(f"its q is {kind}, needs one of {', '.join(TYPES)}")
        self.dtype = TYPES[kind]
        self.heads = {name: int(attributes.get(f"{word}_num_heads", 0)) for name, word in (("h", "q"), ("g", "kv"))}
        self.supports = {**self._sizes(), "dtypes": [self.dtype], "options": [n for n in self.inputs if n not in "qkv"]}
        if fixed := _fixed({name: x for name, x in attributes.items() if name not in self.inputs}):
            self.supports["fixed"] = fixed

    def _sizes(self) -> dict[str, int]:
        """Return the sizes that the model has fixed, by their letters."""
        found: dict[str, Any] = {name: n for name, n in self.heads.items() if n}
        for name, letters in (("q", "bh nq d"), ("k", "bg nk d"), ("v", "bg nk e")):
            shape = self.inputs[name].shape
            sizes = (letters[0], letters[1], *letters.split()[1:])
            if len(shape) == 4:
                found |= {letter: n for letter, n in zip(sizes, shape, strict=True) if isinstance(n, int) and n > 0}
            elif len(shape) == 3:  # the width of all heads together says that of one if the heads are known
                pairs = zip((sizes[0], sizes[2]), shape[:2], strict=True)
                found |= {letter: n for letter, n in pairs if isinstance(n, int) and n > 0}
                heads = self.heads["h" if name == "q" else "g"]
                if heads and isinstance(shape[2], int):
                    found[sizes[3]] = shape[2] // heads
        return found

    def __call__(self, q: Any, k: Any, v: Any, *, dtype: str, **given: Any) -> Any:
        """Run the model."""
        if dtype != self.dtype:
            return Decline(f"its q is {self.dtype}")
        arguments = {"q": q, "k": k, "v": v, **given}
        if lacking := [name for name in given if name not in self.inputs]:
            return Decline(f"the model has no input {', '.join(lacking)}")
        feed = {}
        for name, one in self.inputs.items():
            value = arguments.get(name)
            if value is None and name == "scale":
                value = q.shape[3] ** -0.5
            if value is None and name not in NEUTRAL:
                return Decline(f"the model needs {name}")
            value = NEUTRAL[name] if value is None else value
            feed[one.name] = self._laid_out(name, np.asarray(value), one, q, k)
        found = self.session.run([one.name for one in self.outputs.values()], feed)
        (b, h, n, _), e = q.shape, v.shape[3]
        results = dict(zip(self.outputs, found, strict=True))
        if np.shape(results["out"]) == (b, n, h * e) and len(self.inputs["q"].shape) == 3:
            results["out"] = results["out"].reshape(b, n, h, e).swapaxes(1, 2)
        return results

    def _laid_out(self, name: str, x: NDArray[Any], one: Any, q: Any, k: Any) -> NDArray[Any]:
        """Return an argument as an input of the model has it."""
        if name in ("mask", "bias", "keep"):
            rank, plane = len(one.shape or ()) or 4, (q.shape[2], k.shape[2])
            x = np.broadcast_to(x, (*np.broadcast_shapes(x.shape, (1, 1, 1, 1))[:2], *plane))
            x = x.reshape(x.shape[4 - rank :]) if all(n == 1 for n in x.shape[: 4 - rank]) else x
        elif name in ("q", "k", "v") and len(one.shape) == 3:
            x = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
        kind = _numpy(one.type)
        if name == "mask" and kind.kind == "f":
            return np.where(x, 0.0, -np.inf).astype(kind)  # an additive one
        if name not in ("q", "k", "v") and one.shape == [1] and x.ndim == 0:
            x = x.reshape(1)
        return np.ascontiguousarray(x, dtype=kind) if x.ndim else x.astype(kind)


def _by_meaning(found: Any, names: Mapping[str, str], known: tuple[str, ...]) -> dict[str, Any]:
    """Return inputs or outputs by the names here; one that is not known and must be given is an error."""
    taken: dict[str, Any] = {}
    for one in found:
        ours = names.get(one.name) or meaning(one.name, known)
        if ours == "-" or (not ours and known is RESULTS):
            continue
        if ours not in known:
            needs = f"one of {', '.join(known)}: --rename {one.name}=NAME"
            raise ModelError(f"has the input {one.name} {one.shape}, which is not known, needs {needs}")
        if ours in taken:
            raise ModelError(
                f"{ours}: got {taken[ours].name} and {one.name}, which may both be {ours}: --rename says which"
            )
        taken[ours] = one
    return taken


def _fixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that an Attention node has as attributes; ONNX aligns a causal mask top left."""
    found: dict[str, Any] = {"causal": "top_left"} if attributes.get("is_causal") else {}
    found |= {name: float(attributes[name]) for name in ("scale", "softcap") if attributes.get(name)}
    return found


@functools.cache
def _numpy(kind: str) -> np.dtype[Any]:
    """Return the NumPy type of an input's type."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))
