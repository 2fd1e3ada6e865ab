"""Everything about kernels that can be counted, the same on any machine.

On replay, per call: launches, bytes, accesses, instructions, barriers. Of kernels in C++, per call:
instructions (`stepping`). Of the machine code for one GPU: registers, spills, instructions of the
main loop, widths of accesses. On the host: bytecodes, operators, reads, fresh memory
(`host_counts`). Kernels of users are counted as ours are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from twinstep.benchmarks.beside.rows import dtype_of, engines_of
from twinstep.benchmarks.beside.subject import Shape, arguments_of
from twinstep.benchmarks.regressions import host_counts
from twinstep.benchmarks.regressions.host_counts import Facts
from twinstep.parity.operations.operation import LAYOUTS
from twinstep.parity.proof.gates.compile.artefacts import CEILINGS, FLOORS
from twinstep.parity.proof.gates.compile.build import build
from twinstep.parity.proof.gates.compile.variants import Variant, recorded, variants_of
from twinstep.parity.proof.gates.compile.worker import facts_of as compiled_facts
from twinstep.parity.registry.engines import engine_named, uses_triton
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.report.traffic_count import counted

PARAMETERS = 1 << 16
TARGET = "sm_90"
# Of the machine code; its size moves with alignment and is no cost by itself.
STATIC = tuple(fact for fact in (*CEILINGS, *FLOORS) if fact != "code")


@dataclass
class Counted:
    """Counts of one thing.

    Attributes:
        place: file and line, for annotations; empty for whole classes.
        facts: by name.
        missing: why some could not be counted here.
    """

    place: str = ""
    facts: Facts = field(default_factory=dict)
    missing: str = ""


def counts(
    kernels: Sequence[Kernel], classes: bool, in_process: bool
) -> Iterator[tuple[str, Counted]]:
    """Counts by label, as they are made.

    Args:
        kernels: registered.
        classes: whether to count our optimizer classes, too.
        in_process: compile here; a kernel of a user's file is known to no other process.
    """
    known: dict[object, None] = {}
    chosen = []
    for kernel in kernels:
        key = (kernel.operation.name, kernel.function)
        if kernel.operation.lists and key not in known:
            known[key] = None
            chosen.append(kernel)
    for kernel in chosen:
        yield from of_kernel(kernel)
    if classes:
        for name, facts in host_counts.of_classes():
            yield f"class {name}", Counted(facts=facts)
    yield from machine_code(chosen, in_process)


def of_kernel(kernel: Kernel) -> Iterator[tuple[str, Counted]]:
    """Counts of its calls in one dtype combination: on replay if it runs there, and on the host."""
    dtype, engines = dtype_of(kernel), engines_of(kernel)
    if "replay" in engines and not engine_named("replay").missing:
        for layout in kernel.layouts:
            label = f"{kernel.name} {dtype} {layout}"
            try:
                yield label, Counted(kernel.place, replayed(kernel, dtype, layout))
            except Exception as error:  # whatever a compiler or a kernel raises
                yield label, Counted(kernel.place, {}, sentence(error))
    elif "cpu" in engines:
        yield from stepped(kernel, dtype)
    label = f"{kernel.name} {dtype} host"
    try:
        facts = host_counts.of_kernel(kernel, dtype, on_cpu="replay" not in engines)
        yield label, Counted(kernel.place, facts)
    except Exception as error:
        yield label, Counted(kernel.place, {}, sentence(error))


def stepped(kernel: Kernel, dtype: str) -> Iterator[tuple[str, Counted]]:
    """Instructions of its calls in C++ of its own, where it has any."""
    # The gate measures older checkouts with this file; they may lack what builds it.
    from twinstep.benchmarks.regressions import stepping

    for layout in kernel.layouts:
        found = Counted(kernel.place)
        try:
            found.facts = stepping.of_kernel(kernel, dtype, layout)
        except Exception as error:
            found.missing = sentence(error)
        if found.facts or found.missing:
            yield f"{kernel.name} {dtype} {layout}", found


def replayed(kernel: Kernel, dtype: str, layout: str) -> Facts:
    """Counts of one call on replay, all launches together."""
    launches = counted(kernel, dtype, layout, PARAMETERS)
    return {
        "launches": len(launches),
        "bytes read": sum(row[0] for one in launches for row in one.buffers.values()),
        "bytes written": sum(row[1] for one in launches for row in one.buffers.values()),
        "memory accesses": sum(sum(one.widths.values()) for one in launches),
        "thread instructions": sum(sum(one.classes.values()) for one in launches),
        "barriers passed": sum(one.barriers for one in launches),
        "bytes of shared memory moved": sum(sum(one.shared) for one in launches),
    }


def machine_code(kernels: Sequence[Kernel], in_process: bool) -> Iterator[tuple[str, Counted]]:
    """Static facts of what the kernels launch, compiled for one GPU."""
    merged: dict[str, Variant] = {}
    for kernel in kernels:
        if "replay" in engines_of(kernel) and uses_triton(kernel.function):
            try:
                merged |= usual(kernel) if in_process else of_ours(kernel)
            except Exception as error:
                yield f"{kernel.name} {TARGET}", Counted(kernel.place, {}, sentence(error))
    variants = list(merged.values())
    if in_process:
        for variant in variants:
            try:
                facts = static(compiled_facts(variant, TARGET))
                yield named(variant.name), Counted(facts=facts)
            except Exception as error:
                yield named(variant.name), Counted(missing=sentence(error))
        return
    for built in build(variants, (TARGET,), lambda _: None):
        facts = static(built.facts)
        yield named(built.variant.name), Counted(facts=facts, missing=built.error)


def of_ours(kernel: Kernel) -> dict[str, Variant]:
    """Every variant of a kernel of ours, by name."""
    found = variants_of([replace(kernel, dtypes=(dtype_of(kernel),))])
    return {variant.name: variant for variant in found}


def usual(kernel: Kernel) -> dict[str, Variant]:
    """Variants that a user's kernel launches for tensors of a usual size."""
    with recorded() as found:
        for layout in kernel.layouts:
            shape = Shape(1 if layout == LAYOUTS[0] else len(LAYOUTS), PARAMETERS)
            given = arguments_of(kernel.operation, dtype_of(kernel), shape, torch.device("cpu"))
            given.call(kernel)
    return found


def named(variant: str) -> str:
    """Label of a compiled variant."""
    return f"{variant} {TARGET}"


def static(facts: dict[str, int]) -> Facts:
    """The facts that a gate holds, under names that can be read."""
    return {f"machine code, {name}": facts[name] for name in STATIC if name in facts}


def sentence(error: Exception) -> str:
    """Type and first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
