"""Triton kernels and their launchers, one operation for each file."""
