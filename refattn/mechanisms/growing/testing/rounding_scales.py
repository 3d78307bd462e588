"""Sizes of rounding errors: the core is that of softmax attention."""

from refattn.mechanisms.softmax.testing.rounding_scales import FURTHER, NAMED, ROUNDING_SCALES, STORED

__all__ = ["FURTHER", "NAMED", "ROUNDING_SCALES", "STORED"]
