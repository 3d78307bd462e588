"""Flows that stop, and gradients at rest."""
