"""Triton kernels that reach memory they should not, and mostly leave the right values there."""

from __future__ import annotations

from functools import partial

from twinstep.parity.proof.corpus import memory_kernels as kernels
from twinstep.parity.proof.corpus.calls import CastCopyCall, GlobalNormCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
unwritten = partial(wrong, SHELF, law="uninitialised", engines=("replay",))


@unwritten("global_norm", component="norms")
def scratch_behind_the_partial_sums_added(call: GlobalNormCall) -> None:
    """All of the scratch is added up, of which the programs have filled the beginning."""
    kernels.global_norm(call, zeroed=False)


@unwritten("cast_copy", component="copies")
def nan_of_the_old_copy_kept(call: CastCopyCall) -> None:
    """A copy that is NaN already stays so, whatever the weight is now."""
    kernels.cast_copy(call, keeps=True)


@wrong(SHELF, "cast_copy", component="copies", law="nothing_else_written", engines=("replay",))
def next_copy_reached_from_this_one(call: CastCopyCall) -> None:
    """Each launch clears the first element of the next copy, which the next launch writes."""
    kernels.cast_copy(call, clears=True)
