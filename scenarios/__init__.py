"""Whole training runs put through both sides.

A small language model is trained on real text in mixed precision: with every step put through the
reference and the fast side and compared bit for bit, or around either side's optimizer classes, as
users train, with fp16 and bf16 judged against fp32.
"""

from __future__ import annotations

if __name__ != "twinstep.scenarios":
    raise ImportError("import twinstep.scenarios, not scenarios")

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario command (`lockstep`, `train`, `precision`, ...) and return its exit code.

    Args:
        argv: the words after the program's name; None takes those of the process.

    Returns:
        0 when all is equal (or the run ended), 1 when the sides differ or a dtype does not reach
        fp32's loss, 2 for a wrong request, 3 when too little ran to tell.
    """
    from twinstep.scenarios.cli import main as command

    return command(argv)
