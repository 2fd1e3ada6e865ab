"""Write a failing sequence as one stand-alone Python file.

The file carries the modules that build, act and observe, what the reference showed at the end, and
for bounded twins what the subject took over on the way. It needs torch and the user's file; a
wrapper also needs the inner optimizer and the scaler, which come from this project's folder.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from importlib import import_module, resources
from pathlib import Path

import torch

from twinstep.parity.records.standalone import GUARD, Run, repro_path, run_file
from twinstep.parity.sequences.drive import Mismatch
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.world import Act

SECONDS, RUNS = 60.0, 3
BASE = ("twinstep.parity.sequences.adam_rules",)
OVER_RANKS = "twinstep.parity.sequences.over_ranks.drive"
IMPORT = re.compile(r"^from (twinstep\.parity\.(?:sequences|ranks)\.[\w.]+) import", re.MULTILINE)


def write_repro(
    twin: Twin, dtype: str, acts: Sequence[Act], mismatch: Mismatch, headline: str, folder: str
) -> str:
    """Write the file into a folder, which is created if need be; its path."""
    path = repro_path(folder, twin.name, dtype)
    path.write_text(repro_text(twin, dtype, acts, mismatch, headline))
    return str(path)


def shown_again(path: str) -> str:
    """Run the file; empty if it fails again, otherwise what became of it, and it is removed."""
    deadline, runs = time.monotonic() + SECONDS, list[Run]()
    while len(runs) < RUNS and time.monotonic() < deadline:
        runs.append(run_file(path, deadline - time.monotonic()))
        if runs[-1].broken:
            return ""
        if runs[-1].refused:
            break
    Path(path).unlink(missing_ok=True)
    refused = runs[-1].refused if runs else ""
    return f"not shown again: {refused}" if refused else "does not fail again alone"


def repro_text(
    twin: Twin, dtype: str, acts: Sequence[Act], mismatch: Mismatch, headline: str
) -> str:
    """The file's text."""
    template = (
        resources.files("twinstep.parity.sequences").joinpath("repro_template.txt").read_text()
    )
    wanted = {
        path: (leaf.says, None if leaf.tensor is None else digits(leaf.tensor), leaf.moved)
        for path, leaf in mismatch.want.items()
    }
    resets = {
        at: {path: digits(tensor) for path, tensor in row.items()}
        for at, row in mismatch.resets.items()
        if row and at < mismatch.at
    }
    needed = [] if mismatch.over is None else [OVER_RANKS]
    parts = type(twin.rules).parts or (type(twin.rules),)
    engine = headline.split("]")[0].split(", ")[-1]
    filled = {
        "GUARD": GUARD,
        "HEADLINE": headline.replace('"""', "'''").replace("\\", "\\\\"),
        "FILE": repr(str(twin.file)),
        "NAME": repr(twin.name),
        "CLASS": repr(twin.subject.__name__),
        "ROOT": repr(str(Path(__file__).resolve().parents[2])),
        "ENGINE": repr(engine),
        "DTYPE": repr(dtype),
        "RULES": repr([(part.__module__, part.__name__) for part in parts]),
        "RANK": repr(None if mismatch.over is None else mismatch.over.rank),
        "PRIVATE": repr(twin.private),
        "OVERLAP": repr(twin.flat),
        "PROPERTIES": repr(twin.properties),
        "ACTIONS": _rows([(act.name, dict(act.values)) for act in acts]),
        "WANTED": _table(wanted),
        "RESETS": repr(resets),
        "ACCEPTED": repr(_accepted(mismatch)),
        "SOURCES": _table({name: _source(name) for name in carried(type(twin.rules), needed)}),
    }
    for mark, text in filled.items():
        template = template.replace(f"@{mark}@", text, 1)
    return template


def _accepted(mismatch: Mismatch) -> tuple[str, str, str, list[int]] | None:
    if mismatch.accepted is None:
        return None
    low, high, zone = mismatch.accepted
    places = zone.reshape(-1).nonzero().reshape(-1).tolist()
    return mismatch.difference.path.rpartition("[")[0], digits(low), digits(high), places


def carried(rules: type, more: Sequence[str] = ()) -> list[str]:
    """Modules that a rule set needs, and some more, each after those that it imports."""
    homes = [kind.__module__ for kind in rules.__mro__]
    found: list[str] = []
    for name in (
        *BASE,
        *more,
        *(home for home in homes[::-1] if home.startswith("twinstep.parity.sequences.")),
    ):
        _collect(name, found)
    return found


def _collect(name: str, found: list[str]) -> None:
    if name not in found:
        for needed in IMPORT.findall(_source(name)):
            _collect(needed, found)
        found.append(name)


def _source(name: str) -> str:
    return Path(str(import_module(name).__file__)).read_text()


def digits(tensor: torch.Tensor) -> str:
    """Bytes of the elements, in order, as hexadecimal digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()).hex() if flat.numel() else ""


def _rows(rows: Sequence[object]) -> str:
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]"


def _table(table: Mapping[str, object]) -> str:
    return "{\n" + "".join(f"    {name!r}: {value!r},\n" for name, value in table.items()) + "}"
