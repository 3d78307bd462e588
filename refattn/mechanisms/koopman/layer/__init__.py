"""The mechanism as a layer: projections around the core, random numbers for it, and what its queries point at."""
