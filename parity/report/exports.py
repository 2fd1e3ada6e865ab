"""Results for machines: JSON with a schema version, and JUnit XML."""

from __future__ import annotations

import json
import platform
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import torch

from twinstep.parity.expected.widths import widths
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import operations
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import SCHEMA, Cell, Ledger, Status
from twinstep.parity.records.proof import PROVED, REFUTED, Proof
from twinstep.parity.records.versions import version_of


def environment() -> dict[str, str]:
    """Environment that the results depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "machine": platform.machine(),
    }


def as_json(ledger: Ledger, seconds: float) -> str:
    """The whole ledger as one JSON document."""
    document = {
        "schema": SCHEMA,
        "verdict": ledger.verdict(),
        "exit_code": ledger.exit_code(),
        "counts": ledger.counts(),
        "declared": len(ledger.declared),
        "seconds": round(seconds, 3),
        "environment": environment(),
        "bounds": widths(_operations(ledger)),
        "cells": [cell.record() for cell in ledger.cells.values()],
        "proofs": [proof.record() for proof in ledger.proofs],
    }
    return json.dumps(document, indent=1) + "\n"


def _operations(ledger: Ledger) -> list[Operation]:
    """The operations that have a bounded kernel in the ledger."""
    bounded = {c.key.operation for c in ledger.cells.values() if c.arithmetic == "bounded"}
    return [operation for operation in operations() if operation.name in bounded]


def as_junit(ledger: Ledger) -> str:
    """One test case for each cell, grouped by kernel."""
    suites = ElementTree.Element("testsuites", name="parity")
    by_kernel: dict[str, list[Cell]] = {}
    for cell in ledger.cells.values():
        by_kernel.setdefault(cell.key.kernel, []).append(cell)
    for kernel, cells in by_kernel.items():
        failed, passed, errors = (
            sum(cell.status is status for cell in cells)
            for status in (Status.FAILED, Status.PASSED, Status.CANNOT_JUDGE)
        )
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name=kernel,
            tests=str(len(cells)),
            failures=str(failed),
            errors=str(errors),
            skipped=str(len(cells) - failed - passed - errors),
            time=f"{sum(cell.seconds for cell in cells):.3f}",
        )
        for cell in cells:
            _add_case(suite, cell)
    if ledger.proofs:
        _add_proofs(suites, ledger.proofs)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, cell: Cell) -> None:
    key = cell.key
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"parity.{key.operation}.{key.kernel}",
        name=f"{key.law}[{key.dtype}, {cell.engine}]",
        time=f"{cell.seconds:.3f}",
    )
    if cell.worst:
        properties = ElementTree.SubElement(case, "properties")
        for name, ratio in cell.worst.items():
            attributes = {"name": f"error_over_bound.{name}", "value": f"{ratio:.4g}"}
            ElementTree.SubElement(properties, "property", attributes)
    if cell.status is Status.FAILED:
        headline = cell.failure.splitlines()[0]
        ElementTree.SubElement(case, "failure", message=headline).text = cell.failure
    elif cell.status is Status.CANNOT_JUDGE:
        ElementTree.SubElement(case, "error", message=f"{cell.status.value}: {cell.reason}")
    elif cell.status is not Status.PASSED:
        ElementTree.SubElement(case, "skipped", message=f"{cell.status.value}: {cell.reason}")


def _add_proofs(suites: ElementTree.Element, proofs: Sequence[Proof]) -> None:
    """A suite of all proofs; what is neither proved nor refuted is skipped, with its word."""
    refuted, proved = (sum(p.verdict.word == word for p in proofs) for word in (REFUTED, PROVED))
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name="proofs",
        tests=str(len(proofs)),
        failures=str(refuted),
        errors="0",
        skipped=str(len(proofs) - refuted - proved),
        time=f"{sum(p.verdict.seconds for p in proofs):.3f}",
    )
    for proof in proofs:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"parity.{proof.operation}.{proof.kernel}",
            name=f"proof[{', '.join(filter(None, (proof.dtype, proof.words)))}]",
            time=f"{proof.verdict.seconds:.3f}",
        )
        said = f"{proof.verdict.word}: {proof.verdict.detail}".splitlines()[0]
        if proof.verdict.word == REFUTED:
            failure = ElementTree.SubElement(case, "failure", message=said)
            failure.text = proof.verdict.detail
        elif proof.verdict.word != PROVED:
            ElementTree.SubElement(case, "skipped", message=said)


def write(path: str, text: str, flag: str) -> None:
    """Write a report; `-` is standard output.

    Raises:
        UsageError: the file cannot be written.
    """
    if path == "-":
        print(text, end="")
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
