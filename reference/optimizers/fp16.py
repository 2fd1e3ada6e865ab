"""FP16Optimizer: mixed precision over flat buffers, one fp32 master per parameter group.

One step, in order:

    1. overflow    any gradient, on any rank, infinite or NaN, or squares past fp32?
    2. norm        of the gradients as stored, each element of the model once
    3. skip        on overflow drop the gradients and change nothing else
    4. flatten     gradients to fp32, in the layout of the master; a missing one is zero
    5. unscale     and clip, in one multiplication
    6. step        of the inner optimizer, on the masters
    7. copy        masters to model weights, each rounded once
    8. loss scale  moves, after everything that used it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import overload

import torch
from torch import Tensor

from twinstep.contract.agreement import constructed_by_all
from twinstep.contract.checkpoint import fp16
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.loss_scale import ScaleArguments
from twinstep.contract.moments import StateDict
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.refusals import refuse_legacy_adam
from twinstep.contract.tensors import drop_gradients
from twinstep.contract.timers import Timers
from twinstep.contract.wrapper import initialize
from twinstep.reference.arithmetic import float64
from twinstep.reference.clip import clip_factor
from twinstep.reference.optimizers.flat_groups import (
    copy_masters_to_model,
    copy_model_to_masters,
    flat_gradient,
    flat_group,
)
from twinstep.reference.optimizers.scaled_wrapper import ScaledWrapper, unscaled
from twinstep.reference.optimizers.scalers import LossScale, saved_scale, wrapper_loss_scale
from twinstep.reference.unscale import past_squares

STEP_TIMERS = [
    "compute_norm",
    "overflow_check",
    "unscale_and_clip",
    "basic_step",
    "update_fp16",
]


class FP16Optimizer(ScaledWrapper):
    """Loss scaling and fp32 master weights for fp16 (or bf16) models, in flat buffers.

    Args:
        init_optimizer: fresh; each of its groups gets one flat master as its only parameter.
            Frozen parameters are left alone, empty ones are fine, dtypes may be mixed.
        deepspeed: an engine handle; asked whether backward reduces gradients over ranks.
        loss_scale_config: a scaler, which then decides instead of the five arguments below.
        low_precision_dtype: float16 scales the loss; anything else does not without a scaler.
        static_loss_scale: the scale without dynamic_loss_scale.
        dynamic_loss_scale: let the scale move by the wrapper rule of `reference.loss_scale`.
        initial_dynamic_scale: the first scale without dynamic_loss_args.
        dynamic_loss_args: `init_scale`, `scale_window` and `min_scale`.
        verbose: log skipped steps and changes of the scale.
        mpu: the model-parallel unit; norms and overflows are then those of the whole model.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        norm_type: of that norm: 1, 2, infinity (exact) or another positive number.
        fused_adam_legacy: refused, the argument exists for callers that pass False.
        has_moe_layers: accepted; parameters carry marks of their own.
        expert_groups: expert-parallel process groups by name, whose ranks hold different experts.
        expert_data_groups: by name, groups whose ranks hold the same experts; norms of these are
            averaged over them.
        timers: called by phase; `contract.timers` has some.
        compat: upstream behaviour to reproduce; the default is correct.

    Writes model weights, masters, the state of the inner optimizer, and drops gradients.

    Source: Micikevicius et al. (2018); names as in DeepSpeed's `FP16_Optimizer`.
    """

    @constructed_by_all
    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        *,
        deepspeed: Engine | None = None,
        loss_scale_config: LossScale | None = None,
        low_precision_dtype: torch.dtype = torch.float16,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        initial_dynamic_scale: float = 2.0**32,
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
        mpu: ModelParallelUnit | None = None,
        clip_grad: float = 0.0,
        norm_type: float = 2.0,
        fused_adam_legacy: bool = False,
        has_moe_layers: bool = False,
        expert_groups: ExpertGroups | None = None,
        expert_data_groups: ExpertGroups | None = None,
        timers: Timers | None = None,
        compat: Compat = CORRECT,
    ) -> None:
        del has_moe_layers
        refuse_legacy_adam(fused_adam_legacy, "FP16Optimizer")
        scales = loss_scale_config is not None or low_precision_dtype is torch.float16
        arguments = ScaleArguments(
            scales=scales,
            static_loss_scale=static_loss_scale,
            dynamic_loss_scale=dynamic_loss_scale,
            dynamic_loss_args=dynamic_loss_args,
            initial_scale=initial_dynamic_scale,
            min_scale=1.0,
        )
        super().__init__(
            init_optimizer,
            loss_scaler=loss_scale_config or wrapper_loss_scale(arguments),
            scales=scales,
            clip_grad=clip_grad,
            norm_type=norm_type,
            mpu=mpu,
            deepspeed=deepspeed,
            expert_groups=expert_groups,
            expert_data_groups=expert_data_groups,
            verbose=verbose,
            timers=timers,
            compat=compat,
        )
        self.groups = [
            flat_group(group["params"], f"group {index}, FP16Optimizer")
            for index, group in enumerate(init_optimizer.param_groups)
        ]
        for group, flat in zip(init_optimizer.param_groups, self.groups, strict=True):
            group["params"] = [flat.master]
        if compat.step_at_construction:
            self.initialize_optimizer_states()

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group."""
        return [group.params for group in self.groups]

    @property
    def fp16_groups_flat(self) -> list[Tensor]:
        """The flat buffers of the model weights: one per group, more where dtypes are mixed."""
        return list(chain.from_iterable(group.buffers for group in self.groups))

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters, one per group."""
        return [group.master for group in self.groups]

    def initialize_optimizer_states(self) -> None:
        """Allocate the state of the inner optimizer; see `contract.wrapper.initialize`."""
        initialize(self.optimizer, self.fp32_groups_flat, self.compat)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, or skip it; `overflow` and `get_global_norm()` report on it afterwards.

        Args:
            closure: refused.

        Raises:
            RuntimeError: a closure was given, or a gradient is sparse.
            TypeError: a hyper-parameter is no number.
            ValueError: another rank of its groups raises one of these, or has another scale.
            MinimumLossScale: overflow at the floor of a scale that makes this an error.
                In each case nothing has changed.
        """
        params = list(chain.from_iterable(self.fp16_groups))
        with self._timed("overflow_check"):
            held, worst = self._agreed(closure, params)
        with self._timed("compute_norm"):
            scaled_norm = self._parallelism.global_norm(held, self.norm_type, worst)
            found_inf = worst > 0.0 or past_squares(scaled_norm.item(), self.norm_type)
            after = self.loss_scaler.after(found_inf)
            scale = self._scale_of_step(after)
            self._norm = unscaled(scaled_norm, scale)
        if found_inf:
            drop_gradients(params)
        else:
            limit = float64(self.clip_grad)
            self._update(clip_factor(norm=scaled_norm, scale=scale, max_norm=limit))
        self._enter(found_inf, after)
        if self.timers is not None:
            self.timers.log(STEP_TIMERS[:2] if found_inf else STEP_TIMERS)
        return None

    def _update(self, factor: Tensor) -> None:
        """Gradients to masters, a step, masters to model weights."""
        with self._timed("unscale_and_clip"):
            for group in self.groups:
                group.master.grad = flat_gradient(group) * factor
                drop_gradients(group.params)
        with self._timed("basic_step"):
            self.optimizer.step()
        drop_gradients(self.fp32_groups_flat)
        with self._timed("update_fp16"):
            for group in self.groups:
                copy_masters_to_model(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model weights, or zero them."""
        drop_gradients(chain.from_iterable(self.fp16_groups), set_to_none=set_to_none)

    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after these were loaded or changed."""
        for group in self.groups:
            copy_model_to_masters(group)

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients and the state of the inner optimizer."""
        return self._bytes(
            model_weights=self.fp16_groups_flat,
            master_weights=self.fp32_groups_flat,
            gradients=[param.grad for group in self.fp16_groups for param in group],
        )

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """Loss scale (fp16 only), clip norm, masters and the inner dict; copies, not views.

        `cpu_offload` copies to the CPU; the device needs no memory for it.
        """
        scale = saved_scale(self.loss_scaler) if self.scales else {}
        return fp16.saved(
            self.optimizer, self.fp32_groups_flat, self.clip_grad, scale, cpu_offload=cpu_offload
        )

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Load a state of this class or of DeepSpeed's, and write its masters to the model.

        Args:
            state_dict: copied; later steps do not write into it. Constants of the loss-scale rule
                come from the constructor, whatever the dict holds.
            load_optimizer_states: False leaves the state of the inner optimizer.

        Raises:
            ValueError: something does not fit; the sentence names it. Nothing has changed.
        """
        where = "FP16Optimizer.load_state_dict"
        loaded, scaling = fp16.checked(
            self.optimizer,
            state_dict,
            self.fp32_groups_flat,
            where,
            self.ranks,
            restored=self.loss_scaler.restored if self.scales else None,
            states=load_optimizer_states,
        )
        # Everything fits from here on.
        if loaded.inner is not None:
            self.optimizer.load_state_dict(loaded.inner)
        self.loss_scaler.state = scaling or self.loss_scaler.state
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        with torch.no_grad():
            for group, master in zip(self.groups, loaded.masters, strict=True):
                group.master.copy_(master)
                copy_masters_to_model(group)
