"""The contracts that kernels implement, one row each."""
