"""The floor under our own kernels: cells that must be judged, committed as a file.

`parity/report/declared_cells.json` names, for each kernel and optimizer of ours, its arithmetic
and the
laws that a machine without a GPU judges it by, dtype by dtype. A claim, a law or a kernel that goes
away fails a test and every full `parity run`; `parity ledger declare` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from twinstep.parity.laws import LAWS
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.sequences.judge import LAW
from twinstep.parity.sequences.registry import Twin

FILE = "declared_cells.json"
# kernel -> "arithmetic" -> it, and "fp16, bf16" -> laws.
Floor = Mapping[str, Mapping[str, str]]
Place = tuple[str, str, str]


def floor_of(known: Sequence[Kernel], twins: Sequence[Twin]) -> dict[str, dict[str, str]]:
    """Cells of these kernels and optimizers that are judged where there is no GPU."""
    floor = {}
    for kernel in known:
        rows: dict[str, list[str]] = {}
        for dtype in kernel.dtypes:
            laws = [law for law in kernel.operation.laws if is_judged(kernel, dtype, law)]
            rows.setdefault(", ".join(laws), []).append(dtype)
        claims = {", ".join(dtypes): laws for laws, dtypes in rows.items()}
        floor[kernel.name] = {"arithmetic": kernel.arithmetic, **claims}
    for twin in twins:
        floor[twin.name] = {"arithmetic": twin.arithmetic, ", ".join(twin.dtypes): LAW}
    return floor


def is_judged(kernel: Kernel, dtype: str, name: str) -> bool:
    """True if a law is judged on a kernel on replay, or on the CPU if that is its one engine."""
    engine = "cpu" if kernel.engines == ("cpu",) else "replay"
    law = LAWS[name]
    claimed = not law.claim or law.claim in kernel.claims
    return claimed and engine in law.engines and not law.idle(kernel.operation, dtype)


def cells_of(floor: Floor) -> set[Place]:
    """Every (kernel, dtype, law) of a floor."""
    return {
        (kernel, dtype, law)
        for kernel, rows in floor.items()
        for dtypes, laws in rows.items()
        if dtypes != "arithmetic"
        for dtype in dtypes.split(", ")
        for law in laws.split(", ")
    }


def declared_floor() -> Floor:
    """The committed floor.

    Raises:
        UsageError: the file is missing or no JSON.
    """
    try:
        file = resources.files("twinstep.parity.report") / FILE
        floor: Floor = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"parity/report/{FILE} cannot be read: {error} [declared cells]") from None
    return floor


def write_floor(floor: Floor) -> Path:
    """Write the floor over the committed one; its path."""
    path = Path(__file__).parent / FILE
    path.write_text(json.dumps(floor, indent=1, sort_keys=True) + "\n")
    return path


def sunk(floor: Floor, now: Floor) -> list[str]:
    """Entries of a floor that no longer hold, one sentence each."""
    gone = sorted(cells_of(floor) - cells_of(now))
    found = [f"{kernel} {dtype} {law}: declared, but not judged" for kernel, dtype, law in gone]
    for kernel, rows in floor.items():
        if rows["arithmetic"] == "exact" and now.get(kernel, rows)["arithmetic"] != "exact":
            found.append(f"{kernel}: declared exact, but bounded")
    return found


def not_judged(floor: Floor, ledger: Ledger) -> list[str]:
    """Cells of the floor that a full run left out, one sentence each.

    A skip has a reason, which the run prints; it is the test of the claims that lets none become
    idle unseen.
    """
    seen = {(c.key.kernel, c.key.dtype, c.key.law): c.status for c in ledger.cells.values()}
    kept = (Status.PASSED, Status.FAILED, Status.SKIPPED)
    found = []
    for place in sorted(cells_of(floor)):
        status = seen.get(place)
        if status not in kept:
            how = "absent" if status is None else status.value
            found.append(f"{' '.join(place)}: declared, but {how}")
    return found
