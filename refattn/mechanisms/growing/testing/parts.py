"""How a call is cut into parts: the core is that of softmax attention."""

from refattn.mechanisms.softmax.testing.parts import of_keys, of_queries

__all__ = ["of_keys", "of_queries"]
