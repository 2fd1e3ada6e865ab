"""FusedAdam: Adam and AdamW as an ordinary `torch.optim.Optimizer`, in Triton.

A step prepares coefficients and counters in one launch for each group and device, and updates in
one launch for each dtype combination; it never waits for the GPU. Numbers reach the device through
a control block, and only when they have changed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat, moment_dtype
from twinstep.contract.hyper import Number, check_adam
from twinstep.contract.moments import (
    MOMENTS,
    StateDict,
    check_added_group,
    loading_as_stored,
    new_state,
)
from twinstep.contract.refusals import refuse_amsgrad
from twinstep.contract.tensors import FLOATS, check_dense_gradients
from twinstep.contract.wrapper import ParamGroup
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.runtime.control import GroupBlock
from twinstep.fast.runtime.strides import contiguous_lists
from twinstep.fast.runtime.tables import FixedLists, TableCache

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
        amsgrad: only False.
        set_grad_none: what `zero_grad()` does unless told.
        compat: upstream behaviour to reproduce.

    State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (fp32, shaped like the
    parameter). A parameter without a gradient keeps all of it. Parameters that are not contiguous
    are updated in place where they are dense, and through a copy otherwise.

    Source: Kingma & Ba (2015), algorithm 1; Loshchilov & Hutter (2019), algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        *,
        lr: Number = 1e-3,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        compat: Compat = CORRECT,
    ) -> None:
        refuse_amsgrad(amsgrad, "FusedAdam")
        self.adam_w_mode, self.set_grad_none = bool(adam_w_mode), bool(set_grad_none)
        self.compat = compat
        self._forget_device()
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        super().__init__(params, {**defaults, "eps": eps, "weight_decay": weight_decay})

    def _forget_device(self) -> None:
        self._blocks: dict[tuple[int, torch.device], GroupBlock] = {}
        self._fixed: defaultdict[tuple[object, ...], FixedLists] = defaultdict(FixedLists)
        self._cache = TableCache(limit=64)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; what it does not say comes from the constructor.

        Raises:
            TypeError: a hyper-parameter is no number.
            ValueError: a hyper-parameter is out of range, or a parameter is not fp16, bf16 or fp32
                or overlaps itself. Nothing has been added.
        """
        check_adam(self.defaults | param_group, "FusedAdam")
        super().add_param_group(param_group)
        check_added_group(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (True) or zero (False) all gradients; None does what `set_grad_none` says."""
        drop = set_to_none if set_to_none is not None else self.set_grad_none
        super().zero_grad(set_to_none=drop)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; writes parameters, moments and counters in place.

        Args:
            closure: evaluates the loss again, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a gradient is sparse, or nothing here can run kernels on the parameters'
                device. Nothing has been written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for params in self._by_device():
            check_dense_gradients(params.members, "FusedAdam.step")
        for params in self._by_device():
            self._step_members(params)
        return loss

    def _by_device(self) -> "Iterator[_Members]":
        """Yield what has a gradient, for each group and device."""
        for index, group in enumerate(self.param_groups):
            found: dict[torch.device, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    found.setdefault(param.device, []).append(param)
            for device, members in found.items():
                yield _Members(index=index, group=group, device=device, members=members)

    def _step_members(self, params: "_Members") -> None:
        for param in params.members:
            if not self.state[param]:
                self.state[param] = self._new_state(param)
        block = self._block(params)
        controls = [*block.hyper(), block["factor"], block["found_inf"]]
        if not self.compat.shared_step_counter:
            self._update(params, params.members, params.members, controls)
            return
        # Upstream's one counter: the last parameter counts, once for each dtype, for all of it.
        for dtype in FLOATS:
            alike = [param for param in params.members if param.dtype == dtype]
            if alike:
                self._update(params, alike, params.members[-1:], controls)

    def _block(self, params: "_Members") -> GroupBlock:
        key = (params.index, params.device)
        if key not in self._blocks:
            self._blocks[key] = GroupBlock(params.device, lamb=False)
        self._blocks[key].set_group(params.group)
        return self._blocks[key]

    def _update(
        self,
        place: "_Members",
        params: list[Tensor],
        counting: list[Tensor],
        controls: list[Tensor],
    ) -> None:
        """Advance the counters of `counting` and update `params` with their corrections."""
        steps = [self.state[param]["step"] for param in counting]
        bias_correction = bool(place.group["bias_correction"])
        coefficients = prepare_adam(
            steps, controls, bias_correction=bias_correction, cache=self._cache
        )
        columns = [params, *([self.state[param][name] for param in params] for name in MOMENTS)]
        key = (place.index, place.device, params[0].dtype if params is not counting else None)
        weights, *moments = self._fixed[key].of(chain(*columns), lambda: columns)
        grads = [cast(Tensor, param.grad) for param in params]
        with contiguous_lists([weights, grads, *moments], WRITTEN) as lanes:
            update_adam(
                lanes,
                coefficients,
                decoupled=self.adam_w_mode,
                cache=self._cache,
                shared=len(counting) == 1,
            )

    def initialize_states(self) -> None:
        """Make the state of parameters that have not been stepped yet; values stay as they are."""
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param] = self.state[param] or self._new_state(param)

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        return new_state(param, moment_dtype(self.compat, param.dtype))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; moments keep their precision, counters become integers. All is copied.

        Raises:
            ValueError: a counter is not a whole number of steps, or groups do not match.
        """
        with loading_as_stored(self, self._new_state):
            super().load_state_dict(state_dict)
        self._fixed.clear()

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in KEPT}}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._forget_device()


@dataclass(frozen=True, kw_only=True)
class _Members:
    """Parameters of one group on one device that have a gradient."""

    index: int
    group: ParamGroup
    device: torch.device
    members: list[Tensor]
