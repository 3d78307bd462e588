"""The contraction with which growth begins, in less memory than the definition takes."""
