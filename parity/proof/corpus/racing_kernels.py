"""Small Triton kernels whose programs meet in memory; switches let some of them race or not.

Replay runs the programs of a small grid in step with one another, so that all of them are right
there in either case. On a GPU programs start when there is room.
"""

import torch
import triton
import triton.language as tl

from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    GlobalNormCall,
    SgdCall,
    TorchScaleCall,
    UnscaleCall,
    skipped,
)
from twinstep.parity.proof.corpus.sgd import scalars

BLOCK = 512


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["p", "g", "b", "c"])
def sgd_kernel(
    p,
    g,
    b,
    c,
    step,
    tickets,
    numel,
    mu,
    damp,
    lr,
    wd,
    factor,
    BLOCK: tl.constexpr,
    HAS_BUFFER: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_COPY: tl.constexpr,
    ADVANCES: tl.constexpr,
):
    """SGD on one tensor; ADVANCES: a program moves the counter that all read.

    `first` is the first one, `relaxed` and `acq_rel` the last to draw a ticket, so ordered.
    """
    t = tl.load(step) + 1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    old = tl.load(p + at, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(g + at, mask=here, other=0.0).to(tl.float32) * factor + wd * old
    d = grad
    if HAS_BUFFER:
        before = tl.load(b + at, mask=here, other=0.0)
        first = (t == 1) & (at >= 0)
        buffer = tl.where(first, grad, mu * before + damp * grad)
        tl.store(b + at, buffer, mask=here)
        d = grad + mu * buffer if NESTEROV else buffer
    new = old - lr * d
    tl.store(p + at, new.to(p.dtype.element_ty), mask=here)
    if HAS_COPY:
        tl.store(c + at, new.to(c.dtype.element_ty), mask=here)
    if ADVANCES == "first":
        if tl.program_id(0) == 0:
            tl.store(step, t)
    elif ADVANCES != "":
        # All threads of the program have read the counter before one of them draws the ticket.
        tl.debug_barrier()
        if tl.atomic_add(tickets, 1, sem=ADVANCES) == tl.num_programs(0) - 1:
            tl.store(step, tl.load(step) + 1)


def sgd(call: SgdCall, advances: str) -> None:
    """One launch for each tensor that has elements; `advances`: see the kernel, else the host."""
    if skipped(call) or not call.params:
        return
    s = scalars(call)
    tickets = torch.zeros(len(call.params), dtype=torch.int32, device=call.params[0].device)
    for i, p in enumerate(call.params):
        if p.numel():
            sgd_kernel[(-(-p.numel() // BLOCK),)](
                p,
                call.grads[i],
                call.momentums[i] if call.momentums else p,
                call.copies[i] if call.copies else p,
                call.steps[i],
                tickets[i],
                p.numel(),
                *(float(value) for value in (s.mu, s.damp, s.lr, s.wd, call.factor)),
                BLOCK=BLOCK,
                HAS_BUFFER=bool(call.momentums),
                NESTEROV=call.nesterov,
                HAS_COPY=bool(call.copies),
                ADVANCES=advances,
                enable_fp_fusion=False,
            )
        if not (advances and p.numel()):
            call.steps[i].add_(1)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["g"])
def flag_kernel(g, flag, numel, inv_scale, BLOCK: tl.constexpr, COUNTS: tl.constexpr):
    """Unscale one tensor; `flag` is cleared by the first program, or counted up by atomics."""
    if not COUNTS and tl.program_id(0) == 0:
        tl.store(flag, 0)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    x = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
    bad = tl.max(tl.where((x - x) != 0.0, 1, 0), axis=0)
    if COUNTS:
        tl.atomic_add(flag, bad, sem="relaxed")
    else:
        tl.store(flag, 1, mask=bad != 0)
    tl.store(g + at, (x * inv_scale).to(g.dtype.element_ty), mask=here)


def unscale(call: UnscaleCall, counts: bool) -> None:
    """One launch, with a flag of its own, for each tensor that has elements."""
    for g in call.grads:
        if not g.numel():
            continue
        # What the step before has left in the flag.
        flag = torch.full((1,), 0 if counts else 1, dtype=torch.int32, device=g.device)
        flag_kernel[(-(-g.numel() // BLOCK),)](
            g, flag, g.numel(), float(call.inv_scale), BLOCK=BLOCK, COUNTS=counts
        )
        call.found_inf.copy_(
            torch.where(flag[0] > 0, torch.ones_like(call.found_inf), call.found_inf)
        )


@triton.jit
def behind_a_fence(value):
    """The value, once all memory that was touched before is in order."""
    return tl.inline_asm_elementwise(
        "membar.gl; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["g"])
def squares_kernel(
    g,
    partial,
    arrived,
    total,
    numel,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SEM: tl.constexpr,
    FENCES: tl.constexpr,
):
    """The sum of squares of one tensor: the program that arrives last adds what all have left."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(g + at, mask=at < numel, other=0.0).to(tl.float64)
    tl.store(partial + tl.program_id(0), tl.sum(x * x, axis=0))
    one = 1
    if FENCES > 0:
        one = behind_a_fence(one)
    before = tl.atomic_add(arrived, one, sem=SEM)
    if FENCES > 1:
        before = behind_a_fence(before)
    if before == tl.num_programs(0) - 1:
        row = tl.arange(0, PROGRAMS)
        every = tl.load(partial + row, mask=row < tl.num_programs(0), other=0.0)
        tl.store(total, tl.sum(every, axis=0))


def global_norm(call: GlobalNormCall, sem: str, fences: int = 0) -> None:
    """One launch for each tensor that has elements; the root is taken of all sums together.

    The ticket has a fence before it, and with two of them another one behind.
    """
    total = torch.zeros(len(call.grads), dtype=torch.float64, device=call.norm.device)
    for i, g in enumerate(call.grads):
        programs = -(-g.numel() // BLOCK)
        if programs:
            partial = torch.zeros(programs, dtype=torch.float64, device=g.device)
            arrived = torch.zeros(1, dtype=torch.int32, device=g.device)
            squares_kernel[(programs,)](
                g,
                partial,
                arrived,
                total[i:],
                g.numel(),
                BLOCK=BLOCK,
                PROGRAMS=triton.next_power_of_2(programs),
                SEM=sem,
                FENCES=fences,
            )
    call.norm.copy_(total.sum().sqrt())
    if not bool(torch.isfinite(total).all()):
        call.found_inf.fill_(1.0)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["g"])
def lane_sums_kernel(
    g, lock, sums, numel, BLOCK: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr
):
    """Squares added lane by lane under a lock, which one thread of the program gives back."""
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(g + at, mask=at < numel, other=0.0).to(tl.float64)
        squares += x * x
    while tl.atomic_cas(lock, 0, 1, scope=SCOPE) == 1:
        pass
    lane = sums + tl.arange(0, BLOCK)
    tl.store(lane, tl.load(lane) + squares)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0, scope=SCOPE)


def global_norm_by_lock(call: GlobalNormCall, scope: str, barrier: bool) -> None:
    """One launch for each tensor that has elements; the host adds the lanes."""
    lock = torch.zeros(1, dtype=torch.int32, device=call.norm.device)
    sums = torch.zeros(BLOCK, dtype=torch.float64, device=call.norm.device)
    for g in call.grads:
        # Each waits for all before it: the work grows with the square of their number.
        programs = min(-(-g.numel() // BLOCK), 16)
        if programs:
            lane_sums_kernel[(programs,)](
                g, lock, sums, g.numel(), BLOCK=BLOCK, SCOPE=scope, BARRIER=barrier
            )
    call.norm.copy_(sums.sum().sqrt())
    if not bool(torch.isfinite(sums).all()):
        call.found_inf.fill_(1.0)


@triton.jit
def torch_scale_kernel(scale, tracker, found, growth, backoff, interval):
    """Torch's rule in one program: every thread reads the state, one writes it."""
    old = tl.load(scale)
    clean = tl.load(tracker) + 1
    grown = (old * tl.load(growth)).to(tl.float32)
    grows = (clean == tl.load(interval)) & (tl.load(found) == 0.0)
    new = tl.where(grows & (tl.abs(grown) < float("inf")), grown.to(tl.float64), old)
    if tl.load(found) != 0.0:
        new = (old * tl.load(backoff)).to(tl.float32).to(tl.float64)
        clean = clean * 0
    tl.store(scale, new)
    tl.store(tracker, tl.where(grows, 0, clean))


def update_scale_torch(call: TorchScaleCall) -> None:
    """One launch of one program."""
    torch_scale_kernel[(1,)](
        call.scale,
        call.growth_tracker,
        call.found_inf,
        call.growth_factor,
        call.backoff_factor,
        call.growth_interval,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def ticket_kernel(a, g, tickets, numel, tiles, BLOCK: tl.constexpr, RESETS: tl.constexpr):
    """Adds tiles as a counter hands them out; with RESETS the last program sets it back."""
    tile = tl.atomic_add(tickets, 1)
    while tile < tiles:
        at = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < numel
        total = tl.load(a + at, mask=here).to(tl.float32) + tl.load(g + at, mask=here).to(
            tl.float32
        )
        tl.store(a + at, total.to(a.dtype.element_ty), mask=here)
        tile = tl.atomic_add(tickets, 1)
    if RESETS and tl.program_id(0) == tl.num_programs(0) - 1:
        tl.atomic_xchg(tickets, 0)


def accumulate_by_tickets(call: AccumulateCall, *, resets: bool) -> None:
    """One launch for each pair of tensors, of eight programs at most."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        if a.numel():
            tickets = torch.zeros((), dtype=torch.int32, device=a.device)
            tiles = triton.cdiv(a.numel(), BLOCK)
            grid = (min(tiles, 8),)
            ticket_kernel[grid](a, g, tickets, a.numel(), tiles, BLOCK=BLOCK, RESETS=resets)


@triton.jit
def atomic_squares_kernel(g, total, numel, BLOCK: tl.constexpr, SWAPS: tl.constexpr):
    """The sum of squares of one tensor; every program adds what it has by one floating atomic.

    With SWAPS by a compare-and-swap, until nothing has come between it and what it expects.
    """
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(g + at, mask=at < numel, other=0.0).to(tl.float32)
        squares += x * x
    own = tl.sum(squares, axis=0)
    if SWAPS:
        word = total.to(tl.pointer_type(tl.int32))
        seen = 0
        found = tl.atomic_cas(word, seen, own.to(tl.int32, bitcast=True))
        while found != seen:
            seen = found
            new = seen.to(tl.float32, bitcast=True) + own
            found = tl.atomic_cas(word, seen, new.to(tl.int32, bitcast=True))
    else:
        tl.atomic_add(total, own)


def global_norm_by_float_atomics(call: GlobalNormCall, most: int, swaps: bool = False) -> None:
    """One launch of at most so many programs for each tensor that has elements."""
    total = torch.zeros(len(call.grads), dtype=torch.float32, device=call.norm.device)
    for i, g in enumerate(call.grads):
        programs = min(-(-g.numel() // BLOCK), most)
        if programs:
            atomic_squares_kernel[(programs,)](g, total[i:], g.numel(), BLOCK=BLOCK, SWAPS=swaps)
    call.norm.copy_(total.double().sum().sqrt())
    if not bool(torch.isfinite(total).all()):
        call.found_inf.fill_(1.0)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["g"])
def total_kernel(g, total, arrived, norm, numel, BLOCK: tl.constexpr, READS: tl.constexpr):
    """Squares are added to one total, of which a program stores the root in the same launch.

    READS: `last`, the program that arrives last; all others store what they happen to read, by a
    `volatile` load or by an atomic that adds nothing.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(g + at, mask=at < numel, other=0.0).to(tl.float64)
    tl.atomic_add(total, tl.sum(x * x, axis=0))
    if READS == "last":
        if tl.atomic_add(arrived, 1) == tl.num_programs(0) - 1:
            tl.store(norm, tl.sqrt(tl.load(total, volatile=True)))
    elif READS == "volatile":
        tl.store(norm, tl.sqrt(tl.load(total, volatile=True)))
    else:
        tl.store(norm, tl.sqrt(tl.atomic_add(total, 0.0)))


def global_norm_in_one_launch(call: GlobalNormCall, reads: str) -> None:
    """One launch for each tensor that has elements; each stores the root of all sums so far."""
    total = torch.zeros(1, dtype=torch.float64, device=call.norm.device)
    norm = torch.zeros_like(total)
    for g in call.grads:
        programs = -(-g.numel() // BLOCK)
        if programs:
            arrived = torch.zeros(1, dtype=torch.int32, device=g.device)
            total_kernel[(programs,)](g, total, arrived, norm, g.numel(), BLOCK=BLOCK, READS=reads)
    call.norm.copy_(norm[0])
    if not bool(torch.isfinite(total).all()):
        call.found_inf.fill_(1.0)
