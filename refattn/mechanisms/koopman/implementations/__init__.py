"""Other evaluations of the same mathematics, which are compared with the dense one."""
