"""A step's facts on which all ranks of ZeRO agree, in one message over each group.

Every rank enters the squares of its own partitions into the limbs. Their sum over ranks is that of
the whole model, each element once, whatever the number and the order of ranks. Refusals and scales
travel along (`agreement`), and in a slot of its own the number of ranks that have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Groups
from twinstep.fast.kernels._limbs import NONFINITE, REFUSED, TOLD
from twinstep.fast.kernels.finalise import Finish
from twinstep.fast.kernels.reduce import new_limbs, norm_kernel
from twinstep.fast.optimizers.agreement import TOLD_SLOTS, enter_scale, refuse
from twinstep.fast.optimizers.driver import StepDriver
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.norms import GIVEN, reduce_norm
from twinstep.fast.optimizers.parallelism import Gradients, NormBucket
from twinstep.fast.optimizers.scalers import LossScale
from twinstep.fast.optimizers.zero_offload import enter_squares
from twinstep.fast.runtime.control import SLOTS
from twinstep.fast.runtime.dispatch import launch

TAKEN = TOLD_SLOTS.stop  # the slot that counts ranks with a gradient
NO_GRADIENT = REFUSED.value  # in the control `exhausted`: no rank had one


class ZeroDriver(StepDriver):
    """Steps of partitions; the control block of the scaler is left with facts of all ranks.

    Args:
        device: of the model.
        scaler: whose control block holds the scale.
        finish: the rule of the loss scale; with the norm GIVEN, gradients that are not finite are
            taken like others.
        ranks: the data-parallel ranks, then those that hold one model together.
        offloads: gradients are in the memory of the CPU.
    """

    _repeats = False

    def __init__(
        self,
        device: torch.device,
        scaler: LossScale,
        finish: Finish,
        ranks: Groups,
        *,
        offloads: bool = False,
    ) -> None:
        super().__init__(device, scaler, finish, 2.0)
        self._ranks = ranks
        self._takes_all = finish.norm_kind == GIVEN
        self._divides_apart = finish.unscale_with_updated_scale
        self._taken, self._offloads = False, offloads

    def gradients(
        self, counted: Sequence[Tensor], uncounted: Sequence[Tensor], *, taken: bool
    ) -> Gradients:
        """All gradients of a step.

        Args:
            counted: reduced, of this rank, that count in the norm.
            uncounted: the others.
            taken: this rank had a gradient.
        """
        self._taken = taken
        counts = NormBucket(tensors=counted)
        return Gradients(shares=[counts], uncounted=uncounted, model=self._ranks)

    def tell(self, refusal: Exception) -> None:
        """Meet the messages of a step that this rank refuses."""
        self._meet(self.gradients((), (), taken=False), refusal=refusal)
        self._limbs.zero_()

    def decide(
        self,
        gradients: Gradients,
        first: GroupTensors | None = None,
        *,
        external: bool = False,
        clips_apart: bool = False,
        leaves_scaled_norm: bool = False,
    ) -> Tensor:
        """As in `StepDriver`; the norm is divided by the scale that the gradients were made with.

        With `unscale_with_updated_scale` the kernel would divide it by the next one.
        """
        control = self.control
        scale = control["scale"].clone() if self._divides_apart and not external else None
        options = {"clips_apart": clips_apart, "leaves_scaled_norm": scale is not None}
        block = super().decide(gradients, first, external=external, **options)
        if scale is not None:
            control["norm"].copy_(control["norm"].double() / scale)
        return block

    def _reduce(
        self, gradients: Gradients, *, external: bool = False, refusal: Exception | None = None
    ) -> None:
        refusal = self._meet(gradients, external=external, refusal=refusal)
        if refusal is not None:
            self._limbs.zero_()
            raise refusal
        if self._takes_all:
            written = (self._limbs, self.control["norm"], self._found_apart)
            launch(norm_kernel, 1, self._limbs, written, warps=1)
            self._limbs[NONFINITE.value] = 0

    def _meet(
        self, gradients: Gradients, *, external: bool = False, refusal: Exception | None = None
    ) -> Exception | None:
        """Enter this rank's gradients, and add the limbs up over ranks; returns a refusal."""
        limbs = self._limbs
        try:
            if refusal is None:
                self._enter(gradients)
        except Exception as error:
            refusal = error
        if not self._ranks:
            return refusal
        if refusal is not None:
            refuse([limbs], "2")
        else:
            word = self.control.block[SLOTS["external_scale" if external else "scale"]]
            enter_scale(limbs, word, "2")
            limbs[TAKEN] = int(self._taken)
        for group in self._ranks:
            dist.all_reduce(limbs, group=group)
        # Without a gradient the step is skipped as one that somebody refuses.
        none = (limbs[TAKEN] == 0) & (limbs[TOLD.value] == 0)
        limbs[TOLD.value] += none
        limbs[NONFINITE.value] += none.to(torch.int64) << 32
        return refusal

    def _enter(self, gradients: Gradients) -> None:
        if self._offloads:
            enter_squares(gradients.counted, gradients.uncounted, self._limbs)
            return
        reduce_norm(gradients.counted, self._limbs, "2", self.cache)
        if gradients.uncounted:
            # They can overflow, no more.
            apart = new_limbs(self.device)
            reduce_norm(gradients.uncounted, apart, "2", self.cache)
            self._limbs[NONFINITE.value] += apart[NONFINITE.value]


def no_gradient() -> RuntimeError:
    """The error of a step for which no rank has a gradient."""
    return RuntimeError(
        "there is no gradient on any rank since the last step, but should be: call backward "
        "before each step [ZeroOptimizer.step]"
    )
