"""Mechanisms studied as dynamical systems: on the host, in float64, with SciPy, and with pictures.

A study is a function that returns its results as a frozen dataclass, and a second one that draws them. Nothing in
`ops`, `mechanisms`, `model` or `train` imports this package.
"""
