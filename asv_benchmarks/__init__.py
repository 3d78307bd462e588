"""Speed, memory and accuracy: over time with asv, between two commits, and beside other libraries (see peers.py)."""
