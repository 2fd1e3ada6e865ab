"""Errors that a training loop may want to catch by name."""


class MinimumLossScale(RuntimeError):
    """Gradients overflow although the loss scale is at its floor."""
