"""Softmax attention as a layer: projections around the core, and the same token by token."""
