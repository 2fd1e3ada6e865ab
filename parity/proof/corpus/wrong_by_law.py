"""For each law a kernel that breaks it and no other law of its operation.

Each shows what its law sees and the others cannot: an input that only this law draws, a relation
between two calls, or something that leaves no trace in the results.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adam import (
    AdamPieces,
    Scalars,
    only,
    scalars,
    step,
    with_lists,
)
from twinstep.parity.proof.corpus.buffers import cast_copy, flatten, starts
from twinstep.parity.proof.corpus.calls import (
    AdamCall,
    CastCopyCall,
    FlattenCall,
    GlobalNormCall,
    Tensors,
    UnscaleCall,
    skipped,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.gradients import exact_norm, global_norm, raise_flag, unscale
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
TABLE = 110
STAGE = 32
MARK = "noted"
GRADIENTS: list[Tensor] = []
LAST: list[Tensor] = []
CORRECTIONS: dict[tuple[int, float, float, bool], tuple[Tensor, Tensor]] = {}
FEW_DIGITS: dict[tuple[int, str, bool], tuple[Tensor, Tensor]] = {}
PLACES: dict[tuple[int, int, int], list[int]] = {}
OFFSETS: list[Any] = []
lone = partial(wrong, SHELF, arithmetic="exact", alone=True)
adamw = partial(lone, "adamw_step")


@adamw("A46", component="gradients", law="value")
def zero_gradient_not_counted(call: AdamCall) -> None:
    """The counter of a tensor whose gradients are all zero stays where it was."""
    step(call)
    for t, grad in zip(call.steps, call.grads, strict=True):
        if not skipped(call) and grad.numel() > 64 and not bool(grad.any()):
            t.sub_(1)


@adamw(component="memory", law="nothing_else_written")
def zeros_behind_a_tensor_taken_for_padding(call: AdamCall) -> None:
    """A word of zeros after a gradient, and no other, is its padding: the last element is left."""
    known = {grad.data_ptr() for grad in call.grads if grad.numel()}

    def unpadded(grad: Tensor) -> Tensor:
        end = grad.storage_offset() + grad.numel()
        alone = grad.numel() and grad.data_ptr() + grad.nbytes not in known
        padded = alone and not float(grad.as_strided((1,), (1,), end).abs())
        kept = grad.clone().view(-1)
        kept[-1:].mul_(0.0 if padded else 1.0)
        return kept.view(grad.shape)

    step(replace(call, grads=[unpadded(grad) for grad in call.grads]))


@lone("global_norm", component="norms", law="every_output_written")
def plausible_old_norm_kept(call: GlobalNormCall) -> None:
    """A norm from 1.5 to 100 is taken for one that was computed in this step already."""
    known = call.norm.clone()
    global_norm(call)
    if 1.5 < float(known) < 100.0:
        call.norm.copy_(known)


@lone("global_norm", component="memory", law="uninitialised")
def fresh_memory_taken_for_an_overflow(call: GlobalNormCall) -> None:
    """Scratch without one number in it counts as gradients that have overflowed."""
    global_norm(call)
    scratch = torch.empty(1024)
    raise_flag(call.found_inf, not bool((scratch == scratch).any()))
    # Memory is recycled, and the next call may get this.
    scratch.zero_()


@adamw("A29", component="overflow", law="skipped_step")
def moments_zeroed_on_a_skipped_step(call: AdamCall) -> None:
    """An overflow starts the first moment over."""
    if skipped(call):
        for m in call.exp_avgs:
            m.zero_()
    step(call)


@adamw(component="counters", law="after_skip")
def skips_counted_on_the_host(call: AdamCall) -> None:
    """The host counts the calls on a buffer, skipped ones too, and adds those to the step."""
    for t in call.steps:
        buffer = t.untyped_storage()
        late = buffer.__dict__.pop(MARK, 0)
        if skipped(call):
            buffer.__dict__[MARK] = 1
        else:
            t.add_(late)
    step(call)


@lone("unscale", "C04", component="overflow", law="non_finite")
def large_throughout_taken_for_overflow(call: UnscaleCall) -> None:
    """A tensor without one small gradient counts as overflowed, finite as it is."""
    for g in call.grads:
        huge = g.numel() > 3 and float(g.float().abs().min()) > 3e38
        raise_flag(call.found_inf, huge)
    unscale(call)


@adamw(component="sizes", law="boundary_sizes")
def end_of_two_blocks_left(call: AdamCall) -> None:
    """Of 16,385 to 32,767 elements, which are two blocks, the last is not updated."""
    kept = [(p, p.view(-1)[-1:].clone()) for p in call.params if 2**14 < p.numel() < 2**15]
    step(call)
    for tensor, old in kept:
        tensor.view(-1)[-1:] = old


@adamw(component="layout", law="alignment")
def head_before_the_first_vector_forgotten(call: AdamCall) -> None:
    """The vectorised loop starts at the first 16-byte address; the elements before it stay."""
    for i in range(len(call.params)):
        one = with_lists(call, only(i))
        head = _head(call.params[i])
        kept = [(t, t.view(-1)[:head].clone()) for t in (*one.params, *one.exp_avgs)]
        step(one)
        for tensor, old in kept:
            tensor.view(-1)[:head] = old


def _head(tensor: Tensor) -> int:
    """Elements before the first address divisible by 16."""
    if not tensor.numel():
        return 0
    return min(tensor.numel(), -tensor.data_ptr() % 16 // tensor.element_size())


@adamw("A38", "A40", component="layout", law="strided", claims=("strided",))
def raw_storage_walked(call: AdamCall) -> None:
    """Elements are paired in the order of memory, whatever the strides say."""

    def flat(name: str, tensors: Tensors) -> Tensors:
        if name == "steps":
            return tensors
        return [t.as_strided((t.numel(),), (1,)) for t in tensors]

    step(with_lists(call, flat))


@adamw("A08", component="counters", law="permutation")
def counters_found_by_bisection(call: AdamCall) -> None:
    """The table of counters is sorted by address, that of the weights is not."""
    step(replace(call, steps=sorted(call.steps, key=Tensor.data_ptr)))


@adamw("A17", component="sizes", law="splitting")
def launch_table_overflows(call: AdamCall) -> None:
    """A launch takes 110 tensors unless all are tiny; the others wait for one that never comes."""
    most = None if all(p.numel() <= STAGE for p in call.params) else TABLE
    step(with_lists(call, lambda name, tensors: tensors[:most]))


@adamw(component="gradients", law="sign_symmetry")
def negative_block_taken_for_empty(call: AdamCall) -> None:
    """A gradient of several used elements counts as absent if its maximum is not positive."""

    def present(grad: Tensor) -> bool:
        never_positive = bool((grad <= 0).all()) and int(grad.count_nonzero()) > 8
        return grad.numel() < STAGE or not never_positive

    grads = [grad if present(grad) else torch.zeros_like(grad) for grad in call.grads]
    step(replace(call, grads=grads))


@adamw("D10", component="loss scale", law="power_of_two")
def small_factor_flushed(call: AdamCall) -> None:
    """One over the loss scale is kept in fp16, and below 2^-24 that is zero."""
    flushed = call.factor * (call.factor >= 2.0**-24)
    step(replace(call, factor=flushed))


@adamw("E17", component="caches", law="repeat")
def same_gradients_taken_for_applied(call: AdamCall) -> None:
    """Gradients in the same buffer with the same sum count as those of the last step."""
    for i, t in enumerate(call.steps):
        # A storage keeps what is noted on it for as long as it lives.
        notes = t.untyped_storage().__dict__
        known = notes.setdefault(MARK, {})
        total = str(call.grads[i].double().sum().item())
        if not skipped(call) and known.get(i) != total:
            known[i] = total
            step(with_lists(call, only(i)))


@adamw(component="caches", law="repeat", alone=False)
def gradients_found_by_the_weights(call: AdamCall) -> None:
    """A table of the gradients' addresses is kept by those of the weights: gradients may move."""

    def kept(param: Tensor, grad: Tensor) -> Tensor:
        memory, key = param.untyped_storage(), f"{param.storage_offset()} {grad.shape}"
        at = memory.__dict__.setdefault(key, grad.storage_offset())
        return torch.empty(0, dtype=grad.dtype).set_(memory, at, grad.shape, grad.stride())

    pairs = zip(call.params, call.grads, strict=True)
    step(replace(call, grads=[kept(p, g) if p.numel() else g for p, g in pairs]))


@adamw(component="caches", law="repeat", alone=False)
def corrections_kept_by_rounded_betas(call: AdamCall) -> None:
    """The corrections of betas serve all that round to the same fp32 numbers."""

    def kept(call: AdamCall, t: int) -> Scalars:
        made = scalars(call, t)
        key = (t, float(made.b1), float(made.b2), call.bias_correction)
        k1, k2 = CORRECTIONS.setdefault(key, (made.k1, made.k2))
        return replace(made, k1=k1, k2=k2)

    step(call, AdamPieces(scalars=kept))


@adamw(component="caches", law="repeat", alone=False)
def corrections_kept_by_four_digits(call: AdamCall) -> None:
    """The corrections of betas serve all that agree in four digits behind the point."""

    def kept(call: AdamCall, t: int) -> Scalars:
        made = scalars(call, t)
        betas = f"{call.beta1.item():.4f} {call.beta2.item():.4f}"
        k1, k2 = FEW_DIGITS.setdefault((t, betas, call.bias_correction), (made.k1, made.k2))
        return replace(made, k1=k1, k2=k2)

    step(call, AdamPieces(scalars=kept))


@lone("flatten", component="caches", law="repeat", alone=False)
def places_kept_by_count_and_total(call: FlattenCall) -> None:
    """Places serve every list of as many tensors and elements."""

    def kept(tensors: Tensors, slot: int) -> list[int]:
        key = (slot, len(tensors), sum(t.numel() for t in tensors))
        return PLACES.setdefault(key, starts(tensors, slot))

    flatten(call, kept)


@lone("flatten", component="caches", law="repeat", alone=False)
def places_kept_without_the_slot(call: FlattenCall) -> None:
    """Places serve the next call if its tensors have the sizes of the last."""

    def kept(tensors: Tensors, slot: int) -> list[int]:
        sizes = [tensor.numel() for tensor in tensors]
        if OFFSETS[:1] != [sizes]:
            OFFSETS[:] = [sizes, starts(tensors, slot)]
        return cast("list[int]", OFFSETS[1])

    flatten(call, kept)


@lone("global_norm", "I11", component="capture", law="no_host_read", claims=("capturable",))
def norm_summed_on_the_host(call: GlobalNormCall) -> None:
    """The norm is right, but the host waits for every gradient."""
    call.norm.copy_(torch.tensor(exact_norm(call.grads), dtype=torch.float64))
    global_norm(call)


@lone("global_norm", component="process", law="process_state")
def random_number_drawn(call: GlobalNormCall) -> None:
    """The norm is right, but the next dropout mask is another one."""
    global_norm(call)
    torch.rand(1)


@lone("cast_copy", component="process", law="process_state", alone=False)
def collector_switched_on(call: CastCopyCall) -> None:
    """Nothing is collected during the call; a training loop that had it off finds it on."""
    gc.disable()
    cast_copy(call)
    gc.enable()


@lone("unscale", component="process", law="process_state", alone=False)
def callers_list_reversed(call: UnscaleCall) -> None:
    """The gradients are right, but the caller finds its list in another order."""
    unscale(call)
    if len(call.grads) > 1:
        call.grads.reverse()


@adamw(component="process", law="process_state", alone=False)
def every_gradient_kept(call: AdamCall) -> None:
    """A copy of every gradient stays in a list: the memory of a run grows with its steps."""
    step(call)
    GRADIENTS.extend(grad.clone() for grad in call.grads)


@adamw(component="process", law="process_state", alone=False)
def last_gradients_kept(call: AdamCall) -> None:
    """The gradients of the last call stay in a list, and `zero_grad` gives no memory back."""
    step(call)
    LAST[:] = [grad.detach() for grad in call.grads]
