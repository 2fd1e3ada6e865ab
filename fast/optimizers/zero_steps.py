"""Steps of ZeRO from reduced gradients to weights: by kernels, on the CPU, by torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from twinstep.contract.hyper import Number
from twinstep.contract.tensors import drop_gradients
from twinstep.fast.kernels._arith import FOUND_INF, INV_SCALE
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.zero_masters import ALLGATHER, GRADIENTS, STEP, ZeroMasters
from twinstep.fast.optimizers.zero_offload import Offload


class ZeroSteps(ZeroMasters):
    """A wrapper whose masters are split over ranks; see `ZeroOptimizer` for the arguments."""

    def _step_by_kernels(self, inside: FusedAdam | FusedLamb, refusal: Exception | None) -> None:
        try:
            if refusal is not None:
                self._step.tell(refusal)
            elif self._offload is not None and isinstance(inside, FusedAdam):
                self._step_on_cpu(self._offload, decoupled=inside.adam_w_mode)
            else:
                groups = [self._group_tensors(index) for index in range(len(self.groups))]
                external = self.external_loss_scale is not None
                gradients = self._reduced_gradients()
                self._step.run(gradients, groups, inside, external=external, timed=self._phase)
                self._stepped = True
        except Exception as error:
            refusal = error
        # Other ranks learn on the device that there is no step: they meet in this, too.
        with self._timed(ALLGATHER):
            self._gather()
        if refusal is not None:
            raise refusal

    def _decided(self) -> torch.Tensor:
        external = self.external_loss_scale is not None
        block = self._step.decide(self._reduced_gradients(), external=external)
        self._stepped = True
        return block

    def _step_on_cpu(self, offload: Offload, *, decoupled: bool) -> None:
        """Decide on the device, wait for it, and update there where the masters are."""
        with self._timed(GRADIENTS):
            block = self._decided()
            factor, found_inf = block[[INV_SCALE.value, FOUND_INF.value]].tolist()
        with self._timed(STEP):
            for index, group in enumerate(() if found_inf else self.groups):
                options, state = self.param_groups[index], self._state_to_step(group.master)
                offload.update(
                    [group.master, group.reduced, state["exp_avg"], state["exp_avg_sq"]],
                    group.own(group.flat),
                    state["step"],
                    [*hyper_of(options), factor],
                    bias_correction=bool(options["bias_correction"]),
                    decoupled=decoupled,
                )

    def _step_by_torch(self, refusal: Exception | None) -> None:
        """Unscale with torch, call the inner optimizer, copy to the model; the host waits."""
        if refusal is not None:
            self._step.tell(refusal)
            raise refusal
        with self._timed(GRADIENTS):
            block = self._decided()
            skips = self.overflow
            if self._offload is not None:
                self._offload.fold()
            for group in () if skips else self.groups:
                factor = block[INV_SCALE.value].to(group.reduced.device)
                group.master.grad = group.reduced.float() * factor
        with self._timed(STEP):
            if not skips:
                self._held().step()
                drop_gradients(self.single_partition_of_fp32_groups)
        with self._timed(ALLGATHER):
            if not skips:
                self.update_lp_params()


def hyper_of(options: Mapping[str, object]) -> list[float]:
    """Hyper-parameters of Adam as numbers, in the order of `fast.kernels.cpu.adam.HYPER`."""
    beta1, beta2 = cast(tuple[Number, Number], options["betas"])
    others = (cast(Number, options[name]) for name in ("eps", "weight_decay"))
    return [float(value) for value in (cast(Number, options["lr"]), beta1, beta2, *others)]
