"""Errors that a training loop may want to catch by name."""

from __future__ import annotations


class MinimumLossScale(RuntimeError):
    """The loss scale is at its floor and the gradients still overflow: training cannot go on."""
