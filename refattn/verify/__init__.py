"""Verification: of the reference by itself (`check`), and of foreign kernels against it (`verify`).

Host side. Everything here knows mechanisms through their records alone.

A kernel goes this way: `adapters/load.py`, in the process that `adapters/isolate.py` starts; the designed cases of
`cli/verify.py`; for each `run.verify_case`, `adapter.call` and `call_manners.around`, where the kernel is called;
`tolerance/compare.judge`; if it fails, `diagnose/suspects.locate`; then the lines of `report/diagnosis.py`.

What to read, in this order:

1. `outcome.py`, the data: a truth, a result, the verdict on a tensor, outcomes and reports.
2. `tolerance/`: `budget.py` measures what rounding may do to a result, `compare.py` judges a result by it; `sampled.py`
   does both for calls whose scores cannot be held at once.
3. `run.py`: a kernel on the designed cases, judged one by one. `adapters/` loads it, reads once what it declares (the
   record `Adapter`), calls it, in a process of its own or as a program, reads results from files, and asks which
   conventions it follows.
4. `selfcheck/`: `check.py` and its `sections.py`, with `properties.py`, `gradients.py`, and what they call a core by,
   `probe.py` and `samples.py`.
5. `bugs/`, real bugs of flash kernels on an emulator.
6. `diagnose/`, which error it is: `known.py` tries all that have a name, the known bugs among them; `mutants.py` are
   wrong kernels on purpose; `symptoms.py` reads errors off what was got; `error_templates.py` knows what an
   error in each equation does; `residuals.py` and `nearest.py` find the one that explains best what was got,
   `substitution.py` the first value that does not follow from those before; `localise.py` says where; `suspects.py`
   joins them.
7. `report/`: `sections.py` has a report as data, with `diagnosis.py` and `suspects.py`; `tables.py` draws it as text,
   `page.py` as a page, `junit.py` as XML; golden vectors and traces as text (`texts.py` has what texts share).
8. Tools on top: `user_cases.py`, shapes of the user's, and what an adapter states, which `found_supports.py` finds by
   trial; `captured.py`, files of arrays, and dumps, whose names `names.py` guesses; `adapt.py`, a function called
   through a few words, which `adapters/find_words.py` finds by trial; `traced.py`, a run with every equation;
   `freeze.py`, golden vectors; `shrink.py`, the smallest case that fails; `large.py`, properties where no truth can be
   afforded; `invariances.py`, layouts and calls around a call, and the same bits; `plugin.py`, for pytest.

What users call is imported from here; nothing is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refattn.verify.adapters.conventions import probe_conventions as probe_conventions
    from refattn.verify.adapters.isolate import Isolated as Isolated
    from refattn.verify.adapters.load import load as load
    from refattn.verify.adapters.program import Program as Program
    from refattn.verify.diagnose.suspects import locate as locate
    from refattn.verify.invariances import verify_bitwise as verify_bitwise
    from refattn.verify.invariances import verify_memory as verify_memory
    from refattn.verify.large import verify_large as verify_large
    from refattn.verify.run import verify as verify
    from refattn.verify.run import verify_case as verify_case
    from refattn.verify.selfcheck.check import check as check

# Where a public name lives.
_HOMES = {
    "Isolated": "adapters.isolate",
    "Program": "adapters.program",
    "check": "selfcheck.check",
    "load": "adapters.load",
    "locate": "diagnose.suspects",
    "probe_conventions": "adapters.conventions",
    "verify": "run",
    "verify_bitwise": "invariances",
    "verify_case": "run",
    "verify_large": "large",
    "verify_memory": "invariances",
}

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # for a type checker names that are not listed above do not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'refattn.verify' has no attribute {name!r}")
        return getattr(importlib.import_module(f"refattn.verify.{_HOMES[name]}"), name)


class _Callable(ModuleType):
    """This package is `ra.verify`, too, which is a function for who asks for no more."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        from refattn.verify.in_python import verify

        return verify(*given, **named)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """That of the function, whose parameters ``help(ra.verify)`` is asked for."""
        from refattn.verify.in_python import verify

        return verify.__doc__

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        from refattn.verify.in_python import verify

        return signature(verify)


sys.modules[__name__].__class__ = _Callable
