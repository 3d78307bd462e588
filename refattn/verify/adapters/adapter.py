"""Foreign kernels: loading one, calling it, and bringing what it returns to the host.

A kernel is ``f(q, k, v, *, mask=None, causal=False, scale=None, **options)`` or, for gradients, an object with
``forward`` of that signature and ``backward(d_out)``. It is given fresh read-only NumPy arrays and returns an array of
any library, ``(out, lse)``, `Decline`, or a dict: "out", and any further output by its name or equation of the forward
by its id ("SM.4"), each of which is judged. It may carry attributes: ``framework`` ("torch" or "jax": it is given
tensors of that library, not NumPy arrays), ``device`` (where these lie: "cuda:0"), ``d_lse`` (true where its autograd
may be asked for the gradient of lse; a ``backward(d_out, d_lse)`` says so by its parameters), ``slack`` ("unwritten"
where it leaves rows beyond the lengths as they are: these are not judged), ``keep`` (a function of a case's name and a
shape that returns the factors of a kernel that draws its own dropout, asked before the truth is computed) and
``roundings`` (what it rounds beside what every kernel does: see `refattn.verify.tolerance.budget.Roundings`). In
formats with factors it is given numbers and ``descale``, these factors: in float8 ``descale = "tensor"`` asks for one
of each tensor, and ``descale = 64`` for one for each 64 tokens of a head; ``result`` names the type of its output.
Where it has, after a call, an attribute ``intermediates``, that is a dict of its own values of equations, by id:
`refattn.verify.diagnose.substitution` finds with them where it goes wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends
from refattn.args import checked
from refattn.golden.storage_types import SCALED, TYPES, has_gradient
from refattn.mechanisms.record import Mechanism
from refattn.messages import install, meant, shown
from refattn.verify import adapt
from refattn.verify.adapters import call_manners, devices, interpreted
from refattn.verify.adapters.tangents import Called, derivatives
from refattn.verify.outcome import Decline, Result
from refattn.verify.tolerance.budget import UNTAGGED, names_of_roundings

LARGEST = 256 << 20
"""Bytes of results that are taken beside 64 times those of the inputs."""


class LoadError(Exception):
    """A kernel cannot be loaded; the message names what was asked and what went wrong."""


class CallError(Exception):
    """A kernel raised, changed its inputs or returned what is no result."""


class LateCallError(CallError):
    """A kernel did not end within its time limit."""


DECLARED = ("framework", "device", "roundings", "slack", "descale", "result", "supports", "keep")
"""The attributes that a kernel, or its forward, may carry."""


@dataclass(frozen=True)
class Adapter:
    """A kernel with all that it declares, read once.

    Attributes
    ----------
    kernel
        What was loaded: a function, an object with `forward`, or one in another process.
    framework, device, roundings, slack, descale, result, supports, keep
        Its attributes of these names, as it has them; None where it has none.
    pulls
        The outputs beside `out` that it may be asked the gradient of: its backward has a parameter ``d_lse``, or it has
        a true attribute of this name.
    parameters
        The names that its forward takes; None where these are not known.
    takes_all
        Whether its forward takes any name.
    """

    kernel: Any
    framework: Any = None
    device: Any = None
    roundings: Any = None
    slack: Any = None
    descale: Any = None
    result: Any = None
    supports: Any = None
    keep: Callable[[str, tuple[int, ...]], Any] | None = None
    pulls: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    takes_all: bool = True

    @classmethod
    def of(cls, kernel: Any) -> Adapter:
        """Return the record of a kernel, or the one that it is or has already.

        Raises
        ------
        LoadError
            Where reading an attribute raises.
        """
        try:
            known = kernel if isinstance(kernel, cls) else getattr(kernel, "adapter", None)
            if isinstance(known, cls):
                return known
            owners = (kernel, getattr(kernel, "forward", kernel))
            declared = {name: [getattr(one, name, None) for one in owners] for name in DECLARED}
            pulls = {*(_parameters(getattr(kernel, "backward", None)) or ())}
            pulls |= {name for one in owners for name in dir(one) if name[:2] == "d_" and getattr(one, name) is True}
            parameters = _parameters(owners[1])
            return cls(
                kernel,
                **{name: next((x for x in found if x is not None), None) for name, found in declared.items()},
                pulls=frozenset(name[2:] for name in pulls if name[:2] == "d_"),
                parameters=frozenset(parameters or ()),
                takes_all=parameters is None or any(x.kind is x.VAR_KEYWORD for x in parameters.values()),
            )
        except Exception as error:  # properties of foreign code may raise anything
            raise LoadError(f"--impl: reading its attributes {words(error)}") from error

    def __repr__(self) -> str:
        return repr(self.kernel)

    def rounds(self, mechanism: Mechanism) -> dict[str, str]:
        """Return what it declares to round, as `refattn.verify.tolerance.budget.Roundings` has it.

        Raises
        ------
        LoadError
            Where that is no tuple, list or dict of such names, or a type is none.
        """
        try:
            return read_roundings(() if self.roundings is None else self.roundings, mechanism)
        except ValueError as error:
            raise LoadError(f"--impl: its roundings {error}") from error

    @property
    def fixed(self) -> dict[str, Any]:
        """The options that it always has, and has no argument for: ``supports = {"fixed": {"causal": True}}``."""
        fixed = self.supports.get("fixed") if isinstance(self.supports, dict) else None
        return {name: tuple(x) if isinstance(x, list) else x for name, x in (fixed or {}).items()}

    def scaled(self) -> dict[str, Any]:
        """Return what it says of formats with factors, as `refattn.verify.tolerance.budget.truth` takes it.

        Raises
        ------
        LoadError
            Where its attribute `result` or `descale` is none.
        """
        result, descale = self.result or "", str(self.descale or "")
        if result not in ("", "float32", "float16", "bfloat16"):
            raise LoadError(f"--impl: its result is {result!r}, needs one of float32, float16, bfloat16")
        per = {"": None, "head": None, "tensor": 0}
        if descale not in per and not (descale.isdecimal() and int(descale) > 0):
            raise LoadError(f'--impl: its descale is {descale!r}, needs "head", "tensor" or a number of tokens')
        return {"result": result or "bfloat16", "per": per[descale] if descale in per else int(descale)}

    def drawn(self, case: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the factors of weights that it draws itself for a case.

        Raises
        ------
        CallError
            Where it raises, or they are not of the shape that was asked.
        """
        assert self.keep is not None
        try:
            with interpreted.world():
                keep = to_host("keep", self.keep(case, shape))
        except CallError:
            raise
        except BaseException as error:  # foreign code may raise anything
            if isinstance(error, KeyboardInterrupt):
                raise
            raise CallError(f"keep {words(error)}") from error
        if keep.shape != shape or keep.dtype.kind not in "bf":
            needs = f"needs bool or floating numbers of {shape}"
            raise CallError(f"keep returned {keep.dtype} of shape {keep.shape}, {needs}")
        return keep

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Return the arguments of a case that it has no parameter for."""
        return [] if self.takes_all else [name for name in names if name not in self.parameters]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function; None where they are not known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def read_roundings(declared: Any, mechanism: Mechanism) -> dict[str, str]:
    """Return what is declared to be rounded with its type, of names, "NAME=TYPE", or a dict; "" is the storage type.

    Raises
    ------
    ValueError
        Where it is something else.
    """
    known, listed = names_of_roundings(mechanism), declared
    if isinstance(declared, (tuple, list, set)) and all(isinstance(id, str) for id in declared):
        listed = {id: type_ for id, _, type_ in (one.partition("=") for one in declared)}
    words = (*UNTAGGED, *mechanism.named_roundings)
    if not isinstance(listed, dict) or not all(id in known for id in listed):
        raise ValueError(f"are {declared!r}, needs some of {', '.join(words)} and ids such as {known[0]}")
    if wrong := [type_ for type_ in listed.values() if type_ and type_ not in TYPES]:
        raise ValueError(f"name {wrong[0]!r}, needs one of {', '.join(TYPES)}")
    if wrong := [id for id, type_ in listed.items() if type_ == "int8" and id not in ("q", "k", "v")]:
        raise ValueError(f"have int8 for {wrong[0]}, needs it for q, k or v alone")
    return listed


@dataclass(frozen=True)
class Question:
    """One call of a kernel: the arguments of `call`, where `derivatives` are those that are asked."""

    inputs: Mapping[str, NDArray[Any]]
    options: Mapping[str, Any]
    dtype: str
    upstream: NDArray[Any] | None
    outputs: tuple[str, ...]
    factors: Mapping[str, Sequence[NDArray[Any]]]
    further: Mapping[str, NDArray[Any]]
    along: Mapping[str, NDArray[Any]]
    derivatives: tuple[str, ...]
    manner: str


@checked(spec=str)
def load(spec: str, *, interrupts: bool = True) -> Any:
    """Return the kernel that ``MODULE:NAME`` or ``FILE.py:NAME`` names; a class is instantiated.

    After its name there may be words of `refattn.verify.adapt`, which say how it is called.

    With ``interrupts=False`` a KeyboardInterrupt is the kernel's own, and one more error.

    Raises
    ------
    LoadError
        Where the spec has no colon, the module or file is missing or fails, or the name is missing or not callable.

    Examples
    --------
    >>> from refattn.verify import load
    >>> attend = load("refattn.mechanisms.softmax:forward")
    >>> callable(attend)
    True
    """
    function, described = adapt.split(spec)
    place, colon, name = function.rpartition(":")
    if not (colon and place and name):
        raise LoadError(f"--impl: got {spec!r}, needs MODULE_OR_FILE:FUNCTION")
    try:
        interpreted.start_for(place)
        with _streams_held(), interpreted.world():
            file = place.endswith(".py") or "/" in place
            module = _import_file(Path(place)) if file else importlib.import_module(place)
    except LoadError:
        raise
    except interpreted.NoInterpreterError as error:
        raise LoadError(f"--impl {spec}: {error}") from error
    except ModuleNotFoundError as error:
        raise LoadError(f"--impl {spec}: cannot import {place}: {error}{install(error)}") from error
    except BaseException as error:  # the file may do anything
        if interrupts and isinstance(error, KeyboardInterrupt):
            raise
        raise LoadError(f"--impl {spec}: importing {place} {words(error)}") from error
    found = module
    for part in name.split("."):  # Class.apply, too
        if not hasattr(found, part):
            raise LoadError(f"--impl {spec}: {place} has no {name!r}{meant(part, dir(found))}")
        found = getattr(found, part)
    try:
        with interpreted.world():
            kernel = found() if inspect.isclass(found) else found
    except BaseException as error:
        if interrupts and isinstance(error, KeyboardInterrupt):
            raise
        raise LoadError(f"--impl {spec}: making {name} {words(error)}") from error
    if not callable(kernel) and not hasattr(kernel, "forward"):
        raise LoadError(f"--impl {spec}: {name} is {type(found).__name__}, needs a function or an object with forward")
    try:
        return adapt.call(kernel if callable(kernel) else kernel.forward, described) if described else kernel
    except adapt.WordError as error:
        raise LoadError(f"--call {function}: {error}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise LoadError(f"--impl: there is no file {path}")
    name = f"refattn_implementation_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"--impl: {path} is no Python file, whose name ends in .py")
    # Its neighbours can be imported, as when Python runs the file; also later, from inside a function.
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call(
    kernel: Any,
    inputs: Mapping[str, NDArray[Any]],
    options: Mapping[str, Any],
    dtype: str,
    upstream: NDArray[Any] | None = None,
    outputs: tuple[str, ...] = ("out", "lse"),
    *,
    factors: Mapping[str, Sequence[NDArray[Any]]] | None = None,
    along: Mapping[str, NDArray[Any]] | None = None,
    asked: tuple[str, ...] = (),
    interrupts: bool = True,
    further: Mapping[str, NDArray[Any]] | None = None,
    manner: str = "",
) -> Result | Decline:
    """Run a kernel on one case, with gradients where `upstream` is given, and `further` ones ("d_lse").

    Of "tangent" and "hessian" those that are `asked` are taken `along` a direction of its arrays. `factors` are those
    of the numbers in a format that has some, by the argument that each tuple of them is.

    In a `manner` of `refattn.verify.adapters.call_manners` arrays lie elsewhere, or other calls are around this one.

    `outputs` are the names of what it may return: the first alone, a tuple of as many as it has, or a dict. With
    ``interrupts=False`` a KeyboardInterrupt is the kernel's own, and one more error.

    Raises
    ------
    CallError
        Where it raises, changes its inputs, or returns anything but arrays, (out, lse) or `Decline`.
    """
    adapter = Adapter.of(kernel)
    given = inputs, options, dtype, upstream, outputs, factors or {}, further or {}, along or {}, asked, manner
    question = Question(*given)
    elsewhere = getattr(adapter.kernel, "call_case", None)  # in another process: `refattn.verify.adapters.isolate`
    if elsewhere is not None:
        found: Result | Decline = elsewhere(question)
        return found
    # Otherwise JAX turns float64 into float32 as it comes in; afterwards it is as it was.
    wide = backends.get("jax").with_float64() if dtype == "float64" and "jax" in sys.modules else nullcontext()
    with wide, call_manners.using(manner), _streams_held(), interpreted.world():
        try:
            device = devices.checked(adapter.framework, adapter.device)
            with devices.on(adapter.framework, device):
                return _call(adapter, device, question)
        except Decline as error:
            return Decline(shown(error.reason))
        except CallError:
            raise
        except BaseException as error:  # foreign code may raise anything, even where it is only looked at
            if interrupts and isinstance(error, KeyboardInterrupt):
                raise
            if (lacks := interpreted.declined(error)) is not None:
                return lacks
            raise CallError(_passed_on(error, (*inputs, *options)) or words(error)) from error


@contextmanager
def _streams_held() -> Iterator[None]:
    """Open standard output and error again if foreign code closes them: somebody else may have to write there."""
    held: dict[int, int] = {}
    with suppress(OSError):  # it may have used up all descriptors
        held |= {n: os.dup(n) for n in (1, 2) if _is_open(n)}
    try:
        yield
    finally:
        closed = [n for n in held if not _is_open(n)]
        with suppress(OSError):  # it may have closed every descriptor
            for n in closed:
                os.dup2(held[n], n)
            if closed:
                names = " and ".join({1: "standard output", 2: "standard error"}[n] for n in closed)
                os.write(2, f"\nit closed its {names}, opened again; what it printed meanwhile is lost\n".encode())
        for n in held.values():
            with suppress(OSError):
                os.close(n)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _passed_on(error: BaseException, names: Iterable[str]) -> str:
    """Return what is wrong where an adapter gives an argument of the case to a function without such a parameter."""
    said = words(error)
    if not isinstance(error, TypeError) or "keyword" not in said:
        return ""
    name = next((name for name in names if f"'{name}'" in said), "")
    hint = f'if {name} is not None: return refattn.Decline("no {name}")'
    return name and f"it takes {name} and passes it on to what takes none: decline it, {hint} ({said})"


def _call(adapter: Adapter, device: str | None, question: Question) -> Result | Decline:
    kernel, framework, dtype, outputs = adapter.kernel, adapter.framework, question.dtype, question.outputs
    forward = getattr(kernel, "forward", kernel)
    if why := interpreted.refused(dtype):
        return Decline(why)
    if call_manners.current() == "interleaved" and hasattr(kernel, "backward"):
        return Decline("an object with a backward of its own has one forward at a time")
    told = "dtype" in adapter.parameters
    if not told and (dtype in SCALED or (dtype == "bfloat16" and framework not in devices.BFLOAT16)):
        return Decline(f"it takes no dtype=, and so cannot be told that its float32 arrays stand for {dtype}")
    extra = {name: x for name, x in question.options.items() if name not in adapter.fixed}
    if other := [name for name, x in adapter.fixed.items() if question.options.get(name) != x]:
        return Decline(f"it always has {', '.join(f'{name}={adapter.fixed[name]}' for name in other)}")
    extra |= {"dtype": dtype} if told else {}
    extra |= {
        name: tuple(_given(x, framework, "float32", device) for x in each) for name, each in question.factors.items()
    }
    held = "float32" if dtype in SCALED else dtype
    arguments = {name: _given(x, framework, held, device) for name, x in question.inputs.items()}
    if lacking := adapter.lacks((*arguments, *extra)):
        by_name = ", and is called by name, attend(q=q, k=k, v=v)" if {"q", "k", "v"} & {*lacking} else ""
        return Decline(f"it takes no {', '.join(lacking)}{by_name}")
    devices.wait()
    before = {name: to_host(name, x).tobytes() for name, x in arguments.items()}
    returned = call_manners.around(forward, arguments, extra)
    devices.wait()
    if isinstance(returned, Decline):
        return Decline(shown(returned.reason))
    result = _named(returned, outputs)
    judged = tuple(name for name in result if name not in outputs)
    declined = ""
    if question.upstream is not None or question.derivatives:
        library = type(result[outputs[0]]).__module__.partition(".")[0].replace("jaxlib", "jax")
        place = partial(_given, dtype=held, device=device)
        again = Called(kernel, forward, question.inputs, extra, place, partial(_named, outputs=outputs), library)
    if question.upstream is not None:
        gradients: Mapping[str, Any] | Decline
        try:
            pulls = {f"d_{outputs[0]}": question.upstream, **question.further}
            gradients = _gradients(again, pulls, framework if device else None)
        except Decline as error:
            gradients = error
        devices.wait()
        if isinstance(gradients, Decline):
            declined = str(gradients.reason)
        else:
            result |= {f"d_{name}": x for name, x in gradients.items()}
    if question.derivatives:
        pushed, refused = derivatives(again, question.along, question.upstream, outputs, question.derivatives)
        result, declined = result | pushed, "; ".join(filter(None, (declined, refused)))
    result |= {id: x for id, x in _intermediates(forward, kernel).items() if id not in result}
    changed = [name for name, x in arguments.items() if to_host(name, x).tobytes() != before[name]]
    if changed:
        raise CallError(f"changed its inputs: {', '.join(changed)}")
    dtypes = {name: _dtype(name, x) for name, x in result.items()}
    return Result({name: to_host(name, x) for name, x in result.items()}, dtypes, declined, judged)


def _named(returned: Any, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return what was returned by name: outputs, and equations by their ids."""
    needs = f"needs {outputs[0]}, ({', '.join(outputs)}), or a dict of these and of equations by their ids"
    if isinstance(returned, dict):
        odd = [repr(name) for name in returned if name not in outputs and "." not in str(name)]
        if odd:
            raise CallError(f"returned a dict with {', '.join(odd)}, {needs}")
        found = {str(name): x for name, x in returned.items() if x is not None}
    else:
        given = returned if isinstance(returned, tuple) else (returned,)
        if len(given) > len(outputs):
            raise CallError(f"returned a tuple of {len(given)}, {needs}")
        found = {name: x for name, x in zip(outputs, given, strict=False) if x is not None}
    if outputs[0] not in found:
        raise CallError(f"returned no output, {needs}")
    return found


def _intermediates(forward: Any, kernel: Any) -> dict[str, Any]:
    """Return its own values of equations by their ids, none where it has no such attribute."""
    own = getattr(forward, "intermediates", None)
    own = getattr(kernel, "intermediates", None) if own is None else own
    if own is not None and (not isinstance(own, dict) or not all(isinstance(id, str) for id in own)):
        got = type(own).__name__ if not isinstance(own, dict) else "a dict with names that are no text"
        raise CallError(f"intermediates: got {got}, needs a dict of arrays by the ids of equations")
    return own or {}


def _given(x: NDArray[Any], framework: str | None, dtype: str, device: str | None) -> Any:
    """Return a fresh copy of an input: a read-only NumPy array, or a tensor of the library that was named."""
    if framework in devices.FRAMEWORKS:
        return call_manners.laid_out(devices.placed(x, framework, dtype, device))
    return _read_only(x)


def _gradients(call: Called, pulls: Mapping[str, NDArray[Any]], framework: str | None) -> Mapping[str, Any] | Decline:
    """Return the gradients of its arrays: by its own backward, or by the library that its output is of."""
    names = learned(call.inputs)
    if hasattr(call.kernel, "backward"):
        upstream, *others = (call.place(pull, framework) for pull in pulls.values())
        devices.wait()
        found = call.kernel.backward(upstream, **dict(zip([*pulls][1:], others, strict=True)))
        if isinstance(found, Decline):
            return found
        if isinstance(found, dict):
            return {str(name).removeprefix("d_"): x for name, x in found.items()}
        if isinstance(found, tuple) and len(found) in (3, len(names)):
            return dict(zip(names, found, strict=False))
        listed = ", ".join(f"d_{name}" for name in names)
        raise CallError(f"backward returned {type(found).__name__}, needs a dict or ({listed})")
    if call.library not in ("torch", "jax"):
        return Decline("no gradients: it has no backward, and is no function of torch or jax")
    given = {name: call.place(x, call.library) for name, x in call.inputs.items()}
    asked = [name.removeprefix("d_") for name in pulls]
    return (_torch_gradients if call.library == "torch" else _jax_gradients)(call, given, names, asked, pulls)


def _torch_gradients(
    call: Called, given: dict[str, Any], names: tuple[str, ...], asked: list[str], pulls: Mapping[str, Any]
) -> Mapping[str, Any] | Decline:
    import torch

    leaves = [given[name].requires_grad_() for name in names]
    out = call.forward(**given, **call.extra)
    if isinstance(out, Decline):
        return out
    call_manners.interleaved(call.forward, given, call.extra)
    results = [call.named(out)[name] for name in asked]
    if not results[0].requires_grad:
        return Decline("no gradients: torch says that the output depends on no input")
    pairs = zip(pulls.values(), results, strict=True)
    upstream = [call_manners.laid_out(torch.tensor(pull, dtype=x.dtype).to(x.device)) for pull, x in pairs]
    # Not torch.autograd.grad: reentrant checkpoints and the hooks of parallel modules work in a whole backward alone.
    torch.autograd.backward(results, upstream)
    found = {name: x.grad for name, x in zip(names, leaves, strict=True) if x.grad is not None}
    # What comes without a gradient of q, k or v is an error; of other arrays few kernels have one.
    if len(names) == 3 and (missing := [name for name in names if name not in found]):
        raise CallError(f"no gradient of {', '.join(missing)}: torch says that the output does not depend on it")
    return found


def _jax_gradients(
    call: Called, given: dict[str, Any], names: tuple[str, ...], asked: list[str], pulls: Mapping[str, Any]
) -> Mapping[str, Any]:
    import jax
    import jax.numpy as jnp

    run = call.of(names, given)
    results, pull = jax.vjp(lambda *x: [run(*x)[name] for name in asked], *(given[name] for name in names))
    upstream = [jnp.asarray(x, dtype=y.dtype) for x, y in zip(pulls.values(), results, strict=True)]
    return dict(zip(names, pull(upstream), strict=True))


def learned(inputs: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    """Return the names of the inputs that have a gradient: all but masks."""
    return tuple(name for name, x in inputs.items() if has_gradient(x))


def to_host(name: str, x: Any) -> NDArray[Any]:
    """Return an array of any library as a NumPy array; bfloat16 becomes float32.

    A masked array is refused: what its mask hides would be judged as if it were shown.
    """
    if backends.changes_meaning(type(x)):
        raise CallError(f"{name}: got {type(x).__name__}, needs a plain array")
    try:
        try:
            return _numbers(backends.of(x).to_numpy(x))
        except TypeError:
            return _numbers(devices.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x))
    except Exception as error:
        if str(getattr(x, "device", "")) == "meta":
            asks = 'does the kernel call torch.set_default_device("meta")?'
            raise CallError(f'{name}: got a tensor on the device "meta", which has no numbers; {asks}') from error
        why = words(error).removeprefix("raised ")
        raise CallError(f"{name}: got {type(x).__name__}, needs an array ({why})") from error


def _numbers(x: NDArray[Any]) -> NDArray[Any]:
    if x.dtype.name == "bfloat16":  # of ml_dtypes
        return x.astype(np.float32)
    if x.dtype.kind not in "fiub":
        raise TypeError(f"dtype {x.dtype}")
    return x


def _dtype(name: str, x: Any) -> str:
    return str(x.dtype).rpartition(".")[2] if hasattr(x, "dtype") else str(to_host(name, x).dtype)


def _read_only(x: NDArray[Any]) -> NDArray[Any]:
    fresh = call_manners.laid_out(x.copy())
    fresh.setflags(write=False)
    return fresh


def words(error: BaseException) -> str:
    """Return what foreign code raised in one line; even its text may raise. If there is none, the line that raised."""
    said = shown(" ".join(shown(error).split()), 300)
    if not said and (frames := traceback.extract_tb(error.__traceback__)):
        said = shown(frames[-1].line or "", 300)
    return f"raised {shown(type(error).__name__, 300)}: {said}{interpreted.hint(said)}"
