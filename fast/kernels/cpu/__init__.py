"""C++ kernels for tensors on the CPU, compiled at first use, and their launchers."""
