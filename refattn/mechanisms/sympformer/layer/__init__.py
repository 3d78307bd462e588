"""The mechanism as a layer: its choices, its parameters, the block, and decoding."""
