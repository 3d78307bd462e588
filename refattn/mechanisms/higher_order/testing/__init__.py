"""How the mechanism is judged: a second derivation, designed calls, wrong readings, and sizes of rounding errors."""
