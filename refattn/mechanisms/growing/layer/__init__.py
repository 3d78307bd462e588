"""Attention whose weights can grow, as a layer."""
