"""Kernels in CUDA C++, beside those in Triton: the same signatures, the same bits."""
