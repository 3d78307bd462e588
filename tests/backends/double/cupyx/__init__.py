"""What refattn uses of cupyx."""
