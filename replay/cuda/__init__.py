"""CUDA C++: NVRTC to compile it, and the CUDA driver to run the same PTX on a GPU."""
