"""The table of a run: whole names in lines of the screen's width, exceptions and reasons named."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.report.table import MARKS, last_line, print_table

DTYPES = ("fp16", "bf16", "fp32", "fp16-pure", "fp32-to-bf16")
NAMES = (
    "mine",
    "triton.update_scale_dynamic",
    "融合優化器の核",
    "a_name_that_is_longer_than_every_screen_" * 4,
)


def cell(name: str, dtype: str, law: str, status: Status, reason: str = "") -> Cell:
    operation = "adamw_step" if law in LAWS else "FusedAdam"
    key = Key(operation=operation, kernel=name, dtype=dtype, law=law, engine="replay")
    explained = reason or ("" if status in (Status.PASSED, Status.FAILED) else "no reason")
    failure = f"{name} breaks {law}" * (status is Status.FAILED)
    worst = {"params": 0.25, "exp_avgs": 0.75} if law == "value" else {}
    return Cell(
        key=key, status=status, reason=explained, calls=3, sequences=2, failure=failure, worst=worst
    )


def ledger_of(*cells: Cell) -> Ledger:
    return Ledger(declared=tuple(c.key for c in cells), cells={c.key: c for c in cells})


def printed(ledger: Ledger, width: int = 80, verbose: bool = False) -> str:
    screen = Console(width=width, file=io.StringIO())
    print_table(screen, ledger, verbose)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def every_status(name: str) -> list[Cell]:
    """A kernel with all laws and dtypes, and all statuses among them."""
    ends = list(Status)
    return [
        cell(name, dtype, law, ends[(place + number) % len(ends)])
        for place, dtype in enumerate(DTYPES)
        for number, law in enumerate(LAWS)
    ]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", NAMES)
def test_every_line_fits_and_no_name_is_cut(name: str, width: int, verbose: bool) -> None:
    text = printed(ledger_of(*every_status(name)), width, verbose)
    lines = text.splitlines()
    assert all(cell_len(line) <= width or line.strip().startswith(name) for line in lines), text
    assert name in text
    assert "…" not in text
    words = text.replace(",", " ").replace("(", " ").split()
    assert not verbose or set(LAWS) | set(DTYPES) <= set(words)


def test_a_law_broken_with_some_dtypes_alone_names_them() -> None:
    broken = [cell("mine", "bf16", "value", Status.FAILED)]
    broken += [cell("mine", dtype, "repeat", Status.FAILED) for dtype in ("bf16", "fp16")]
    text = printed(ledger_of(cell("mine", "fp16", "value", Status.PASSED), *broken))
    row, exceptions = text.splitlines()[2:4]
    assert row.split() == ["mine", "replay", "fp16", "bf16", "1", "3", "0.75"]
    assert exceptions == "  FAIL  value (bf16), repeat"


def test_what_is_not_claimed_has_no_row_and_is_counted() -> None:
    unclaimed = [cell("mine", "fp32", law, Status.NOT_CLAIMED) for law in LAWS]
    text = printed(ledger_of(cell("mine", "fp16", "value", Status.PASSED), *unclaimed))
    assert "fp32" not in text
    assert f"{len(LAWS)} not claimed" in text


def test_reasons_are_counted_and_folded_and_all_there_when_asked_for() -> None:
    reasons = [f"not liftable: `@%p{n} atom.add.u64 %rd{n}, [%rd0]`, kernel k{n}" for n in (1, 2)]
    cells = [cell("mine", "fp16", "formula", Status.SKIPPED, reasons[0])]
    cells += [cell("mine", "bf16", "formula", Status.SKIPPED, reasons[1])]
    cells += [
        cell("mine", "fp16", law, Status.SKIPPED, f"{law} is judged on cuda only")
        for law in ("race_free", "no_host_read", "graph_capture")
    ]
    short, long = printed(ledger_of(*cells)), printed(ledger_of(*cells), verbose=True)
    skips = [line for line in short.splitlines() if line.startswith("skip")]
    assert skips == [
        "skip    3  race_free no_host_read graph_capture: judged on cuda only",
        "skip    2  formula: not liftable",
    ]
    assert all(f"not liftable: `atom.add.u64`, kernel k{n}" in long for n in (1, 2))


def test_many_reasons_are_cut_short_with_their_number() -> None:
    cells = [cell("mine", "fp16", law, Status.SKIPPED, f"reason {law}") for law in LAWS]
    skips = [line for line in printed(ledger_of(*cells)).splitlines() if line.startswith("skip")]
    assert skips[-1].endswith(f"for {len(LAWS) - 5} more reasons: see -v")
    assert sum(int(line.split()[1]) for line in skips) == len(LAWS)
    text = printed(ledger_of(*cells), verbose=True)
    assert sum(line.startswith("skip") for line in text.splitlines()) == len(LAWS)


def test_verbose_puts_dtypes_together_that_ended_alike() -> None:
    cells = [cell("mine", dtype, "value", Status.PASSED) for dtype in ("fp16", "bf16")]
    cells += [cell("mine", "fp32", "value", Status.FAILED)]
    lines = printed(ledger_of(*cells), verbose=True).splitlines()
    assert "  fp16 bf16" in lines
    assert "  fp32" in lines
    assert lines.count("    error/bound  params 0.25 (fp16), exp_avgs 0.75 (fp16)") == 1


def test_whole_optimizers_have_a_table_of_their_own() -> None:
    cells = [cell("fast.Adam", dtype, "sequences", Status.PASSED) for dtype in ("fp16", "bf16")]
    row = next(line for line in printed(ledger_of(*cells)).splitlines() if "fast.Adam" in line)
    assert row.split() == ["fast.Adam", "replay", "fp16", "bf16", "2", "4"]
    assert "4 sequences, 6 actions" in printed(ledger_of(*cells), verbose=True)


def test_the_last_line_names_what_to_type() -> None:
    key = cell("mine", "fp16", "value", Status.FAILED).key
    broken = Cell(key=key, status=Status.FAILED, failure="x", repro="repros/one.py")
    assert last_line(ledger_of(broken), 2.04).startswith("1 of 1 cells broke a law in 2.0 s: ")
    assert last_line(ledger_of(broken), 2.04).endswith("python repros/one.py")
    kept = ledger_of(cell("mine", "fp16", "value", Status.PASSED))
    assert last_line(kept, 18.4) == "all laws kept in 1 cell in 18 s"
    walks = [cell("mine", "fp16", "large_index", Status.SKIPPED, "walks")]
    walks += [cell("mine", "bf16", "large_index", Status.PASSED)]
    walks += [cell("mine", "fp32", "large_index", Status.NOT_CLAIMED)]
    says = "all laws kept in 1 cell (large_index not judged in 1 of 2 rows) in 2.0 s"
    assert last_line(ledger_of(*walks), 2.04) == says
    idle = ledger_of(cell("mine", "fp16", "value", Status.SKIPPED))
    assert last_line(idle, 0.1).endswith("the same command with -v gives every reason")


def test_every_status_has_a_mark() -> None:
    assert set(MARKS) == set(Status)
