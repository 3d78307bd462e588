"""Calls in the sizes that kernels have, and every option at once: the core is that of softmax attention."""

from dataclasses import replace

from refattn.mechanisms.softmax.testing.cases import CASES
from refattn.mechanisms.softmax.testing.kernel_sizes import KERNEL_SIZES as _OF_SOFTMAX

KERNEL_SIZES = (*_OF_SOFTMAX, *(replace(case, name="every-option") for case in CASES if case.name == "all"))
