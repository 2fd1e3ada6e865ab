"""FusedLamb: LAMB as an ordinary `torch.optim.Optimizer`, in Triton.

A step is four launches for each group and device (`fast.kernels.lamb`) and never waits for the GPU.
Where gradients are clipped one by one, each parameter has a factor and launches of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.checkpoint.plain import loading_as_stored
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import Number, check_lamb
from twinstep.contract.keywords import check_keywords, refuse_asked
from twinstep.contract.moments import (
    MOMENTS,
    StateDict,
    adding_group,
    new_state,
)
from twinstep.contract.tensors import check_dense_gradient
from twinstep.contract.uncompiled import uncompiled
from twinstep.contract.wrapper import ParamGroup
from twinstep.fast.kernels.clip import clip_factor_
from twinstep.fast.kernels.lamb import prepare_lamb, update_lamb
from twinstep.fast.kernels.reduce import global_norm_
from twinstep.fast.optimizers.lamb_rows import Given, Norms, Row, batches, clips, rows_of
from twinstep.fast.optimizers.step_plan import Key, StepPart, StepPlan, laid_out
from twinstep.fast.runtime.checks import require_not_captured
from twinstep.fast.runtime.control import GroupBlock
from twinstep.fast.runtime.lists import FixedLists
from twinstep.fast.runtime.repeated import Repeated
from twinstep.fast.runtime.strides import contiguous_lists
from twinstep.fast.runtime.tables import TableCache

KEPT = ("eps_inside_sqrt", "compat", "_ratios")  # attributes that a pickle carries


class FusedLamb(torch.optim.Optimizer):
    """LAMB with a bounded trust ratio for every parameter.

    Args:
        params: parameters or groups of them; fp16, bf16 and fp32 may be mixed.
        lr: learning rate, a number or a 0-dim tensor like betas, eps, weight_decay, max_coeff and
            min_coeff.
        bias_correction: multiply the step size by sqrt(1 - beta2^t) / (1 - beta1^t).
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment, or under it.
        eps_inside_sqrt: True adds eps under the root.
        weight_decay: of the direction, of either sign.
        max_grad_norm: largest norm of each single gradient, 0 or less for any. Clipping takes two
            launches more for each parameter, and none are shared.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        amsgrad: refused unless False.
        compat: upstream behaviour to reproduce; LAMB has none of its own.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (fp32, shaped like the
    parameter). A parameter without a gradient keeps all of it.

    Source: You et al. (2020), algorithm 2, as DeepSpeed's `FusedLamb` has it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: Number = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: Number = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: Number = 10.0,
        min_coeff: Number = 0.01,
        amsgrad: bool = False,
        compat: Compat = CORRECT,
        **torchs: object,
    ) -> None:
        check_keywords("FusedLamb", torchs, amsgrad)
        self.eps_inside_sqrt, self.compat = bool(eps_inside_sqrt), compat
        # Without places: those that follow.
        self._ratios: list[tuple[Sequence[int], Tensor]] = []
        self._forget_device()
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, {**defaults, "max_coeff": max_coeff, "min_coeff": min_coeff})

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
        check_lamb(self.defaults | param_group, "FusedLamb")
        refuse_asked(param_group, "FusedLamb")
        with adding_group(self, param_group):
            super().add_param_group(param_group)

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, one for each parameter that was stepped, in order.

        Waits for the device.
        """
        found: dict[int, float] = {}
        for given, ratios in self._ratios:
            places = given or range(len(found), len(found) + len(ratios))
            found.update(zip(places, ratios.tolist(), strict=True))
        return [found[place] for place in sorted(found)]

    def record_coeffs(self, ratios: Sequence[Tensor]) -> None:
        """Remember trust ratios of a step that was taken elsewhere, in order; none forgets all."""
        self._ratios = list(zip(repeat(()), ratios))

    @overload
    def step(
        self,
        closure: None = None,
        *,
        grads: Given | None = None,
        output_params: Given | None = None,
        scale: Number = 1.0,
        grad_norms: Norms | None = None,
    ) -> None: ...

    @overload
    def step(
        self,
        closure: Callable[[], float],
        *,
        grads: Given | None = None,
        output_params: Given | None = None,
        scale: Number = 1.0,
        grad_norms: Norms | None = None,
    ) -> float: ...

    @uncompiled
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grads: Given | None = None,
        output_params: Given | None = None,
        scale: Number = 1.0,
        grad_norms: Norms | None = None,
    ) -> float | None:
        """Take one step; writes parameters, moments, counters and the given copies in place.

        Args:
            closure: evaluates the loss again, with gradients enabled.
            grads: used instead of `param.grad`: a list for the only group, or one for each group.
                None in it stands for `param.grad`.
            output_params: low-precision copies to write, laid out like `grads`.
            scale: what the gradients are divided by, with one multiplication by its inverse.
            grad_norms: norm of each gradient as it is stored, a list for each group, read where
                max_grad_norm clips. Without it the norm is computed.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a list is not as long as its group.
            RuntimeError: a gradient is sparse, or nothing here can run kernels on the parameters'
                device. Nothing has been written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = (grads, output_params, grad_norms)
        whole = (
            not isinstance(scale, Tensor)
            and scale == 1.0
            and not any(map(clips, self.param_groups))
        )
        if whole and not any(each is not None for each in given):
            self._step_by_plan()
            return loss
        self._repeated.forget()
        rows = list(rows_of(self.param_groups, *given))
        for row in rows:
            check_dense_gradient(row.grad, "FusedLamb.step")
        self._ratios = [
            ([row.place for row in batch], self._step_batch(batch, scale))
            for batch in batches(rows)
        ]
        return loss

    def _step_by_plan(self) -> None:
        """Step with the gradients of the parameters as they are."""
        plan = self._plan
        if plan is None or not plan.read(self, shared=False):
            plan = self._plan = laid_out(self, self._state_of, self._fixed)
        key: list[object] = [plan, self.eps_inside_sqrt]
        for part in plan.parts:
            key.append(self.param_groups[part.index]["bias_correction"])
            key += self._block(part.index, part.device).hyper()
        make = partial(self._update_all, plan)
        self._ratios = self._repeated(key, plan.grads, plan.device, make)

    def _update_all(self, plan: StepPlan) -> list[tuple[Sequence[int], Tensor]]:
        return [(part.numbers, self._update(part)) for part in plan.parts]

    def _update(self, part: StepPart) -> Tensor:
        """Advance the counters of a part and update its parameters; their trust ratios."""
        group, block = self.param_groups[part.index], self._block(part.index, part.device)
        coefficients = prepare_lamb(
            part.steps,
            [*block.hyper(), block["factor"], block["found_inf"]],
            bias_correction=bool(group["bias_correction"]),
            cache=self._cache,
        )
        return self._updated(part.lists, coefficients)

    def _step_batch(self, rows: list[Row], scale: Number) -> Tensor:
        """Step parameters that share their coefficients; their trust ratios."""
        first = rows[0]
        block = self._block(first.index, first.param.device)
        steps = [self._state_of(row.param)["step"] for row in rows]
        factor = _factor(first, block, scale)
        coefficients = prepare_lamb(
            steps,
            [*block.hyper(), factor, block["found_inf"]],
            bias_correction=bool(first.group["bias_correction"]),
            cache=self._cache,
        )
        lists = [list(role) for role in zip(*map(self._tensors, rows), strict=True)]
        return self._updated(lists, coefficients)

    def _updated(self, lists: Sequence[Sequence[Tensor]], coefficients: Tensor) -> Tensor:
        """Update parameters, moments and copies, if there are any; trust ratios."""
        ratios = torch.empty(len(lists[0]), dtype=torch.float32, device=coefficients.device)
        with contiguous_lists(lists, (0, *range(2, len(lists)))) as lanes:
            update_lamb(
                lanes[:4],
                lanes[4] if len(lanes) > 4 else [],
                coefficients,
                eps_inside_sqrt=self.eps_inside_sqrt,
                cache=self._cache,
                ratios=ratios,
            )
        return ratios

    def _tensors(self, row: Row) -> list[Tensor]:
        state = self.state[row.param]
        tensors = [row.param, row.grad, *(state[name] for name in MOMENTS)]
        return tensors if row.copy is None else [*tensors, row.copy]

    def _block(self, index: int, device: torch.device) -> GroupBlock:
        key = (index, device)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = GroupBlock(device, lamb=True)
        block.set_group(self.param_groups[index])
        return block

    def initialize_states(self) -> None:
        """Make the state of parameters that have not been stepped yet; values stay as they are."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = self.state[param] or self._new_state(param)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter; new where it has none."""
        if not self.state[param]:
            require_not_captured("FusedLamb", param.device)
            self.state[param] = self._new_state(param)
        return cast("dict[str, Tensor]", self.state[param])

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        return new_state(param)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; moments are kept in fp32, counters become integers. All is copied.

        Raises:
            ValueError: a counter is not a whole number of steps, or groups do not match.
        """
        with loading_as_stored(self, self._new_state):
            super().load_state_dict(state_dict)
        self._fixed.clear()
        self._plan = None
        self._repeated.forget()

    def __getstate__(self) -> StateDict:
        kept = {name: getattr(self, name) for name in KEPT}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._forget_device()


def _factor(row: Row, block: GroupBlock, scale: Number) -> Tensor:
    """Return what the gradients are multiplied by; fp32, shape ()."""
    device = row.param.device
    if not row.clips and not isinstance(scale, Tensor) and scale == 1.0:
        return block["factor"]
    if not isinstance(scale, Tensor):
        scale = torch.full((), float(scale), dtype=torch.float64, device=device)
    scale = scale.detach().to(device=device, dtype=torch.float64).reshape(())
    norm, factor = block["norm"], torch.empty((), dtype=torch.float32, device=device)
    if row.clips and row.norm is None:
        norm = torch.empty((), dtype=torch.float32, device=device)
        gradient = row.grad if row.grad.is_contiguous() else row.grad.contiguous()
        # A norm that is not finite says so itself; found_inf is for steps that can be skipped.
        global_norm_([gradient], norm=norm, found_inf=torch.zeros_like(norm))
    elif row.clips:
        given = torch.as_tensor(row.norm, dtype=torch.float64, device=device)
        norm = given.detach().to(torch.float32).reshape(())
    clip_factor_(norm=norm, scale=scale, max_norm=block["max_norm"], factor=factor)
    return factor
