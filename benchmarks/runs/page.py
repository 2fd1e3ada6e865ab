"""The table of docs/guide/benchmarks.md, from the committed results of `make bench`.

    python -m twinstep.benchmarks.runs.page

Without a results file the page says so. The gate's outcomes on unchanged code stand below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from twinstep.benchmarks.beside.statistics import rate_at_most
from twinstep.benchmarks.runs.results import Document, controls
from twinstep.benchmarks.runs.tables import COLUMNS, bracketed, lines, quietness, versions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "bench-2-cores.json"
UNCHANGED = ROOT / "benchmarks" / "results" / "gate-unchanged.json"
PAGE = ROOT / "docs" / "guide" / "benchmarks.md"
MEASURED, GATE = "<!-- measured -->", "<!-- gate -->"
END = "<!-- end -->"


def main() -> int:
    """Write the page anew."""
    PAGE.write_text(page(PAGE.read_text(), RESULTS, UNCHANGED))
    return 0


def page(text: str, results: Path, unchanged: Path) -> str:
    """The page with both of its generated parts, from files that need not exist."""
    text = replaced(text, MEASURED, measured(results))
    return replaced(text, GATE, gated(unchanged))


def replaced(text: str, mark: str, part: str) -> str:
    """A text with what stands between a mark and the next end replaced."""
    before, _, rest = text.partition(mark)
    _, _, after = rest.partition(END)
    return f"{before}{mark}\n{part}\n{END}{after}"


def measured(file: Path) -> str:
    """The last table, or a sentence."""
    if not file.exists():
        return "Not yet measured on a quiet machine."
    return "\n".join(_measured(json.loads(file.read_text()), f"benchmarks/results/{file.name}"))


def _measured(document: Document, name: str) -> Iterator[str]:
    key, made = document["key"], document["stamp"]
    worst, control = controls(document["groups"])[0]
    yield (
        f"Measured on {made['time'][:10]} at {made['commit']}: {key['device']}, Python "
        f"{key['python']}, torch {key['torch']}, Triton {key['triton']}; "
        f"{quietness(document)}; {document['seconds']} s. Figures and curves are in `{name}`."
    )
    yield ""
    yield f"Peers: {versions(document)}. A/A furthest from 1: {bracketed(control)} in `{worst}`."
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "| --- | --- | ---: | ---: | --- | ---: |"
    curves = {(g["operation"], g["dtype"], g["tensors"], g["each"]) for g in points(document)}
    groups = [
        group
        for group in document["groups"]
        if (group["operation"], group["dtype"], group["tensors"], group["each"]) not in curves
    ]
    for line in lines({"groups": groups}):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in line)} |"
    for title, sentences in (
        ("Left out", document["cut"]),
        ("Failed", document["problems"]),
    ):
        if sentences:
            yield ""
            yield f"{title}: {'; '.join(sentences)}."
    for sentence in document["errors"]:
        yield ""
        yield f"**{sentence}**"


def points(document: Document) -> list[Document]:
    """Groups that are points of curves: they have one process, and are drawn."""
    from twinstep.benchmarks.runs.picture import bars_of

    bars = bars_of(document["groups"])
    return [group for group in document["groups"] if group not in bars]


def gated(file: Path) -> str:
    """Failures of the gate on unchanged code, added up; or a sentence."""
    if not file.exists():
        return "Not yet run on unchanged code on a quiet machine."
    document = json.loads(file.read_text())
    runs, key = document["runs"], document["key"]
    failed = [run for run in runs if run["failures"]]
    alarms, looks = (sum(run[name] for run in runs) for name in ("alarms", "looks"))
    loads = sorted(run["load"] for run in runs)
    said = "; ".join(sentence for run in failed for sentence in run["failures"])
    return (
        f"On unchanged code {len(failed)} of {len(runs)} runs failed{': ' + said if said else ''}; "
        f"the baseline was called slower than itself in {alarms} of {looks} first looks (a rate of "
        f"at most {rate_at_most(alarms, looks):.1%}, 95 %). {key['device']}, torch {key['torch']}, "
        f"load {loads[0]} to {loads[-1]}: `benchmarks/results/{file.name}`."
    )


if __name__ == "__main__":
    sys.exit(main())
