"""The options of Koopman attention, a family in each file: objects with forward and backward, of which `dense` is made.

- `kernel`: what functions the operator acts on; `own`: whether a kernel of a user's is one.
- `similarity`: what a query compares keys by.
- `spaces`: which functions the operator reads, and which it answers with.
- `fits`: what is least; `limited`: fits of an operator whose norm or rank is limited.
- `ridges`: one ridge for all coordinates or one for each, and what it is relative to.
- `perturbation`: the map psi whose value is predicted, and its inverse by Newton's method.
"""
