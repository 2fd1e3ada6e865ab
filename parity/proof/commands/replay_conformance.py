"""`parity replay-conformance`: opcode forms against their meaning, on replay or on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, NoDeviceError, UsageError
from twinstep.parity.registry.engines import require
from twinstep.parity.report.exports import environment, write
from twinstep.replay.conformance.report import measure
from twinstep.replay.cuda.driver import NoDriver
from twinstep.replay.errors import UnknownInstruction, UnsupportedTriton

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
    require(engine)
    try:
        report = measure(engine, opcodes, thorough)
    except NoDriver as error:
        raise NoDeviceError(f"engine {engine} was asked for, but {error} [--engine]") from error
    except UnsupportedTriton as error:
        raise UsageError(str(error)) from error
    except UnknownInstruction as error:
        raise UsageError(f"{error} [--opcode]") from error
    report.show(screen)
    if json_file is not None and not report.absent:
        write(json_file, report.as_json(environment()), "--json")
    return EXIT_KEPT if report.conforms else EXIT_BROKEN
