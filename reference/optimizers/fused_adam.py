"""FusedAdam: Adam and AdamW as an ordinary `torch.optim.Optimizer`.

The arithmetic is `reference.adam`, parameter by parameter. The class adds state: fp32
moments whatever the parameter's dtype, and one integer counter per parameter, which advances only
when that parameter had a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.checkpoint.plain import loading_as_stored, marked
from twinstep.contract.compat import CORRECT, Compat, moment_dtype
from twinstep.contract.hyper import Number, check_adam
from twinstep.contract.keywords import check_keywords, refuse_asked, refuse_step_arguments
from twinstep.contract.moments import StateDict, adding_group, new_state
from twinstep.contract.shards import check_gradient_shards
from twinstep.contract.tensors import check_dense_gradients
from twinstep.contract.uncompiled import uncompiled
from twinstep.reference.adam import adam_scalars, adam_update, adamw_update
from twinstep.reference.arithmetic import control, fp32

ParamGroup = dict[str, object]


class FusedAdam(torch.optim.Optimizer):
    """Adam (L2 weight decay) or AdamW (decoupled weight decay).

    Args:
        params: parameters or groups of parameters; fp16, bf16 and fp32 may be mixed.
        lr: learning rate; like betas, eps and weight_decay a float or a 0-dim tensor, read at
            every step, so that a schedule or a captured graph can change it.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the first and the second moment.
        eps: added outside the square root.
        adam_w_mode: True for AdamW, False for Adam with L2 decay; of the whole instance.
        weight_decay: applied whatever its sign.
        amsgrad: refused unless False.
        set_grad_none: what `zero_grad()` does unless told.
        compat: upstream behaviour to reproduce; the default is correct.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State per parameter: `step` (int64, shape ()), `exp_avg` and `exp_avg_sq` (fp32, shaped like
    the parameter). Parameters without a gradient are left alone, counter included; one that has
    a gradient is stepped, frozen or not. Non-contiguous parameters are fine; parameters whose
    elements share memory are refused.

    Source: Kingma & Ba (2015), algorithm 1; Loshchilov & Hutter (2019), algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: Number = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        compat: Compat = CORRECT,
        **torchs: object,
    ) -> None:
        check_keywords("FusedAdam", torchs, amsgrad)
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = bool(set_grad_none)
        self.compat = compat
        defaults: ParamGroup = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; options that it lacks come from the constructor.

        Raises:
            TypeError: a hyper-parameter is no number.
            RuntimeError: the group asks for what a keyword of the constructor may not.
            ValueError: a hyper-parameter is out of range, a dtype is not fp16, bf16 or fp32, or
                elements of a parameter share memory. The optimizer is unchanged.
        """
        check_adam({**self.defaults, **param_group}, "FusedAdam")
        refuse_asked(param_group, "FusedAdam")
        with adding_group(self, param_group, shards=True):
            super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop or zero all gradients.

        Args:
            set_to_none: True drops them, False zeroes them in place, None goes by `set_grad_none`.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @overload
    def step(self, closure: None = None, **legacy: object) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **legacy: object) -> float: ...

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **legacy: object) -> float | None:
        """Take one step; writes parameters, moments and counters in place.

        Args:
            closure: evaluates the loss again, with gradients enabled.
            legacy: refused, the arguments that apex's Adam once took.

        Returns:
            The result of the closure, or None.

        Raises:
            RuntimeError: an argument of apex is given, or a gradient is sparse. Nothing has been
                written.
        """
        if legacy:
            refuse_step_arguments(legacy, "FusedAdam.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        check_dense_gradients(chain.from_iterable(active), "FusedAdam.step")
        check_gradient_shards(chain.from_iterable(active), "FusedAdam.step")
        for group, params in zip(self.param_groups, active, strict=True):
            self._step_group(group, params)
        return loss

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = self._initial_state(param)
        steps = [int(self.state[param]["step"].item()) for param in params]
        if self.compat.shared_step_counter:
            used, stored = count_shared(steps, [param.dtype for param in params])
        else:
            used = stored = [step + 1 for step in steps]
        for param, t, count in zip(params, used, stored, strict=True):
            self._step_param(param, group, t)
            self.state[param]["step"].fill_(count)

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        """Step number t, counted from 1, of one parameter."""
        state, device = self.state[param], param.device
        beta1, beta2 = cast(tuple[Number, Number], group["betas"])
        s = adam_scalars(
            t,
            lr=control(cast(Number, group["lr"]), device),
            beta1=control(beta1, device),
            beta2=control(beta2, device),
            eps=control(cast(Number, group["eps"]), device),
            weight_decay=control(cast(Number, group["weight_decay"]), device),
            factor=torch.ones((), device=device),
            bias_correction=bool(group["bias_correction"]),
        )
        update = adamw_update if self.adam_w_mode else adam_update
        grad = cast(Tensor, param.grad)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        p, m, v = update(fp32(param), fp32(grad), fp32(m), fp32(v), s)
        param.copy_(p)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)

    def initialize_states(self) -> None:
        """Allocate the state of every parameter that has none; no value changes."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param] = self._initial_state(param)

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        return new_state(param, moment_dtype(self.compat, param.dtype))

    def state_dict(self) -> StateDict:
        """As torch's; with `Compat.shared_step_counter` groups have a `step`, as DeepSpeed's."""
        return marked(self, super().state_dict())

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, moments in their own dtype and counters as integers.

        torch rounds every loaded state tensor to its parameter's dtype; fp32 moments of an fp16
        parameter would lose 13 bits, and small second moments would become 0. So the state is
        taken from the dict itself, after all pre-hooks and before all post-hooks. It is copied:
        later steps do not write into the dict. Counters of torch's own Adam (fp32) are accepted.

        Raises:
            ValueError: a counter counts no steps, a moment is missing or has another shape, or
                groups do not match. The optimizer is unchanged.
        """
        with loading_as_stored(self, self._initial_state):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> StateDict:
        own: StateDict = {name: getattr(self, name) for name in OPTIONS}
        return {**super().__getstate__(), **own}


OPTIONS = ("adam_w_mode", "set_grad_none", "compat")


def count_shared(
    steps: Sequence[int], dtypes: Sequence[torch.dtype]
) -> tuple[list[int], list[int]]:
    """Counters that the last parameter keeps for all, once for each dtype (edges FA-1, FA-2).

    Args:
        steps: completed steps of the parameters of a group that have a gradient.
        dtypes: of these.

    Returns:
        The number of this step for each bias correction, and the new counters. Dtypes take turns:
        fp16, then bf16, then fp32.
    """
    used, stored = list(steps), list(steps)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        members = [index for index, of in enumerate(dtypes) if of is dtype]
        if members:
            stored[-1] += 1
        for index in members:
            used[index] = stored[-1]
    return used, stored
