"""Differentiable pieces that mechanisms share: one idea a file, forward and backward side by side."""
