"""The tables of ceilings and of the model of time in docs/reference/static-gates.md.

python -m twinstep.parity.proof.gates.compile.page        # renews it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from twinstep.parity.proof.gates.compile import model
from twinstep.parity.proof.gates.compile.artefacts import Facts
from twinstep.parity.proof.gates.compile.build import TARGETS
from twinstep.parity.proof.gates.compile.ceilings import load

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "static-gates.md"
START, END = "<!-- ceilings -->\n", "<!-- end -->\n"
MODEL = "<!-- model -->\n"
HEAD = (
    "kernel",
    "variants",
    "registers",
    "spilled bytes",
    "float64 (sm_90)",
    "narrowest widest load / store (sm_90)",
    "bytes of code",
)
Worst = Callable[[Sequence[int]], int]


def rows() -> list[str]:
    """One line for each kernel: the worst of its variants."""
    facts = load().facts
    kernels: dict[str, set[str]] = {}
    for variant, _ in facts:
        kernels.setdefault(variant.partition(" ")[0], set()).add(variant)
    return [_row(kernel, sorted(names), facts) for kernel, names in sorted(kernels.items())]


def _row(kernel: str, names: Sequence[str], facts: Mapping[tuple[str, str], Facts]) -> str:
    def worst(fact: str, target: str = "sm_90", of: Worst = max) -> int:
        return of([facts[name, target].get(fact, 0) for name in names])

    applying = [target for target in TARGETS if (names[0], target) in facts]

    def on_all(fact: str) -> str:
        return " / ".join(str(worst(fact, target)) for target in applying)

    widths = f"{worst('load_width', of=min)} / {worst('store_width', of=min)}"
    cells = [kernel, len(names), on_all("registers"), on_all("spilled"), worst("float64"), widths]
    return f"| {' | '.join(map(str, [*cells, on_all('code')]))} |"


def table() -> str:
    """The whole table, as Markdown."""
    ruler = "| --- | " + " | ".join(["---:"] * (len(HEAD) - 1)) + " |"
    return "\n".join([f"| {' | '.join(HEAD)} |", ruler, *rows()]) + "\n"


def page(text: str) -> str:
    """The page with its tables as they should be."""
    return _with(_with(text, START, table()), MODEL, model.table(load().facts))


def _with(text: str, start: str, found: str) -> str:
    before, _, rest = text.partition(start)
    return f"{before}{start}{found}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
