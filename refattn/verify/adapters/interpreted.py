"""Kernels for a GPU on the CPU, by the interpreter of their own language: Triton's or Pallas's.

An interpreter has to be there before the kernel's file is imported: `@triton.jit` decides then how a kernel runs. So
the attribute ``interpret = "triton"`` of an adapter is read from the text of its file, and ``FILE.py:NAME@triton``,
which is what ``refattn verify --interpret`` makes of ``--impl``, says the same. ``triton=2`` takes the third
configuration of `@triton.autotune`, ``triton=all`` another one at each call. ``pallas=tpu`` says that JAX runs on a
TPU, where ``pallas`` says that it runs on a GPU.

What an interpreter cannot run is declined: an operation that it does not have, a `static_assert` of the kernel, and a
storage type in which an operation fails the self-test.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from refattn.verify.adapters import like_gpu
from refattn.verify.adapters.interpreter import Interpreter as Interpreter
from refattn.verify.adapters.interpreter import NoInterpreterError as NoInterpreterError
from refattn.verify.adapters.like_gpu import PLATFORMS
from refattn.verify.outcome import Decline

NAMES = ("triton", "pallas")


_active: dict[str, Interpreter] = {}


def check(text: str) -> None:
    """Raise NoInterpreterError unless a text names an interpreter."""
    name, equals, config = text.partition("=")
    fits = {"triton": config == "all" or config.isdecimal(), "pallas": config in PLATFORMS}
    if name not in NAMES or (equals and not fits[name]):
        raise NoInterpreterError(f"interpret: got {text!r}, needs triton, triton=N, triton=all, pallas or pallas=tpu")


def start(text: str) -> None:
    """Start the interpreter that "triton", "triton=2", "triton=all" or "pallas" names; once for a process.

    Raises
    ------
    NoInterpreterError
        If there is none of this name, if a library that it needs is not installed, or if it is too late.
    """
    check(text)
    name, _, config = text.partition("=")
    if name not in _active:
        try:
            _active[name] = _STARTS[name](config)
        except ImportError as error:
            needs = "refattn[triton]" if name == "triton" else "refattn[jax]"
            raise NoInterpreterError(f'interpret: got {text}, needs `pip install "{needs}"` ({error})') from error


def start_for(place: str) -> None:
    """Start the interpreter that a file or a module asks for by an attribute ``interpret`` in its text, if one does."""
    if place.endswith(".py") or "/" in place:
        file = Path(place)
    else:
        spec = importlib.util.find_spec(place)
        file = Path(spec.origin) if spec is not None and spec.origin and spec.has_location else Path()
    for text in dict.fromkeys(_asked(file) if file.suffix == ".py" and file.is_file() else ()):
        start(text)


def _asked(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            names = (getattr(target, "attr", getattr(target, "id", "")) for target in node.targets)
            if "interpret" in names:
                yield node.value.value


@contextmanager
def world() -> Iterator[None]:
    """Let the machine look as if it had a GPU in the ``with`` block, if kernels are interpreted in this process."""
    with ExitStack() as stack:
        for one in _active.values():
            stack.enter_context(one.world())
        yield


def refused(dtype: str) -> str:
    """Return why no kernel runs in a storage type: an interpreter is wrong in it; "" if none is."""
    wrong = (
        f"{one.label} fails its self-test in {dtype}: {one.failing[dtype]}"
        for one in _active.values()
        if dtype in one.failing
    )
    return "; ".join(wrong)


def hint(said: str) -> str:
    """Return what to do where Triton or Pallas, or what calls them, misses a device; "" for any other error."""
    if "active drivers" in said:
        return "; without a GPU Triton needs --interpret, or attend.interpret = 'triton' in the adapter"
    if "interpret mode is supported on CPU" in said:
        return "; without a GPU or TPU Pallas needs --interpret pallas, or attend.interpret = 'pallas' in the adapter"
    if _active and any(word in said.lower() for word in ("cuda", "nvidia")):
        return "; it is interpreted on the CPU, and asks for a GPU in a way that is not imitated: call what is beneath"
    return ""


def declined(error: BaseException) -> Decline | None:
    """Return why a kernel that raised cannot run in an interpreter; None if this is an error of the kernel."""
    cause: BaseException | None = error
    while cause is not None and _active:
        for one in _active.values():
            if (refused := _refused(cause, one)) is not None:
                return Decline(f"{one.label}: {refused}")
        cause = cause.__cause__ or cause.__context__
    return None


def _refused(error: BaseException, one: Interpreter) -> str | None:
    """Return what an interpreter refused and which line of a kernel, "... (kernel, mine.py:12)"; None if it did not."""
    frames = traceback.extract_tb(error.__traceback__)
    if not one.homes or not frames or not frames[-1].filename.startswith(one.homes):
        return None
    if not one.lacks(error, frames[-1].name):
        return None
    own = [frame for frame in frames if not frame.filename.startswith(one.homes)]
    said = " ".join(str(error).split())[:300] or (own[-1].line if own else "") or type(error).__name__
    return f"{said} ({own[-1].name}, {Path(own[-1].filename).name}:{own[-1].lineno})" if own else said


def told() -> str:
    """Return a line on the interpreters that run and what they do not see; "" if none does."""
    lines = []
    for one in _active.values():
        ran = "".join(f"; {kernel} ran with {config}" for kernel, config in one.ran.items())
        lines.append(f"{one.label}{ran}; not seen: {one.unseen}")
    return "; ".join(lines)


def _triton(config: str) -> Interpreter:
    from refattn.verify.adapters import triton_cpu

    found = triton_cpu.start(config or "0")
    found.world = like_gpu.torch_world
    return found


def _pallas(platform: str) -> Interpreter:
    """Let `pallas_call` interpret: kernels for a GPU by its argument, kernels for a TPU by the mode for good.

    For good, because gradients are pulled after the call of the adapter has returned.
    """
    import jax
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    plain = pallas.pallas_call

    def interpreted(*given: Any, interpret: Any = False, **named: Any) -> Any:
        of_tpu = type(named.get("compiler_params")).__module__.startswith("jax._src.pallas.mosaic.")
        return plain(*given, interpret=interpret or (tpu.InterpretParams() if of_tpu else True), **named)

    for module in [*sys.modules.values()]:
        if getattr(module, "pallas_call", None) is plain and module.__name__.startswith("jax."):
            module.pallas_call = interpreted  # type: ignore[attr-defined]
    found = Interpreter(
        f"Pallas of JAX {jax.__version__}, interpreted on the CPU", "races, layouts, memory spaces, tf32 in dots"
    )
    found.homes = (str(Path(jax.__file__).parent), __file__)
    found.world = partial(like_gpu.jax_world, platform or "gpu")
    # A primitive of kernels inside jax.jit, jax.checkpoint or a branch of lax.cond, such as program_id.
    found.lacks = lambda error, _: isinstance(error, NotImplementedError) and "for platform cpu" in str(error)
    return found


_STARTS: dict[str, Callable[[str], Interpreter]] = {"triton": _triton, "pallas": _pallas}
