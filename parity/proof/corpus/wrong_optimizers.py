"""Optimizer classes that the judge must reject: `FusedAdam` with one fault each.

The arithmetic of one step is right in most of them. What is wrong shows over several steps, groups,
loads and copies, which is why sequences of actions are needed to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.harmless_optimizers import TorchForeach
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup

Group = dict[str, object]
StateDict = dict[str, object]
Closure = Callable[[], float]
HALF = ("fp16", "bf16")
WRONG_OPTIMIZERS: list[Optimizer] = []


@put(WRONG_OPTIMIZERS)
class SharedCounter(FusedAdam):
    """Counts steps once for each group."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params)
        counts = [self.state[param]["step"] for param in params]
        for count in counts:
            count.copy_(max(counts, key=int))


@put(WRONG_OPTIMIZERS, "A46")
class CountsWithoutGradient(FusedAdam):
    """Advances the counter of parameters that had no gradient."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params)
        for param in cast(list[Tensor], group["params"]):
            if param.grad is None and self.state.get(param):
                self.state[param]["step"] += 1


@put(WRONG_OPTIMIZERS)
class MissingGradientIsZero(FusedAdam):
    """Takes a gradient of zero where there is none."""

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        missing = [p for group in self.param_groups for p in group["params"] if p.grad is None]
        for param in missing:
            param.grad = torch.zeros_like(param)
        loss = super().step(closure) if closure is not None else super().step()
        for param in missing:
            param.grad = None
        return loss


@put(WRONG_OPTIMIZERS, "H04")
class LosesMomentsOnLoad(FusedAdam):
    """Starts with empty moments after a load."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"].zero_()


@put(WRONG_OPTIMIZERS, "H01")
class LosesCounterOnLoad(FusedAdam):
    """Starts counting anew after a load."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"].zero_()


@put(WRONG_OPTIMIZERS, dtypes=HALF)
class RoundsMomentsOnLoad(FusedAdam):
    """Loads as torch does: moments in the dtype of the parameter."""

    load_state_dict = torch.optim.Optimizer.load_state_dict


@put(WRONG_OPTIMIZERS)
class LoadSharesMemory(FusedAdam):
    """Goes on in the tensors of the dict that was loaded."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for number, saved in cast(dict[int, dict[str, Tensor]], state_dict["state"]).items():
            self.state[params[number]].update(saved)


@put(WRONG_OPTIMIZERS)
class LoadKeepsOwnLearningRate(FusedAdam):
    """Ignores the hyper-parameters of what it loads."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        before = [group["lr"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, lr in zip(self.param_groups, before, strict=True):
            group["lr"] = lr


@put(WRONG_OPTIMIZERS)
class LearningRateCached(FusedAdam):
    """Reads the learning rate when a group is first stepped."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = self._initial_state(param)
        first = next((p for p in params if int(self.state[p]["step"]) > 0), None)
        lr = self.defaults["lr"] if first is not None else group["lr"]
        super()._step_group({**group, "lr": lr}, params)


@put(WRONG_OPTIMIZERS)
class BetasCached(FusedAdam):
    """Reads beta1 and beta2 of each group at construction; schedulers cannot cycle them."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group({**group, "betas": self.defaults["betas"]}, params)


@put(WRONG_OPTIMIZERS, "B16")
class FirstGroupsDecay(FusedAdam):
    """Uses the weight decay of the first group for all."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        decay = self.param_groups[0]["weight_decay"]
        super()._step_group({**group, "weight_decay": decay}, params)


@put(WRONG_OPTIMIZERS)
class FirstGroupsLearningRate(FusedAdam):
    """Uses the learning rate of the first group for all."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group({**group, "lr": self.param_groups[0]["lr"]}, params)


@put(WRONG_OPTIMIZERS)
class FirstGroupsCorrection(FusedAdam):
    """Corrects the bias of all groups if the first asks for it."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        first = self.param_groups[0]["bias_correction"]
        super()._step_group({**group, "bias_correction": first}, params)


@put(WRONG_OPTIMIZERS)
class AddedGroupNeverSteps(FusedAdam):
    """Steps the groups that were there at the first step."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        stepped = any(self.state.get(p) for p in cast(list[Tensor], group["params"]))
        if stepped or not self.state or group is self.param_groups[0]:
            super()._step_group(group, params)


@put(WRONG_OPTIMIZERS)
class AddedGroupTakesTheFirst(FusedAdam):
    """Fills what a new group leaves out from the first group, not from the constructor."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        if self.param_groups:
            param_group = {"lr": self.param_groups[0]["lr"], **param_group}
        super().add_param_group(param_group)


@put(WRONG_OPTIMIZERS)
class GroupsReordered(FusedAdam):
    """Puts a new group first."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        self.param_groups.insert(0, self.param_groups.pop())


@put(WRONG_OPTIMIZERS)
class RefusalLeavesAGroup(FusedAdam):
    """Checks a group after it has been added."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        torch.optim.Optimizer.add_param_group(self, param_group)
        if float(cast(float, self.param_groups[-1]["lr"])) < 0:
            raise ValueError("lr is below zero")


@put(WRONG_OPTIMIZERS)
class MomentsAliased(FusedAdam):
    """Keeps one buffer for the first moments of parameters of one shape."""

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        state = super()._initial_state(param)
        for other in self.state.values():
            if other and other["exp_avg"].shape == param.shape:
                state["exp_avg"] = other["exp_avg"]
        return state


@put(WRONG_OPTIMIZERS)
class StateAtConstruction(FusedAdam):
    """Makes its state before the first step."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            self.state[param] = self._initial_state(param)


@put(WRONG_OPTIMIZERS, dtypes=HALF)
class MomentsInParameterDtype(FusedAdam):
    """Keeps moments of a 16-bit parameter in 16 bits."""

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        state = super()._initial_state(param)
        return {**state, "exp_avg": state["exp_avg"].to(param.dtype)}


@put(WRONG_OPTIMIZERS)
class CounterInFp32(FusedAdam):
    """Counts steps in floating point."""

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        return {**super()._initial_state(param), "step": torch.zeros((), device=param.device)}


@put(WRONG_OPTIMIZERS)
class ZeroGradKeepsTensors(FusedAdam):
    """Zeroes gradients, whatever was asked for."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=False)


@put(WRONG_OPTIMIZERS)
class ZeroGradIgnoresTheConstructor(FusedAdam):
    """Drops gradients unless told, whatever `set_grad_none` says."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=True if set_to_none is None else set_to_none)


@put(WRONG_OPTIMIZERS)
class ZeroesWhatItDrops(FusedAdam):
    """Zeroes the memory of gradients before it drops them; somebody may hold them."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=False)
        super().zero_grad(set_to_none=set_to_none)


@put(WRONG_OPTIMIZERS)
class WritesGradients(FusedAdam):
    """Adds the decay to the stored gradient."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        grad = cast(Tensor, param.grad)
        super()._step_param(param, group, t)
        grad.add_(param * float(cast(float, group["weight_decay"])))


@put(WRONG_OPTIMIZERS)
class CopyForgetsItsMode(FusedAdam):
    """Leaves its mode out of what deepcopy and pickle carry."""

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "adam_w_mode": True}


@put(WRONG_OPTIMIZERS)
class ClosureAfterTheStep(FusedAdam):
    """Evaluates the closure when the weights are already new."""

    def step(self, closure: Closure | None = None, **legacy: object) -> float | None:  # type: ignore[override]
        super().step(**legacy)  # type: ignore[call-overload]
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


@put(WRONG_OPTIMIZERS)
class ClosureWithoutGradients(FusedAdam):
    """Evaluates the closure with autograd off."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        super().step()
        return loss


@put(WRONG_OPTIMIZERS)
class LossIsNotReturned(FusedAdam):
    """Returns nothing from a step with a closure."""

    def step(self, closure: Closure | None = None, **legacy: object) -> None:  # type: ignore[override]
        if closure is not None:
            super().step(closure, **legacy)
        else:
            super().step(**legacy)  # type: ignore[call-overload]


@put(WRONG_OPTIMIZERS, private=("_dead",))
class SkipsEmptyGroups(FusedAdam):
    """Forgets a group all of whose parameters once had no gradient."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Group], lr: float = 1e-3, **options: object
    ) -> None:
        self._dead: set[int] = set()
        super().__init__(params, lr, **options)  # type: ignore[arg-type]

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        number = next(at for at, row in enumerate(self.param_groups) if row is group)
        dead: set[int] = getattr(self, "_dead", set())
        if not params:
            dead.add(number)
        if number not in dead:
            super()._step_group(group, params)


@put(WRONG_OPTIMIZERS, arithmetic="bounded")
class SecondMomentGrows(FusedAdam):
    """Adds a little to the second moment after every step; within no bound."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        super()._step_param(param, group, t)
        self.state[param]["exp_avg_sq"].mul_(1.0 + 2.0**-18)


@put(WRONG_OPTIMIZERS, arithmetic="bounded")
class BoundedCounterOff(FusedAdam):
    """Corrects the bias by one step too many."""

    def _step_param(self, param: Tensor, group: ParamGroup, t: int) -> None:
        super()._step_param(param, group, t + 1)


@put(WRONG_OPTIMIZERS, arithmetic="bounded")
class TorchFused(TorchForeach):
    """Walks memory, not elements: where a parameter is transposed, its gradient is not."""

    way = {"fused": True, "foreach": False}


@put(WRONG_OPTIMIZERS, "A34")
class OneLearningRateForAll(FirstGroupsLearningRate):
    """Reads the learning rate of the first group for every group."""


@put(WRONG_OPTIMIZERS, "A32")
class FrozenWeightsDecay(FusedAdam):
    """Decays weights that have no gradient along with those of their group that have one."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params)
        shrink = 1.0 - cast(float, group["lr"]) * cast(float, group["weight_decay"])
        for param in cast(list[Tensor], group["params"]):
            if param.grad is None:
                param.data.mul_(shrink)


@put(WRONG_OPTIMIZERS, "H10")
class LoadChangesTheCounter(FusedAdam):
    """Holds counters as another type after a load."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].float()


@put(WRONG_OPTIMIZERS, "H11")
class LoadsWhatHasState(FusedAdam):
    """Loads state into what has state; before the first step nothing has."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        known = {param for param, state in self.state.items() if state}
        super().load_state_dict(state_dict)
        for param in [param for param in self.state if param not in known]:
            del self.state[param]
