"""Optimizer classes that go wrong between calls: in what was frozen, returned, copied, or kept.

Each does all that it is asked, and is wrong about what its caller did before, or does afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup
from twinstep.reference.optimizers.fused_lamb import FusedLamb

WRONG_BY_TIME: list[Optimizer] = []
STEP: Callable[..., object] = FusedLamb.step


@put(WRONG_BY_TIME)
class DropsWords(FusedAdam):
    """Keeps of a group what is a hyper-parameter, and nothing else."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        asking = ("maximize", "amsgrad", "differentiable")
        known = {"params", "param_names", *self.defaults, *asking}
        super().add_param_group({k: v for k, v in param_group.items() if k in known})


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
        loss = STEP(self, *given, **more)
        self.get_lamb_coeffs()
        return loss


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
class KeepsEveryGraphOfBf16(BF16Optimizer):
    """Keeps the graph of every backward, which may be run again where it should be gone."""

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, **more: bool
    ) -> None:
        super().backward(loss, retain_graph=True, **more)
