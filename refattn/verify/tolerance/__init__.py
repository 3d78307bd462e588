"""Truth, error budget, and the verdict on a result."""
