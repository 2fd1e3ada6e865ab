"""Adam (L2) and AdamW (decoupled), with an optional low-precision copy.

    g = fp32(grad) * factor;  L2: g = g + wd * p
    m = b1 * m + c1 * g;  v = b2 * v + (c2 * g) * g
    u = (m / k1) / (sqrt(v / k2) + eps);  decoupled: u = u + wd * p
    p = p - lr * u

Versions, and what each costs for fp32 state, a 16-bit gradient and a 16-bit copy:

1. flat: one tensor, addresses proven aligned by argument specialisation. Reads 2 + 4 + 4 + 4,
   writes 4 + 4 + 4 + 2 bytes per parameter: 28.
2. list: tensors of one dtype combination found through a pointer table, 28 bytes per parameter
   and 72 bytes per chunk of 4096; tensors on 16-byte addresses take the vector path, others
   element by element.

Both read a coefficient block written by a preparing launch, which also advances the step
counters: a program of the update could not, since others still need the old count. When the
block says skip, they return before touching anything.
"""

from collections.abc import Mapping, Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import (
    FOUND_INF,
    LANES,
    adam_tile,
    advance_adam_steps,
    load_adam_coefficients,
    store_adam_header,
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

CONTROLS = ("lr", "beta1", "beta2", "eps", "weight_decay", "factor", "found_inf")


@triton.jit(
    do_not_specialize=["tensors"],
    do_not_specialize_on_alignment=["steps", "coefficients", *CONTROLS],
)
def adam_prepare_kernel(
    steps,
    coefficients,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    factor,
    found_inf,
    tensors: tl.int64,
    BIAS_CORRECTION: tl.constexpr,
    IS_TABLE: tl.constexpr,
):
    """Form the coefficient block and advance the step counters, LANES for each program."""
    found = tl.load(found_inf)
    b1 = tl.load(beta1)
    b2 = tl.load(beta2)
    if tl.program_id(0) == 0:
        scale = tl.load(factor)
        wd = tl.load(weight_decay)
        store_adam_header(coefficients, tl.load(lr), b1, b2, tl.load(eps), wd, scale, found)
    first = tl.program_id(0).to(tl.int64) * LANES
    advance_adam_steps(
        steps, coefficients, first, tensors, b1, b2, found, BIAS_CORRECTION, IS_TABLE
    )


@triton.jit(do_not_specialize=["numel", "slot"], do_not_specialize_on_alignment=["coefficients"])
def adam_flat_kernel(
    param,
    grads,
    exp_avgs,
    exp_avg_sqs,
    copies,
    coefficients,
    numel: tl.int64,
    slot: tl.int64,
    DECOUPLED: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """One tensor.

    Named `param`: the function that Triton generates to launch a kernel overwrites `params`.
    """
    found_inf = tl.load(coefficients + FOUND_INF)
    c = load_adam_coefficients(coefficients, slot)
    if found_inf != 0.0:
        return
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = whole_tiles(left)
    for tile in range(0, whole, TILE):
        at = start + tile + tl.arange(0, TILE)
        adam_tile(param, grads, exp_avgs, exp_avg_sqs, copies, at, None, c, DECOUPLED, HAS_COPY)
    for tile in range(whole, left, EDGE):
        at = start + tile + tl.arange(0, EDGE)
        tail = at < numel
        adam_tile(param, grads, exp_avgs, exp_avg_sqs, copies, at, tail, c, DECOUPLED, HAS_COPY)


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table", "coefficients"])
def adam_list_kernel(
    table,
    coefficients,
    tensors: tl.int64,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    DECOUPLED: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """Every tensor of one dtype combination."""
    found_inf = tl.load(coefficients + FOUND_INF)
    DEPTH: tl.constexpr = 5 if HAS_COPY else 4
    tensor, start = chunk_of(table, tensors, DEPTH)
    numel, aligned, slot = facts_of(table, tensors, tensor, DEPTH)
    p = address_of(table, tensors, tensor, 0)
    g = address_of(table, tensors, tensor, 1)
    m = address_of(table, tensors, tensor, 2)
    v = address_of(table, tensors, tensor, 3)
    low = address_of(table, tensors, tensor, DEPTH - 1)
    c = load_adam_coefficients(coefficients, slot)
    if found_inf != 0.0:
        return
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = tl.where(aligned != 0, whole_tiles(left), 0)
    if whole > 0:
        params = pointer(p, P, True)
        grads = pointer(g, G, True)
        exp_avgs = pointer(m, M, True)
        exp_avg_sqs = pointer(v, M, True)
        copies = pointer(low, C, True)
        for tile in range(0, whole, TILE):
            at = start + tile + tl.arange(0, TILE)
            adam_tile(
                params, grads, exp_avgs, exp_avg_sqs, copies, at, None, c, DECOUPLED, HAS_COPY
            )
    if whole < left:
        params = pointer(p, P, False)
        grads = pointer(g, G, False)
        exp_avgs = pointer(m, M, False)
        exp_avg_sqs = pointer(v, M, False)
        copies = pointer(low, C, False)
        for tile in range(whole, left, EDGE):
            at = start + tile + tl.arange(0, EDGE)
            tail = at < numel
            adam_tile(
                params, grads, exp_avgs, exp_avg_sqs, copies, at, tail, c, DECOUPLED, HAS_COPY
            )


def prepare_adam(
    steps: Sequence[Tensor],
    controls: Sequence[Tensor],
    *,
    bias_correction: bool,
    cache: TableCache = SHARED,
) -> Tensor:
    """Advance the step counters and return the coefficient block of this step."""
    return prepared(adam_prepare_kernel, steps, controls, cache, BIAS_CORRECTION=bias_correction)


def update_adam(
    lists: Sequence[Sequence[Tensor]],
    coefficients: Tensor,
    *,
    decoupled: bool,
    cache: TableCache = SHARED,
    shared: bool = False,
) -> None:
    """Run the update over (params, grads, exp_avgs, exp_avg_sqs[, copies]).

    `shared`: the block has one pair of bias corrections, for all tensors.
    """
    has_copy = len(lists) == 5
    slot = only_slot(lists)
    if slot is not None:
        tensors = [role[slot] for role in lists]
        numel = tensors[0].numel()
        args = (*tensors[:4], tensors[-1], coefficients, numel, 0 if shared else slot)
        launch(
            adam_flat_kernel,
            cdiv(numel, CHUNK.value),
            tensors[0],
            args,
            DECOUPLED=decoupled,
            HAS_COPY=has_copy,
        )
        return
    for table in tensor_tables(lists, chunk=CHUNK.value, cache=cache, shared=shared):
        launch(
            adam_list_kernel,
            table.chunks,
            table.data,
            (table.data, coefficients, table.tensors),
            reaches=lists,
            P=TRITON_DTYPE[table.dtypes[0]],
            G=TRITON_DTYPE[table.dtypes[1]],
            M=TRITON_DTYPE[table.dtypes[2]],
            C=TRITON_DTYPE[table.dtypes[-1]],
            DECOUPLED=decoupled,
            HAS_COPY=has_copy,
        )


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """Adam with L2 weight decay: the decay is part of the gradient, and so of both moments.

    Args:
        params: fp32 master weights, or fp16/bf16 weights without masters; contiguous, on one
            device like everything else; written.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32; written.
        exp_avg_sqs: second moments, fp32; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the four that follow.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added outside the square root.
        weight_decay: of either sign.
        factor: multiplies every gradient, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        bias_correction: False uses 1 for both corrections.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_step("adam_step_", lists, steps, controls)
    _step(lists, steps, controls, bias_correction=bias_correction, decoupled=False)


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """AdamW: the decay acts on the weights alone. Arguments and errors as in `adam_step_`."""
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_step("adamw_step_", lists, steps, controls)
    _step(lists, steps, controls, bias_correction=bias_correction, decoupled=True)


def _step(
    lists: Mapping[str, Sequence[Tensor]],
    steps: Sequence[Tensor],
    controls: Mapping[str, Tensor],
    *,
    bias_correction: bool,
    decoupled: bool,
) -> None:
    given = [controls[name] for name in CONTROLS]
    coefficients = prepare_adam(steps, given, bias_correction=bias_correction)
    *required, copies = lists.values()
    update_adam([*required, *([copies] if len(copies) else [])], coefficients, decoupled=decoupled)
