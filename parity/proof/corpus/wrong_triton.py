"""Triton kernels that are wrong: masks, grids, offsets, stores, tests, and false claims."""

from __future__ import annotations

from twinstep.parity.proof.corpus import triton_kernels as kernels
from twinstep.parity.proof.corpus.calls import AdamCall, CastCopyCall, UnscaleCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong
from twinstep.parity.proof.corpus.triton_kernels import AdamwLaunch, adamw

SHELF: list[Entry] = []
COMPONENT = "triton"
ENGINES = ("cuda", "replay")
ELSE = "nothing_else_written"
SIZES = "boundary_sizes"
NON_FINITE = "non_finite"


@wrong(SHELF, "adamw_step", "I04", component=COMPONENT, law=ELSE, engines=ENGINES)
def tail_not_masked(call: AdamCall) -> None:
    """Loads and stores of the last block reach past the end."""
    adamw(call, AdamwLaunch(mask=kernels.NONE))


@wrong(SHELF, "adamw_step", "I04", component=COMPONENT, law=ELSE, engines=ENGINES)
def stores_not_masked(call: AdamCall) -> None:
    """The mask is computed and given to the loads only."""
    adamw(call, AdamwLaunch(masked_store=False))


@wrong(SHELF, "adamw_step", "I04", component=COMPONENT, law=ELSE, engines=ENGINES)
def mask_one_too_many(call: AdamCall) -> None:
    """`at <= numel`: one element past the end is read and written."""
    adamw(call, AdamwLaunch(mask=kernels.ONE_MORE))


@wrong(SHELF, "adamw_step", component=COMPONENT, law=SIZES, engines=ENGINES)
def mask_one_too_few(call: AdamCall) -> None:
    """`at < numel - 1`: the last element is skipped."""
    adamw(call, AdamwLaunch(mask=kernels.ONE_LESS))


@wrong(SHELF, "adamw_step", component=COMPONENT, law=SIZES, engines=ENGINES)
def only_whole_blocks(call: AdamCall) -> None:
    """The mask ends at the last whole block."""
    adamw(call, AdamwLaunch(mask=kernels.WHOLE_BLOCKS))


@wrong(SHELF, "adamw_step", "A16", component=COMPONENT, law=SIZES, engines=ENGINES)
def grid_of_zero_blocks(call: AdamCall) -> None:
    """The grid is a quarter of what it should be, which is nothing for small tensors."""
    adamw(call, AdamwLaunch(grid_divisor=4))


@wrong(SHELF, "adamw_step", "A02", component=COMPONENT, law=SIZES, engines=ENGINES)
def rows_for_numel(call: AdamCall) -> None:
    """`n = p.shape[0]`, not `p.numel()`."""
    adamw(call, AdamwLaunch(rows_for_count=True))


@wrong(SHELF, "adamw_step", "A17", component=COMPONENT, law=SIZES, engines=ENGINES)
def empty_last_tensor_drops_the_launch(call: AdamCall) -> None:
    """An empty tensor at the end of the list, and nothing is launched."""
    if call.params and call.params[-1].numel():
        adamw(call)


@wrong(
    SHELF,
    "adamw_step",
    "I05",
    "A14",
    component=COMPONENT,
    law="large_index",
    engines=ENGINES,
    alone=True,
)
def offsets_in_int32(call: AdamCall) -> None:
    """`program_id * BLOCK` is a 32-bit product: it wraps past 2**31 elements."""
    adamw(call, AdamwLaunch(narrow_index=True))


@wrong(SHELF, "adamw_step", "A19", component=COMPONENT, engines=ENGINES)
def moments_stored_in_the_gradient_dtype(call: AdamCall) -> None:
    """Both moments are cast to the 16-bit dtype of the gradient before the store."""
    adamw(call, AdamwLaunch(narrow_moments=True))


@wrong(SHELF, "adamw_step", component=COMPONENT, engines=ENGINES)
def copy_stored_through_fp16(call: AdamCall) -> None:
    """The bf16 copy is cast to fp16 on the way."""
    adamw(call, AdamwLaunch(copy_via_fp16=True))


@wrong(SHELF, "adamw_step", component=COMPONENT, engines=ENGINES)
def triton_eps_inside_the_square_root(call: AdamCall) -> None:
    """sqrt(v/k2 + eps), compiled."""
    adamw(call, AdamwLaunch(eps_inside=True))


@wrong(SHELF, "adamw_step", component=COMPONENT, engines=ENGINES, arithmetic="exact")
def contraction_claimed_exact(call: AdamCall) -> None:
    """Claims to be exact, but products and sums are contracted to fma."""
    adamw(call, AdamwLaunch(fusion=True))


@wrong(SHELF, "adamw_step", "I07", component=COMPONENT, engines=ENGINES, arithmetic="exact")
def fast_division_claimed_exact(call: AdamCall) -> None:
    """Claims to be exact, but `/` compiles to an approximate instruction."""
    adamw(call, AdamwLaunch(ieee=False))


@wrong(
    SHELF,
    "unscale",
    "C04",
    component="overflow",
    law=NON_FINITE,
    engines=ENGINES,
    dtypes=("fp32",),
)
def triton_found_inf_by_the_sum(call: UnscaleCall) -> None:
    """A block that sums to inf raises found_inf, whatever its elements."""
    kernels.unscale(call, kernels.SUM)


@wrong(SHELF, "unscale", component="overflow", law=NON_FINITE, engines=ENGINES)
def triton_maximum_drops_nan(call: UnscaleCall) -> None:
    """The block maximum prefers numbers to NaN: NaN is not found."""
    kernels.unscale(call, kernels.MAXIMUM)


@wrong(SHELF, "unscale", "B20", component="memory", law=ELSE, engines=ENGINES)
def triton_maximum_not_masked(call: UnscaleCall) -> None:
    """The block maximum is taken over a load without mask: it reads what is not its own."""
    kernels.unscale(call, kernels.UNMASKED_MAXIMUM)


@wrong(SHELF, "cast_copy", "I04", component=COMPONENT, law=ELSE, engines=ENGINES)
def triton_cast_one_too_many(call: CastCopyCall) -> None:
    """`at <= numel`: one copy too many."""
    kernels.cast_copy(call, mask=kernels.ONE_MORE)


@wrong(SHELF, "cast_copy", component="copies", engines=ENGINES)
def triton_cast_truncates(call: CastCopyCall) -> None:
    """The upper half of the word is stored, without rounding."""
    kernels.cast_copy(call, truncate=True)
