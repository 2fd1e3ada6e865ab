"""One step of masters in partitions: reduce, finalise each group, update each group.

    norm    = of all gradients that count, in one read; exact
    skip    = it is infinite or NaN
    clip    = max_norm / (norm + 1e-6) where that is below 1
    p, m, v = Adam or AdamW with that factor; model weights = p, rounded once

Two launches for each group, and one or two in all to reduce. 16-bit accumulators that are clipped
take one launch more: clipping rounds to their dtype, as storing the clipped gradient would. The
host decides nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.hyper import Number
from twinstep.fast.bf16_groups import PartitionedGroup
from twinstep.fast.collectives import Gradients
from twinstep.fast.control import ControlBlock
from twinstep.fast.fused_adam import ParamGroup
from twinstep.fast.kernels._arith import HEADER
from twinstep.fast.kernels.adam import update_adam
from twinstep.fast.kernels.finalise_unscaled import CONTROLS, finalise_unscaled
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.kernels.unscale import unscale_
from twinstep.fast.norms import GIVEN, kind_of_norm
from twinstep.fast.reduction import reduce_over_ranks
from twinstep.fast.tables import TableCache


def kind_of(norm_type: float, where: str) -> str:
    """Return the kind of norm that kernels compute.

    Raises:
        ValueError: it is not 1, 2 or infinity.
    """
    kind = kind_of_norm(norm_type, where)
    if kind == GIVEN:
        raise ValueError(
            f"norm_type={norm_type}, but should be 1, 2 or infinity: kernels have no other "
            f"exact norms [{where}]"
        )
    return kind


class PartitionedStep:
    """Steps over groups whose tensors stay where they are.

    Args:
        groups: as laid out.
        kind: of the norm: "2", "1" or "inf".
    """

    def __init__(self, groups: Sequence[PartitionedGroup], kind: str) -> None:
        device = groups[0].flat.device
        self._groups = groups
        self._kind = kind
        self._cache = TableCache(limit=64)
        self._limbs = new_limbs(device)
        self._scratch = torch.zeros((), dtype=torch.float32, device=device)
        self._blocks = [ControlBlock(device, {"factor": 1.0}) for _ in groups]
        size = HEADER.value + 2
        self._coefficients = [torch.empty(size, dtype=torch.float32, device=device) for _ in groups]

    @property
    def norm(self) -> Tensor:
        """Norm of the gradients of the last step, before clipping; fp32, shape ()."""
        return self._blocks[0]["norm"]

    @property
    def found_inf(self) -> Tensor:
        """1.0 if the last step was skipped; fp32, shape ()."""
        return self._blocks[0]["found_inf"]

    def sync_hyperparameters(self, options: Sequence[ParamGroup], max_norm: float) -> None:
        """Send hyper-parameters that have changed; before replaying a captured graph, call this."""
        for block, group in zip(self._blocks, options, strict=True):
            beta1, beta2 = cast(tuple[Number, Number], group["betas"])
            given = {name: cast(Number, group[name]) for name in ("lr", "eps", "weight_decay")}
            for name, value in {"beta1": beta1, "beta2": beta2, **given}.items():
                block.set(name, value)
            block.set("max_norm", max_norm)
            block.sync_hyperparameters()

    def run(
        self,
        gradients: Gradients,
        states: Sequence[Mapping[str, Tensor]],
        options: Sequence[ParamGroup],
        *,
        max_norm: float,
        decoupled: bool,
    ) -> None:
        """Take one step, or skip it; writes masters, state and this rank's model weights.

        Args:
            gradients: of all groups.
            states: `step`, `exp_avg` and `exp_avg_sq` of each group's master.
            options: hyper-parameters of each group.
            max_norm: largest norm of the gradients; 0 or less for any.
            decoupled: True for AdamW.
        """
        self.sync_hyperparameters(options, max_norm)
        reduce_over_ranks(gradients, self._limbs, self._kind, self._cache)
        ahead = max_norm > 0.0 and self._groups[0].accumulator.dtype != torch.float32
        for index, (state, group) in enumerate(zip(states, options, strict=True)):
            finalise_unscaled(
                self._limbs,
                state["step"],
                self._coefficients[index],
                [self._blocks[index][name] for name in CONTROLS],
                kind=self._kind,
                bias_correction=bool(group["bias_correction"]),
                ahead=ahead,
                last=index == len(states) - 1,
            )
        if ahead:
            runs = [
                view for group in self._groups for view in group.runs([True] * len(group.params))
            ]
            # Only the norm decides: gradients that do not count in it cannot skip a step.
            unscale_(runs, inv_scale=self._blocks[0]["factor"], found_inf=self._scratch)
        for index, state in enumerate(states):
            self._update(index, state, decoupled)

    def _update(self, index: int, state: Mapping[str, Tensor], decoupled: bool) -> None:
        group = self._groups[index]
        row = [group.master, group.own(group.accumulator), state["exp_avg"], state["exp_avg_sq"]]
        update_adam(
            [[tensor] for tensor in (*row, group.own(group.flat))],
            self._coefficients[index],
            decoupled=decoupled,
            cache=self._cache,
        )
