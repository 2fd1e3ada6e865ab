"""FP16Optimizer: mixed precision over flat buffers, one fp32 master per parameter group.

Around `FusedAdam` a step is three launches, around `FusedLamb` five: gradients are read where
autograd left them, and masters, moments and model weights are written in one pass (LAMB: two).
The host decides nothing and waits for nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import overload

import torch
from torch import Tensor

from twinstep.contract.agreement import constructed_by_all
from twinstep.contract.checkpoint import fp16
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import check_numbers
from twinstep.contract.loss_scale import ScaleArguments
from twinstep.contract.moments import MOMENTS, StateDict
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.refusals import refuse_legacy_adam
from twinstep.contract.tensors import drop_gradients
from twinstep.contract.timers import Timers
from twinstep.fast.kernels._arith import INV_SCALE
from twinstep.fast.optimizers.flat_groups import flat_group
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.parallelism import Gradients
from twinstep.fast.optimizers.scaled_wrapper import Given, ScaledWrapper
from twinstep.fast.optimizers.scalers import LossScale, saved_scale, wrapper_loss_scale
from twinstep.fast.optimizers.zeros import clear_gradients

# What kernels do in one pass has one timer; overflows are found with the norm.
PHASES = ["compute_norm", "basic_step"]
PHASES_BY_TORCH = ["compute_norm", "unscale_and_clip", "basic_step", "update_fp16"]


class FP16Optimizer(ScaledWrapper):
    """Loss scaling and fp32 master weights for fp16 (or bf16) models, in flat buffers.

    Args:
        init_optimizer: fresh; each of its groups gets one flat master as its only parameter.
            Frozen parameters are left alone, empty ones are fine, dtypes may be mixed. With
            another class than `FusedAdam` and `FusedLamb`, with hooks on its step, or with LAMB's
            max_grad_norm, gradients are unscaled by torch and its own `step` is called: slower,
            and the host waits to know whether the step is skipped.
        deepspeed: an engine handle; asked whether backward reduces gradients over ranks.
        loss_scale_config: a scaler, which then decides instead of the five arguments below.
        low_precision_dtype: float16 scales the loss; anything else does not without a scaler.
        static_loss_scale: the scale without dynamic_loss_scale.
        dynamic_loss_scale: let the scale move by the wrapper rule of `fast.kernels.loss_scale`.
        initial_dynamic_scale: the first scale without dynamic_loss_args.
        dynamic_loss_args: `init_scale`, `scale_window` and `min_scale`.
        verbose: log skipped steps, when something is read after them.
        mpu: the model-parallel unit; norms and overflows are then those of the whole model.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        norm_type: of that norm: 1, 2 or infinity, exact and on the device; any other positive
            number is computed on the host, from gradients that are copied there.
        fused_adam_legacy: refused, the argument exists for callers that pass False.
        has_moe_layers: accepted; parameters say themselves who is an expert.
        expert_groups: expert-parallel process groups by name, whose ranks hold different experts.
        expert_data_groups: by name, groups whose ranks hold the same experts; norms of these are
            averaged over them.
        timers: called around "compute_norm" (which finds overflows, too, and moves the scale) and
            "basic_step" (which unscales, clips and writes the model weights, too); around another
            class inside also "unscale_and_clip" and "update_fp16". `contract.timers` has some that
            wait for nothing.
        compat: upstream behaviour to reproduce; the default is correct.

    Writes model weights, masters, the state of the optimizer inside, and drops gradients. State
    appears in the optimizer inside once a first step was taken and something has been read.

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
        scales = low_precision_dtype is torch.float16 or loss_scale_config is not None
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
        options = init_optimizer.param_groups
        where = "group {}, FP16Optimizer"
        self._groups = [flat_group(g["params"], where.format(i)) for i, g in enumerate(options)]
        for group, flat in zip(options, self._groups, strict=True):
            group["params"] = [flat.master]
        self._rows = [[group.master] for group in self._groups]
        self._prepare(self._params())
        if compat.step_at_construction:
            self.initialize_optimizer_states()

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group."""
        return [group.params for group in self._groups]

    @property
    def fp16_groups_flat(self) -> list[Tensor]:
        """The flat buffers of the model weights: one per group, more where dtypes are mixed."""
        return [buffer for group in self._groups for buffer in group.buffers]

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters, one per group."""
        return [group.master for group in self._groups]

    def _params(self) -> list[Tensor]:
        return list(chain(*self.fp16_groups))

    def initialize_optimizer_states(self) -> None:
        """Make the state of the optimizer inside; values change with `step_at_construction` alone.

        An optimizer that is not ours makes its state when it first steps.
        """
        self._initialize(self.fp32_groups_flat)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, or skip it; does not wait for the device.

        `overflow` and `get_global_norm()` tell about it afterwards. An overflow at the floor of a
        scale that makes this an error changes nothing but drops the gradients; the next value that
        is read raises `MinimumLossScale`.

        Args:
            closure: refused.

        Raises:
            RuntimeError: a closure was given, or a gradient is sparse.
            TypeError: a hyper-parameter is no number.
                In each case nothing has changed, and ranks that this one tells of overflows skip
                the step as well. The next value that is read there raises a ValueError. So does it
                on ranks that have made their gradients with different scales.
        """
        try:
            self._refuse(closure)
            # Copied at most once: the norm and the update read the same memory.
            gradients, given = self._read(self.fp16_groups)
            self.sync_hyperparameters()
            inside = self._fused()
            if inside is None:
                check_numbers(self.param_groups, f"{type(self).__name__}.step")
            groups = [] if inside is None else self._group_tensors(given)
        except Exception as error:
            self._step.refuse(self._parallelism, error)
        external = self._external_scale() is not None
        if inside is None:
            self._step_by_torch(self._params(), gradients, external)
        else:
            timed = nullcontext if self.timers is None else self._timed
            self._step.run(gradients, groups, inside, external=external, timed=timed)
            self._stepped = True
        if self._plan is None:
            drop_gradients(self._params(), set_to_none=True)
        else:
            self._plan.drop()
        if self.timers is not None:
            self.timers.log(PHASES if inside is not None else PHASES_BY_TORCH)
        return None

    def _group_tensors(self, given: Given) -> list[GroupTensors]:
        """Groups as the kernels take them: pieces of masters, in the order of the parameters."""

        def make() -> list[GroupTensors]:
            return [self._laid(index, grads) for index, grads in enumerate(given())]

        return self._groups_laid_out(self._plan, self._rows, make)

    def _laid(self, index: int, grads: Sequence[Tensor]) -> GroupTensors:
        group = self._groups[index]
        state = self._state_to_step(group.master)
        flat = [group.master, *(state[name] for name in MOMENTS)]
        masters, *others = self._fixed[index].of([*flat, *group.params], partial(group.lists, flat))
        return GroupTensors(
            lists=[masters, grads, *others],
            steps=[state["step"]],
            bias_correction=bool(self.param_groups[index]["bias_correction"]),
            shared=True,
        )

    def _step_by_torch(self, params: list[Tensor], gradients: Gradients, external: bool) -> None:
        """Unscale with torch, call the inner optimizer, copy to the model; the host waits."""
        inside = self._held()
        with self._timed("compute_norm"):
            block = self._step.decide(gradients, external=external)
        self._stepped = True
        self._sync_state()
        if self._step.control["found_inf"].item():
            return
        with self._timed("unscale_and_clip"):
            factor = block[INV_SCALE.value]
            for group in self._groups:
                flat = torch.zeros_like(group.master)
                for param, piece in zip(group.params, group.pieces(flat), strict=True):
                    if param.grad is not None:
                        piece.copy_(param.grad.reshape(-1)).mul_(factor)
                group.master.grad = flat
            drop_gradients(params, set_to_none=True)
        with self._timed("basic_step"):
            inside.step()
        drop_gradients(self.fp32_groups_flat, set_to_none=True)
        with self._timed("update_fp16"):
            for group in self._groups:
                group.copy_masters_to_model()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model weights, or zero them."""
        clear_gradients(self._params(), set_to_none=set_to_none)

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after somebody has loaded or changed these."""
        for group in self._groups:
            group.copy_model_to_masters()

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients and the state of the optimizer inside."""
        return self._bytes(
            model_weights=self.fp16_groups_flat,
            master_weights=self.fp32_groups_flat,
            gradients=[param.grad for param in self._params()],
        )

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """Loss scale (fp16 only), clip norm, masters and the dict inside; copies, not views.

        The format is the reference's: either loads what the other has saved. `cpu_offload` copies
        to the CPU; the device needs no memory for it.
        """
        self._sync_state()
        scale = saved_scale(self.loss_scaler) if self.scales else {}
        return fp16.saved(
            self._held(), self.fp32_groups_flat, self.clip_grad, scale, cpu_offload=cpu_offload
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Load a state of this class, the reference's or DeepSpeed's; its masters go to the model.

        Args:
            state_dict: copied; later steps do not write into it. Constants of the loss-scale rule
                come from the constructor, whatever the dict says.
            load_optimizer_states: False leaves the state of the optimizer inside.

        Raises:
            ValueError: something does not fit; the sentence says what. Nothing has changed.
        """
        self._sync_state()
        where = "FP16Optimizer.load_state_dict"
        loaded, scaling = fp16.checked(
            self._held(),
            state_dict,
            self.fp32_groups_flat,
            where,
            self.ranks,
            restored=self.loss_scaler.restored if self.scales else None,
            states=load_optimizer_states,
        )
        # Everything fits from here on.
        if loaded.inner is not None:
            self._load_inner(loaded.inner)
        self.loss_scaler.enter(scaling or {})
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        for group, master in zip(self._groups, loaded.masters, strict=True):
            group.master.copy_(master)
            group.copy_masters_to_model()
