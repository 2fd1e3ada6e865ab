"""`FusedLAMB` of both sides but for its arithmetic: apex's arguments, groups, state and files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.checkpoint.plain import loading_as_stored
from twinstep.contract.hyper import Number, check_apex_lamb
from twinstep.contract.keywords import check_keywords, refuse_asked, refuse_step_arguments
from twinstep.contract.moments import (
    State,
    StateDict,
    adding_group,
    new_moments,
    whole_steps,
)
from twinstep.contract.shards import waited
from twinstep.contract.tensors import check_dense_gradients
from twinstep.contract.uncompiled import uncompiled
from twinstep.contract.wrapper import ParamGroup

OPTIONS = ("adam_w_mode", "set_grad_none", "use_nvlamb")
NAME = "FusedLAMB"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters of one group that have a gradient, and their gradients.

    Attributes:
        index: of the group.
        group: its options; `step` counts the steps before this one.
        params: some of the group's.
        grads: one for each.
    """

    index: int
    group: ParamGroup
    params: list[Tensor]
    grads: list[Tensor]


class ApexLamb(torch.optim.Optimizer):
    """apex's LAMB without its arithmetic; `FusedLAMB` of either side says what the arguments mean.

    State of a parameter: `exp_avg`, `exp_avg_sq` (fp32, shaped like the parameter). A group counts
    its steps as `step`, an int, whichever of its parameters had a gradient.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: Number = 1e-3,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-6,
        weight_decay: Number = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: Number = 1.0,
        use_nvlamb: bool = False,
        **torchs: object,
    ) -> None:
        check_keywords(NAME, torchs, amsgrad)
        self.adam_w_mode, self.set_grad_none = bool(adam_w_mode), bool(set_grad_none)
        self.use_nvlamb = bool(use_nvlamb)
        self._forget_device()
        defaults: ParamGroup = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; what it lacks comes from the constructor, and its `step` is 0 unless given.

        Raises:
            TypeError: a hyper-parameter is no number.
            RuntimeError: the group asks for what a keyword of the constructor may not.
            ValueError: a hyper-parameter is out of range, a dtype is not fp16, bf16 or fp32, or
                elements of a parameter share memory. The optimizer is unchanged.
        """
        check_apex_lamb({**self.defaults, **param_group}, NAME)
        refuse_asked(param_group, NAME)
        steps = whole_steps(param_group.get("step", 0), NAME)
        counted = {**param_group, "step": steps}
        with adding_group(self, counted):
            super().add_param_group(counted)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (True) or zero (False) all gradients; None goes by `set_grad_none`."""
        drop = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=drop)

    @overload
    def step(self, closure: None = None, **legacy: object) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **legacy: object) -> float: ...

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **legacy: object) -> float | None:
        """Take one step; writes parameters and moments in place, and counts it in every group.

        Args:
            closure: evaluates the loss again, with gradients enabled.
            legacy: refused, arguments that optimizers of apex once took.

        Returns:
            The result of the closure, or None.

        Raises:
            RuntimeError: an argument of apex is given, a gradient is sparse, or nothing here can
                take the step where the parameters are.
            ValueError: parameters are on several devices. Nothing has been written.
        """
        where = f"{NAME}.step"
        if legacy:
            refuse_step_arguments(legacy, where)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_dense_gradients(chain.from_iterable(g["params"] for g in self.param_groups), where)
        held = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        everything = list(chain(*held))
        self._check_step(everything)
        for param in everything:
            self.state[param] = self.state[param] or self._new_state(param)
        parts = [
            Part(index=index, group=group, params=mine, grads=[waited(p.grad) for p in mine])
            for index, (group, mine) in enumerate(zip(self.param_groups, held, strict=True))
            if mine
        ]
        if parts:
            self._update(parts)
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def _forget_device(self) -> None:
        """Drop what is kept on a device beside the state."""

    def _check_step(self, params: list[Tensor]) -> None:
        """Require parameters on one device, for one norm is of all their gradients."""
        places = sorted({str(param.device) for param in params})
        if len(places) > 1:
            raise ValueError(
                f"parameters are on {', '.join(places)}, but should be on one device: gradients "
                f"are clipped by the norm of all of them [{NAME}.step]"
            )

    @abstractmethod
    def _update(self, parts: list[Part]) -> None:
        """Clip by the norm of all gradients, and update every parameter."""

    def _new_state(self, param: Tensor) -> State:
        return new_moments(param)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, apex's or one of this class; moments become fp32, and all is copied.

        Raises:
            ValueError: a counter counts no steps, a moment is missing or has another shape, or
                groups do not match. The optimizer is unchanged.
        """
        with loading_as_stored(self, self._new_state):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> StateDict:
        kept: StateDict = {name: getattr(self, name) for name in OPTIONS}
        return {**cast(StateDict, super().__getstate__()), **kept}
