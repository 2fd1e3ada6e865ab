"""One whole mixed-precision step in three launches: reduce, finalise, update.

    found_inf = 1 if any gradient is not finite
    norm      = norm of the scaled gradients / scale
    factor    = clip_factor(scaled norm, scale), with the scale that the gradients were made with
    p, m, v   = Adam or AdamW with that factor, unless found_inf
    scale     = the loss-scale rule, after the step

The host decides nothing and waits for nothing, so that the step can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.contract.hyper import Number
from twinstep.contract.tensors import FLOATS
from twinstep.fast.adam import require_adam
from twinstep.fast.checks import require_lists
from twinstep.fast.control import ControlBlock
from twinstep.fast.kernels import mixed_step as kernels
from twinstep.fast.kernels.finalise import CONTROLS, Finish

RULES = ("static", "dynamic", "wrapper", "torch")


def require_rule(where: str, rule: str) -> None:
    """Require the name of a loss-scale rule."""
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}, but should be one of {', '.join(RULES)} [{where}]")


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
    """Take one step from scaled gradients to weights, moments, copies and loss scale.

    Args:
        params: this and the lists that follow as in `fast.adam.adam_step_`.
        grads: gradients of the scaled loss.
        exp_avgs: first moments; written.
        exp_avg_sqs: second moments; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps; written.
        lr: this and the four that follow as in `fast.adam.adam_step_`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added outside the square root.
        weight_decay: L2 or decoupled, by adam_w_mode.
        max_norm: largest norm of the unscaled gradients, 0 or less for any; float64.
        scale: the loss scale, float64; written, like the five counters (int64) that follow, as
            far as the rule has them; see `fast.loss_scale`.
        cur_iter: steps seen.
        last_overflow_iter: cur_iter of the last overflow, or -1.
        cur_hysteresis: overflows left before the scale shrinks.
        growth_tracker: clean steps in a row.
        exhausted: 1 after an overflow at the floor.
        scale_factor: growth of the scale; of torch's rule the growth factor.
        scale_window: clean steps between growths; of torch's rule the growth interval.
        min_scale: floor of shrinking.
        delayed_shift: full hysteresis.
        backoff_factor: of torch's rule.
        norm: fp32; written: the norm of the unscaled gradients.
        found_inf: fp32; written: 1.0 if the step was skipped, else 0.0.
        adam_w_mode: True for AdamW, False for Adam with L2 decay.
        bias_correction: False uses 1 for both corrections.
        rule: "static", "dynamic", "wrapper" or "torch".
        consecutive_hysteresis: of the dynamic rule.
        raise_error_at_min_scale: of the dynamic rule.

    Raises:
        TypeError: a dtype is not as in `fast.adam.adam_step_`.
        ValueError: the rule is unknown; lengths, shapes or devices differ; not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    require_rule("mixed_step_", rule)
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "max_norm": max_norm, "scale": scale}
    controls |= {"cur_iter": cur_iter, "last_overflow_iter": last_overflow_iter}
    controls |= {"cur_hysteresis": cur_hysteresis, "growth_tracker": growth_tracker}
    controls |= {"exhausted": exhausted, "scale_factor": scale_factor}
    controls |= {"scale_window": scale_window, "min_scale": min_scale}
    controls |= {"delayed_shift": delayed_shift, "backoff_factor": backoff_factor}
    controls |= {"norm": norm, "found_inf": found_inf}
    require_adam("mixed_step_", lists, steps, controls)
    kernels.mixed_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        copies,
        steps,
        **controls,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
        rule=rule,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
    )


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How a `MixedStep` scales the loss; rules and constants as in `mixed_step_`."""

    rule: str = "dynamic"
    init_scale: float = 65536.0
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    backoff_factor: float = 0.5
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True

    def __post_init__(self) -> None:
        require_rule("LossScaling", self.rule)
        if self.scale_window < 1:
            raise ValueError(
                f"scale_window={self.scale_window}, but should be at least 1 [LossScaling]"
            )

    def controls(self) -> dict[str, float]:
        """Return constants and first state by the names of controls."""
        return {
            "scale": self.init_scale,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
            "min_scale": self.min_scale,
            "delayed_shift": self.delayed_shift,
            "backoff_factor": self.backoff_factor,
            "cur_hysteresis": self.delayed_shift,
            "last_overflow_iter": -1,
        }

    def finish(self, compat: Compat, *, bias_correction: bool) -> Finish:
        """Return what the finalise kernel is compiled for."""
        return Finish(
            bias_correction=bias_correction,
            rule=self.rule,
            consecutive_hysteresis=self.consecutive_hysteresis,
            raise_error_at_min_scale=self.raise_error_at_min_scale,
            growth_counts_this_step=compat.growth_counts_this_step,
            unscale_with_updated_scale=compat.unscale_with_updated_scale,
        )


class MixedStep:
    """A mixed-precision Adam step over fixed tensors, with its state in one control block.

    Args:
        params: master weights; this and the lists that follow as in `fast.adam.adam_step_`.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        copies: low-precision model weights, or nothing.
        lr: learning rate; like the following a number, changed later through `control.set`.
        betas: decay of the first and the second moment.
        eps: added outside the square root.
        weight_decay: L2 or decoupled, by adam_w_mode.
        max_norm: largest norm of the unscaled gradients; 0 does not clip.
        adam_w_mode: True for AdamW.
        bias_correction: False uses 1 for both corrections.
        loss_scaling: the rule and its constants; the dynamic rule with its defaults unless given.
        compat: upstream behaviour to reproduce, as far as it concerns the loss scale.

    Attributes:
        control: the `ControlBlock`; `control["scale"]`, `control["norm"]` and
            `control["found_inf"]` are 0-dim tensors, and reading them is up to the caller.
        steps: completed steps of each tensor, 0-dim views of one int64 tensor.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        copies: Sequence[Tensor] = (),
        *,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        weight_decay: Number = 0.0,
        max_norm: Number = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        loss_scaling: LossScaling | None = None,
        compat: Compat = CORRECT,
    ) -> None:
        if not len(params):
            raise ValueError("params has 0 tensors, but should have at least 1 [MixedStep]")
        scaling = LossScaling() if loss_scaling is None else loss_scaling
        device = params[0].device
        self.control = ControlBlock(device, scaling.controls())
        self.steps = list(torch.zeros(len(params), dtype=torch.int64, device=device))
        lists = {"params": params, "grads": params, "exp_avgs": exp_avgs}
        lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
        require_adam("MixedStep", lists, self.steps, {"scale": self.control["scale"]})
        hyper = (lr, *betas, eps, weight_decay, max_norm)
        for name, value in zip(CONTROLS, hyper, strict=False):
            self.control.set(name, value)
        self._lists = [params, exp_avgs, exp_avg_sqs, *([copies] if len(copies) else [])]
        self._adam_w_mode = adam_w_mode
        self._finish = scaling.finish(compat, bias_correction=bias_correction)
        self._workspace = kernels.new_workspace(device, len(params))
        self.sync_hyperparameters()

    def sync_hyperparameters(self) -> None:
        """Send changed hyper-parameters; before replaying a captured graph, call this."""
        self.control.sync_hyperparameters()

    def step(self, grads: Sequence[Tensor]) -> None:
        """Take one step with gradients of the scaled loss; three launches, no waiting.

        Args:
            grads: as in `mixed_step_`. While their addresses stay the same nothing is uploaded.
        """
        params = self._lists[0]
        lists = {"grads": grads, "params": params}
        require_lists("MixedStep.step", lists, dict.fromkeys(lists, FLOATS), params[0])
        self.sync_hyperparameters()
        kernels.run_mixed_step(
            [params, grads, *self._lists[1:]],
            self.steps,
            [self.control[name] for name in CONTROLS],
            self._workspace,
            self._finish,
            adam_w_mode=self._adam_w_mode,
        )

    def raise_if_exhausted(self) -> None:
        """Raise where the dynamic rule has met an overflow at its floor; waits for the device.

        Raises:
            MinimumLossScale: training cannot go on. Every further overflow says so again.
        """
        if self.control["exhausted"].item():
            raise MinimumLossScale(
                f"gradients overflow at loss scale {self.control['scale'].item()}, which should be "
                f"above its floor to shrink again "
                f"[step {self.control['cur_iter'].item()}, MixedStep]"
            )
