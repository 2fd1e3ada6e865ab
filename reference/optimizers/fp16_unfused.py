"""FP16UnfusedOptimizer: mixed precision with one fp32 master per parameter, and LAMB.

One step, in order:

    1. overflow    any gradient, on any rank, infinite or NaN?
    2. norm        of the gradients as stored, each element of the model once
    3. skip        on overflow drop the gradients and change nothing else
    4. unscale     gradients to fp32, and clip, in one multiplication; a missing one is zero
    5. step        of the inner optimizer, on the masters
    6. copy        masters to model weights, each rounded once
    7. loss scale  moves, after everything that used it

With `fused_lamb_legacy` the inner optimizer is given the gradients as they are stored and what to
divide them by, and does 4, 5 and 6 itself. Gradients of the model weights stay where they are after
a step that was taken: whoever runs backward next drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.agreement import constructed_by_all
from twinstep.contract.checkpoint import fp16
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.loss_scale import ScaleArguments
from twinstep.contract.moe import is_moe_param
from twinstep.contract.moments import StateDict
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.refusals import check_legacy_lamb
from twinstep.contract.tensors import check_param, drop_gradients
from twinstep.contract.wrapper import initialize
from twinstep.reference.arithmetic import float64, fp32
from twinstep.reference.clip import combined_scale
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.scaled_wrapper import ScaledWrapper, unscaled
from twinstep.reference.optimizers.scalers import LossScale, saved_scale, wrapper_loss_scale
from twinstep.reference.unscale import past_squares


class FP16UnfusedOptimizer(ScaledWrapper):
    """Loss scaling and fp32 master weights for fp16 (or bf16) models, tensor by tensor.

    Args:
        init_optimizer: fresh; the parameters of its groups become their masters. Frozen parameters
            and empty ones are left alone, dtypes may be mixed.
        deepspeed: an engine handle; asked whether backward reduces gradients over ranks.
        loss_scale_config: a scaler, which then decides instead of the four arguments below.
        low_precision_dtype: float16 scales the loss; anything else does not without a scaler.
        static_loss_scale: the scale without dynamic_loss_scale.
        dynamic_loss_scale: let the scale move by the wrapper rule of `reference.loss_scale`.
        dynamic_loss_args: `init_scale`, `scale_window` and `min_scale`; without it 65536, 1000
            and 0.25.
        verbose: log skipped steps and changes of the scale.
        mpu: the model-parallel unit; norms and overflows are then those of the whole model.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        norm_type: of that norm: 1, 2, infinity (exact) or another positive number.
        fused_lamb_legacy: hand gradients, copies and a divisor to the inner optimizer, which must
            take them, as `FusedLamb` does.
        has_moe_layers: accepted; parameters carry marks of their own.
        expert_groups: expert-parallel process groups by name, whose ranks hold different experts.
        expert_data_groups: by name, groups whose ranks hold the same experts; norms of these are
            averaged over them.
        compat: upstream behaviour to reproduce; the default is correct.

    Writes model weights, masters and the state of the inner optimizer.

    Source: Micikevicius et al. (2018); names as in DeepSpeed's `FP16_UnfusedOptimizer`.
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
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
        mpu: ModelParallelUnit | None = None,
        clip_grad: float = 0.0,
        norm_type: float = 2.0,
        fused_lamb_legacy: bool = False,
        has_moe_layers: bool = False,
        expert_groups: ExpertGroups | None = None,
        expert_data_groups: ExpertGroups | None = None,
        compat: Compat = CORRECT,
    ) -> None:
        del has_moe_layers
        if fused_lamb_legacy:
            check_legacy_lamb(init_optimizer, "FP16UnfusedOptimizer")
        scales = loss_scale_config is not None or low_precision_dtype is torch.float16
        arguments = ScaleArguments(
            scales=scales,
            static_loss_scale=static_loss_scale,
            dynamic_loss_scale=dynamic_loss_scale,
            dynamic_loss_args=dynamic_loss_args,
            initial_scale=2.0**16,
            min_scale=0.25,
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
            timers=None,
            compat=compat,
        )
        self.fused_lamb_legacy = fused_lamb_legacy
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                check_param(param, f"parameter {index}, FP16UnfusedOptimizer")
            trained = [p for p in group["params"] if p.requires_grad and p.numel()]
            masters = [fp32(param.detach()).clone().requires_grad_() for param in trained]
            self.fp16_groups.append(trained)
            self.fp32_groups.append(masters)
            group["params"] = masters
        if compat.step_at_construction:
            self.initialize_optimizer_states()

    def initialize_optimizer_states(self) -> None:
        """Allocate the state of the inner optimizer; see `contract.wrapper.initialize`."""
        initialize(self.optimizer, self._masters(), self.compat)

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
        params = self._params()
        held, worst = self._agreed(closure, params)
        if self.compat.clip_without_experts:
            held = [(param, grad) for param, grad in held if not is_moe_param(param)]
        norm = self._parallelism.global_norm(held, self.norm_type, worst)
        found_inf = worst > 0.0 or past_squares(norm.item(), self.norm_type)
        after = self.loss_scaler.after(found_inf)
        scale = self._scale_of_step(after)
        self._norm = norm if self.compat.report_scaled_norm else unscaled(norm, scale)
        divisor = combined_scale(norm=norm, scale=scale, max_norm=float64(self.clip_grad))
        if found_inf:
            drop_gradients(params)
        elif self.fused_lamb_legacy:
            self._step_fused_lamb(divisor)
        else:
            self._update(fp32(1.0 / divisor))
        self._enter(found_inf, after)
        return None

    def _update(self, factor: Tensor) -> None:
        """Gradients to masters to model weights."""
        for param, master in self._pairs():
            master.grad = fp32(_gradient(param)) * factor
        self.optimizer.step()
        drop_gradients(self._masters())
        self._copy_masters_to_model()

    def _step_fused_lamb(self, divisor: Tensor) -> None:
        """Let the inner optimizer unscale, step and write the copies."""
        cast(FusedLamb, self.optimizer).step(
            grads=[[_gradient(param) for param in group] for group in self.fp16_groups],
            output_params=[[param.detach() for param in group] for group in self.fp16_groups],
            scale=divisor,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model weights, or zero them."""
        drop_gradients(self._params(), set_to_none=set_to_none)

    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after these were loaded or changed."""
        for param, master in self._pairs():
            master.detach().copy_(param.detach())

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients and the state of the inner optimizer."""
        return self._bytes(
            model_weights=self._params(),
            master_weights=self._masters(),
            gradients=[param.grad for param in self._params()],
        )

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """Loss scale, clip norm, masters by group and the inner dict; copies, not views.

        `cpu_offload` copies to the CPU; the device needs no memory for it.
        """
        scale = saved_scale(self.loss_scaler)
        return fp16.saved(
            self.optimizer, self.fp32_groups, self.clip_grad, scale, cpu_offload=cpu_offload
        )

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Load a state of this class or of DeepSpeed's, and write its masters to the model.

        Args:
            state_dict: copied; later steps do not write into it. Constants of the loss-scale rule
                come from the constructor, whatever the dict holds. Without `clip_grad`, which
                DeepSpeed does not save, the constructor's stays.
            load_optimizer_states: False leaves the state of the inner optimizer.

        Raises:
            ValueError: something does not fit; the sentence names it. Nothing has changed.
        """
        where = "FP16UnfusedOptimizer.load_state_dict"
        loaded, scaling = fp16.checked(
            self.optimizer,
            state_dict,
            self.fp32_groups,
            where,
            self.ranks,
            restored=self.loss_scaler.restored,
            states=load_optimizer_states,
        )
        # Everything fits from here on.
        if loaded.inner is not None:
            self.optimizer.load_state_dict(loaded.inner)
        self.loss_scaler.state = scaling or self.loss_scaler.state
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        for master, saved in zip(self._masters(), loaded.masters, strict=True):
            master.detach().copy_(saved)
        self._copy_masters_to_model()

    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable(self.fp16_groups))

    def _masters(self) -> list[Tensor]:
        return list(chain.from_iterable(self.fp32_groups))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params(), self._masters(), strict=True))

    def _copy_masters_to_model(self) -> None:
        for param, master in self._pairs():
            param.detach().copy_(master.detach())


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
