"""Designed inputs and the storage types they are rounded to. Host side: NumPy."""
