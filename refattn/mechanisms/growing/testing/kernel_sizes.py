"""Calls in the sizes that kernels have: the core is that of softmax attention."""

from refattn.mechanisms.softmax.testing.kernel_sizes import KERNEL_SIZES

__all__ = ["KERNEL_SIZES"]
