"""Record traces again: `python -m twinstep.golden.record torch`, or `deepspeed`.

Writes into golden/traces, or into the folder named as the second argument. A recording that differs
from the committed one is news about that package, not a fix: say in the commit what moved and why.
"""

from __future__ import annotations

import sys
from pathlib import Path

from twinstep.golden import record_deepspeed, record_torch, record_wrappers
from twinstep.golden.sequences import SITUATIONS
from twinstep.golden.trace import TRACES, Trace, write

RULES = {"torch": ("torch",), "deepspeed": ("dynamic", "wrapper", *record_wrappers.SUBJECTS)}


def recorded(package: str) -> list[Trace]:
    """Run every situation of a package.

    Raises:
        ImportError: the package is not installed.
    """
    own = record_torch.record if package == "torch" else record_deepspeed.record
    return [
        record_wrappers.record(situation)
        if situation.rule in record_wrappers.SUBJECTS
        else own(situation)
        for situation in SITUATIONS
        if situation.rule in RULES[package]
    ]


def main(arguments: list[str]) -> int:
    """Record one package; exit code 2 for wrong usage or a missing package."""
    if not 1 <= len(arguments) <= 2 or arguments[0] not in RULES:
        print(
            f"usage: python -m twinstep.golden.record {{{','.join(RULES)}}} [FOLDER]",
            file=sys.stderr,
        )
        return 2
    package = arguments[0]
    folder = Path(arguments[1]) if len(arguments) == 2 else TRACES
    try:
        traces = recorded(package)
    except ImportError as error:
        print(f"{package} should be installed to be recorded, but: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        print(write(trace, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
