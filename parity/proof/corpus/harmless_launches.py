"""Compiled kernels that are right, launched in the ways that users launch them."""

from __future__ import annotations

from functools import partial

from twinstep.parity.proof.corpus import launch_kernels as kernels
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    CastCopyCall,
    GlobalNormCall,
    LambCall,
    SgdCall,
)
from twinstep.parity.proof.corpus.entry import Variant
from twinstep.parity.proof.corpus.lamb_kernels import lamb_in_two_sweeps
from twinstep.parity.proof.corpus.shelf import harmless

SHELF: list[Variant] = []
MASTERS = ("bf16", "fp16", "fp32")
launched = partial(harmless, SHELF, engines=("cuda", "replay"))


@launched("accumulate", arithmetic="exact")
def triton_table_of_addresses(call: AccumulateCall) -> None:
    """One grid of blocks and tensors; the addresses of the list lie in a table."""
    kernels.accumulate_by_table(call)


@launched("accumulate", arithmetic="exact")
def triton_folded_grid(call: AccumulateCall) -> None:
    """One row of two-dimensional blocks, folded at 65,535."""
    kernels.accumulate_folded(call)


@launched("accumulate", arithmetic="exact", dtypes=("fp16",))
def triton_folded_at_2048(call: AccumulateCall) -> None:
    """The same row, folded so that a place behind 2^24 begins at a line's end."""
    kernels.accumulate_folded(call, widest=2048)


@launched("accumulate", arithmetic="exact")
def triton_rows_and_columns(call: AccumulateCall) -> None:
    """Rows of 1,024, found by an integer division."""
    kernels.accumulate_by_rows(call, narrow=False)


@launched("accumulate", arithmetic="exact")
def triton_a_program_for_each_row(call: AccumulateCall) -> None:
    """Rows of matrices in blocks of 128 columns, one behind the other."""
    kernels.accumulate_matrices(call, whole=True)


@launched("accumulate", arithmetic="exact")
def triton_tuned_and_restored(call: AccumulateCall) -> None:
    """Autotuned; the tuner restores what its trials write."""
    kernels.accumulate_tuned(call, restores=True)


@launched("accumulate", arithmetic="exact")
def triton_where_there_is_a_gpu(call: AccumulateCall) -> None:
    """Torch without a GPU; with one a kernel, of fewer warps where many do not fit."""
    kernels.accumulate_on_a_gpu(call)


@launched("cast_copy", arithmetic="exact", dtypes=MASTERS)
def triton_striding_programs(call: CastCopyCall) -> None:
    """Eight programs walk over the tensor."""
    kernels.cast_striding(call)


@launched("cast_copy", arithmetic="exact", dtypes=MASTERS)
def triton_backwards_and_forwards(call: CastCopyCall) -> None:
    """A sweep from the last block to the first, and one on its results in the usual order."""
    kernels.cast_negated_twice(call)


@launched("sgd_step", dtypes=MASTERS)
def triton_controls_on_the_device(call: SgdCall) -> None:
    """The device reads every control; products and sums by fma."""
    kernels.sgd_on_the_device(call)


@launched("lamb_step", dtypes=("bf16",))
def triton_lamb_in_two_sweeps(call: LambCall) -> None:
    """Two launches for each tensor; sums in float64, one place for each program."""
    lamb_in_two_sweeps(call)


@launched("global_norm", dtypes=MASTERS)
def triton_partial_sums_kept(call: GlobalNormCall) -> None:
    """Partial sums in float64, in scratch memory that is kept from call to call."""
    kernels.norm_by_parts(call)


@launched("global_norm", dtypes=("fp16",))
def triton_norm_on_two_streams(call: GlobalNormCall) -> None:
    """Every other partial sum on a stream of its own, that waits and is waited for."""
    kernels.norm_on_two_streams(call)
