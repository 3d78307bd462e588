"""What is said of results that rounding has moved too far: a warning, or an error where no digit is left.

An estimate is of a relative error. The bound is that of the dtype of the arguments: 1e-6 in float64 and 1e-2 in
float32, float16 and bfloat16, of whose 16, 7, 3 and 2 digits tests and trainings need no more. Above the bound some
digits are right, which may do: that is a warning. From 1/2 on none is right, and such a number serves nobody: that is
an error. Where values cannot be asked, under ``jax.jit``, nothing is said.
"""

from __future__ import annotations

import warnings

from refattn.xp import Array, backend, concrete, dtype_name, namespace

BOUND = {"float64": 1e-6, "float32": 1e-2, "float16": 1e-2, "bfloat16": 1e-2}
"""The largest relative error that is passed over, by the dtype of the arguments."""

LOST = 0.5
"""The relative error from which no digit is right."""


class PrecisionWarning(UserWarning):
    """Says that rounding has left a result only a few of its digits."""


class PrecisionError(ArithmeticError):
    """Raised where rounding has left a result no digit that is right."""


def bound_of(like: Array) -> float:
    """Return the largest relative error that is passed over for arguments of the dtype of `like`."""
    return BOUND[dtype_name(like)]


def report(what: str, error: Array, bound: float, needs: str, *, stacklevel: int) -> None:
    """Warn where an estimate is above the bound; raise PrecisionError where no digit is left.

    Parameters
    ----------
    what
        Whose error it is: "out".
    error
        The estimates, of any shape; NaN where what came in is.
    bound
        See `bound_of`.
    needs
        What would do: "a larger jitter".
    stacklevel
        That of `warnings.warn` for the caller of this function.
    """
    xp = namespace(error)
    if not concrete(xp.any(error > bound)):
        return
    errors = backend(error).to_numpy(xp.where(xp.isnan(error), 0.0, error))
    largest = float(errors.max())
    places = zip(*(errors == largest).nonzero(), strict=True) if errors.ndim else iter(())
    at = "".join(f" at {tuple(int(n) for n in place)}" for place in list(places)[:1])
    if largest >= LOST:
        raise PrecisionError(f"{what}: rounding leaves no digit right{at}, needs {needs}")
    text = f"{what}: rounding may move it by {largest:.0e} of its size{at}, needs {needs}"
    warnings.warn(text, PrecisionWarning, stacklevel=stacklevel + 1)
