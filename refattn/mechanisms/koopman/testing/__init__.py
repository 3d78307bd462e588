"""What judges the mechanism: a second derivation, designed calls, sizes of rounding errors and wrong readings."""
