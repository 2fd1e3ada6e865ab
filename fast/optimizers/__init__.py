"""Optimizers of a training loop, and the one driver of their steps."""
