"""The forces: what a step asks for its force and its velocity, and what these save of the past."""
