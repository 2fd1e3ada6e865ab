"""Which kernels there are."""
