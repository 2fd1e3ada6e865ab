"""`parity replay-conformance`: opcode forms against their meaning, on replay or on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, NoDeviceError, UsageError
from twinstep.parity.registry.engines import require
from twinstep.parity.report.exports import environment, write
from twinstep.replay.conformance.probe import Probe
from twinstep.replay.conformance.run import Row, capability, on_cuda, on_replay, rows
from twinstep.replay.conformance.suite import missing, needs, probes
from twinstep.replay.cuda import NoDriver
from twinstep.replay.driver import check_version
from twinstep.replay.errors import UnsupportedTriton
from twinstep.replay.forms import supported

FORMS_SHOWN = 60
ENGINES = ("replay", "cuda")


def conformance(engine: str, opcodes: Sequence[str], thorough: bool, json_file: str | None) -> int:
    """Run the suite, print its table, write it as JSON; the exit code.

    Raises:
        NoDeviceError: no GPU, or one that is too old.
        UsageError: an unknown engine or opcode, or a Triton that replay was not tested with.
    """
    if engine not in ENGINES:
        raise UsageError(
            f'engine "{engine}" has no conformance suite, but should be among '
            f"{', '.join(ENGINES)} [--engine]"
        )
    screen = Console(stderr=json_file == "-", width=None if sys.stdout.isatty() else 150)
    ready(engine)
    for opcode in opcodes:
        if not any(form == opcode or form.startswith(f"{opcode}.") for form in supported()):
            raise UsageError(f'replay supports no opcode "{opcode}" [--opcode]')
    found = outcomes(engine, opcodes, thorough)
    screen.print(table(found, engine))
    left = [form for form in supported() if engine == "cuda" and needs(form) > capability()]
    wrong = [row for row in found.values() if row.mismatches]
    cases = sum(row.cases for row in found.values())
    verdict = f"{len(wrong)} of {len(found)} opcode forms differ on {engine}, {cases} cases"
    screen.print(verdict, style="bold", highlight=False)
    if left:
        screen.print(f"{len(left)} forms are not on this GPU", highlight=False)
    if not opcodes and (absent := missing()):
        screen.print(f"forms that no probe shows: {' '.join(absent)}", highlight=False)
        return EXIT_BROKEN
    if json_file is not None:
        write(json_file, as_json(found, engine, left), "--json")
    return EXIT_BROKEN if wrong else EXIT_KEPT


def ready(engine: str) -> None:
    """Refuse to start where the engine cannot run.

    Raises:
        NoDeviceError: no GPU, or one that is too old.
        UsageError: a Triton that replay was not tested with.
    """
    require(engine)
    if engine == "cuda" and capability() < 90:
        raise NoDeviceError(
            f"this GPU has compute capability {capability() / 10}, but the probes need 9.0 or newer"
        )
    if engine == "replay":
        import triton

        try:
            check_version(triton.__version__)
        except UnsupportedTriton as error:
            raise UsageError(str(error)) from error


def outcomes(engine: str, opcodes: Sequence[str], thorough: bool) -> dict[str, Row]:
    """Outcomes by form, of the forms asked for."""
    newest = capability() if engine == "cuda" else 1000

    def chosen() -> Iterator[Probe]:
        for opcode in opcodes or ("",):
            yield from probes(opcode, thorough, newest)

    execute, exactly = (on_cuda, False) if engine == "cuda" else (on_replay, True)
    try:
        found = rows(chosen(), execute, exactly)
    except NoDriver as error:
        raise NoDeviceError(f"engine cuda was asked for, but {error} [--engine]") from error
    wanted = [form for form in found if _asked(form, opcodes)]
    return {form: found[form] for form in sorted(wanted)}


def _asked(form: str, opcodes: Sequence[str]) -> bool:
    return not opcodes or any(form == o or form.startswith(f"{o}.") for o in opcodes)


def table(found: dict[str, Row], engine: str) -> Table:
    """Forms one by one where they are few, else by family; every form that differs."""
    printed = Table(title=f"opcode forms on {engine}", title_justify="left")
    for name in ("form", "forms", "cases", "mismatches", "first divergence"):
        printed.add_column(
            name, justify="left" if name in ("form", "first divergence") else "right"
        )
    for family, members in by_family(found).items() if len(found) > FORMS_SHOWN else ():
        counts = (sum(row.cases for row in members), sum(row.mismatches for row in members))
        printed.add_row(family, str(len(members)), *map(str, counts), "")
    for row in found.values():
        if len(found) <= FORMS_SHOWN or row.mismatches:
            printed.add_row(row.form, "1", str(row.cases), str(row.mismatches), row.first)
    return printed


def by_family(found: dict[str, Row]) -> dict[str, list[Row]]:
    """Rows by the opcode before its first dot."""
    families: dict[str, list[Row]] = {}
    for row in found.values():
        families.setdefault(row.form.split(".")[0], []).append(row)
    return families


def as_json(found: dict[str, Row], engine: str, left: Sequence[str]) -> str:
    """Every form with its counts and first divergence."""
    document = {
        "schema": 1,
        "engine": engine,
        "environment": environment(),
        "forms": [vars(row) for row in found.values()],
        "not on this GPU": list(left),
    }
    return json.dumps(document, indent=1)
