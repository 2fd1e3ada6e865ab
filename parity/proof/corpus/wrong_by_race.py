"""Triton kernels that leave the right values in step, and race: no other law sees it."""

from __future__ import annotations

from functools import partial

from twinstep.parity.proof.corpus import racing_kernels as kernels
from twinstep.parity.proof.corpus.calls import AccumulateCall, GlobalNormCall, SgdCall, UnscaleCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.launch_kernels import norm_on_two_streams
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
racing = partial(wrong, SHELF, law="race_free", engines=("replay",), alone=True)
locked = partial(wrong, SHELF, law="race_free", engines=("replay",))


@racing("sgd_step", component="counters")
def counter_advanced_while_others_read_it(call: SgdCall) -> None:
    """The first program stores the new step count; one that starts later takes it for the old."""
    kernels.sgd(call, advances="first")


@locked("sgd_step", component="counters")
def counter_advanced_behind_a_relaxed_ticket(call: SgdCall) -> None:
    """The last program to draw a ticket stores the new step count, which it has read itself."""
    kernels.sgd(call, advances="relaxed")


@racing("unscale", "C23", component="overflow")
def flag_cleared_while_others_raise_it(call: UnscaleCall) -> None:
    """The first program clears the overflow flag that the others may have raised already."""
    kernels.unscale(call, counts=False)


@racing("global_norm", "B21", component="norms")
def partial_sums_read_without_acquiring_them(call: GlobalNormCall) -> None:
    """Programs count themselves by a relaxed atomic, and the last reads what all have stored."""
    kernels.global_norm(call, "relaxed")


@racing("global_norm", "B22", component="norms")
def partial_sums_read_without_a_second_fence(call: GlobalNormCall) -> None:
    """A fence before a relaxed ticket orders the stores; none behind it orders the loads."""
    kernels.global_norm(call, "relaxed", fences=1)


@locked("global_norm", component="norms")
def lock_given_back_before_all_have_stored(call: GlobalNormCall) -> None:
    """One thread gives the lock back while other threads of its program still store."""
    kernels.global_norm_by_lock(call, "gpu", barrier=False)


@locked("global_norm", component="norms")
def lock_of_one_block(call: GlobalNormCall) -> None:
    """Programs meet at a lock whose scope is a program."""
    kernels.global_norm_by_lock(call, "cta", barrier=True)


@locked("accumulate", component="accumulation", arithmetic="exact")
def tickets_reset_while_others_still_ask(call: AccumulateCall) -> None:
    """The last program sets the counter of tiles back when it ends, not when all have."""
    kernels.accumulate_by_tickets(call, resets=True)


@racing("global_norm", component="norms", dtypes=("fp16",))
def partial_sums_added_by_float_atomics(call: GlobalNormCall) -> None:
    """Programs add their sums of squares to one float, in whichever order they end."""
    kernels.global_norm_by_float_atomics(call, most=1 << 16)


@locked("global_norm", component="norms", dtypes=("fp16",))
def partial_sums_added_by_swaps(call: GlobalNormCall) -> None:
    """The same by a loop of compare-and-swap."""
    kernels.global_norm_by_float_atomics(call, most=1 << 16, swaps=True)


@racing("global_norm", component="norms", dtypes=("fp16",))
def root_of_a_total_that_others_add_to(call: GlobalNormCall) -> None:
    """Every program adds to one total, reads it `volatile`, and stores the norm."""
    kernels.global_norm_in_one_launch(call, "volatile")


@locked("global_norm", component="norms", dtypes=("fp16",))
def root_of_a_total_read_by_an_atomic(call: GlobalNormCall) -> None:
    """The same with an atomic that adds nothing for the read."""
    kernels.global_norm_in_one_launch(call, "atomic")


@racing("global_norm", component="norms", dtypes=("fp16",))
def partial_sums_of_a_stream_not_awaited(call: GlobalNormCall) -> None:
    """The root is taken on a stream that does not wait for those of the partial sums."""
    norm_on_two_streams(call, missing="the old one")


@locked("global_norm", component="norms", dtypes=("fp16",))
def gradients_read_on_a_stream_that_does_not_wait(call: GlobalNormCall) -> None:
    """A new stream begins before the stream that made the gradients is done."""
    norm_on_two_streams(call, missing="the new one")


@locked("global_norm", component="norms", dtypes=("fp16",))
def new_stream_left_current(call: GlobalNormCall) -> None:
    """Every wait is in place, but the caller goes on with a stream that it does not know."""
    norm_on_two_streams(call, missing="the way back")
