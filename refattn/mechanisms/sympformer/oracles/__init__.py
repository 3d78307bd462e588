"""The oracles that a step asks for its force and its velocity, and what they keep of the past."""
