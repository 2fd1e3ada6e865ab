"""FusedLAMB: apex's LAMB as an ordinary `torch.optim.Optimizer`.

The arithmetic is `reference.apex_lamb`, parameter by parameter; arguments, groups and state are
those of `contract.apex_lamb`.
"""

from __future__ import annotations

from itertools import chain
from typing import cast

from torch import Tensor

from twinstep.contract.apex_lamb import ApexLamb, Part
from twinstep.contract.hyper import Number
from twinstep.reference.adam import adam_scalars
from twinstep.reference.apex_lamb import ApexOptions, apex_lamb_update, clip_divisor
from twinstep.reference.arithmetic import control, fp32
from twinstep.reference.norm import l2_norm


class FusedLAMB(ApexLamb):
    """LAMB as apex has it, NVLAMB included.

    Args:
        params: parameters or groups of parameters; fp16, bf16 and fp32 may be mixed.
        lr: learning rate; like betas, eps, weight_decay and max_grad_norm a float or a 0-dim
            tensor, read at every step.
        bias_correction: divide the moments by 1 - beta^t, t the number of the group's step.
        betas: decay of the first and the second moment.
        eps: added outside the square root.
        weight_decay: applied whatever its sign.
        amsgrad: refused unless False.
        adam_w_mode: True adds the decay to the direction, False to the gradient.
        grad_averaging: False adds the whole gradient to the first moment, not 1 - beta1 of it.
        set_grad_none: what `zero_grad()` does unless told.
        max_grad_norm: largest norm of all gradients of all groups; 0 or below does not clip.
        use_nvlamb: True takes the trust ratio of parameters without decay too.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State per parameter: `exp_avg` and `exp_avg_sq` (fp32, shaped like the parameter). `step` is an
    int of each group, as in apex, and counts steps without a gradient too.

    Source: You et al. (2020), algorithm 2, as apex's `FusedLAMB` has it.
    """

    def _update(self, parts: list[Part]) -> None:
        norm = l2_norm(list(chain(*(part.grads for part in parts))))
        for part in parts:
            self._update_group(part, norm)

    def _update_group(self, part: Part, norm: Tensor) -> None:
        group = part.group
        beta1, beta2 = cast(tuple[Number, Number], group["betas"])

        def number(value: object) -> Tensor:
            return control(cast(Number, value), norm.device)

        one = norm.new_ones(())
        s = adam_scalars(
            cast(int, group["step"]) + 1,
            lr=number(group["lr"]),
            beta1=number(beta1),
            beta2=number(beta2),
            eps=number(group["eps"]),
            weight_decay=number(group["weight_decay"]),
            factor=one,
            bias_correction=bool(group["bias_correction"]),
        )
        divisor = clip_divisor(norm, number(group["max_grad_norm"]))
        options = ApexOptions(
            bias_correction=bool(group["bias_correction"]),
            adam_w_mode=self.adam_w_mode,
            grad_averaging=bool(group["grad_averaging"]),
            use_nvlamb=self.use_nvlamb,
        )
        for param, grad in zip(part.params, part.grads, strict=True):
            state = self.state[param]
            m, v = state["exp_avg"], state["exp_avg_sq"]
            p, first, second = apex_lamb_update(fp32(param), fp32(grad), m, v, s, divisor, options)
            param.copy_(p)
            m.copy_(first)
            v.copy_(second)
