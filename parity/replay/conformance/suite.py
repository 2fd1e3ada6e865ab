"""All probes of the suite, thin or thorough, and which forms none of them shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import parity.replay.translate  # noqa: F401 (importing it registers the pure instructions)
from parity.replay.conformance import atomics, memory, threads
from parity.replay.conformance.operands import exhaustive, sampled
from parity.replay.conformance.probe import Probe, batch
from parity.replay.conformance.statements import Statement, operand_types, statement
from parity.replay.forms import form_of, supported
from parity.replay.operations import RESOLVERS

FEW, MANY = 64, 2000
TOGETHER = 32
"""Forms per probe: enough to share one kernel's overhead, few enough to name one soon."""

UNSHOWN = frozenset(
    ("bra", "brx", "ret", "exit", "trap", "brkpt", "call", "createpolicy", "discard", "membar")
    + ("fence", "prefetch", "prefetchu", "griddepcontrol", "nanosleep", "setmaxnreg", "pmevent")
    + ("applypriority",)
)
"""Families without a value of their own: control flow is in every test of threads, and the rest
does nothing. (`st.param` passes arguments to a call, and known callees return nothing.)"""


def pure_forms(wanted: str = "") -> tuple[str, ...]:
    """Supported forms that only compute, whose opcode starts with `wanted`."""
    return tuple(
        form for form in supported() if form.split(".")[0] in RESOLVERS and _asked(form, wanted)
    )


def _asked(form: str, wanted: str) -> bool:
    return not wanted or form == wanted or form.startswith(f"{wanted}.")


def pure(forms: Sequence[str], count: int) -> Iterator[Probe]:
    """Probes over edges and random bits."""
    for sources, statements in _grouped(forms).items():
        inputs = sampled(sources, ".".join(sources), count)
        for start in range(0, len(statements), TOGETHER):
            yield batch(statements[start : start + TOGETHER], inputs)


def thorough(forms: Sequence[str]) -> Iterator[Probe]:
    """Probes over all 65,536 patterns of 16-bit sources, MANY operands elsewhere."""
    for sources, statements in _grouped(forms).items():
        inputs = exhaustive(sources) or sampled(sources, ".".join(sources), MANY)
        for one in statements:
            yield batch([one], inputs)


def programs() -> tuple[Probe, ...]:
    """Probes that are written form by form: memory, atomics, threads."""
    return (*memory.probes(), *atomics.probes(), *threads.probes())


def _grouped(forms: Sequence[str]) -> dict[tuple[str, ...], list[Statement]]:
    groups: dict[tuple[str, ...], list[Statement]] = {}
    for form in forms:
        groups.setdefault(operand_types(form)[0], []).append(statement(form))
    return groups


def probes(wanted: str = "", count: int = FEW) -> Iterator[Probe]:
    """Every probe that shows a form whose opcode starts with `wanted`."""
    yield from pure(pure_forms(wanted), count)
    for probe in programs():
        if any(_asked(form, wanted) for form in probe.forms):
            yield probe


def missing() -> list[str]:
    """Supported forms that no probe shows."""
    shown: set[str] = set(pure_forms())
    for probe in programs():
        shown |= {form_of(form) or form for form in probe.forms}
    rest = (form for form in supported() if form not in shown)
    return [f for f in rest if f.split(".")[0] not in UNSHOWN and not f.startswith("st.param.")]
