"""Real defects by id, read from `bugs.toml`.

Ids are stable: A Adam kernels, counters and state; B LAMB, Lion and low-bit variants; C overflow
detection; D loss scale and unscale; E norms and clipping; F bf16, master weights, accumulation; G
partitions, reduction and offload; H checkpoint and resume; I Triton, graphs and compilers; J the
checks themselves. Numbers that are missing were duplicates. `waits_for` names what must exist
before a row can be replanted here; every other row is planted by at least one entry of the corpus,
by a wrong optimizer class or by the test that it names, and a test holds that so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKS = "tests/parity/test_parity_checks.py::"


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One defect that a project shipped.

    Attributes:
        title: what went wrong, in a few words.
        places: issues, pull requests or commits; empty for a pattern without a public thread.
        waits_for: empty, or the component that must exist before the row can be replanted.
        test: empty, or the node id of a test that plants the defect and demands that it is
            noticed; that of a defect of checks is in `CHECKS`.
    """

    title: str
    places: Sequence[str] = ()
    waits_for: str = ""
    test: str = ""


BUGS: dict[str, Bug] = {
    name: Bug(**row)
    for name, row in tomllib.loads(Path(__file__).with_name("bugs.toml").read_text()).items()
}


def cited(names: Iterable[str]) -> tuple[str, ...]:
    """Threads and commits of these bugs, `owner/name#number` or `owner/name@commit`."""
    return tuple(place for name in names for place in BUGS[name].places)
