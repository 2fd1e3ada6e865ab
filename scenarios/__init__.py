"""Whole training runs put through both sides.

A small language model is trained on real text in mixed precision; on every step the same
parameters and gradients go through the reference and the fast side and are compared bit for bit.

Import the modules by name (`scenarios.train`, `scenarios.lockstep`, ...); this package itself holds
only the door that the command line uses.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario command (`lockstep`, `train` or `picture`) and return its exit code.

    Args:
        argv: the words after the program's name; None takes those of the process.

    Returns:
        0 when both sides agree (or the run ended), 1 when they differ, 2 for a wrong request.
    """
    # Imported here: `python -m scenarios.lockstep` imports this package before it runs the module.
    from scenarios.cli import main as command

    return command(argv)
