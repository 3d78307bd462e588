"""The sizes that rounding errors are relative to: of the equations forward, and of their adjoints."""

from refattn.mechanisms.koopman.testing.adjoint_magnitudes import ADJOINTS
from refattn.mechanisms.koopman.testing.magnitudes import MAGNITUDES, STORED

__all__ = ["ROUNDING_SCALES", "STORED"]

ROUNDING_SCALES = MAGNITUDES | ADJOINTS
