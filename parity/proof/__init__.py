"""The judge judged: wrong kernels, planted faults, other projects, static gates."""
