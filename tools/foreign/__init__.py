"""Triton's own tests on replay, from a checkout of Triton, with every outcome counted by reason."""
