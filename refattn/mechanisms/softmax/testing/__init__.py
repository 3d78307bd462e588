"""How softmax attention is judged: a second derivation, designed calls, sizes of errors, wrong readings."""
