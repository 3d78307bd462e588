"""Instruments: the same source, run on arrays that measure.

`wrapper.py` is an array library around NumPy's, whose every operation passes through an instrument; `counting.py` is
one, which tallies work and memory. No mechanism knows of them, and nothing of refattn imports them.
"""
