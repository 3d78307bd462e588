"""Verification: of the reference by itself (`check`), and of foreign implementations against it (`verify`).

Host side. Everything here knows mechanisms through their records alone.
"""
