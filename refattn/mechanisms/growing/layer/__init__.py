"""Attention whose weights can grow as a layer: for whole sequences, and token by token."""
