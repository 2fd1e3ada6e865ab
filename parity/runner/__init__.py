"""The way from kernels to verdicts: calls, checks, shrinking, worker processes."""
