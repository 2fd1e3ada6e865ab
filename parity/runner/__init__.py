"""From kernels to verdicts: plan, calls, checks, shrinking, worker processes."""
