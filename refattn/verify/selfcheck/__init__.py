"""The reference by itself: implementations, properties and gradients of a mechanism."""
