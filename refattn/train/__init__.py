"""Training by hand-written gradients: data, optimiser, schedule, checkpoints and metrics."""
