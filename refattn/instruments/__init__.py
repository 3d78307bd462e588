"""Instruments: the same source, run on arrays that measure.

`wrapper.py` is an array library around NumPy's, whose every operation passes through an instrument. `counting.py` is
one, which tallies work and memory; `dual.py` another, whose arrays carry a derivative by the rules of `rules.py` and
`rules_linalg.py`; `products.py` rounds what is multiplied. No mechanism knows of them, and `import refattn` does not
load them.
"""
