"""SGD with momentum, dampening and Nesterov's look-ahead, with an optional low-precision copy.

    g = fp32(grad) * factor + wd * p
    b = g on a tensor's first step, else momentum * b + (1 - dampening) * g
    d = g + momentum * b with Nesterov's look-ahead, else b;  d = g without momentum buffers
    p = p - lr * d

Versions, and what each costs for a 16-bit gradient, momentum and a 16-bit copy:

1. flat: one tensor. Reads 2 + 4 + 4, writes 4 + 4 + 2 bytes per parameter: 20.
2. list: tensors of one dtype combination through a pointer table, 64 bytes more per chunk.

As in `fast.kernels.adam`, a preparing launch writes the coefficients and advances the counters.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import (
    FOUND_INF,
    HEADER,
    INV_SCALE,
    LANES,
    LR,
    MOMENTUM,
    REST,
    WEIGHT_DECAY,
    load_sgd_coefficients,
    sgd_tile,
    step_pointers,
)
from twinstep.fast.kernels._layout import (
    CHUNK,
    EDGE,
    TILE,
    address_of,
    chunk_of,
    facts_of,
    pointer,
    whole_tiles,
)
from twinstep.fast.kernels._prepare import prepared
from twinstep.fast.runtime.checks import require_step
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, cdiv, launch
from twinstep.fast.runtime.tables import SHARED, TableCache, only_slot, tensor_tables

CONTROLS = ("lr", "momentum", "dampening", "weight_decay", "factor", "found_inf")


@triton.jit(
    do_not_specialize=["tensors"],
    do_not_specialize_on_alignment=["steps", "coefficients", *CONTROLS],
)
def sgd_prepare_kernel(
    steps,
    coefficients,
    lr,
    momentum,
    dampening,
    weight_decay,
    factor,
    found_inf,
    tensors: tl.int64,
    IS_TABLE: tl.constexpr,
):
    """Form the coefficient block and advance the step counters, LANES for each program."""
    found = tl.load(found_inf)
    if tl.program_id(0) == 0:
        tl.store(coefficients + LR, tl.load(lr).to(tl.float32))
        tl.store(coefficients + WEIGHT_DECAY, tl.load(weight_decay).to(tl.float32))
        tl.store(coefficients + INV_SCALE, tl.load(factor))
        tl.store(coefficients + FOUND_INF, found)
        tl.store(coefficients + MOMENTUM, tl.load(momentum).to(tl.float32))
        tl.store(coefficients + REST, (1.0 - tl.load(dampening)).to(tl.float32))
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = lane < tensors
    counters = step_pointers(steps, lane, mask, IS_TABLE)
    t = tl.load(counters, mask=mask, other=0) + 1
    tl.store(coefficients + HEADER + 2 * lane, (t == 1).to(tl.float32), mask=mask)
    if found == 0.0:
        tl.store(counters, t, mask=mask)


@triton.jit(do_not_specialize=["numel", "slot"], do_not_specialize_on_alignment=["coefficients"])
def sgd_flat_kernel(
    param,
    grads,
    momentums,
    copies,
    coefficients,
    numel: tl.int64,
    slot: tl.int64,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """One tensor.

    Named `param`: the function that Triton generates to launch a kernel overwrites `params`.
    """
    found_inf = tl.load(coefficients + FOUND_INF)
    c = load_sgd_coefficients(coefficients, slot)
    if found_inf != 0.0:
        return
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = whole_tiles(left)
    for tile in range(0, whole, TILE):
        at = start + tile + tl.arange(0, TILE)
        sgd_tile(param, grads, momentums, copies, at, None, c, HAS_MOMENTUM, NESTEROV, HAS_COPY)
    for tile in range(whole, left, EDGE):
        at = start + tile + tl.arange(0, EDGE)
        tail = at < numel
        sgd_tile(param, grads, momentums, copies, at, tail, c, HAS_MOMENTUM, NESTEROV, HAS_COPY)


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table", "coefficients"])
def sgd_list_kernel(
    table,
    coefficients,
    tensors: tl.int64,
    P: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """Every tensor of one dtype combination."""
    found_inf = tl.load(coefficients + FOUND_INF)
    DEPTH: tl.constexpr = 2 + HAS_MOMENTUM + HAS_COPY
    tensor, start = chunk_of(table, tensors, DEPTH)
    numel, aligned, slot = facts_of(table, tensors, tensor, DEPTH)
    p = address_of(table, tensors, tensor, 0)
    g = address_of(table, tensors, tensor, 1)
    b = address_of(table, tensors, tensor, 1 + HAS_MOMENTUM)
    low = address_of(table, tensors, tensor, DEPTH - 1)
    c = load_sgd_coefficients(coefficients, slot)
    if found_inf != 0.0:
        return
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = tl.where(aligned != 0, whole_tiles(left), 0)
    if whole > 0:
        params = pointer(p, P, True)
        grads = pointer(g, G, True)
        momentums = pointer(b, tl.float32, True)
        copies = pointer(low, C, True)
        for tile in range(0, whole, TILE):
            at = start + tile + tl.arange(0, TILE)
            sgd_tile(
                params, grads, momentums, copies, at, None, c, HAS_MOMENTUM, NESTEROV, HAS_COPY
            )
    if whole < left:
        params = pointer(p, P, False)
        grads = pointer(g, G, False)
        momentums = pointer(b, tl.float32, False)
        copies = pointer(low, C, False)
        for tile in range(whole, left, EDGE):
            at = start + tile + tl.arange(0, EDGE)
            tail = at < numel
            sgd_tile(
                params, grads, momentums, copies, at, tail, c, HAS_MOMENTUM, NESTEROV, HAS_COPY
            )


def prepare_sgd(
    steps: Sequence[Tensor], controls: Sequence[Tensor], cache: TableCache = SHARED
) -> Tensor:
    """Advance the step counters and return the coefficient block of this step."""
    return prepared(sgd_prepare_kernel, steps, controls, cache)


def _update_flat(
    tensors: Sequence[Tensor], slot: int, coefficients: Tensor, options: dict[str, bool]
) -> None:
    """Run the flat kernel over (param, grad[, momentum][, copy])."""
    params, grads = tensors[:2]
    momentums = tensors[1 + options["HAS_MOMENTUM"]]
    numel = params.numel()
    args = (params, grads, momentums, tensors[-1], coefficients, numel, slot)
    launch(sgd_flat_kernel, cdiv(numel, CHUNK.value), params, args, **options)  # type: ignore[arg-type]


def update_sgd(
    lists: Sequence[Sequence[Tensor]],
    coefficients: Tensor,
    options: dict[str, bool],
    cache: TableCache = SHARED,
) -> None:
    """Run the update over (params, grads[, momentums][, copies])."""
    slot = only_slot(lists)
    if slot is not None:
        _update_flat([role[slot] for role in lists], slot, coefficients, options)
        return
    for table in tensor_tables(lists, chunk=CHUNK.value, cache=cache):
        launch(
            sgd_list_kernel,
            table.chunks,
            table.data,
            (table.data, coefficients, table.tensors),
            reaches=lists,
            P=TRITON_DTYPE[table.dtypes[0]],
            G=TRITON_DTYPE[table.dtypes[1]],
            C=TRITON_DTYPE[table.dtypes[-1]],
            HAS_MOMENTUM=options["HAS_MOMENTUM"],
            NESTEROV=options["NESTEROV"],
            HAS_COPY=options["HAS_COPY"],
        )


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentums: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    momentum: Tensor,
    dampening: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    nesterov: bool,
) -> None:
    """One SGD step.

    Args:
        params: fp32 master weights, or fp16/bf16 weights; contiguous; written.
        grads: fp32, fp16 or bf16.
        momentums: momentum buffers, fp32, or an empty list; written. What a buffer holds before
            the tensor's first step is ignored.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the three that follow.
        momentum: decay of the buffer.
        dampening: 1 minus the weight of the gradient in the buffer.
        weight_decay: added to the gradient (L2), of either sign.
        factor: multiplies every gradient, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        nesterov: look ahead by one step of the buffer.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    given = {"params": params, "grads": grads, "momentums": momentums, "copies": copies}
    controls = {"lr": lr, "momentum": momentum, "dampening": dampening}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    require_step("sgd_step_", given, steps, controls)
    coefficients = prepare_sgd(steps, [controls[name] for name in CONTROLS])
    lists = [params, grads]
    lists += [optional for optional in (momentums, copies) if len(optional)]
    options = {
        "HAS_MOMENTUM": len(momentums) > 0,
        "NESTEROV": nesterov,
        "HAS_COPY": len(copies) > 0,
    }
    update_sgd(lists, coefficients, options)
