"""apex's LAMB: Adam's corrected direction, its length that of each tensor's weights.

    c = n / max_norm if n > max_norm > 0, else 1, n the norm of all gradients times factor
    h = (fp32(grad) * factor) / c, without ADAM_W h = h + wd * p
    m = b1 * m + b3 * h;  v = b2 * v + (c2 * h) * h, b3 either 1 - b1 or 1
    u = (m / k1) / (sqrt(v / k2) + eps), with ADAM_W u = u + wd * p
    rho = |p| / |u|;  1 where either norm is 0, and without decay unless NVLAMB
    p = p - (lr * rho) * u

The four launches, their bytes and their loops are those of `fast.kernels.lamb`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import FOUND_INF, HEADER, LANES, LR, advance_adam_steps
from twinstep.fast.kernels._lamb import (
    APEX_DECOUPLED,
    APEX_L2,
    TRIPLE,
    apex_trust_ratio,
    load_apex_coefficients,
    store_apex_header,
)
from twinstep.fast.kernels._lamb_sweeps import (
    span_of,
    sweep_moments,
    sweep_twice,
    sweep_weights,
)
from twinstep.fast.kernels._limbs import PADDED
from twinstep.fast.kernels._prepare import prepared
from twinstep.fast.runtime.checks import require_step
from twinstep.fast.runtime.dispatch import launch
from twinstep.fast.runtime.tables import SHARED, TableCache

CONTROLS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "max_norm",
    "norm",
    "factor",
    "found_inf",
)
# Elements summed at once, and by how many warps: with as many as LAMB, whose direction has fewer
# divisions, registers spill.
WIDE = tl.constexpr(512)
WARPS = 4


@triton.jit(
    do_not_specialize=["tensors"],
    do_not_specialize_on_alignment=["steps", "coefficients", *CONTROLS],
)
def apex_lamb_prepare_kernel(
    steps,
    coefficients,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    max_norm,
    norm,
    factor,
    found_inf,
    tensors: tl.int64,
    BIAS_CORRECTION: tl.constexpr,
    GRAD_AVERAGING: tl.constexpr,
    IS_TABLE: tl.constexpr,
):
    """Form the coefficient block and advance the step counters, LANES for each program."""
    found = tl.load(found_inf)
    b1 = tl.load(beta1)
    b2 = tl.load(beta2)
    if tl.program_id(0) == 0:
        hyper = (tl.load(lr), b1, b2, tl.load(eps), tl.load(weight_decay))
        clip = (tl.load(max_norm), tl.load(norm), tl.load(factor))
        store_apex_header(coefficients, hyper, clip, found, GRAD_AVERAGING)
    first = tl.program_id(0).to(tl.int64) * LANES
    advance_adam_steps(
        steps, coefficients, first, tensors, b1, b2, found, BIAS_CORRECTION, IS_TABLE, TRIPLE
    )


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table", "coefficients"])
def apex_lamb_moments_kernel(
    table,
    coefficients,
    limbs,
    tensors: tl.int64,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    ADAM_W: tl.constexpr,
):
    """Moments, and the squares of weights and direction added to each tensor's two sums."""
    found_inf = tl.load(coefficients + FOUND_INF)
    span, rows = span_of(table, tensors, 4)
    c = load_apex_coefficients(coefficients, span[4])
    if found_inf != 0.0:
        return
    FORM: tl.constexpr = APEX_DECOUPLED if ADAM_W else APEX_L2
    sweep_moments(limbs, span, rows, c, P, G, M, FORM, WIDE)


@triton.jit(do_not_specialize_on_alignment=["coefficients"])
def apex_lamb_ratio_kernel(coefficients, limbs, NVLAMB: tl.constexpr):
    """The length of one tensor's step: the learning rate times its trust ratio."""
    found_inf = tl.load(coefficients + FOUND_INF)
    if found_inf != 0.0:
        return
    slot = tl.program_id(0).to(tl.int64)
    rho = apex_trust_ratio(limbs + 2 * PADDED * slot, coefficients, NVLAMB)
    tl.store(coefficients + HEADER + TRIPLE * slot + 2, tl.load(coefficients + LR) * rho)


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table", "coefficients"])
def apex_lamb_weights_kernel(
    table,
    coefficients,
    tensors: tl.int64,
    P: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    ADAM_W: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """The weights, from the moments that `apex_lamb_moments_kernel` left."""
    found_inf = tl.load(coefficients + FOUND_INF)
    span, rows = span_of(table, tensors, 4 if HAS_COPY else 3)
    c = load_apex_coefficients(coefficients, span[4])
    length = tl.load(coefficients + HEADER + TRIPLE * span[4] + 2)
    if found_inf != 0.0:
        return
    FORM: tl.constexpr = APEX_DECOUPLED if ADAM_W else APEX_L2
    sweep_weights(span, rows, length, c, P, M, C, FORM, HAS_COPY)


def prepare_apex_lamb(
    steps: Sequence[Tensor],
    controls: Sequence[Tensor],
    *,
    bias_correction: bool,
    grad_averaging: bool,
    cache: TableCache = SHARED,
) -> Tensor:
    """Advance the step counters and return the coefficient block of this step."""
    return prepared(
        apex_lamb_prepare_kernel,
        steps,
        controls,
        cache,
        width=TRIPLE.value,
        BIAS_CORRECTION=bias_correction,
        GRAD_AVERAGING=grad_averaging,
    )


def update_apex_lamb(
    lists: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
    coefficients: Tensor,
    *,
    adam_w_mode: bool,
    use_nvlamb: bool,
    cache: TableCache = SHARED,
) -> None:
    """Run the three launches over (params, grads, exp_avgs, exp_avg_sqs) and copies."""

    def ratio(limbs: Tensor) -> None:
        args = (coefficients, limbs)
        launch(apex_lamb_ratio_kernel, len(limbs), limbs, args, warps=1, NVLAMB=use_nvlamb)

    sweeps = (apex_lamb_moments_kernel, apex_lamb_weights_kernel)
    form = {"ADAM_W": adam_w_mode}
    sweep_twice(sweeps, ratio, lists, copies, coefficients, form, warps=WARPS, cache=cache)


def apex_lamb_step_(
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
    max_norm: Tensor,
    norm: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
    adam_w_mode: bool,
    grad_averaging: bool,
    use_nvlamb: bool,
) -> None:
    """One step of apex's LAMB; ratios are of whole tensors, so joining or cutting them matters.

    Args:
        params: weights of any shape, fp32, fp16 or bf16, contiguous, on one device like everything
            else; written.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32; written.
        exp_avg_sqs: second moments, fp32; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the five that follow.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the square root.
        weight_decay: of either sign.
        max_norm: largest norm of all gradients; 0 or below does not clip.
        norm: of all gradients as they are stored, fp32, shape ().
        factor: multiplies every gradient and their norm, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        bias_correction: False uses 1 for both corrections.
        adam_w_mode: True adds the decay to the direction, False to the gradient.
        grad_averaging: False adds the whole gradient to the first moment.
        use_nvlamb: True takes the trust ratio without a decay too.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    controls |= {"max_norm": max_norm, "norm": norm, "factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_step("apex_lamb_step_", lists, steps, controls)
    coefficients = prepare_apex_lamb(
        steps,
        [controls[name] for name in CONTROLS],
        bias_correction=bias_correction,
        grad_averaging=grad_averaging,
    )
    *required, _ = lists.values()
    update_apex_lamb(required, copies, coefficients, adam_w_mode=adam_w_mode, use_nvlamb=use_nvlamb)
