"""Optimizer classes that go wrong between calls: in what was frozen, returned, copied, or kept.

Each does all that it is asked, and is wrong about what its caller did before, or does afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from twinstep.contract.wrapper import Wrapper
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.scalers import DynamicLossScale

WRONG_BY_TIME: list[Optimizer] = []
# Not among the attributes, which are compared.
BETAS: WeakKeyDictionary[FusedAdam, dict[tuple[np.float32, ...], tuple[float, float]]] = (
    WeakKeyDictionary()
)
STEP: Callable[..., object] = FusedAdam.step
STEP_OF_FP16: Callable[..., object] = FP16Optimizer.step
STEP_OF_LAMB: Callable[..., object] = FusedLamb.step


def set_in_place(optimizer: Wrapper, set_lr: Callable[[float], None], lr: float) -> None:
    """Set a rate; a tensor that a group holds is written to."""
    held = [(group, group["lr"]) for group in optimizer.param_groups]
    set_lr(lr)
    for group, before in held:
        if isinstance(before, Tensor):
            group["lr"] = before.fill_(lr)


@put(WRONG_BY_TIME)
class DropsWords(FusedAdam):
    """Keeps of a group what is a hyper-parameter, and nothing else."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        asking = ("maximize", "amsgrad", "differentiable")
        known = {"params", "param_names", *self.defaults, *asking}
        super().add_param_group({k: v for k, v in param_group.items() if k in known})


@put(WRONG_BY_TIME)
class GroupIsACopy(FusedAdam):
    """Adds a copy of a group: what its owner writes there later is not read."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group({**param_group})


@put(WRONG_BY_TIME, private=("_stepped",))
class GroupsOfConstruction(FusedAdam):
    """Steps the groups that were added or loaded, not those of now."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        self._stepped = list(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        self._stepped = list(self.param_groups)

    def step(self, *given: object, **more: object) -> object:  # type: ignore[override]
        shown = self.param_groups
        self.param_groups = vars(self).setdefault("_stepped", list(shown))
        try:
            return STEP(self, *given, **more)
        finally:
            self.param_groups = shown


@put(WRONG_BY_TIME)
class RatesOfTheFile(FusedAdam):
    """Takes over rates in tensors from a state that is loaded, and does not copy them."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        saved = cast(list[ParamGroup], state_dict["param_groups"])
        for group, one in zip(self.param_groups, saved, strict=True):
            if isinstance(one["lr"], Tensor):
                group["lr"] = one["lr"]


@put(WRONG_BY_TIME)
class FrozenWithoutState(FusedAdam):
    """Makes no state of parameters that are frozen at the time."""

    def initialize_states(self) -> None:
        known = {param for param, row in self.state.items() if row}
        super().initialize_states()
        for param in [p for group in self.param_groups for p in group["params"]]:
            if not param.requires_grad and param not in known:
                del self.state[param]


@put(WRONG_BY_TIME, private=("_decoupled",))
class ModeOfConstruction(FusedAdam):
    """Steps in the mode that it was constructed with, whatever its owner assigns."""

    def step(self, *given: object, **more: object) -> object:  # type: ignore[override]
        shown = self.adam_w_mode
        self.adam_w_mode = vars(self).setdefault("_decoupled", shown)
        try:
            return STEP(self, *given, **more)
        finally:
            self.adam_w_mode = shown


@put(WRONG_BY_TIME)
class SaysThatItUnscales(FusedAdam):
    """Tells GradScaler to leave scale and overflow to it, and looks at neither."""

    _step_supports_amp_scaling = True


@put(WRONG_BY_TIME)
class RoundedBetas(FusedAdam):
    """Keeps what follows from betas by their fp32 numbers: others nearby find those of before."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        betas = cast("tuple[float, float]", group["betas"])
        kept = BETAS.setdefault(self, {}).setdefault(tuple(map(np.float32, betas)), betas)
        super()._step_group({**group, "betas": kept}, params)


@put(WRONG_BY_TIME)
class SkipsALossOfNan(FusedAdam):
    """Leaves out a step whose closure gives NaN."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], object] | None = None, **more: object
    ) -> object:
        given: list[object] = []

        def once() -> object:
            given.append(closure() if closure is not None else None)
            if given[-1] != given[-1]:
                raise ArithmeticError
            return given[-1]

        try:
            return STEP(self, closure if closure is None else once, **more)
        except ArithmeticError:
            return given[-1]


@put(WRONG_BY_TIME, private=("_loss",))
class OneTensorForLosses(FusedAdam):
    """Returns losses that are tensors in one tensor, always the same."""

    def step(self, *given: object, **more: object) -> object:  # type: ignore[override]
        loss = STEP(self, *given, **more)
        if not isinstance(loss, Tensor):
            return loss
        kept: Tensor = vars(self).setdefault("_loss", loss.clone())
        return kept.copy_(loss)


@put(WRONG_BY_TIME)
class CopiesShareDefaults(FusedAdam):
    """Shares its defaults with its copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesShareDefaults:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.defaults)] = self.defaults
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


@put(WRONG_BY_TIME, reference="FusedLamb", private=("_shown",))
class LiveRatios(FusedLamb):
    """Returns one list of trust ratios, always the same, which it brings up to date."""

    def get_lamb_coeffs(self) -> list[float]:
        shown: list[float] = vars(self).setdefault("_shown", [])
        shown[:] = super().get_lamb_coeffs()
        return shown

    def step(self, *given: object, **more: object) -> object:  # type: ignore[override]
        loss = STEP_OF_LAMB(self, *given, **more)
        self.get_lamb_coeffs()
        return loss


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class CopiesDoNotClip(FP16Optimizer):
    """Clips, but its copies do not."""

    def __reduce_ex__(  # type: ignore[override]
        self, protocol: object
    ) -> tuple[Callable[..., object], object]:
        given, self.clip_grad = self.clip_grad, 0.0
        try:
            return super().__reduce_ex__(protocol)
        finally:
            self.clip_grad = given


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",), private=("_copied",))
class CopiesDoNotStep(FP16Optimizer):
    """Steps, but its copies leave out every step."""

    def _enter_copied(self, state: object, kept: Mapping[str, object]) -> None:
        super()._enter_copied(state, kept)
        self._copied = True

    def step(self, *given: object, **more: object) -> object:  # type: ignore[override]
        return None if hasattr(self, "_copied") else STEP_OF_FP16(self, *given, **more)


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class KeepsEveryGraph(FP16Optimizer):
    """Keeps the graph of every backward, which may be run again where it should be gone."""

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        super().backward(loss, create_graph=create_graph, retain_graph=True)


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class ZeroesWhatIsTrained(FP16Optimizer):
    """Leaves the gradients of parameters that have been frozen since."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        frozen = [p for group in self.fp16_groups for p in group if not p.requires_grad]
        held = [(param, param.grad) for param in frozen]
        for param in frozen:
            param.grad = None
        super().zero_grad(set_to_none)
        for param, grad in held:
            param.grad = grad


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class RefreshesWhatIsTrained(FP16Optimizer):
    """Leaves the masters of parameters that have been frozen since."""

    def refresh_fp32_params(self) -> None:
        before = [group.master.detach().clone() for group in self.groups]
        super().refresh_fp32_params()
        for group, old in zip(self.groups, before, strict=True):
            for param, place in group.slices():
                if not param.requires_grad:
                    group.master.data[place] = old[place]


@put(WRONG_BY_TIME, reference="BF16Optimizer", dtypes=("bf16",))
class SetsRatesInPlace(BF16Optimizer):
    """Writes a rate into the tensor that the group holds, which is its owner's."""

    def set_lr(self, lr: float) -> None:
        set_in_place(self, super().set_lr, lr)


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class SetsScaledRatesInPlace(FP16Optimizer):
    """Writes a rate into the tensor that the group holds, which is its owner's."""

    def set_lr(self, lr: float) -> None:
        set_in_place(self, super().set_lr, lr)


@put(WRONG_BY_TIME)
class IdleRowsStay(FusedAdam):
    """Leaves weights of a row whose gradient is zero as they are."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        before = [param.detach().clone() for param in params]
        super()._step_group(group, params)
        for param, old in zip(params, before, strict=True):
            if param.dim() > 1 and param.grad is not None and not param.grad.is_sparse:
                idle = (param.grad == 0).all(-1, keepdim=True)
                param.detach().copy_(torch.where(idle, old, param.detach()))


@put(WRONG_BY_TIME)
class TinyRatesAreNone(FusedAdam):
    """Takes a learning rate below 1e-6 for 0."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        rate = 0.0 if 0 < float(cast(float, group["lr"])) < 1e-6 else group["lr"]
        super()._step_group({**group, "lr": rate}, params)


@put(WRONG_BY_TIME)
class ZeroesWithoutDetaching(FusedAdam):
    """Zeroes gradients in place, which keep their graph."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        drop = self.set_grad_none if set_to_none is None else set_to_none
        if drop:
            super().zero_grad(set_to_none=True)
            return
        for param in [p for group in self.param_groups for p in group["params"]]:
            if param.grad is not None:
                param.grad.data.zero_()


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class NormOfDefaultDtype(FP16Optimizer):
    """Passes the norm on through a tensor of torch's default dtype."""

    def get_global_norm(self) -> float:
        return torch.tensor(super().get_global_norm()).item()


@put(WRONG_BY_TIME, reference="FP16Optimizer", dtypes=("fp16",))
class RefusesOneElement(FP16Optimizer):
    """Refuses a loss of one element that has a dimension."""

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        if loss.dim():
            raise ValueError("the loss should have no dimension")
        super().backward(loss, create_graph=create_graph, retain_graph=retain_graph)


@put(WRONG_BY_TIME, reference="DynamicLossScale")
class WholeBatches(DynamicLossScale):
    """Looks at gradients in batches of 128; behind a whole one the rest is not looked at."""

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        held = list(params)
        return super().has_overflow(held[: max(len(held) // 128 * 128, 128)])


@put(WRONG_BY_TIME, reference="DynamicLossScale")
class OverflowOfTheTrained(DynamicLossScale):
    """Does not look at gradients of parameters that are frozen."""

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return super().has_overflow(param for param in params if param.requires_grad)


@put(WRONG_BY_TIME, reference="BF16Optimizer", dtypes=("bf16",))
class RefreshForgetsSums(BF16Optimizer):
    """Forgets accumulated gradients where weights are loaded."""

    def refresh_fp32_params(self) -> None:
        super().refresh_fp32_params()
        self.clear_hp_grads()


@put(WRONG_BY_TIME, reference="BF16Optimizer", dtypes=("bf16",))
class KeepsEveryGraphOfBf16(BF16Optimizer):
    """Keeps the graph of every backward, which may be run again where it should be gone."""

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, **more: bool
    ) -> None:
        super().backward(loss, retain_graph=True, **more)


@put(WRONG_BY_TIME)
class PresenceIn64Bits(FusedAdam):
    """Keeps in 64 bits who has a gradient: who has none is stepped if one 64 places away has."""

    def step(self, *given: object, **more: object) -> object:  # type: ignore[override]
        places = [(at % 64, p) for g in self.param_groups for at, p in enumerate(g["params"])]
        present = {place for place, param in places if param.grad is not None}
        missing = [p for place, p in places if p.grad is None and place in present]
        for param in missing:
            param.grad = torch.zeros_like(param)
        try:
            return STEP(self, *given, **more)
        finally:
            for param in missing:
                param.grad = None


@put(WRONG_BY_TIME, reference="FP16Optimizer")
class CopiesShareTheScaler(FP16Optimizer):
    """A deep copy goes on with the scaler of its original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesShareTheScaler:
        memo[id(self.loss_scaler)] = self.loss_scaler
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made
