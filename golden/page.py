"""The table of traces in golden/README.md, from the manifest: `python -m twinstep.golden.page`."""

from __future__ import annotations

import re
from pathlib import Path

from twinstep.golden import manifest
from twinstep.golden.trace import TRACES, read

PAGE = Path(__file__).parent / "README.md"
MARKED = re.compile(r"(<!-- generated: traces -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """A row for each trace: subject, steps, where our default differs, last reason of a change."""
    entries = manifest.read()
    count = f"{len(entries)} traces, written by `python -m twinstep.golden.page`:"
    rows = ["| trace | recorded from | steps | our default differs | last change |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for name, entry in sorted(entries.items()):
        header = read(TRACES / f"{name}.jsonl").header
        subject = f"{header.subject.removeprefix('deepspeed.runtime.')}, {entry.version}"
        edge = header.differs.removeprefix("edge ").split(":")[0]
        differs = f"{edge}: {', '.join(entry.differs_in)}" if edge else ""
        rows.append(f"| {name} | {subject} | {header.steps} | {differs} | {entry.changes[-1]} |")
    return "\n".join([count, "", *rows])


def rendered(page: str) -> str:
    """The page with its table made anew."""
    return MARKED.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
