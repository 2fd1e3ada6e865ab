"""`parity compile`: static facts of every kernel of ours, held against rules and ceilings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twinstep.parity.proof.gates.compile import ceilings
from twinstep.parity.proof.gates.compile.artefacts import CEILINGS, FLOORS, MEANING
from twinstep.parity.proof.gates.compile.build import (
    TARGETS,
    Built,
    Variant,
    applies,
    build,
    compiler,
)
from twinstep.parity.proof.gates.compile.ceilings import Breach
from twinstep.parity.proof.gates.compile.cuda import PREFIX, compilers, cuda_variants_of
from twinstep.parity.proof.gates.compile.variants import variants_of
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE, UsageError
from twinstep.parity.registry.engines import require
from twinstep.parity.registry.kernels import kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.exports import write
from twinstep.parity.report.progress import progress
from twinstep.parity.report.table import plain_table
from twinstep.replay.cuda import nvrtc

Names = Sequence[str] | None
SCHEMA = 1


def compile_all(
    target: Names, op: Names, json_file: str | None, update: bool, file: Path = ceilings.FILE
) -> int:
    """Compile what is launched for every target and judge it; the exit code.

    Raises:
        UsageError: an unknown name, no assembler, or a file that cannot be read or written.
    """
    require("replay")
    targets = _targets(target)
    made_by = {name: compiler(name) for name in targets} | compilers(targets)
    recorded = ceilings.load(file)
    variants = _variants(op)
    screen = Console(stderr=json_file == "-", width=None if sys.stdout.isatty() else 170)
    found = _with_progress(variants, targets)
    if not found:
        print("parity: nothing was compiled", file=sys.stderr)
        return EXIT_TOO_LITTLE
    if json_file is not None:
        write(json_file, _as_json(found, made_by), "--json")
    screen.print(facts_table(found))
    whole = not op
    if update:
        return _update(screen, recorded, found, made_by, whole, file)
    wrong = ceilings.breaches(recorded, found, made_by, whole)
    _print_verdict(screen, recorded, found, made_by, wrong)
    return EXIT_BROKEN if wrong else EXIT_KEPT


def _targets(asked: Names) -> list[str]:
    for name in asked or ():
        if name not in TARGETS:
            raise UsageError(
                f'--target "{name}" is unknown, but should be among {", ".join(TARGETS)}'
            )
    return list(dict.fromkeys(asked or TARGETS))


def _variants(op: Names) -> list[Variant]:
    from twinstep.parity.registry.house_kernels import register_house

    register_house()
    chosen = Selection(operations=tuple(op or ())).kernels(kernels())
    triton = [kernel for kernel in chosen if kernel.name.startswith("triton.")]
    found: list[Variant] = [*variants_of(triton, optimizers=not op)]
    if reason := nvrtc.missing():
        print(f"parity: CUDA C++ kernels are not compiled: {reason}", file=sys.stderr)
        return found
    return found + cuda_variants_of([one for one in chosen if one.name.startswith(PREFIX)])


def _with_progress(variants: Sequence[Variant], targets: Sequence[str]) -> list[Built]:
    pairs = sum(applies(variant, target) for variant in variants for target in targets)
    with progress(pairs) as told:
        return build(variants, targets, lambda b: told(f"{b.target} {b.variant.kernel}", 1))


def facts_table(found: Sequence[Built]) -> Table:
    """The worst of each kernel's variants on each target."""
    headings = [heading.replace("_", "\n") for heading in ("variants", *CEILINGS, *FLOORS)]
    title = "static facts, the worst of each kernel's variants"
    table = plain_table(title, ("kernel", "target"), headings)
    groups: dict[tuple[str, str], list[Built]] = {}
    for built in found:
        groups.setdefault((built.variant.kernel, built.target), []).append(built)
    before = ""
    for (kernel, target), group in sorted(groups.items()):
        facts = [built.facts for built in group if not built.error]
        worst = [_worst(facts, fact) for fact in (*CEILINGS, *FLOORS)]
        table.add_row(kernel if kernel != before else "", target, str(len(group)), *worst)
        before = kernel
    return table


def _worst(facts: Sequence[dict[str, int]], fact: str) -> str:
    values = [row[fact] for row in facts if fact in row]
    if not values:
        return "-"
    return str(max(values) if fact in CEILINGS else min(values))


def _print_verdict(
    screen: Console,
    recorded: ceilings.Ceilings,
    found: Sequence[Built],
    compilers: dict[str, str],
    wrong: Sequence[Breach],
) -> None:
    for target, versions in compilers.items():
        made = recorded.compilers.get(target, "nothing")
        if made != versions:
            screen.print(
                f"{target}: compiled with {versions}, but ceilings were recorded with {made}: "
                "only rules are judged",
                highlight=False,
            )
    if wrong:
        screen.print(breach_table(wrong))
    targets = {built.target for built in found}
    count = f"{len(found)} compiled kernels on {len(targets)} targets"
    verdict = f"{len(wrong)} breaches" if wrong else "all rules and ceilings kept"
    screen.print(f"{verdict}, {count}", style="bold", highlight=False)
    if better := ceilings.improvements(recorded, found):
        screen.print(f"{better} numbers are better than recorded: --update tightens them")


def breach_table(wrong: Sequence[Breach]) -> Table:
    """Table of recorded or allowed numbers beside the ones found."""
    table = plain_table("breaches", ("kernel", "target", "fact"), ("before", "after"))
    table.add_column("why", overflow="fold")
    for one in wrong:
        before = "" if one.before is None else str(one.before)
        after = "" if one.after is None else str(one.after)
        table.add_row(one.variant, one.target, one.fact, before, after, one.why)
    return table


def _update(
    screen: Console,
    recorded: ceilings.Ceilings,
    found: Sequence[Built],
    compilers: dict[str, str],
    whole: bool,
    file: Path,
) -> int:
    """Record what was found, unless a rule is broken: rules are not for updating."""
    broken = ceilings.breaches(ceilings.Ceilings({}, {}), found, compilers, whole=False)
    if broken:
        screen.print(breach_table(broken))
        screen.print("nothing was recorded: a rule is broken", style="bold")
        return EXIT_BROKEN
    changed = ceilings.breaches(recorded, found, compilers, whole)
    try:
        ceilings.save(ceilings.updated(recorded, found, compilers, whole), file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror} [--update]") from error
    if changed:
        screen.print(breach_table(changed))
    screen.print(f"{len(found)} lines recorded in {file.name}", style="bold", highlight=False)
    return EXIT_KEPT


def _as_json(found: Sequence[Built], compilers: dict[str, str]) -> str:
    rows = [
        {
            "kernel": built.variant.kernel,
            "variant": built.variant.name,
            "operations": sorted(built.variant.operations),
            "target": built.target,
            "warps": built.variant.warps,
            "error": built.error,
            "facts": built.facts,
        }
        for built in found
    ]
    document = {"schema": SCHEMA, "compilers": compilers, "facts": MEANING, "kernels": rows}
    return json.dumps(document, indent=1)
