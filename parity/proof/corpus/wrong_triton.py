"""Triton kernels that are wrong: masks, grids, offsets, stores, tests, and false claims."""

from __future__ import annotations

from functools import partial

from twinstep.parity.proof.corpus import launch_kernels
from twinstep.parity.proof.corpus import triton_kernels as kernels
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    AdamCall,
    CastCopyCall,
    LambCall,
    UnscaleCall,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.lamb_kernels import lamb_in_two_sweeps
from twinstep.parity.proof.corpus.shelf import Faults, plant, wrong
from twinstep.parity.proof.corpus.triton_kernels import AdamwLaunch, adamw

SHELF: list[Entry] = []
ELSE = "nothing_else_written"
SIZES = "boundary_sizes"
NON_FINITE = "non_finite"
fault = partial(wrong, SHELF, component="triton", engines=("cuda", "replay"))
adamw_fault = partial(fault, "adamw_step")


LAUNCH_ELSE: Faults[AdamwLaunch] = {
    "tail_not_masked": (
        "Loads and stores of the last block reach past the end.",
        AdamwLaunch(mask=kernels.NONE),
        "I04",
    ),
    "stores_not_masked": (
        "The mask is computed and given to the loads only.",
        AdamwLaunch(masked_store=False),
        "I04",
    ),
    "mask_one_too_many": (
        "`at <= numel`: one element past the end is read and written.",
        AdamwLaunch(mask=kernels.ONE_MORE),
        "I04",
    ),
}
plant(partial(adamw_fault, law=ELSE), adamw, LAUNCH_ELSE)


LAUNCH_SIZES: Faults[AdamwLaunch] = {
    "mask_one_too_few": (
        "`at < numel - 1`: the last element is skipped.",
        AdamwLaunch(mask=kernels.ONE_LESS),
    ),
    "only_whole_blocks": (
        "The mask ends at the last whole block.",
        AdamwLaunch(mask=kernels.WHOLE_BLOCKS),
    ),
    "grid_of_zero_blocks": (
        "The grid is a quarter of what it should be, which is nothing for small tensors.",
        AdamwLaunch(grid_divisor=4),
        "A16",
    ),
    "rows_for_numel": (
        "`n = p.shape[0]`, not `p.numel()`.",
        AdamwLaunch(rows_for_count=True),
        "A02",
    ),
}
plant(partial(adamw_fault, law=SIZES), adamw, LAUNCH_SIZES)


@adamw_fault("A17", law=SIZES)
def empty_last_tensor_drops_the_launch(call: AdamCall) -> None:
    """An empty tensor at the end of the list, and nothing is launched."""
    if call.params and call.params[-1].numel():
        adamw(call)


@adamw_fault("I05", "A14", law="large_index", alone=True)
def offsets_in_int32(call: AdamCall) -> None:
    """`program_id * BLOCK` is a 32-bit product: it wraps past 2**31 elements."""
    adamw(call, AdamwLaunch(narrow_index=True))


@fault("lamb_step", law="large_index")
def lamb_offsets_in_int32(call: LambCall) -> None:
    """Both sweeps of LAMB multiply program and block in 32 bits."""
    lamb_in_two_sweeps(call, narrow=True)


@fault("accumulate", law="large_index", arithmetic="exact", alone=True)
def row_found_in_fp32(call: AccumulateCall) -> None:
    """Row and column: `fp32(index) / 1024` is the next row for the last elements past 2**24."""
    launch_kernels.accumulate_by_rows(call, narrow=True)


@fault("accumulate", arithmetic="exact")
def rows_along_the_second_axis(call: AccumulateCall) -> None:
    """A row of programs for each row of a matrix: a GPU takes 65,535 of them."""
    launch_kernels.accumulate_along_y(call)


@fault("accumulate", law=SIZES, arithmetic="exact", dtypes=("fp16", "bf16", "fp32", "bf16-pure"))
def columns_past_128_left_out(call: AccumulateCall) -> None:
    """A program for each row of a matrix with several rows takes one block of 128 columns."""
    launch_kernels.accumulate_matrices(call, whole=False)


@adamw_fault(law="large_index")
def block_between_two_halves_lost(call: AdamCall) -> None:
    """More than 2**20 blocks go in two halves, and the block between them in neither."""
    adamw(call, AdamwLaunch(lost_block=True))


LAUNCH: Faults[AdamwLaunch] = {
    "moments_stored_in_the_gradient_dtype": (
        "Both moments are cast to the 16-bit dtype of the gradient before the store.",
        AdamwLaunch(narrow_moments=True),
        "A19",
    ),
    "copy_stored_through_fp16": (
        "The bf16 copy is cast to fp16 on the way.",
        AdamwLaunch(copy_via_fp16=True),
    ),
    "triton_eps_inside_the_square_root": (
        "sqrt(v/k2 + eps), compiled.",
        AdamwLaunch(eps_inside=True),
    ),
}
plant(adamw_fault, adamw, LAUNCH)


@adamw_fault(arithmetic="exact")
def contraction_claimed_exact(call: AdamCall) -> None:
    """Claims to be exact, but products and sums are contracted to fma."""
    adamw(call, AdamwLaunch(fusion=True))


@adamw_fault("I07", arithmetic="exact")
def fast_division_claimed_exact(call: AdamCall) -> None:
    """Claims to be exact, but `/` compiles to an approximate instruction."""
    adamw(call, AdamwLaunch(ieee=False))


@fault("unscale", "C04", component="overflow", law=NON_FINITE, dtypes=("fp32",))
def triton_found_inf_by_the_sum(call: UnscaleCall) -> None:
    """A block that sums to inf raises found_inf, whatever its elements."""
    kernels.unscale(call, kernels.SUM)


@fault("unscale", component="overflow", law=NON_FINITE)
def triton_maximum_drops_nan(call: UnscaleCall) -> None:
    """The block maximum prefers numbers to NaN: NaN is not found."""
    kernels.unscale(call, kernels.MAXIMUM)


@fault("unscale", "B20", component="memory", law=ELSE)
def triton_maximum_not_masked(call: UnscaleCall) -> None:
    """The block maximum is taken over a load without mask: it reads what is not its own."""
    kernels.unscale(call, kernels.UNMASKED_MAXIMUM)


@fault("cast_copy", "I04", law=ELSE)
def triton_cast_one_too_many(call: CastCopyCall) -> None:
    """`at <= numel`: one copy too many."""
    kernels.cast_copy(call, mask=kernels.ONE_MORE)


@fault("cast_copy", component="copies")
def triton_cast_truncates(call: CastCopyCall) -> None:
    """The upper half of the word is stored, without rounding."""
    kernels.cast_copy(call, truncate=True)


@fault("cast_copy")
def passes_rounded_down(call: CastCopyCall) -> None:
    """512 programs of 1,024 elements make as many passes as are full, and one at least."""
    launch_kernels.cast_striding(call, 512, 1024, whole_passes=True)


@fault("accumulate", component="accumulation")
def tuned_on_live_accumulators(call: AccumulateCall) -> None:
    """Autotuned without restoring: each trial adds the gradients once more."""
    launch_kernels.accumulate_tuned(call, restores=False)


caught = partial(fault, "accumulate", law="value", engines=("replay",), arithmetic="exact")


@caught()
def store_past_the_end_caught(call: AccumulateCall) -> None:
    """Loads and stores reach past the end; the launcher catches every error and uses torch."""
    launch_kernels.accumulate_or_in_torch(call, launch_kernels.unmasked_kernel)


@caught()
def error_of_the_compiler_caught(call: AccumulateCall) -> None:
    """The kernel does not compile; the launcher catches every error and uses torch."""
    launch_kernels.accumulate_or_in_torch(call, launch_kernels.uncompiled_kernel)
