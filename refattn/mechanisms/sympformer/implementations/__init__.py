"""The force in memory linear in the number of tokens."""
