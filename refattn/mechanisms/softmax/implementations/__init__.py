"""Softmax attention evaluated otherwise: the same numbers in memory linear in the lengths."""
