"""What a kernel declares: what it rounds, and the type of its output in formats with factors."""

from __future__ import annotations

from typing import Any

from refattn.golden.storage_types import TYPES
from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters.adapter import LoadError, attribute
from refattn.verify.tolerance.budget import UNTAGGED, names_of_roundings


def roundings(kernel: Any, mechanism: Mechanism) -> dict[str, str]:
    """Return what a kernel declares to round, as `refattn.verify.tolerance.budget.Roundings` has it.

    Raises
    ------
    LoadError
        Where its attribute `roundings` is no tuple, list or dict of such names, or a type is none.
    """
    declared = attribute(kernel, "roundings")
    try:
        return read_roundings(() if declared is None else declared, mechanism)
    except ValueError as error:
        raise LoadError(f"--impl: its roundings {error}") from error


def read_roundings(declared: Any, mechanism: Mechanism) -> dict[str, str]:
    """Return what is declared to be rounded with its type, of names, "NAME=TYPE", or a dict; "" is the storage type.

    Raises
    ------
    ValueError
        Where it is something else.
    """
    known, listed = names_of_roundings(mechanism), declared
    if isinstance(declared, (tuple, list)) and all(isinstance(id, str) for id in declared):
        listed = {id: type_ for id, _, type_ in (one.partition("=") for one in declared)}
    words = (*UNTAGGED, *mechanism.named_roundings)
    if not isinstance(listed, dict) or not all(id in known for id in listed):
        raise ValueError(f"are {declared!r}, needs some of {', '.join(words)} and ids such as {known[0]}")
    if wrong := [type_ for type_ in listed.values() if type_ and type_ not in TYPES]:
        raise ValueError(f"name {wrong[0]!r}, needs one of {', '.join(TYPES)}")
    if wrong := [id for id, type_ in listed.items() if type_ == "int8" and id not in ("q", "k", "v")]:
        raise ValueError(f"have int8 for {wrong[0]}, needs it for q, k or v alone")
    return listed


def of_float8(kernel: Any) -> dict[str, Any]:
    """Return what a kernel says of its results in float8, as `refattn.verify.tolerance.budget.truth` takes it.

    Raises
    ------
    LoadError
        Where its attribute `result` or `descale` is none.
    """
    result, descale = (attribute(kernel, name) or "" for name in ("result", "descale"))
    if result not in ("", "float32", "float16", "bfloat16"):
        raise LoadError(f"--impl: its result is {result!r}, needs one of float32, float16, bfloat16")
    per = {"": None, "head": None, "tensor": 0}
    if descale not in per and not (str(descale).isdecimal() and int(descale) > 0):
        raise LoadError(f'--impl: its descale is {descale!r}, needs "head", "tensor" or a number of tokens')
    return {"result": result or "bfloat16", "per": per[descale] if descale in per else int(descale)}
