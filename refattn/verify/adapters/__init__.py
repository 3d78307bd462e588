"""Foreign kernels: loading and calling one, here or in another process, as a program or by its files."""
