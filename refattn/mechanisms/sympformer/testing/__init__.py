"""How the force is judged: a second derivation, designed calls, sizes of errors, and wrong readings."""
