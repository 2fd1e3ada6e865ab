"""One step from scaled gradients to weights: reduce, finalise, update; nothing waits.

    found_inf = any gradient is not finite
    norm      = of the scaled gradients / the scale they were made with
    factor    = 1 / (scale c) where the norm is too long, else 1 / scale
    p, m, v   = Adam, AdamW or LAMB with that factor, and model weights = p rounded once
    scale     = its rule, after everything that used it

Three launches for one group and dtype with Adam, five with LAMB. Each further group takes one more
to form its coefficients, and an update of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.compat import Compat
from twinstep.contract.hyper import Number
from twinstep.fast.collectives import Gradients
from twinstep.fast.control import ControlBlock
from twinstep.fast.fused_adam import FusedAdam, ParamGroup
from twinstep.fast.fused_lamb import FusedLamb, LambBlock
from twinstep.fast.kernels._arith import FACTOR, HEADER
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.kernels.finalise import CONTROLS, finalise
from twinstep.fast.kernels.lamb import prepare_lamb, update_lamb
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.norms import GIVEN, norm_on_host
from twinstep.fast.reduction import reduce_over_ranks
from twinstep.fast.scalers import LossScale
from twinstep.fast.tables import TableCache

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors of one group.

    Attributes:
        options: hyper-parameters of the group.
        lists: masters, gradients, first and second moments, model weights; contiguous.
        steps: counters of completed steps.
        shared: the tensors are pieces of one master with one counter.
    """

    options: ParamGroup
    lists: list[list[Tensor]]
    steps: list[Tensor]
    shared: bool


class AdamBlock:
    """The hyper-parameters of a group of Adam on the device, sent when they change."""

    def __init__(self, device: torch.device) -> None:
        self._block = ControlBlock(device, {})

    def set_group(self, group: ParamGroup) -> None:
        """Take over a group's hyper-parameters, in at most one asynchronous copy."""
        betas = cast(tuple[Number, Number], group["betas"])
        values = (group["lr"], *betas, group["eps"], group["weight_decay"])
        for name, value in zip(HYPER, values, strict=True):
            self._block.set(name, cast(Number, value))
        self._block.sync_hyperparameters()

    def hyper(self) -> list[Tensor]:
        """Controls in the order of HYPER."""
        return [self._block[name] for name in HYPER]


@contextmanager
def untimed(name: str) -> Iterator[None]:
    """Stand in for timers where there are none."""
    del name
    yield


class ScaledStep:
    """Steps of one optimizer, with a scaler's control block.

    Args:
        scaler: whose rule moves the scale.
        device: of everything.
        compat: `unscale_with_updated_scale` is honoured.
        norm_type: of the norm that clips.
        kind: how that is computed, see `fast.norms`.
        reports_scaled_norm: the norm that is left is that of the scaled gradients.
    """

    def __init__(
        self,
        scaler: LossScale,
        device: torch.device,
        compat: Compat,
        *,
        norm_type: float,
        kind: str,
        reports_scaled_norm: bool = False,
    ) -> None:
        self.scaler, self.device = scaler, device
        self.cache = TableCache(limit=64)
        self._norm_type, self._kind = norm_type, kind
        rules = Compat(
            growth_counts_this_step=scaler.compat.growth_counts_this_step,
            unscale_with_updated_scale=compat.unscale_with_updated_scale,
        )
        self._finish = replace(
            scaler.scaling.finish(rules, bias_correction=True),
            norm_kind=kind,
            reports_scaled_norm=reports_scaled_norm,
        )
        self._limbs = new_limbs(device)
        self._external = torch.zeros((), dtype=torch.float64, device=device)
        self._external_is: float | None = None
        self._blocks: dict[int, AdamBlock | LambBlock] = {}
        self._coefficients: dict[int, Tensor] = {}
        self._ratios: dict[int, Tensor] = {}

    @property
    def control(self) -> ControlBlock:
        """The control block: scale, norm and found_inf of the last step."""
        return self.scaler.on(self.device)

    def sync_hyperparameters(
        self, optimizer: torch.optim.Optimizer, clip_grad: float, external: float | None
    ) -> None:
        """Send what has changed; before replaying a captured graph, call this."""
        if isinstance(optimizer, FusedAdam | FusedLamb):
            kind = LambBlock if isinstance(optimizer, FusedLamb) else AdamBlock
            for index, group in enumerate(optimizer.param_groups):
                if index not in self._blocks:
                    self._blocks[index] = kind(self.device)
                self._blocks[index].set_group(group)
        self.control.set("max_norm", clip_grad)
        self.control.sync_hyperparameters()
        if external is not None and external != self._external_is:
            self._external.fill_(external)
            self._external_is = external

    def decide(
        self,
        gradients: Gradients,
        first: Batch | None,
        external: float | None,
        *,
        leaves_scaled_norm: bool = False,
    ) -> Tensor:
        """Reduce and finalise: norm, found_inf, the new scale, and coefficients of one group.

        Args:
            gradients: all that are there, contiguous.
            first: the group whose coefficients are formed and whose counters advance, if any.
            external: the scale that the gradients were made with, where it is not the scaler's.
            leaves_scaled_norm: leave the norm of the scaled gradients in the control block.

        Returns:
            The coefficients; FACTOR is what gradients are multiplied by.
        """
        reduce_over_ranks(gradients, self._limbs, self._kind, self.cache)
        controls = [self.control[name] for name in CONTROLS]
        if self._kind == GIVEN:
            # As a tensor, since a number behind the end of fp32 cannot be filled in as infinity.
            self.control["norm"].copy_(norm_on_host(gradients, self._norm_type, self._limbs))
        steps: list[Tensor] = []
        finish, bounds = self._finish, None
        if leaves_scaled_norm:
            finish = replace(finish, reports_scaled_norm=True)
        if first is not None:
            hyper = self._blocks[0].hyper()
            controls[:5], steps = hyper[:5], first.steps
            bounds = (hyper[5], hyper[6]) if len(hyper) > 5 else None
            finish = replace(finish, bias_correction=bool(first.options["bias_correction"]))
        coefficients = self._coefficient_block(0, len(steps))
        finalise(
            self._limbs,
            steps,
            coefficients,
            controls,
            finish,
            self.cache,
            external=None if external is None else self._external,
            bounds=bounds,
        )
        return coefficients

    def run(
        self,
        gradients: Gradients,
        batches: Sequence[Batch],
        optimizer: FusedAdam | FusedLamb,
        external: float | None,
        timed: Callable[[str], AbstractContextManager[None]] = untimed,
    ) -> None:
        """Take one step, or skip it, with an optimizer whose update is a kernel here.

        Args:
            gradients: as in `decide`.
            batches: one for each group of the optimizer.
            optimizer: whose options are used and whose `step` is not called.
            external: as in `decide`.
            timed: is entered with the name of each phase, "compute_norm" and "basic_step".
        """
        with timed("compute_norm"):
            first = self.decide(gradients, batches[0], external)
        with timed("basic_step"):
            self._update(first, batches, optimizer)

    def _update(
        self, first: Tensor, batches: Sequence[Batch], optimizer: FusedAdam | FusedLamb
    ) -> None:
        """Write masters, moments and model weights; `first` are the first group's coefficients."""
        given = [first[FACTOR.value], self.control["found_inf"]]
        blocks = [first]
        prepare = prepare_lamb if isinstance(optimizer, FusedLamb) else prepare_adam
        for index, batch in enumerate(batches[1:], start=1):
            controls = [*self._blocks[index].hyper(), *given]
            bias_correction = bool(batch.options["bias_correction"])
            blocks.append(
                prepare(batch.steps, controls, bias_correction=bias_correction, cache=self.cache)
            )
        for index, (batch, block) in enumerate(zip(batches, blocks, strict=True)):
            if isinstance(optimizer, FusedLamb):
                self._update_lamb(index, batch, block, optimizer)
            else:
                update_adam(
                    batch.lists,
                    block,
                    decoupled=optimizer.adam_w_mode,
                    cache=self.cache,
                    shared=batch.shared,
                )
        if isinstance(optimizer, FusedLamb):
            kept = [self._ratios[index] for index in range(len(batches))]
            optimizer._ratios = [ratio for ratios in kept for ratio in ratios]

    def _update_lamb(self, index: int, batch: Batch, block: Tensor, optimizer: FusedLamb) -> None:
        ratios = self._ratios.get(index)
        if ratios is None:
            # Until a step is taken there are none: a skipped one leaves them as they are.
            ratios = torch.full((len(batch.steps),), torch.nan, device=self.device)
            self._ratios[index] = ratios
        update_lamb(
            batch.lists[:4],
            batch.lists[4],
            block,
            eps_inside_sqrt=optimizer.eps_inside_sqrt,
            cache=self.cache,
            ratios=ratios,
            shared=batch.shared,
        )

    def _coefficient_block(self, index: int, count: int) -> Tensor:
        size = HEADER.value + 2 * count
        block = self._coefficients.get(index)
        if block is None or block.numel() != size:
            block = torch.empty(size, dtype=torch.float32, device=self.device)
            self._coefficients[index] = block
        return block
