"""Kernels that are registered, what is selected of them, and engines that run them."""
