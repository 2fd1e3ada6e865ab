"""Optimizer classes and scalers that are wrong about a state, or about what a caller gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isclose
from typing import Any, cast

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from twinstep.contract.moments import StateDict
from twinstep.contract.wrapper import Wrapper
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.parity.proof.corpus.wrong_by_situation import unhooked
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup
from twinstep.reference.optimizers.scalers import DynamicLossScale, StaticLossScale

WRONG_BY_STATE: list[Optimizer] = []
HOMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@put(WRONG_BY_STATE, reference="DynamicLossScale", dtypes=("fp16",), private=("_entries",))
class OneStateForAll(DynamicLossScale):
    """Gives one dict, which later calls write into."""

    def state_dict(self) -> dict[str, float | int | bool]:
        entries = vars(self).setdefault("_entries", {})
        entries.update(super().state_dict())
        return cast("dict[str, float | int | bool]", entries)


@put(WRONG_BY_STATE, reference="DynamicLossScale", dtypes=("fp16",))
class FlagsInTheOrderOfTorch(DynamicLossScale):
    """Takes the flags of backward in the order that `torch.Tensor.backward` has them in."""

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        super().backward(loss, create_graph=create_graph, retain_graph=retain_graph)


@put(WRONG_BY_STATE, reference="FP16Optimizer", dtypes=("fp16",))
class ReadsWhatItLeaves(FP16Optimizer):
    """Refuses moments of another class where the state of the inner optimizer is not asked for."""

    def load_state_dict(
        self, state_dict: dict[str, object], load_optimizer_states: bool = True
    ) -> None:
        inner = state_dict.get("optimizer_state_dict")
        if not load_optimizer_states and isinstance(self.optimizer, FusedAdam):
            states = inner["state"].values() if isinstance(inner, dict) else [{}]
            if not all("exp_avg" in state for state in states):
                raise ValueError("moments should be there, but are not")
        super().load_state_dict(state_dict, load_optimizer_states)


@put(WRONG_BY_STATE, reference="BF16Optimizer", dtypes=("bf16",))
class OffloadsWithoutACopy(BF16Optimizer):
    """Gives its own masters where they are to be on the CPU, and are there already."""

    def state_dict(self, *, cpu_offload: bool = False) -> dict[str, object]:
        saved = super().state_dict(cpu_offload=cpu_offload)
        if cpu_offload:
            masters = [master.detach().cpu() for master in self.fp32_groups_flat_partition]
            saved["single_partition_of_fp32_groups"] = masters
        return saved


@put(WRONG_BY_STATE, reference="FP16Optimizer", dtypes=("fp16",))
class PopsTheScaleOfTheCaller(FP16Optimizer):
    """Takes the first scale out of the dict of arguments that it is given."""

    def __init__(self, *given: Any, dynamic_loss_args: Any = None, **options: Any) -> None:
        own = dict(dynamic_loss_args) if isinstance(dynamic_loss_args, dict) else dynamic_loss_args
        super().__init__(*given, dynamic_loss_args=own, **options)
        if isinstance(dynamic_loss_args, dict):
            dynamic_loss_args.pop("init_scale", None)


@put(WRONG_BY_STATE, reference="BF16Optimizer", dtypes=("bf16",), private=("_whole",))
class KeepsWholeWeights(BF16Optimizer):
    """Keeps a weight that was asked for by name alone until the next step or load."""

    def get_full_hp_param(self, name: str, *key: str) -> Tensor:  # type: ignore[override]
        if key:
            return super().get_full_hp_param(name, *key)
        kept = vars(self).setdefault("_whole", {})
        if name not in kept:
            kept[name] = super().get_full_hp_param(name)
        return cast(Tensor, kept[name].clone())

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        vars(self)["_whole"] = {}
        unhooked(BF16Optimizer)(self, closure)

    def load_state_dict(self, *given: object, **options: object) -> None:
        vars(self)["_whole"] = {}
        super().load_state_dict(*cast(Any, given), **cast(Any, options))


@put(WRONG_BY_STATE, reference="FP16UnfusedOptimizer", dtypes=("fp16",))
class UpdatesTheCallersFile(FP16UnfusedOptimizer):
    """Puts a clip norm into the caller's dict where the file is of before there was one."""

    def load_state_dict(
        self, state_dict: dict[str, object], load_optimizer_states: bool = True
    ) -> None:
        if isinstance(state_dict, dict):
            state_dict.setdefault("clip_grad", self.clip_grad)
        super().load_state_dict(state_dict, load_optimizer_states)


@put(WRONG_BY_STATE, reference="FP16UnfusedOptimizer", dtypes=("fp16",))
class WritesToTheFirstMemory(FP16UnfusedOptimizer):
    """Steps the memory that a weight had in its first step, not the one it has now."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        moved = []
        for weight in (weight for group in self.fp16_groups for weight in group):
            first = HOMES.setdefault(weight, weight.detach())
            if first.data_ptr() != weight.data_ptr():
                moved.append((weight, weight.data))
                weight.data = first
        try:
            unhooked(FP16UnfusedOptimizer)(self, closure)
        finally:
            for weight, data in moved:
                weight.data = data


@put(WRONG_BY_STATE)
class KeepsWhatAFileLacks(FusedAdam):
    """Goes on with the moments of parameters that the loaded dict has no state of."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        before = dict(self.state)
        super().load_state_dict(state_dict)
        for param, state in before.items():
            if not self.state.get(param):
                self.state[param] = state


@put(WRONG_BY_STATE)
class FullTableStays(FusedAdam):
    """Launches what is left in a table of 256, and none that the last parameter has filled."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        dropped = []
        for group in self.param_groups:
            rows = [param for param in group["params"] if param.grad is not None]
            if rows and len(rows) % 256 == 0:
                dropped += [(param, param.grad) for param in rows[-256:]]
        for param, _ in dropped:
            param.grad = None
        try:
            return cast("float | None", unhooked(FusedAdam)(self, closure))
        finally:
            for param, grad in dropped:
                param.grad = grad


@put(WRONG_BY_STATE)
class RefusesGroupByGroup(FusedAdam):
    """Looks at a group when its turn comes: others have been stepped before one is refused."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        groups, found = self.param_groups, None
        try:
            for number, group in enumerate(groups):
                self.param_groups = [group]
                value = unhooked(FusedAdam)(self, closure if number == 0 else None)
                found = cast("float | None", value) if number == 0 else found
        finally:
            self.param_groups = groups
        return found


@put(WRONG_BY_STATE)
class RatesOfSixDigits(FusedAdam):
    """Steps a group by the rate of an earlier one with the same six digits."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        rates = [group["lr"] for group in self.param_groups]
        known: dict[str, float] = {}
        try:
            for group, rate in zip(self.param_groups, rates, strict=True):
                if isinstance(rate, float):
                    group["lr"] = known.setdefault(f"{rate:.6g}", rate)
            return cast("float | None", unhooked(FusedAdam)(self, closure))
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


@put(WRONG_BY_STATE, reference="FP16Optimizer", dtypes=("fp16",), private=("_seen",))
class RefreshesByVersion(FP16Optimizer):
    """Copies weights to masters where a version counter has moved since the last time."""

    def refresh_fp32_params(self) -> None:
        seen = [(id(param), param._version) for group in self.fp16_groups for param in group]
        if vars(self).get("_seen") != seen:
            super().refresh_fp32_params()
        vars(self)["_seen"] = seen


@put(WRONG_BY_STATE, private=("_known",))
class RatesByVersion(FusedAdam):
    """Reads a rate in a tensor again where its version counter has moved."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        rates = [group["lr"] for group in self.param_groups]
        known = vars(self).setdefault("_known", {})
        try:
            for group, rate in zip(self.param_groups, rates, strict=True):
                if isinstance(rate, Tensor):
                    key = id(rate), rate._version
                    group["lr"] = known.setdefault(key, (rate, rate.item()))[1]
            return cast("float | None", unhooked(FusedAdam)(self, closure))
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


@put(WRONG_BY_STATE, reference="FP16Optimizer", dtypes=("fp16",))
class OffersLiveMasters(FP16Optimizer):
    """Takes the masters to the CPU, where they are already, and so does not copy them."""

    def state_dict(self, **named: bool) -> StateDict:
        state = super().state_dict(**named)
        if named.get("cpu_offload"):
            state["fp32_groups_flat"] = [flat.detach().cpu() for flat in self.fp32_groups_flat]
        return state


@put(WRONG_BY_STATE, reference="DynamicLossScale", dtypes=("fp16",))
class SpendsTheBudgetOfTheFile(DynamicLossScale):
    """Spends overflows of a budget that a state brought, where there should be none to spend."""

    def update_scale(self, overflow: bool) -> None:
        state = self.state_dict()
        delayed = getattr(self.rule, "delayed_shift", 2)
        if bool(overflow) and delayed == 1 and state.get("cur_hysteresis", 1) > 1:
            now = cast(int, state["cur_iter"])
            left = cast(int, state["cur_hysteresis"]) - 1
            spent = {"cur_hysteresis": left, "last_overflow_iter": now, "cur_iter": now + 1}
            self.load_state_dict({**state, **spent})
        else:
            super().update_scale(overflow)


@put(WRONG_BY_STATE, reference="StaticLossScale", dtypes=("fp16",))
class EntersTheScaleFirst(StaticLossScale):
    """Enters the scale of a state before it looks at the rest, which it may refuse."""

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        # What it refuses is found again below.
        with suppress(KeyError, TypeError, ValueError):
            super().load_state_dict({**self.state_dict(), "cur_scale": state_dict["cur_scale"]})
        super().load_state_dict(state_dict)


def close(optimizer: Wrapper, lr: float) -> bool:
    """True if all groups have about that rate already."""
    held = [cast(float, group["lr"]) for group in optimizer.param_groups]
    return bool(held) and all(isclose(rate, lr, rel_tol=1e-5, abs_tol=1e-8) for rate in held)


@put(WRONG_BY_STATE, reference="FP16Optimizer", dtypes=("fp16",))
class LeavesARateThatIsClose(FP16Optimizer):
    """Does not set a learning rate that is close to the one in force."""

    def set_lr(self, lr: float) -> None:
        if not close(self, lr):
            super().set_lr(lr)


@put(WRONG_BY_STATE, reference="BF16Optimizer", dtypes=("bf16",))
class LeavesCloseRatesOfBf16(BF16Optimizer):
    """Does not set a learning rate that is close to the one in force."""

    def set_lr(self, lr: float) -> None:
        if not close(self, lr):
            super().set_lr(lr)


@put(WRONG_BY_STATE, private=("_all",))
class ZeroesOldLists(FusedAdam):
    """Drops the gradients of the parameters that there were at the first time, or were added."""

    def add_param_group(self, param_group: dict[str, object]) -> None:
        super().add_param_group(param_group)
        vars(self).pop("_all", None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        now = [param for group in self.param_groups for param in group["params"]]
        known = vars(self).setdefault("_all", now)
        grads = [(param, param.grad) for param in now if all(param is not one for one in known)]
        super().zero_grad(set_to_none)
        for param, grad in grads:
            param.grad = grad
        for param in known:
            if all(param is not one for one in now):
                param.grad = None


@put(WRONG_BY_STATE, reference="BF16Optimizer", dtypes=("bf16",))
class TakesMastersOfEveryFile(BF16Optimizer):
    """Takes masters from the file, over the weights of now, where that is not asked for."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: object, *rest: object, **keywords: object
    ) -> None:
        if len(rest) < 3 and state_dict_list:
            keywords.setdefault("load_from_fp32_weights", True)
        super().load_state_dict(state_dict_list, *rest, **keywords)  # type: ignore[arg-type]


@put(WRONG_BY_STATE)
class RefusalWritesTheDict(FusedAdam):
    """Leaves the constructor's values in the dict of a group that it refuses."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        try:
            super().add_param_group(param_group)
        except ValueError:
            for name, value in self.defaults.items():
                param_group.setdefault(name, value)
            raise
