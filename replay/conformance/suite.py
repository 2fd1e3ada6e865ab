"""All probes of the suite, thin or thorough, and which forms none of them shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from twinstep.replay.conformance import atomics, memory, threads
from twinstep.replay.conformance.operands import exhaustive, sampled
from twinstep.replay.conformance.probe import Probe, batch
from twinstep.replay.conformance.statements import Statement, operand_types, statement
from twinstep.replay.isa.forms import NO_EFFECT, form_of, pure_families, supported
from twinstep.replay.ptx.flow import BRANCHES

FEW, MANY = 64, 2000
TOGETHER = 32
"""Forms per probe: enough to share one kernel's overhead, few enough to name one soon."""

UNSHOWN = BRANCHES | {"trap", "brkpt", "call", "createpolicy", *NO_EFFECT}
"""Families without a value of their own: control flow is in every test of threads, and the rest
does nothing. (`st.param` passes arguments to a call, and known callees return nothing.)"""


def pure_forms(wanted: str = "") -> tuple[str, ...]:
    """Supported forms that only compute, whose opcode starts with `wanted`."""
    return tuple(
        form
        for form in supported()
        if form.split(".")[0] in pure_families() and _asked(form, wanted)
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
    """Probes over all 65,536 patterns of each 16-bit source, and MANY operands of every form."""
    for sources, statements in _grouped(forms).items():
        seed = ".".join(sources)
        inputs = sampled(sources, seed, MANY)
        if every := exhaustive(sources, seed):
            inputs = [np.concatenate(pair) for pair in zip(every, inputs, strict=True)]
        for one in statements:
            yield batch([one], inputs)


def needs(form: str) -> int:
    """Compute capability times ten of the oldest GPU that has a form, 90 at least."""
    parts = form.split(".")
    wide = "v8" in parts and parts[0] in ("ld", "st")
    wide |= "v4" in parts and parts[-1] in ("u64", "s64", "b64", "f64")
    mixed = parts[-2:-1] == ["f32"] and parts[-1] in ("f16", "bf16") and parts[0] != "cvt"
    mixed &= parts[0] not in ("set", "slct")
    newest = wide or mixed or parts[-1] == "f32x2" or (parts[0] == "redux" and parts[-1] == "f32")
    return 100 if newest else 90


def programs() -> tuple[Probe, ...]:
    """Probes that are written form by form: memory, atomics, threads."""
    return (*memory.probes(), *atomics.probes(), *threads.probes())


def _grouped(forms: Sequence[str]) -> dict[tuple[str, ...], list[Statement]]:
    groups: dict[tuple[str, ...], list[Statement]] = {}
    for form in forms:
        groups.setdefault(operand_types(form)[0], []).append(statement(form))
    return groups


def probes(wanted: str = "", long: bool = False, capability: int = 1000) -> Iterator[Probe]:
    """Every probe that shows a form whose opcode starts with `wanted`.

    Args:
        wanted: The beginning of an opcode, up to a dot; "" for all.
        long: All 65,536 patterns of each 16-bit source.
        capability: Of the GPU that runs it, times ten.
    """
    forms = [form for form in pure_forms(wanted) if needs(form) <= capability]
    yield from thorough(forms) if long else pure(forms, FEW)
    for probe in programs():
        if any(_asked(form, wanted) for form in probe.forms) and all(
            needs(form) <= capability for form in probe.forms
        ):
            yield probe


def missing() -> list[str]:
    """Supported forms that no probe shows."""
    shown: set[str] = set(pure_forms())
    for probe in programs():
        shown |= {form_of(form) or form for form in probe.forms}
    rest = (form for form in supported() if form not in shown)
    return [f for f in rest if f.split(".")[0] not in UNSHOWN and not f.startswith("st.param.")]
