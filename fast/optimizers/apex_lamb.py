"""FusedLAMB: apex's LAMB as an ordinary `torch.optim.Optimizer`, in Triton.

A step is the norm of all gradients, and four launches for each group (`fast.kernels.apex_lamb`). It
never waits for the GPU.
"""

from itertools import chain
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.apex_lamb import ApexLamb, Part
from twinstep.contract.hyper import Number
from twinstep.contract.moments import MOMENTS, StateDict
from twinstep.fast.kernels.apex_lamb import prepare_apex_lamb, update_apex_lamb
from twinstep.fast.kernels.reduce import global_norm_
from twinstep.fast.runtime.control import GroupBlock
from twinstep.fast.runtime.strides import contiguous_lists
from twinstep.fast.runtime.tables import TableCache
from twinstep.fast.runtime.uploads import is_capturing

WRITTEN = (0, 2, 3)


class FusedLAMB(ApexLamb):
    """LAMB as apex has it, NVLAMB included.

    Args:
        params: parameters or groups of them; fp16, bf16 and fp32 may be mixed, on one device.
        lr: learning rate, a number or a 0-dim tensor like betas, eps, weight_decay and
            max_grad_norm.
        bias_correction: divide the moments by 1 - beta^t, t the number of the group's step.
        betas: decay of the first and the second moment.
        eps: added outside the square root.
        weight_decay: of either sign.
        amsgrad: refused unless False.
        adam_w_mode: True adds the decay to the direction, False to the gradient.
        grad_averaging: False adds the whole gradient to the first moment, not 1 - beta1 of it.
        set_grad_none: what `zero_grad()` does unless told.
        max_grad_norm: largest norm of all gradients of all groups; 0 or below does not clip.
        use_nvlamb: True takes the trust ratio of parameters without decay too.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State of a parameter: `exp_avg`, `exp_avg_sq` (fp32, shaped like the parameter). `step` is an
    int of each group, as in apex, so that a step cannot be captured in a CUDA graph.

    Source: You et al. (2020), algorithm 2, as apex's `FusedLAMB` has it.
    """

    def _check_step(self, params: list[Tensor]) -> None:
        super()._check_step(params)
        for param in params[:1]:
            if is_capturing(param.device):
                raise RuntimeError(
                    "a step is being captured in a CUDA graph, but should be called outside: its "
                    "number is an int of the group, as in apex [FusedLAMB.step]"
                )

    def _update(self, parts: list[Part]) -> None:
        device = parts[0].params[0].device
        norm = torch.empty((), dtype=torch.float32, device=device)
        grads = [grad.contiguous() for grad in chain(*(part.grads for part in parts))]
        # A norm that is not finite says so itself; found_inf is for steps that can be skipped.
        global_norm_(grads, norm=norm, found_inf=torch.zeros_like(norm))
        for part in parts:
            self._update_group(part, norm)

    def _update_group(self, part: Part, norm: Tensor) -> None:
        kept = self._kept(part, norm.device)
        block = kept.block
        coefficients = prepare_apex_lamb(
            kept.counters,
            [*block.hyper(), block["max_norm"], norm, block["factor"], block["found_inf"]],
            bias_correction=bool(part.group["bias_correction"]),
            grad_averaging=bool(part.group["grad_averaging"]),
            cache=self._cache,
        )
        states = [self.state[param] for param in part.params]
        moments = [[state[name] for state in states] for name in MOMENTS]
        with contiguous_lists([part.params, part.grads, *moments], WRITTEN) as lanes:
            update_apex_lamb(
                lanes,
                [],
                coefficients,
                adam_w_mode=self.adam_w_mode,
                use_nvlamb=self.use_nvlamb,
                cache=self._cache,
            )

    def _kept(self, part: Part, device: torch.device) -> "_Kept":
        """What the device has of a group, up to date; the kernels count the step that is taken."""
        key = (part.index, device)
        if key not in self._groups or len(self._groups[key].counters) != len(part.params):
            self._groups[key] = _Kept(device, len(part.params))
        kept = self._groups[key]
        kept.block.set("max_norm", cast(Number, part.group["max_grad_norm"]))
        kept.block.set_group(part.group)
        # The rates may be those of before.
        kept.block.sync_hyperparameters()
        kept.counts.fill_(cast(int, part.group["step"]))
        return kept

    def _forget_device(self) -> None:
        self._groups: dict[tuple[int, torch.device], _Kept] = {}
        self._cache = TableCache(limit=64)

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._forget_device()


class _Kept:
    """Hyper-parameters of a group on a device, and a counter for each parameter that is stepped."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.block = GroupBlock(device, lamb=False)
        self.counts = torch.zeros(count, dtype=torch.int64, device=device)
        self.counters = list(self.counts.unbind())
