"""Compare the test double of CuPy with an installed CuPy: names, signatures, and the types that functions have kernels
for.

    python -m tools.cupy_double        # needs CuPy, no GPU

Prints what differs, one line each, and fails where something does.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOUBLE = Path(__file__).parents[1] / "tests" / "backends" / "double"
MODULES = ("cupy", "cupy.linalg", "cupy.cuda", "cupyx.scipy.special", "cupyx.scipy.sparse")
OWN = ("declared", "note")


def imported() -> dict[str, ModuleType]:
    """Return the modules that their names lead to now."""
    for known in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupyx")]:
        del sys.modules[known]
    return {name: importlib.import_module(name) for name in MODULES}


def parameters(function: Any) -> list[tuple[str, bool]] | None:
    """Return the names of parameters and whether they have a default; None where CuPy does not tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(one.name, one.default is not one.empty) for one in found]


def widest(kernels: list[str]) -> str:
    """Return the widest kind of number that there is a kernel for: complex, float or integer."""
    given = {letter for kernel in kernels for letter in kernel.partition("->")[0]}
    return "c" if given & {*"FD"} else "f" if given & {*"efd"} else "i"


def differences(double: dict[str, ModuleType], real: dict[str, ModuleType]) -> list[str]:
    """Return a line for each thing that the double has otherwise than CuPy."""
    lines = []
    kinds = {name: kind for kind, names in double["cupy"].UFUNCS.items() for name in names.split()}
    for module in MODULES:
        for name, own in vars(double[module]).items():
            place = str(getattr(own, "__module__", ""))
            if name.startswith("_") or not callable(own) or place in ("typing", "collections.abc") or name in OWN:
                continue
            theirs = getattr(real[module], name, None)
            if theirs is None:
                lines.append(f"{module}.{name}: CuPy has none")
            elif name in kinds and module == "cupy":
                if (kind := widest(theirs.types)) != kinds[name]:
                    lines.append(f"{module}.{name}: CuPy's widest kernel is of kind {kind}, not {kinds[name]}")
            elif inspect.isfunction(own) and name != "matmul":  # of a class of its own, with options of NumPy's
                if parameters(theirs) not in (None, parameters(own)):
                    lines.append(f"{module}.{name}: CuPy has {inspect.signature(theirs)}, not {inspect.signature(own)}")
    methods = {name for name in vars(double["cupy"].ndarray) if not name.startswith("_")}
    lines += [f"ndarray.{name}: CuPy has none" for name in sorted(methods) if not hasattr(real["cupy"].ndarray, name)]
    return lines


def main() -> None:
    """Print what differs."""
    real = imported()
    sys.path.insert(0, str(DOUBLE))
    lines = differences(imported(), real)
    print(*lines, sep="\n" if lines else "")
    print(f"{len(lines)} differences from CuPy {real['cupy'].__version__}")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
