"""Ensembles of tokens in the geometry of their scores: a step (`step.py`), and one ensemble for each prefix."""
