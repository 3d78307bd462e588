"""Other evaluations of the sums over pairs of scores: a few rows at a time, matrix products, sparse graphs."""
