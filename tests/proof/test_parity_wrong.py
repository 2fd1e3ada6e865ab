"""The judge judged: every known-wrong kernel is rejected, every harmless variant accepted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import Entry, Variant, corpus, harmless
from twinstep.parity.proof.corpus.corpus import planted_classes
from twinstep.parity.proof.corpus.judged import absent, judged, row_of
from twinstep.parity.proof.upstream.bugs import BUGS, cited
from twinstep.parity.proof.upstream.bugs_page import render
from twinstep.parity.proof.upstream.edges import built, node_ids
from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.kernels import kernels
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.shared import Shared, sharing

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "bugs.md"
CORPUS, HARMLESS = corpus(), harmless()
SUBJECTS: tuple[Entry | Variant, ...] = (*CORPUS, *HARMLESS)
SEEN = [entry for entry in CORPUS if not entry.waits_for]
WAITING = [entry for entry in CORPUS if entry.waits_for]
# One behind the other they find what was formed for the one before, in one worker too.
RUNS_HERE = sorted((v for v in HARMLESS if not v.unavailable), key=lambda v: v.operation)
RAISING = {"empty_list_raises", "decay_branch_names_what_is_not_there"}
QUICK = Effort(examples=8, shrink_seconds=0.0, repros=None)
# A rejection stops at its first case; enough of them make sure that it does not hang on the draw.
ENOUGH = Effort(examples=48, shrink_seconds=0.0, repros=None)
FORMED = Shared()


def names(subject: Entry | Variant) -> str:
    return f"{subject.operation}-{subject.name}"


def failures(ledger: Ledger) -> str:
    return "\n\n".join(cell.failure for cell in ledger.with_status(Status.FAILED))


def judged_cells(ledger: Ledger) -> set[str]:
    return {cell.key.dtype for cell in ledger.with_status(Status.PASSED, Status.FAILED)}


@pytest.mark.parametrize("entry", SEEN, ids=names)
def test_wrong_kernel_is_rejected_by_its_law_on_every_dtype(entry: Entry) -> None:
    if reason := absent(entry):
        pytest.skip(reason)
    ledger = judged(entry, laws=(entry.law,), effort=ENOUGH)
    assert judged_cells(ledger) == set(entry.dtypes), ledger.counts()
    assert not ledger.with_status(Status.PASSED), entry.says
    if entry.engines == ("cpu",):
        # A kernel that merely crashes would be rejected for the wrong reason.
        raised = "the kernel raises" in failures(ledger)
        assert raised == (entry.name in RAISING), failures(ledger)


@pytest.mark.parametrize("entry", WAITING, ids=names)
def test_wrong_kernel_that_waits_is_not_seen_yet(entry: Entry) -> None:
    ledger = judged(entry, laws=(entry.law,), effort=QUICK)
    assert not ledger.with_status(Status.FAILED), f"{entry.name} waits for nothing any more"


@pytest.fixture
def _same_cases() -> Iterator[None]:
    with sharing(FORMED):
        yield


@pytest.mark.usefixtures("_same_cases")
@pytest.mark.parametrize("variant", RUNS_HERE, ids=names)
def test_harmless_variant_keeps_every_law(variant: Variant) -> None:
    ledger = judged(variant, dtypes=variant.dtypes[:1], effort=QUICK)
    assert not ledger.with_status(Status.FAILED), failures(ledger)
    assert judged_cells(ledger) == set(variant.dtypes[:1]), ledger.counts()


@pytest.mark.usefixtures("_same_cases")
@pytest.mark.parametrize("variant", [v for v in RUNS_HERE if len(v.dtypes) > 1], ids=names)
def test_harmless_variant_keeps_its_values_on_the_other_dtypes(variant: Variant) -> None:
    ledger = judged(variant, laws=("value",), dtypes=variant.dtypes[1:], effort=QUICK)
    assert not ledger.with_status(Status.FAILED), failures(ledger)
    assert judged_cells(ledger) == set(variant.dtypes[1:]), ledger.counts()


def test_corpus_has_every_operation_and_more_than_enough_kernels() -> None:
    assert len(SEEN) >= 200
    assert len(RUNS_HERE) >= 30
    wrong = {entry.operation for entry in SEEN}
    assert wrong == {variant.operation for variant in RUNS_HERE}
    assert len(wrong) == 17


def test_corpus_names_are_unique() -> None:
    every = [subject.name for subject in SUBJECTS]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("entry", CORPUS, ids=names)
def test_wrong_kernel_says_what_is_wrong_and_names_a_law_of_its_operation(entry: Entry) -> None:
    assert entry.law in operation_named(entry.operation, entry.name).laws
    assert entry.says.endswith(".")
    assert all(
        re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,8}| \(its source\))", place)
        for place in cited(entry.bugs)
    )


def test_variant_that_cannot_run_says_why() -> None:
    assert all(v.unavailable for v in HARMLESS if v not in RUNS_HERE)


def test_real_bugs_are_planted_unless_they_wait_for_something() -> None:
    planted = {bug for entry in SEEN for bug in entry.bugs} | set(planted_classes())
    assert planted <= set(BUGS)
    waiting = {bug for bug, row in BUGS.items() if row.waits_for}
    tests = {bug for bug, row in BUGS.items() if row.test}
    assert planted | waiting | tests == set(BUGS)
    assert not planted & waiting
    assert not tests & (planted | waiting)


def named_in(file: Path) -> set[str]:
    """Names of classes and strings of a test file, and of those under tests that it imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Constant):
            found.add(str(node.value))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests."):
            found |= named_in(ROOT / f"{str(node.module).replace('.', '/')}.py")
    return found


def missing(test: str, tests: set[str]) -> str:
    """A name in a row that does not exist, or nothing."""
    function, _, case = test.removesuffix("]").partition("[")
    if function not in tests:
        return function
    return "" if not case or case in named_in(ROOT / function.partition("::")[0]) else test


def test_every_test_that_a_row_names_exists() -> None:
    named, tests = [row.test for row in BUGS.values() if row.test], node_ids(ROOT)
    assert len(named) == len(set(named))
    assert [test for test in named if missing(test, tests)] == []
    function = next(test for test in named if "[" in test).partition("[")[0]
    assert missing(f"{function}[Unheard]", tests)
    assert missing(f"{function}_at_all", tests)


def test_no_row_waits_for_what_exists() -> None:
    assert not {row.waits_for for row in BUGS.values()} & built(ROOT)


def test_page_of_bugs_is_current() -> None:
    current = "run python -m twinstep.parity.proof.upstream.bugs_page > docs/reference/bugs.md"
    assert PAGE.read_text() == render(), current


def test_corpus_leaves_the_registry_alone() -> None:
    before = kernels()
    row_of(CORPUS[0])
    assert kernels() == before
    assert not {row.name for row in before} & {subject.name for subject in SUBJECTS}
