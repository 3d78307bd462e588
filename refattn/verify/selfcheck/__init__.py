"""The reference by itself: forms, laws and gradients of a mechanism."""
