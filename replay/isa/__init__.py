"""The instructions that replay accepts, and a NumPy function for each pure one."""
