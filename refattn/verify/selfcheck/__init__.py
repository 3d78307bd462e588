"""The reference by itself: implementations, laws and gradients of a mechanism."""
