"""Outcomes of the suite on one engine: as a table, as sentences, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from twinstep.replay.conformance.probe import Probe
from twinstep.replay.conformance.run import Row, capability, on_cuda, on_replay, rows
from twinstep.replay.conformance.suite import missing, needs, probes
from twinstep.replay.cuda.driver import NoDriver
from twinstep.replay.errors import UnknownInstruction
from twinstep.replay.isa.forms import supported
from twinstep.replay.triton.driver import check_version

FORMS_SHOWN = 60
OLDEST = 90
"""Compute capability, times ten, that the probes need."""


@dataclass(frozen=True)
class Report:
    """Outcomes of the forms that were asked for.

    Attributes:
        engine: "replay" or "cuda".
        found: By form.
        left: Forms that the GPU at hand does not have.
        absent: Supported forms that no probe shows; not looked for where only some were asked for.
    """

    engine: str
    found: dict[str, Row]
    left: list[str]
    absent: list[str]

    @property
    def conforms(self) -> bool:
        """No form differs, and none goes unshown."""
        return not self.absent and not any(row.mismatches for row in self.found.values())

    def show(self, screen: Console) -> None:
        """Print the table and the verdict."""
        screen.print(self.table())
        wrong = sum(bool(row.mismatches) for row in self.found.values())
        cases = sum(row.cases for row in self.found.values())
        verdict = (
            f"{wrong} of {len(self.found)} opcode forms differ on {self.engine}, {cases} cases"
        )
        screen.print(verdict, style="bold", highlight=False)
        if self.left:
            screen.print(f"{len(self.left)} forms are not on this GPU", highlight=False)
        if self.absent:
            screen.print(f"forms that no probe shows: {' '.join(self.absent)}", highlight=False)

    def table(self) -> Table:
        """Forms one by one where they are few, else by family; every form that differs."""
        printed = Table(title=f"opcode forms on {self.engine}", title_justify="left")
        for name in ("form", "forms", "cases", "mismatches", "first divergence"):
            left = name in ("form", "first divergence")
            printed.add_column(name, justify="left" if left else "right")
        many = len(self.found) > FORMS_SHOWN
        for family, members in self.by_family().items() if many else ():
            counts = (sum(row.cases for row in members), sum(row.mismatches for row in members))
            printed.add_row(family, str(len(members)), *map(str, counts), "")
        for row in self.found.values():
            if not many or row.mismatches:
                printed.add_row(row.form, "1", str(row.cases), str(row.mismatches), row.first)
        return printed

    def by_family(self) -> dict[str, list[Row]]:
        """Rows by the opcode before its first dot."""
        families: dict[str, list[Row]] = {}
        for row in self.found.values():
            families.setdefault(row.form.split(".")[0], []).append(row)
        return families

    def as_json(self, environment: Mapping[str, str]) -> str:
        """Every form with its counts and first divergence."""
        document = {
            "schema": 1,
            "engine": self.engine,
            "environment": environment,
            "forms": [vars(row) for row in self.found.values()],
            "not on this GPU": self.left,
        }
        return json.dumps(document, indent=1)


def measure(engine: str, opcodes: Sequence[str] = (), thorough: bool = False) -> Report:
    """Run the suite.

    Args:
        engine: "replay" or "cuda".
        opcodes: Beginnings of opcodes, up to a dot; all forms where there are none.
        thorough: All 65,536 patterns of each 16-bit source.

    Raises:
        NoDriver: there is no GPU, or one that is too old.
        UnknownInstruction: replay supports no such opcode.
        UnsupportedTriton: the installed Triton is not one that replay was tested with.
    """
    require(engine)
    for opcode in opcodes:
        if not any(_asked(form, [opcode]) for form in supported()):
            raise UnknownInstruction(f'replay supports no opcode "{opcode}"')
    newest = capability() if engine == "cuda" else 1000

    def chosen() -> Iterator[Probe]:
        for opcode in opcodes or ("",):
            yield from probes(opcode, thorough, newest)

    execute, exactly = (on_cuda, False) if engine == "cuda" else (on_replay, True)
    found = rows(chosen(), execute, exactly)
    wanted = sorted(form for form in found if not opcodes or _asked(form, opcodes))
    left = [form for form in supported() if needs(form) > newest]
    return Report(engine, {form: found[form] for form in wanted}, left, _absent(opcodes))


def require(engine: str) -> None:
    """Refuse to start where the engine cannot run; raises as `measure`."""
    if engine == "replay":
        import triton

        check_version(triton.__version__)
    elif not torch.cuda.is_available():
        raise NoDriver("torch finds no GPU")
    elif capability() < OLDEST:
        raise NoDriver(
            f"this GPU has compute capability {capability() / 10}, but the probes need 9.0 or newer"
        )


def _absent(opcodes: Sequence[str]) -> list[str]:
    return [] if opcodes else missing()


def _asked(form: str, opcodes: Sequence[str]) -> bool:
    return any(form == opcode or form.startswith(f"{opcode}.") for opcode in opcodes)
