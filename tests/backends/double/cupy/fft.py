"""Nothing of refattn uses it; array-api-compat imports it."""
