"""Which equation is wrong: mutants, what an error in each equation does, and what explains best what was got."""
