"""Compiled kernels that are right: Triton in other shapes, and torch.compile where it can build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from twinstep.parity.proof.corpus import memory_kernels, racing_kernels
from twinstep.parity.proof.corpus import triton_kernels as kernels
from twinstep.parity.proof.corpus.adam import next_count, scalars
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    AdamCall,
    CastCopyCall,
    GlobalNormCall,
    SgdCall,
    TorchScaleCall,
    UnscaleCall,
    skipped,
)
from twinstep.parity.proof.corpus.entry import Variant
from twinstep.parity.proof.corpus.shelf import harmless
from twinstep.parity.proof.corpus.triton_kernels import AdamwLaunch, adamw

SHELF: list[Variant] = []
ENGINES = ("cuda", "replay")
MASTERS = ("bf16", "fp16", "fp32")


@harmless(SHELF, "adamw_step", arithmetic="exact", engines=ENGINES, dtypes=(*MASTERS, "bf16-pure"))
def triton_adamw(call: AdamCall) -> None:
    """One block of 256 per 256 elements."""
    adamw(call)


@harmless(SHELF, "adamw_step", arithmetic="exact", engines=ENGINES)
def triton_small_blocks(call: AdamCall) -> None:
    """Blocks of 64 in one warp."""
    adamw(call, AdamwLaunch(block=64, warps=1))


@harmless(SHELF, "adamw_step", arithmetic="exact", engines=ENGINES)
def triton_large_blocks(call: AdamCall) -> None:
    """Blocks of 2048 in eight warps."""
    adamw(call, AdamwLaunch(block=2048, warps=8))


@harmless(SHELF, "adamw_step", engines=ENGINES)
def triton_contracted(call: AdamCall) -> None:
    """Products and sums contracted to fma."""
    adamw(call, AdamwLaunch(fusion=True))


@harmless(SHELF, "adamw_step", engines=ENGINES)
def triton_fast_division(call: AdamCall) -> None:
    """`/` and `tl.sqrt` as they come: approximate instructions."""
    adamw(call, AdamwLaunch(ieee=False, ieee_root=False, fusion=True))


@harmless(SHELF, "unscale", arithmetic="exact", engines=ENGINES, dtypes=(*MASTERS, "mixed"))
def triton_unscale(call: UnscaleCall) -> None:
    """One launch per tensor; every element is tested by itself."""
    kernels.unscale(call)


@harmless(SHELF, "sgd_step", arithmetic="exact", engines=ENGINES)
def triton_counter_advanced_by_the_host(call: SgdCall) -> None:
    """Every program reads the step count; it advances after the launch."""
    racing_kernels.sgd(call, advances="")


@harmless(SHELF, "sgd_step", arithmetic="exact", engines=ENGINES)
def triton_counter_advanced_by_the_last_program(call: SgdCall) -> None:
    """The program whose ticket says that all others have read the step count stores the next."""
    racing_kernels.sgd(call, advances="acq_rel")


@harmless(SHELF, "unscale", arithmetic="exact", engines=ENGINES)
def triton_overflows_counted(call: UnscaleCall) -> None:
    """Programs add integers to one counter by relaxed atomics."""
    racing_kernels.unscale(call, counts=True)


@harmless(SHELF, "global_norm", engines=ENGINES)
def triton_last_program_adds_up(call: GlobalNormCall) -> None:
    """The program that arrives last acquires the partial sums of all others and adds them."""
    racing_kernels.global_norm(call, "acq_rel")


@harmless(SHELF, "global_norm", engines=ENGINES)
def triton_last_program_behind_fences(call: GlobalNormCall) -> None:
    """The same by a relaxed ticket between two fences."""
    racing_kernels.global_norm(call, "relaxed", fences=2)


@harmless(SHELF, "global_norm", engines=ENGINES, dtypes=("fp16",))
def triton_root_by_the_last_program(call: GlobalNormCall) -> None:
    """All programs add to one total, and the last to arrive stores its root."""
    racing_kernels.global_norm_in_one_launch(call, "last")


@harmless(SHELF, "global_norm", engines=ENGINES)
def triton_sums_under_a_lock(call: GlobalNormCall) -> None:
    """Programs add lane by lane under a lock; a barrier comes before it is given back."""
    racing_kernels.global_norm_by_lock(call, "gpu", barrier=True)


@harmless(SHELF, "global_norm", engines=ENGINES, dtypes=("fp16",))
def triton_two_sums_by_float_atomics(call: GlobalNormCall) -> None:
    """Two programs add their sums by floating atomics: either order gives the same bits."""
    racing_kernels.global_norm_by_float_atomics(call, most=2)


@harmless(SHELF, "global_norm", engines=ENGINES, dtypes=("fp16",))
def triton_two_sums_by_swaps(call: GlobalNormCall) -> None:
    """The same by a loop of compare-and-swap."""
    racing_kernels.global_norm_by_float_atomics(call, most=2, swaps=True)


@harmless(SHELF, "accumulate", engines=ENGINES)
def triton_tiles_by_tickets(call: AccumulateCall) -> None:
    """Tiles are handed out by a counter that is new for every launch."""
    racing_kernels.accumulate_by_tickets(call, resets=False)


@harmless(SHELF, "global_norm", engines=ENGINES)
def triton_scratch_zeroed(call: GlobalNormCall) -> None:
    """All of the scratch is added up, which was zeroed before."""
    memory_kernels.global_norm(call, zeroed=True)


@harmless(SHELF, "global_norm", engines=ENGINES)
def triton_scratch_read_and_dropped(call: GlobalNormCall) -> None:
    """Scratch behind the partial sums is read, and not used."""
    memory_kernels.global_norm(call, zeroed=False, drops=True)


@harmless(SHELF, "update_scale_torch", arithmetic="exact", engines=ENGINES)
def triton_scale_read_by_four_warps(call: TorchScaleCall) -> None:
    """All threads of one program read the state, and one of them stores it."""
    racing_kernels.update_scale_torch(call)


@harmless(SHELF, "cast_copy", arithmetic="exact", engines=ENGINES, dtypes=MASTERS)
def triton_cast_copy(call: CastCopyCall) -> None:
    """One launch per tensor."""
    kernels.cast_copy(call, block=128)


def compiler_missing() -> str:
    """Reason why torch.compile cannot build a CPU kernel here; empty if it can."""
    named = os.environ.get("CXX", "g++")
    if shutil.which(named) is None:
        return f"torch.compile needs a C++ compiler, and {named} is not on the path"
    return ""


def formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """AdamW as one expression; s holds b1, c1, b2, c2, k1, k2, eps, wd, lr."""
    m = s[0] * m + s[1] * g
    v = s[2] * v + (s[3] * g) * g
    u = (m / s[4]) / ((v / s[5]).sqrt() + s[6]) + s[7] * p
    return p - s[8] * u, m, v


@cache
def compiled() -> Callable[..., tuple[Tensor, ...]]:
    """The expression compiled; to ask for it imports what takes seconds."""
    return torch.compile(formula, dynamic=True)


@harmless(SHELF, "adamw_step", unavailable=compiler_missing())
def torch_compiled(call: AdamCall) -> None:
    """torch.compile over the whole formula."""
    if skipped(call):
        return
    for i, p in enumerate(call.params):
        s = scalars(call, next_count(call, i))
        row = torch.stack([s.b1, s.c1, s.b2, s.c2, s.k1, s.k2, s.eps, s.wd, s.lr])
        if p.numel():
            g = call.grads[i].reshape(-1).to(torch.float32) * call.factor
            m, v = (t.reshape(-1).clone() for t in (call.exp_avgs[i], call.exp_avg_sqs[i]))
            new, m, v = compiled()(p.reshape(-1).clone(), g, m, v, row)
            p.copy_(new.view(p.shape))
            call.exp_avgs[i].copy_(m.view(p.shape))
            call.exp_avg_sqs[i].copy_(v.view(p.shape))
            if call.copies:
                call.copies[i].copy_(new.view(p.shape))
        call.steps[i].add_(1)
