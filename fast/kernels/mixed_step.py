"""A whole mixed-precision Adam step: reduce, finalise, update.

Versions, and what each costs with 16-bit gradients and copies: one; three launches, 2 + 28 bytes
per parameter. Tensors of several dtype combinations take one reduce launch for each gradient
dtype and one update launch for each combination.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinstep.fast.kernels._arith import HEADER
from twinstep.fast.kernels.adam import update_adam
from twinstep.fast.kernels.finalise import Finish, finalise
from twinstep.fast.kernels.reduce import new_limbs, reduce_gradients
from twinstep.fast.tables import SHARED, TableCache


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Memory that a step needs between its launches, and the pointer tables of its tensors.

    A captured graph keeps using the same memory, so whoever captures keeps the workspace alive.
    `limbs` is zero between steps.
    """

    limbs: Tensor
    coefficients: Tensor
    cache: TableCache = field(default_factory=TableCache)


def new_workspace(device: torch.device, tensors: int, cache: TableCache | None = None) -> Workspace:
    """Return a workspace for steps over this many tensors."""
    return Workspace(
        limbs=new_limbs(device),
        coefficients=torch.empty(HEADER.value + 2 * tensors, dtype=torch.float32, device=device),
        cache=TableCache() if cache is None else cache,
    )


def run_mixed_step(
    lists: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    controls: Sequence[Tensor],
    workspace: Workspace,
    finish: Finish,
    *,
    adam_w_mode: bool,
) -> None:
    """Launch one step over (params, grads, exp_avgs, exp_avg_sqs[, copies])."""
    cache = workspace.cache
    reduce_gradients(lists[1], workspace.limbs, cache)
    finalise(workspace.limbs, steps, workspace.coefficients, controls, finish, cache)
    update_adam(lists, workspace.coefficients, decoupled=adam_w_mode, cache=cache)


def mixed_step_(
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
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    cur_hysteresis: Tensor,
    growth_tracker: Tensor,
    exhausted: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
    delayed_shift: Tensor,
    backoff_factor: Tensor,
    norm: Tensor,
    found_inf: Tensor,
    adam_w_mode: bool,
    bias_correction: bool,
    rule: str,
    consecutive_hysteresis: bool,
    raise_error_at_min_scale: bool,
) -> None:
    """One step from scaled gradients to weights, moments, copies and loss scale."""
    hyper = (lr, beta1, beta2, eps, weight_decay, max_norm)
    state = (scale, cur_iter, last_overflow_iter, cur_hysteresis, growth_tracker, exhausted)
    constants = (scale_factor, scale_window, min_scale, delayed_shift, backoff_factor)
    lists = [params, grads, exp_avgs, exp_avg_sqs, *([copies] if len(copies) else [])]
    finish = Finish(
        bias_correction=bias_correction,
        rule=rule,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
    )
    run_mixed_step(
        lists,
        steps,
        (*hyper, *state, *constants, norm, found_inf),
        new_workspace(scale.device, len(steps), SHARED),
        finish,
        adam_w_mode=adam_w_mode,
    )
