"""How it is judged: a second derivation in loops, designed cases, sizes of rounding errors, wrong readings."""
