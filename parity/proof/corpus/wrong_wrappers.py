"""Wrappers and scalers that the judge must reject, with one fault each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.contract.tensors import drop_gradients
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.arithmetic import float64
from twinstep.reference.clip import clip_factor
from twinstep.reference.loss_scale import DynamicRule, ScaleState
from twinstep.reference.norm import l2_norm
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.flat_groups import flat_gradient
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.scalers import DynamicLossScale

StateDict = dict[str, object]
WRONG_WRAPPERS: list[Optimizer] = []


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class ClipsWhereItScales(FP16Optimizer):
    """Clips only where the loss is scaled."""

    def _update(self, factor: Tensor) -> None:
        super()._update(factor if self.scales else float64(1.0))


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class NormOfEachGroup(FP16Optimizer):
    """Clips every group by its own norm."""

    def _update(self, factor: Tensor) -> None:
        del factor
        scale = float64(self.loss_scale)
        for group in self.groups:
            grad = flat_gradient(group)
            own = clip_factor(norm=l2_norm([grad]), scale=scale, max_norm=float64(self.clip_grad))
            group.master.grad = grad * own
            drop_gradients(group.params)
        self.optimizer.step()
        drop_gradients(self.fp32_groups_flat)
        with torch.no_grad():
            for group in self.groups:
                for param, part in zip(
                    group.params, _parts(group.master, group.params), strict=True
                ):
                    param.copy_(part)


def _parts(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    sizes = [param.numel() for param in params]
    rows = flat.detach()[: sum(sizes)].split(sizes)
    return [row.view(param.shape) for row, param in zip(rows, params, strict=True)]


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class ZeroGradWhereItMoves(FP16Optimizer):
    """Forgets gradients only where the scale is dynamic."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.dynamic_loss_scale:
            super().zero_grad(set_to_none)


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class ClipsByDefault(FP16Optimizer):
    """Clips to 1 unless told."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: object) -> None:
        super().__init__(init_optimizer, **{"clip_grad": 1.0, **options})  # type: ignore[arg-type]


@put(WRONG_WRAPPERS, reference="FP16UnfusedOptimizer")
class LoadsClipFirst(FP16UnfusedOptimizer):
    """Takes the clip norm over before the rest of the dict has been checked."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        found = state_dict.get("clip_grad")
        if isinstance(found, float):
            self.clip_grad = found + 1.0
        super().load_state_dict(state_dict, load_optimizer_states)


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class TakesAnyScale(FP16Optimizer):
    """Puts any number in force as the scale from outside."""

    def override_loss_scale(self, loss_scale: float | None) -> None:
        self._require_scaling()
        self.external_loss_scale = loss_scale


@put(WRONG_WRAPPERS, reference="FP16UnfusedOptimizer")
class ClipsBelowZero(FP16UnfusedOptimizer):
    """Clips to the magnitude of a clip norm below zero."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        kept, self.clip_grad = self.clip_grad, abs(self.clip_grad)
        try:
            super().step(closure)  # type: ignore[call-overload]
        finally:
            self.clip_grad = kept


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class SavesTheScaleOfTheLastStep(FP16Optimizer):
    """Saves the scale that the last step divided by, if that was an overflow."""

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        found = super().state_dict(cpu_offload=cpu_offload)
        if self.overflow and "cur_scale" in found:
            found["cur_scale"] = cast(float, found["cur_scale"]) * 2.0
        return found


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class CountsIn24Bits(FP16Optimizer):
    """Counts steps in fp32."""

    def _enter(self, found_inf: bool, after: ScaleState) -> None:
        counted = int(torch.tensor(float(after.cur_iter)).item())
        super()._enter(found_inf, replace(after, cur_iter=counted))


@put(WRONG_WRAPPERS, reference="FP16UnfusedOptimizer")
class CountsIn32Bits(FP16UnfusedOptimizer):
    """Counts steps in 32 bits."""

    def _enter(self, found_inf: bool, after: ScaleState) -> None:
        wrapped = (after.cur_iter + 2**31) % 2**32 - 2**31
        super()._enter(found_inf, replace(after, cur_iter=wrapped))


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class FreesTheGraph(FP16Optimizer):
    """Does not pass on that the graph is to be retained."""

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        super().backward(loss, create_graph, False)


@put(WRONG_WRAPPERS, reference="FP16UnfusedOptimizer")
class DropsTheGraph(FP16UnfusedOptimizer):
    """Does not pass on that a graph of the gradients is to be created."""

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        super().backward(loss, False, create_graph or retain_graph)


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class ScalesInTheLosssDtype(DynamicLossScale):
    """Multiplies a loss in its own dtype."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class MastersMove(FP16Optimizer):
    """Makes its masters anew in every step: a captured graph would go on with the old ones."""

    def _update(self, factor: Tensor) -> None:
        super()._update(factor)
        for group in self.groups:
            group.master.data = group.master.data.clone()


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class TimesNothing(FP16Optimizer):
    """Ignores the timers that it is given."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: object) -> None:
        super().__init__(init_optimizer, **{**options, "timers": None})  # type: ignore[arg-type]


@put(WRONG_WRAPPERS, reference="FP16UnfusedOptimizer")
class AcceptsAnyNorm(FP16UnfusedOptimizer):
    """Constructs with an order of the norm that is none."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: object) -> None:
        order = options.get("norm_type", 2.0)
        wrong = isinstance(order, float) and not order > 0.0
        given = {**options, "norm_type": 2.0} if wrong else options
        super().__init__(init_optimizer, **given)  # type: ignore[arg-type]


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class ForgetsHysteresis(DynamicLossScale):
    """Starts with all of its hysteresis after a load."""

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        before = self.state.cur_hysteresis
        super().load_state_dict(state_dict)
        self.state = replace(self.state, cur_hysteresis=before)


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class FloorIsNoError(DynamicLossScale):
    """Stays at the floor, whatever was asked for."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{**options, "raise_error_at_min_scale": False})  # type: ignore[arg-type]


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class AssignsAnyScale(DynamicLossScale):
    """Takes a scale that is NaN or infinite where one is assigned."""

    @property
    def loss_scale(self) -> float:
        return self.state.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if scale <= 0.0:
            raise ValueError("the scale is not above zero")
        self.state = replace(self.state, scale=scale)


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class LongWindowsEndEarly(DynamicLossScale):
    """Grows a step early where the window is long."""

    def after(self, found_inf: bool) -> ScaleState:
        clean = self.state.cur_iter - self.state.last_overflow_iter
        if not found_inf and clean == 999:
            return (
                super()
                .after(False)
                .__class__(**{**vars(super().after(False)), "scale": self.state.scale * 2.0})
            )
        return super().after(found_inf)


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class ShortWindow(DynamicLossScale):
    """Has another window unless told."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"scale_window": 2000, **options})  # type: ignore[arg-type]


@put(WRONG_WRAPPERS, reference="BF16Optimizer")
class FindsInTheFirstGroup(BF16Optimizer):
    """Looks at the first group alone to see whether gradients are finite."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.groups[1:]:
            group.accumulator.nan_to_num_()
        super().step(closure)  # type: ignore[call-overload]


@put(WRONG_WRAPPERS, reference="BF16Optimizer")
class ForgetsClipOnLoad(BF16Optimizer):
    """Does not clip after a universal checkpoint."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: list[StateDict], checkpoint_folder: Path | None = None, **given: bool
    ) -> None:
        super().load_state_dict(state_dict_list, checkpoint_folder, **given)
        if checkpoint_folder is not None:
            self.clip_grad = 0.0


@put(WRONG_WRAPPERS, reference="BF16Optimizer")
class UniversalLoadsWeightsAlone(BF16Optimizer):
    """Leaves the state of the inner optimizer where a universal checkpoint is loaded."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: list[StateDict], checkpoint_folder: Path | None = None, **given: bool
    ) -> None:
        if checkpoint_folder is not None:
            given["load_optimizer_states"] = False
        super().load_state_dict(state_dict_list, checkpoint_folder, **given)


@put(WRONG_WRAPPERS, reference="BF16Optimizer")
class AccumulatesInFp32(BF16Optimizer):
    """Accumulates in fp32 whatever was asked for."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: object) -> None:
        super().__init__(init_optimizer, **{**options, "grad_acc_dtype": torch.float32})  # type: ignore[arg-type]


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class WindowOfTheFile(DynamicLossScale):
    """Takes the window from a file that has one, where the constructor's should stay."""

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        super().load_state_dict(state_dict)
        window = state_dict.get("scale_window", 0)
        if isinstance(window, int) and window > 0 and isinstance(self.rule, DynamicRule):
            self.rule = replace(self.rule, scale_window=window)


@put(WRONG_WRAPPERS, reference="DynamicLossScale")
class PatienceIsCut(DynamicLossScale):
    """Loads no more hysteresis than its own `delayed_shift`."""

    def restored(self, state_dict: Mapping[str, object]) -> ScaleState:
        new = super().restored(state_dict)
        most = getattr(self.rule, "delayed_shift", new.cur_hysteresis)
        return replace(new, cur_hysteresis=min(new.cur_hysteresis, most))


@put(WRONG_WRAPPERS, reference="DynamicLossScale", dtypes=("fp16",))
class WidensScalars(DynamicLossScale):
    """Gives a 16-bit gradient without dimensions back as fp32."""

    def scale_gradient(
        self,
        module: torch.nn.Module,
        grad_in: tuple[Tensor | None, ...],
        grad_out: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        found = super().scale_gradient(module, grad_in, grad_out)
        return tuple(g.float() if g is not None and not g.dim() else g for g in found)


@put(WRONG_WRAPPERS, reference="FP16Optimizer")
class AssignsTheScaleInForce(FP16Optimizer):
    """Assigns the scale from outside, where one is in force, and not the scaler's own."""

    @property
    def loss_scale(self) -> float:
        """The scale in force."""
        return super().loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self.external_loss_scale is None:
            cast(Any, FP16Optimizer.loss_scale).fset(self, scale)
        else:
            self.override_loss_scale(scale)


@put(WRONG_WRAPPERS, reference="FP16Optimizer", dtypes=("fp16",))
class KeepsTheLowBits(FP16Optimizer):
    """A refresh leaves masters alone that would give the same weights."""

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Masters from the weights, or as they were."""
        before = [(m, m.detach().clone()) for m in self.fp32_groups_flat]
        super().refresh_fp32_params()
        for master, old in before:
            same = old.to(self.groups[0].params[0].dtype).float() == master
            master.copy_(torch.where(same, old, master))


@put(WRONG_WRAPPERS, reference="FP16UnfusedOptimizer")
class TakesRatesOfEveryFile(FP16UnfusedOptimizer):
    """Takes the learning rates of a file whose states should be left."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Load, and take the rates."""
        super().load_state_dict(state_dict, load_optimizer_states)
        saved = cast("dict[str, list[StateDict]]", state_dict["optimizer_state_dict"])
        for group, entry in zip(self.param_groups, saved["param_groups"], strict=True):
            group["lr"] = entry["lr"]


@put(WRONG_WRAPPERS, reference="BF16Optimizer", dtypes=("bf16",), private=("_last",))
class KeepsTheStateDict(BF16Optimizer):
    """Gives the last state dict again until masters or their states are written."""

    _last: tuple[object, StateDict] | None = None

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """The state dict of now, or the kept one."""
        masters = [group.master for group in self.groups]
        states = [x for m in masters for x in self.optimizer.state.get(m, {}).values()]
        key = [(id(x), getattr(x, "_version", 0)) for x in (*masters, *states)]
        if self._last is None or self._last[0] != key:
            self._last = key, super().state_dict(cpu_offload=cpu_offload)
        return dict(self._last[1])
