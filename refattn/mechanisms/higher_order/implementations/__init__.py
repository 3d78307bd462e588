"""The other evaluations: in tiles of pairs, and by sums over keys that every query reads."""
