"""The other evaluation: in chunks of tokens, whose writes are found together by one triangular system."""
