"""Optimizer classes that are wrong in situations that random drawing rarely meets.

Long runs, defaults, states that are to be refused, gradients and parameters out of the ordinary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.optimizers.apex_lamb import FusedLAMB
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.scalers import StaticLossScale

Group = dict[str, object]
StateDict = dict[str, object]
Closure = Callable[[], float]
WRONG_BY_SITUATION: list[Optimizer] = []
# By number of the group. Not among the attributes, which are compared.
RATES: WeakKeyDictionary[FusedAdam, dict[int, float]] = WeakKeyDictionary()
LIMITS: WeakKeyDictionary[FusedLAMB, dict[int, tuple[object, object]]] = WeakKeyDictionary()
CAPTURED: WeakKeyDictionary[FusedAdam, dict[int, tuple[int, ParamGroup]]] = WeakKeyDictionary()


def unhooked(base: type[torch.optim.Optimizer]) -> Callable[..., object]:
    """A base's step without the hooks that torch puts around it once there is an instance."""
    step = base.step
    hooked = getattr(step, "hooked", False)
    return cast("Callable[..., object]", step.__wrapped__ if hooked else step)  # type: ignore[attr-defined]


STEP, STEP_OF_LAMB = unhooked(FusedAdam), unhooked(FusedLamb)


@put(WRONG_BY_SITUATION)
class AcceptsAnyRate(FusedAdam):
    """Constructs with a learning rate that is none."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        torch.optim.Optimizer.add_param_group(self, param_group)


@put(WRONG_BY_SITUATION)
class OtherDefault(FusedAdam):
    """Decays unless told not to."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Group], lr: float = 1e-3, **options: object
    ) -> None:
        super().__init__(params, lr, **{"weight_decay": 0.01, **options})  # type: ignore[arg-type]


@put(WRONG_BY_SITUATION)
class OtherDefaultMode(FusedAdam):
    """Is Adam with L2 decay unless told."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Group], lr: float = 1e-3, **options: object
    ) -> None:
        super().__init__(params, lr, **{"adam_w_mode": False, **options})  # type: ignore[arg-type]


@put(WRONG_BY_SITUATION)
class LoadWritesBeforeItRefuses(FusedAdam):
    """Takes learning rates over before the state has been checked."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        saved = state_dict.get("param_groups", [])
        saved = cast(list[Group], saved if isinstance(saved, list) else [])
        for group, given in zip(self.param_groups, saved, strict=False):
            if isinstance(given, dict) and "lr" in given:
                group["lr"] = given["lr"]
        super().load_state_dict(state_dict)


@put(WRONG_BY_SITUATION)
class LoadsWithoutACheck(FusedAdam):
    """Takes a moment of any shape over."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        rows = state_dict.get("param_groups")
        whole = isinstance(rows, list) and isinstance(state_dict.get("state"), dict)
        load = torch.optim.Optimizer.load_state_dict if whole else FusedAdam.load_state_dict
        load(self, state_dict)


@put(WRONG_BY_SITUATION)
class StateMadeAnew(FusedAdam):
    """Makes a moment anew in every step: a captured graph would go on with the old one."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        super()._step_param(param, group, t)
        self.state[param]["exp_avg"] = self.state[param]["exp_avg"].clone()


@put(WRONG_BY_SITUATION)
class CounterOf24Bits(FusedAdam):
    """Counts steps in fp32, in an integer's place."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params)
        for param in params:
            self.state[param]["step"].copy_(self.state[param]["step"].float())


@put(WRONG_BY_SITUATION)
class CounterOf32Bits(FusedAdam):
    """Counts steps in 32 bits, in 64 bits' place."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params)
        for param in params:
            self.state[param]["step"].copy_(self.state[param]["step"].int())


@put(WRONG_BY_SITUATION)
class SparseIsDense(FusedAdam):
    """Takes a sparse gradient."""

    def step(  # type: ignore[override]
        self, closure: Closure | None = None, **legacy: object
    ) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()
        return cast("float | None", unhooked(FusedAdam)(self, closure, **legacy))


@put(WRONG_BY_SITUATION)
class ReadsMemoryNotElements(FusedAdam):
    """Reads a gradient in the order of its memory."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        grad = cast(Tensor, param.grad)
        dense = grad.numel() > 0 and 0 not in grad.stride()
        if dense and not grad.is_contiguous():
            param.grad = grad.as_strided((grad.numel(),), (1,)).view(grad.shape)
        super()._step_param(param, group, t)
        param.grad = grad


@put(WRONG_BY_SITUATION)
class SkipsWhatIsFrozen(FusedAdam):
    """Leaves a parameter that was frozen out, though it has a gradient."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, [param for param in params if param.requires_grad])


@put(WRONG_BY_SITUATION)
class FirstGroupsEps(FusedAdam):
    """Uses the eps of the first group for all."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group({**group, "eps": self.param_groups[0]["eps"]}, params)


@put(WRONG_BY_SITUATION)
class EightForAStep(FusedAdam):
    """Steps the first eight parameters of a group."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params[:8])


@put(WRONG_BY_SITUATION)
class LargeTailStays(FusedAdam):
    """Leaves the elements of a parameter past 512."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        before = param.detach().clone()
        super()._step_param(param, group, t)
        if param.numel() > 512 and param.is_contiguous():
            param.view(-1)[512:] = before.view(-1)[512:]


@put(WRONG_BY_SITUATION)
class DecaysMatricesAlone(FusedAdam):
    """Leaves decay out where a parameter has more than two dimensions."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        decay = 0.0 if param.dim() > 2 else group["weight_decay"]
        super()._step_param(param, {**group, "weight_decay": decay}, t)


@put(WRONG_BY_SITUATION)
class PastAChunkStays(FusedAdam):
    """Leaves the elements of a parameter past a chunk of 65,536."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        before = param.detach().clone()
        super()._step_param(param, group, t)
        if param.numel() > 65_536:
            param.view(-1)[65_536:] = before.view(-1)[65_536:]


@put(WRONG_BY_SITUATION)
class OppositesAreNothing(FusedAdam):
    """Leaves a parameter out whose gradients sum to zero."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        sums = [cast(Tensor, param.grad).double().sum() for param in params]
        pairs = zip(params, sums, strict=True)
        super()._step_group(group, [p for p, total in pairs if float(total) or not p.numel()])


@put(WRONG_BY_SITUATION)
class CorrectionEnds(FusedAdam):
    """Takes both corrections for 1 after 10 / (1 - beta) steps of the larger beta."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        ended = t * (1.0 - max(cast(tuple[float, float], group["betas"]))) > 10.0
        kept = group["bias_correction"] and not ended
        super()._step_param(param, {**group, "bias_correction": kept}, t)


@put(WRONG_BY_SITUATION)
class SmallChangesOfTheRate(FusedAdam):
    """Takes a learning rate over only if it has moved by more than 1e-5."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        rates, rate = RATES.setdefault(self, {}), cast(float, group["lr"])
        at = next(n for n, given in enumerate(self.param_groups) if given is group)
        if abs(rates.get(at, torch.inf) - rate) > 1e-5:
            rates[at] = rate
        super()._step_group({**group, "lr": rates[at]}, params)


@put(WRONG_BY_SITUATION)
class CapturedAfterAHundred(FusedAdam):
    """Keeps the hyper-parameters of its hundredth step, as a captured graph does."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        at = next(n for n, given in enumerate(self.param_groups) if given is group)
        count, kept = CAPTURED.setdefault(self, {}).get(at, (1, group))
        kept = cast(ParamGroup, {**group}) if count == 100 else kept
        CAPTURED[self][at] = count + 1, kept
        super()._step_group(kept if count >= 100 else group, params)


@put(WRONG_BY_SITUATION)
class SixteenRates(FusedAdam):
    """Has a table of sixteen learning rates, which the next groups overwrite."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        at = next(n for n, given in enumerate(self.param_groups) if given is group)
        last = max(n for n in range(at % 16, len(self.param_groups), 16))
        super()._step_group({**group, "lr": self.param_groups[last]["lr"]}, params)


@put(WRONG_BY_SITUATION)
class GradModeStaysOff(FusedAdam):
    """Leaves gradients disabled where the closure raises an error."""

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        loss = cast("float | None", unhooked(FusedAdam)(self, closure))
        torch.set_grad_enabled(before)
        return loss


@put(WRONG_BY_SITUATION)
class LargeLosesItsEnd(FusedAdam):
    """Leaves the elements of a parameter past two chunks of 65,536."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        before = param.detach().clone()
        super()._step_param(param, group, t)
        if param.numel() > 131_072:
            param.view(-1)[131_072:] = before.view(-1)[131_072:]


@put(WRONG_BY_SITUATION, reference="FP16Optimizer")
class CeilingOfTheScale(FP16Optimizer):
    """Cuts the scale to 2^40 after a step."""

    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
        unhooked(FP16Optimizer)(self, closure)
        if self.loss_scale > 2.0**40:
            self.loss_scale = 2.0**40


@put(WRONG_BY_SITUATION)
class TableDropsOne(FusedAdam):
    """Drops the parameter that finds its table of 110 full."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        kept = [param for at, param in enumerate(params) if at % 111 != 110]
        super()._step_group(group, kept)


@put(WRONG_BY_SITUATION, reference="FusedLamb")
class LambTableDropsOne(FusedLamb):
    """Drops the parameter that finds its table of 110 full."""

    def _rows(self, *given: Any) -> Any:
        rows = super()._rows(*given)
        return [row for at, row in enumerate(rows) if at % 111 != 110]


@put(WRONG_BY_SITUATION, reference="FusedLAMB", dtypes=("fp16", "fp32"))
class LimitIsReadWithTheRates(FusedLAMB):
    """Reads a new largest norm once another hyper-parameter of the group has changed, too."""

    def step(  # type: ignore[override]
        self, closure: Closure | None = None
    ) -> float | None:
        kept = LIMITS.setdefault(self, {})
        limits = [group["max_grad_norm"] for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            rates = [group[name] for name in ("lr", "betas", "eps", "weight_decay")]
            if number not in kept or kept[number][0] != rates:
                kept[number] = rates, group["max_grad_norm"]
            group["max_grad_norm"] = kept[number][1]
        try:
            return cast("float | None", unhooked(FusedLAMB)(self, closure))
        finally:
            for group, limit in zip(self.param_groups, limits, strict=True):
                group["max_grad_norm"] = limit


@put(WRONG_BY_SITUATION, reference="FP16Optimizer")
class WrapperTableDropsOne(FP16Optimizer):
    """Drops the gradient that finds its table of 110 full."""

    def _update(self, factor: Tensor) -> None:
        for param in (param for group in self.fp16_groups for param in group[110::111]):
            param.grad = None
        super()._update(factor)


@put(WRONG_BY_SITUATION, reference="FP16Optimizer")
class ThirdGroupNotChecked(FP16Optimizer):
    """Looks for an overflow in two groups; of the others it drops what overflows, and steps."""

    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
        for param in (param for group in self.fp16_groups[2:] for param in group):
            if param.grad is not None and not bool(param.grad.isfinite().all()):
                param.grad = None
        unhooked(FP16Optimizer)(self, closure)


@put(WRONG_BY_SITUATION, reference="StaticLossScale")
class ReadsParametersTwice(StaticLossScale):
    """Looks for a gradient first, and for an overflow in what is left of an iterator."""

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return any(param.grad is not None for param in params) and super().has_overflow(params)


@put(WRONG_BY_SITUATION)
class DecaysOfThreeDigits(FusedAdam):
    """Rounds the weight decay to three digits behind the point: 1e-4 is none."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **legacy: object
    ) -> object:
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            if isinstance(group["weight_decay"], float):
                group["weight_decay"] = round(group["weight_decay"], 3)
        try:
            return STEP(self, closure, **legacy)
        finally:
            for group, decay in zip(self.param_groups, kept, strict=True):
                group["weight_decay"] = decay


@put(WRONG_BY_SITUATION, reference="FusedLamb", dtypes=("fp16", "fp32"))
class ScalesFromOneOn(FusedLamb):
    """Takes a scale below 1 for 1."""

    def step(  # type: ignore[override]
        self, closure: Closure | None = None, *, scale: float | Tensor = 1.0, **more: object
    ) -> object:
        return STEP_OF_LAMB(self, closure, scale=max(scale, 1.0) if scale > 0 else scale, **more)
