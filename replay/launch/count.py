"""Counters of a launch's record: instructions and accesses."""

from __future__ import annotations

from twinstep.replay.dtypes import Array
from twinstep.replay.launch.record import Launch, Traffic, class_of
from twinstep.replay.machine.lanes import Batch
from twinstep.replay.machine.program import Program


def count_instructions(launch: Launch, program: Program, runs: Array) -> None:
    """Add the instructions of blocks of code that so many threads ran each."""
    # Products of floats are BLAS's, and exact as far as 2^53.
    totals = runs @ program.census
    for opcode, count in zip(program.opcodes, totals.tolist(), strict=True):
        if count:
            launch.opcodes[opcode] += int(count)
            launch.classes[class_of(opcode)] += int(count)
    for place in program.noted:
        threads = int(runs[place])
        for name, count in program.charges[place].items() if threads else ():
            launch.approximations[name] += threads * count
            launch.approximated_at[name] = program.charged_at[name]
        launch.barriers += threads if program.blocks[place].waits == "block" else 0


def count_accesses(launch: Launch, batch: Batch) -> None:
    """Add the accesses of a batch, by tensor and width."""
    for (site, index), (threads, moved) in batch.traffic.items():
        traffic = launch.buffers.setdefault(batch.regions.region(index).label, Traffic())
        launch.widths[site.kind, site.bytes] += threads
        if site.kind != "write":
            traffic.read += moved
        if site.kind != "read":
            traffic.written += moved
        traffic.reads += threads if site.kind == "read" else 0
        traffic.writes += threads if site.kind == "write" else 0
        traffic.atomics += threads if site.kind == "atomic" else 0
    counts = batch.counts
    launch.shared_read += counts["shared read"] + counts["shared atomic"]
    launch.shared_written += counts["shared write"] + counts["shared atomic"]
