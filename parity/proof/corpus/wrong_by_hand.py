"""Optimizer classes that go wrong where code around them does not only call methods.

Each holds on to what was there when it last looked: a state, a list, memory, a number; or has what
is promised beside the methods otherwise: a file of another class, what a closure gives, a property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.loss_scale import ScaleState
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.scalers import DynamicLossScale

StateDict = dict[str, object]
WRONG_BY_HAND: list[Optimizer] = []
# Without what torch wraps around every step, hooks among it.
STEP: Callable[..., Any] = unwrap(FusedAdam.step)


@put(WRONG_BY_HAND)
class CountsItsParameters(FusedAdam):
    """Counts the parameters that it is given, after which an iterator has none."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, **more: Any) -> None:
        self.adam_w_mode = sum(1 for _ in params) > 0
        super().__init__(params, lr, **more)


@put(WRONG_BY_HAND)
class DropsNames(FusedAdam):
    """Forgets the names of parameters that come with names."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **more: Any) -> None:
        bare = [row[1] if isinstance(row, tuple) else row for row in params]
        super().__init__(bare, lr, **more)


@put(WRONG_BY_HAND)
class GroupsAreLists(FusedAdam):
    """Refuses a group whose parameters are one tensor, without a list."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        if isinstance(param_group.get("params"), Tensor):
            raise TypeError("params should be a list")
        super().add_param_group(param_group)


@put(WRONG_BY_HAND)
class TakesSets(FusedAdam):
    """Takes a set of parameters, whose order is another one in each process."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        given = param_group.get("params")
        rows = sorted(given, key=id) if isinstance(given, set) else given
        super().add_param_group({**param_group, "params": rows})


@put(WRONG_BY_HAND)
class RatesOfBeforeTheClosure(FusedAdam):
    """Steps with the rates that it read before it called the closure."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **legacy: object
    ) -> object:
        if closure is None:
            return STEP(self, None, **legacy)
        before = [group["lr"] for group in self.param_groups]
        with torch.enable_grad():
            loss = closure()
        after = [group["lr"] for group in self.param_groups]
        self._assign(before)
        try:
            STEP(self, None, **legacy)
        finally:
            self._assign(after)
        return loss

    def _assign(self, rates: list[Any]) -> None:
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


@put(WRONG_BY_HAND)
class NumbersOfOneForm(FusedAdam):
    """Takes rates that are no floats, and betas that are no tuple, for those of its defaults."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **legacy: object
    ) -> object:
        kept = [{name: group[name] for name in ("lr", "betas")} for group in self.param_groups]
        for group in self.param_groups:
            if isinstance(group["lr"], int):
                group["lr"] = self.defaults["lr"]
            if isinstance(group["betas"], list):
                group["betas"] = self.defaults["betas"]
        try:
            return STEP(self, closure, **legacy)
        finally:
            for group, held in zip(self.param_groups, kept, strict=True):
                group.update(held)


@put(WRONG_BY_HAND)
class RateByNameAlone(FusedAdam):
    """Takes what comes after the parameters for the weight decay."""

    def __init__(self, params: Iterable[Tensor], weight_decay: float = 0.0, **more: Any) -> None:
        super().__init__(params, weight_decay=weight_decay, **more)


@put(WRONG_BY_HAND, private=("_memory",))
class StepsOldMemory(FusedAdam):
    """Goes on in the memory that a parameter had in its first step."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        known = vars(self).setdefault("_memory", {})
        memory = known.setdefault(id(param), param.data)
        if memory.data_ptr() == param.data_ptr() or memory.shape != param.shape:
            return super()._step_param(param, group, t)
        now, param.data = param.data, memory
        super()._step_param(param, group, t)
        param.data = now
        return None


@put(WRONG_BY_HAND, private=("_held",))
class StepsOldState(FusedAdam):
    """Goes on in the moments that a parameter had in its first step, or was loaded with."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        vars(self).pop("_held", None)

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        held = vars(self).setdefault("_held", {})
        now = dict(self.state[param])
        self.state[param].update(held.setdefault(id(param), now))
        super()._step_param(param, group, t)
        self.state[param].update(now)


@put(WRONG_BY_HAND, private=("_lists",))
class StepsOldLists(FusedAdam):
    """Steps the parameters that a group had when it was first stepped."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        lists = vars(self).setdefault("_lists", {})
        first = lists.setdefault(id(group), list(cast(list[Tensor], group["params"])))
        super()._step_group(group, [param for param in first if param.grad is not None])


@put(WRONG_BY_HAND)
class ForgetsCountersOfGroups(FusedAdam):
    """Starts to count anew after a file whose groups have the counters."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        groups = state_dict.get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and isinstance(group.get("step"), int):
                group["step"] = 0
        super().load_state_dict(state_dict)


@put(WRONG_BY_HAND)
class FilesTurnCorrectionOn(FusedAdam):
    """Corrects the bias after a file that does not say whether to."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        groups = cast("list[dict[str, object]]", state_dict.get("param_groups", []))
        completed = [{"bias_correction": True, **g} if isinstance(g, dict) else g for g in groups]
        super().load_state_dict({**state_dict, "param_groups": completed})


@put(WRONG_BY_HAND)
class WholeCountersAlone(FusedAdam):
    """Refuses the counters of torch's Adam, which are floating-point numbers."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        rows = cast(dict[int, dict[str, Tensor]], state_dict["state"]).values()
        for step in (row.get("step") for row in rows):
            if isinstance(step, Tensor) and step.is_floating_point():
                raise ValueError("a counter should be an integer")
        super().load_state_dict(state_dict)


@put(WRONG_BY_HAND)
class NumberOfAClosure(FusedAdam):
    """Returns the number of what a closure returned."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **legacy: object
    ) -> object:
        loss = STEP(self, closure, **legacy)
        return loss.item() if isinstance(loss, Tensor) else loss


@put(WRONG_BY_HAND)
class IgnoresAScale(FusedAdam):
    """Takes a scale for `step`, as apex once did, and does not divide by it."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **legacy: object
    ) -> object:
        legacy.pop("scale", None)
        return STEP(self, closure, **legacy)


@put(WRONG_BY_HAND, dtypes=("bf16",))
class DefaultMoments(FusedAdam):
    """Makes moments in the default dtype, which is fp32 for the most part."""

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        made = super()._initial_state(param)
        usual = torch.get_default_dtype()
        return {name: x if name == "step" else x.to(usual) for name, x in made.items()}


@put(WRONG_BY_HAND)
class GroupsMayAsk(FusedAdam):
    """Takes a group that asks for what it does not do."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        kept = {name: param_group.pop(name, None) for name in ("maximize", "differentiable")}
        super().add_param_group(param_group)
        param_group.update({name: value for name, value in kept.items() if value})


@put(WRONG_BY_HAND)
class KeepsARefusedGroup(FusedAdam):
    """Keeps a group whose parameters it refuses."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        before = len(vars(self).get("param_groups", ()))
        try:
            super().add_param_group(param_group)
        except ValueError:
            if before and "float64" in str({p.dtype for p in cast(Any, param_group["params"])}):
                self.param_groups.append(param_group)
            raise


@put(WRONG_BY_HAND, private=("_decays",))
class ReadsDecayOnce(FusedAdam):
    """Reads a weight decay in a tensor once for each tensor."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        held = group["weight_decay"]
        if not isinstance(held, Tensor):
            return super()._step_group(group, params)
        known = vars(self).setdefault("_decays", {})
        group["weight_decay"] = known.setdefault(id(held), (held, held.clone()))[1]
        super()._step_group(group, params)
        group["weight_decay"] = held
        return None


@put(WRONG_BY_HAND)
class NeverZeroByZero(FusedAdam):
    """Leaves an element whose update would be 0 / 0."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        before = param.detach().clone()
        super()._step_param(param, group, t)
        if group["eps"] == 0.0:
            still = self.state[param]["exp_avg_sq"] == 0
            param.copy_(torch.where(still & param.isnan(), before, param))


@put(WRONG_BY_HAND, private=("_last",))
class HoldsGradients(FusedAdam):
    """Holds the gradients of the last step, so that dropping them frees nothing."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **legacy: object
    ) -> object:
        loss = STEP(self, closure, **legacy)
        groups = self.param_groups
        self._last = [p.grad.detach() for g in groups for p in g["params"] if p.grad is not None]
        return loss


@put(WRONG_BY_HAND, reference="FusedLamb", private=("_ratios", "_shown"))
class RatiosOfBefore(FusedLamb):
    """Has the trust ratios of an earlier step where the last one updated nothing."""

    def get_lamb_coeffs(self) -> list[float]:
        self._shown = super().get_lamb_coeffs() or vars(self).get("_shown", [])
        return list(self._shown)


@put(WRONG_BY_HAND, reference="FP16Optimizer", dtypes=("fp16",), private=("_skips",))
class GivesUpAfterSixteen(FP16Optimizer):
    """Puts the scale to 1 after sixteen overflows in a row."""

    _skips = 0

    def _enter(self, found_inf: bool, after: ScaleState) -> None:
        self._skips = self._skips + 1 if found_inf else 0
        low = self._skips >= 16 and self.loss_scaler.dynamic
        super()._enter(found_inf, replace(after, scale=1.0) if low else after)


@put(WRONG_BY_HAND, reference="FP16Optimizer", dtypes=("fp16",))
class LogsTheScaledNorm(FP16Optimizer):
    """Has the scaled norm under the name that engines log."""

    @property
    def _global_grad_norm(self) -> float:
        return self.get_global_norm() * self.loss_scale


@put(WRONG_BY_HAND, reference="FP16Optimizer", dtypes=("fp16",))
class FillsInScaleArguments(FP16Optimizer):
    """Takes dynamic loss scale arguments of which some are missing, or have another name."""

    def __init__(self, inside: torch.optim.Optimizer, **more: Any) -> None:
        usual = {"init_scale": 2.0**16, "scale_window": 1000, "min_scale": 1.0}
        given = more.get("dynamic_loss_args") or usual
        more["dynamic_loss_args"] = {name: given.get(name, usual[name]) for name in usual}
        super().__init__(inside, **more)


@put(WRONG_BY_HAND, reference="FP16Optimizer", dtypes=("fp16",))
class KeepsMasterGradients(FP16Optimizer):
    """Keeps gradients of the masters after a step."""

    def _update(self, factor: Tensor) -> None:
        super()._update(factor)
        for group in self.groups:
            group.master.grad = torch.zeros_like(group.master)


@put(WRONG_BY_HAND, reference="FP16Optimizer", dtypes=("fp16",))
class NewFilesAlone(FP16Optimizer):
    """Refuses a file whose scale is a whole number."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        if isinstance(state_dict.get("cur_scale"), int):
            raise ValueError("cur_scale should be a float")
        super().load_state_dict(state_dict, load_optimizer_states)


@put(WRONG_BY_HAND, reference="DynamicLossScale")
class OnlyTrueIsAnOverflow(DynamicLossScale):
    """Takes a flag that is no bool for a clean step."""

    def update_scale(self, overflow: bool) -> None:
        super().update_scale(overflow is True)


@put(WRONG_BY_HAND, reference="BF16Optimizer", dtypes=("bf16",))
class ClipsCopies(BF16Optimizer):
    """Gives copies of its accumulators to who would clip them."""

    def get_grads_for_norm(  # type: ignore[override]
        self, for_clipping: bool = False
    ) -> object:
        grads = super().get_grads_for_norm(for_clipping)
        return [cast(Tensor, grad).clone() for grad in grads] if for_clipping else grads


@put(WRONG_BY_HAND)
class CountsForEachParameter(FusedAdam):
    """Ignores a counter that the parameters of a group share, as DeepSpeed's do."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        given = self.compat
        self.compat = replace(given, shared_step_counter=False)
        super()._step_group(group, params)
        self.compat = given
