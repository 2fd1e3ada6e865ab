"""FusedAdam: Adam and AdamW as an ordinary `torch.optim.Optimizer`, in Triton.

A step prepares coefficients and counters in one launch for each group and device, and updates in
one launch for each dtype combination; it never waits for the GPU. Numbers reach the device through
a control block, and only when they have changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.checkpoint.plain import loading_as_stored, marked
from twinstep.contract.compat import CORRECT, Compat, moment_dtype
from twinstep.contract.hyper import Number, check_adam
from twinstep.contract.keywords import check_keywords, refuse_asked, refuse_step_arguments
from twinstep.contract.moments import (
    StateDict,
    adding_group,
    new_state,
)
from twinstep.contract.uncompiled import uncompiled
from twinstep.contract.wrapper import ParamGroup
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.optimizers.step_plan import Key, StepPart, StepPlan, laid_out
from twinstep.fast.runtime.checks import require_not_captured
from twinstep.fast.runtime.control import GroupBlock
from twinstep.fast.runtime.lists import FixedLists
from twinstep.fast.runtime.repeated import Repeated
from twinstep.fast.runtime.strides import contiguous_lists
from twinstep.fast.runtime.tables import TableCache

KEPT = ("adam_w_mode", "set_grad_none", "compat")  # attributes that a pickle carries
WRITTEN = (0, 2, 3)  # parameters and both moments, among the lists of an update


class FusedAdam(torch.optim.Optimizer):
    """Adam (L2 weight decay) or AdamW (decoupled weight decay).

    Args:
        params: parameters or groups of them; fp16, bf16 and fp32 may be mixed.
        lr: learning rate, a number or a 0-dim tensor like betas, eps and weight_decay. A float64
            tensor on the parameters' device is read there, by captured graphs too.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the first and the second moment.
        eps: added outside the square root.
        adam_w_mode: True for AdamW, False for Adam with L2 decay; for the whole instance.
        weight_decay: of either sign.
        amsgrad: refused unless False.
        set_grad_none: what `zero_grad()` does unless told.
        compat: upstream behaviour to reproduce.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (fp32, shaped like the
    parameter). A parameter without a gradient keeps all of it; one that has a gradient is stepped,
    frozen or not. Parameters that are not contiguous are updated in place where they are dense,
    and through a copy otherwise.

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
        self.adam_w_mode, self.set_grad_none = bool(adam_w_mode), bool(set_grad_none)
        self.compat = compat
        self._forget_device()
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        super().__init__(params, {**defaults, "eps": eps, "weight_decay": weight_decay})

    def _forget_device(self) -> None:
        self._blocks: dict[tuple[int, torch.device], GroupBlock] = {}
        self._fixed: defaultdict[Key, FixedLists] = defaultdict(FixedLists)
        self._cache = TableCache(limit=64)
        self._plan: StepPlan | None = None
        self._repeated = Repeated()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; what it does not say comes from the constructor.

        Raises:
            TypeError: a hyper-parameter is no number.
            RuntimeError: the group asks for what a keyword of the constructor may not.
            ValueError: a hyper-parameter is out of range, or a parameter is not fp16, bf16 or fp32
                or overlaps itself. Nothing has been added.
        """
        check_adam(self.defaults | param_group, "FusedAdam")
        refuse_asked(param_group, "FusedAdam")
        with adding_group(self, param_group, shards=True):
            super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (True) or zero (False) all gradients; None does what `set_grad_none` says."""
        drop = set_to_none if set_to_none is not None else self.set_grad_none
        super().zero_grad(set_to_none=drop)

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
            What the closure returned, or None.

        Raises:
            RuntimeError: an argument of apex is given, a gradient is sparse, or nothing here can
                run kernels on the parameters'
                device. Nothing has been written.
        """
        if legacy:
            refuse_step_arguments(legacy, "FusedAdam.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = self.compat.shared_step_counter
        plan = self._plan
        if plan is None or not plan.read(self, shared=shared):
            plan = self._plan = laid_out(self, self._state_of, self._fixed, shared=shared)
        # In launches as they were at the last step where nothing has changed.
        key: list[object] = [plan, self.adam_w_mode]
        for part in plan.parts:
            key.append(self.param_groups[part.index]["bias_correction"])
            key += self._block(part).hyper()
        self._repeated(key, plan.grads, plan.device, partial(self._update_all, plan))
        return loss

    def _update_all(self, plan: StepPlan) -> None:
        for part in plan.parts:
            self._update(part, self._block(part))

    def _block(self, part: StepPart) -> GroupBlock:
        key = (part.index, part.device)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = GroupBlock(part.device, lamb=False)
        block.set_group(self.param_groups[part.index])
        return block

    def _update(self, part: StepPart, block: GroupBlock) -> None:
        """Advance the counters of a part and update its parameters with their corrections."""
        coefficients = prepare_adam(
            part.steps,
            [*block.hyper(), block["factor"], block["found_inf"]],
            bias_correction=bool(self.param_groups[part.index]["bias_correction"]),
            cache=self._cache,
        )
        with contiguous_lists(part.lists, WRITTEN) as lanes:
            update_adam(
                lanes,
                coefficients,
                decoupled=self.adam_w_mode,
                cache=self._cache,
                shared=len(part.steps) == 1,
            )

    def initialize_states(self) -> None:
        """Make the state of parameters that have not been stepped yet; values stay as they are."""
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param] = self.state[param] or self._new_state(param)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter; new where it has none."""
        if not self.state[param]:
            require_not_captured("FusedAdam", param.device)
            self.state[param] = self._new_state(param)
        return cast("dict[str, Tensor]", self.state[param])

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        return new_state(param, moment_dtype(self.compat, param.dtype))

    def state_dict(self) -> StateDict:
        """As torch's; with `Compat.shared_step_counter` groups have a `step`, as DeepSpeed's."""
        return marked(self, super().state_dict())

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; moments keep their precision, counters become integers. All is copied.

        Raises:
            ValueError: a counter is not a whole number of steps, or groups do not match.
        """
        with loading_as_stored(self, self._new_state):
            super().load_state_dict(state_dict)
        self._fixed.clear()
        self._plan = None
        self._repeated.forget()

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in KEPT}}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._forget_device()
