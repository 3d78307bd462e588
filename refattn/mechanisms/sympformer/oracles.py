"""Which oracle a block asks."""

from __future__ import annotations

from types import ModuleType

from refattn.mechanisms.sympformer import hamiltonian, linear, oracle
from refattn.mechanisms.sympformer.options import Config


def module_of(config: Config) -> ModuleType:
    """Return the module of the oracle: `oracle` (softmax attention), `hamiltonian` (of all tokens) or `linear`."""
    if config.force == "hamiltonian":
        return hamiltonian
    return linear if config.attention == "linear" else oracle
