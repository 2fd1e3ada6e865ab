"""ZeroOptimizer: fp32 masters, their state and reduced gradients split over ranks (ZeRO 1 and 2).

Every rank holds the whole model and runs backward on its own part of a batch. Masters, moments and
reduced gradients lie in partitions (`reference.partition`), one on each rank. One step, in order:

    1. reduce      gradients of all ranks to one (`zero_groups`); each rank keeps its partition
    2. agree       on overflow, norm and scale, in one message over each group (`zero_report`)
    3. skip        on overflow, or squares past fp32: forget the gradients, change nothing else
    4. unscale     and clip, in one multiplication
    5. step        of the inner optimizer, on the master of this rank
    6. copy        the master to this rank's part of the model weights, each rounded once
    7. gather      model weights of all ranks
    8. loss scale  moves, after everything that used it

Stage 2 reduces after every micro-batch and adds up partitions, so that no rank keeps the sums of
whole gradients; stage 1 adds up whole gradients and reduces once, in the step. Where the additions
are exact both stages have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinstep.contract.agreement import agree_on_layouts, constructed_by_all, on_all_ranks
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import check_numbers
from twinstep.contract.loss_scale import name_idle
from twinstep.contract.moe import check_has_experts, expert_of_group
from twinstep.contract.parallel import ExpertGroups, ModelParallelUnit, tensor_parallel_rank
from twinstep.contract.tensors import check_dense_gradients, drop_gradients
from twinstep.contract.timers import Timers
from twinstep.contract.zero import (
    ALIKE,
    OffloadConfig,
    ZeroOptions,
    check_expert_groups,
    check_names,
    offloads,
    refuse_unbuilt,
)
from twinstep.reference.arithmetic import float64, fp32
from twinstep.reference.clip import clip_factor
from twinstep.reference.loss_scale import ScaleState
from twinstep.reference.optimizers.scaled_wrapper import unscaled
from twinstep.reference.optimizers.scalers import zero_loss_scale
from twinstep.reference.optimizers.zero_groups import (
    ZeroGroup,
    clear_sums,
    reduce_group,
    take_gradients,
    zero_group,
)
from twinstep.reference.optimizers.zero_masters import ZeroMasters
from twinstep.reference.optimizers.zero_report import report

STEP_TIMERS = ["optimizer_allgather", "optimizer_gradients", "optimizer_step"]


class ZeroOptimizer(ZeroMasters):
    """Masters, state and gradients of fp16, bf16 or fp32 models, split over data-parallel ranks.

    Args:
        init_optimizer: fresh; each of its groups gets this rank's flat master as its only
            parameter. Frozen parameters are left alone, empty ones are fine.
        param_names: a name for every parameter, by which checkpoints address it.
        timers: called by phase; `contract.timers` has some.
        static_loss_scale: the scale of an fp16 model without dynamic_loss_scale; others have none.
        dynamic_loss_scale: let the scale of an fp16 model move, by the rule with hysteresis.
        dynamic_loss_args: of `DynamicLossScale`: `init_scale`, `scale_window`, `min_scale`,
            `delayed_shift`, `consecutive_hysteresis`.
        verbose: log skipped steps and changes of the scale.
        dp_process_group: over which masters are split and gradients averaged; None for all ranks.
        expert_parallel_group: by name, groups whose ranks hold different experts.
        expert_data_parallel_group: by name, groups whose ranks hold the same experts, over which
            their masters are split.
        mpu: the model-parallel unit; norms and overflows are then those of the whole model.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        partition_grads: True for stage 2, False for stage 1.
        gradient_accumulation_dtype: of sums over micro-batches, in both stages.
        communication_data_type: in which gradients are sent and added up over ranks; None for
            the dtype of the model.
        gradient_average: the mean over ranks, experts' too; False for the sum.
        postscale_gradients, gradient_predivide_factor, reduce_scatter: where the mean divides;
            see `zero_groups`.
        round_robin_gradients: lay parameters in another order, see `partition.round_robin_order`.
        has_moe_layers: groups marked `moe` hold experts, and only experts.
        check_grad_overflow: False takes every step of a bf16 model; others skip overflows always.
        allgather_bucket_size: largest number of elements, of all ranks together, that one message
            gathers; even.
        elastic_checkpoint: load states of any number of ranks; False for as many as there are.
        contiguous_gradients, reduce_bucket_size, use_multi_rank_bucket_allreduce, overlap_comm,
            offload_optimizer_config, gradient_accumulation_steps, optimizer_params: without effect.
        ignore_unused_parameters, fp16_master_weights_and_gradients,
            bf16_master_weights_and_gradients, bf16_optimizer_states, zenflow_config: refused but
            for their defaults.
        compat: upstream behaviour to reproduce; the default is correct.

    Gradients are taken by `backward`, `fill_grad_accum_attribute`, `reduce_gradients` and `step`:
    a parameter's own gradient is added to the sums, and is None afterwards. What is taken at once
    is one micro-batch. A loop that calls `loss.backward()` itself multiplies the loss by
    `loss_scale`, and calls `reduce_gradients` after each in stage 2. All ranks make the same calls.

    Writes model weights, masters, the state of the inner optimizer, and drops gradients.

    Source: Rajbhandari et al. (2020); names as in DeepSpeed's `DeepSpeedZeroOptimizer`.
    """

    @constructed_by_all
    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        *,
        param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
        timers: Timers | None = None,
        optimizer_params: Mapping[str, object] | None = None,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
        contiguous_gradients: bool = True,
        reduce_bucket_size: int = 500_000_000,
        use_multi_rank_bucket_allreduce: bool = True,
        allgather_bucket_size: int = 5_000_000_000,
        dp_process_group: dist.ProcessGroup | None = None,
        expert_parallel_group: ExpertGroups | None = None,
        expert_data_parallel_group: ExpertGroups | None = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        offload_optimizer_config: OffloadConfig | None = None,
        mpu: ModelParallelUnit | None = None,
        clip_grad: float = 0.0,
        gradient_accumulation_dtype: torch.dtype = torch.float32,
        communication_data_type: torch.dtype | None = None,
        postscale_gradients: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average: bool = True,
        gradient_accumulation_steps: int = 1,
        ignore_unused_parameters: bool = True,
        partition_grads: bool = True,
        round_robin_gradients: bool = False,
        has_moe_layers: bool = False,
        fp16_master_weights_and_gradients: bool = False,
        bf16_master_weights_and_gradients: bool = False,
        bf16_optimizer_states: bool = False,
        elastic_checkpoint: bool = True,
        check_grad_overflow: bool = True,
        zenflow_config: object = None,
        compat: Compat = CORRECT,
    ) -> None:
        del optimizer_params, gradient_accumulation_steps
        del use_multi_rank_bucket_allreduce, overlap_comm
        offloads(offload_optimizer_config)  # without effect here
        refuse_unbuilt(
            ignore_unused_parameters=ignore_unused_parameters,
            fp16_master_weights_and_gradients=fp16_master_weights_and_gradients,
            bf16_master_weights_and_gradients=bf16_master_weights_and_gradients,
            bf16_optimizer_states=bf16_optimizer_states,
            zenflow_config=zenflow_config,
        )
        self.options = ZeroOptions(
            partition_grads=partition_grads,
            reduce_scatter=reduce_scatter,
            postscale_gradients=postscale_gradients,
            gradient_predivide_factor=gradient_predivide_factor,
            gradient_average=gradient_average,
            gradient_accumulation_dtype=gradient_accumulation_dtype,
            communication_data_type=communication_data_type,
            contiguous_gradients=contiguous_gradients,
            reduce_bucket_size=reduce_bucket_size,
            allgather_bucket_size=allgather_bucket_size,
            has_moe_layers=has_moe_layers,
        )
        scales = any(p.dtype is torch.float16 for p in trained(init_optimizer))
        if scales and not check_grad_overflow:
            raise ValueError(
                "check_grad_overflow=False, but should be True for an fp16 model, whose loss scale "
                "follows overflows [ZeroOptimizer]"
            )
        name_idle(scales, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        super().__init__(
            init_optimizer,
            loss_scaler=zero_loss_scale(
                static_loss_scale if scales else 1.0,
                dynamic_loss_scale and scales,
                dynamic_loss_args,
                compat,
            ),
            scales=scales,
            clip_grad=clip_grad,
            norm_type=2.0,
            mpu=mpu,
            deepspeed=None,
            expert_groups=expert_parallel_group,
            expert_data_groups=expert_data_parallel_group,
            verbose=verbose,
            timers=timers,
            compat=compat,
        )
        self.check_grad_overflow = check_grad_overflow
        self.elastic_checkpoint = elastic_checkpoint
        self.round_robin_gradients = round_robin_gradients
        self._data_group = dp_process_group
        self._taken = False
        self.groups = self._laid_out(dict(param_names.items()), round_robin_gradients)
        for group, laid_out in zip(init_optimizer.param_groups, self.groups, strict=True):
            group["params"] = [laid_out.master]

    def _laid_out(self, names: Mapping[Tensor, str], round_robin: bool) -> list[ZeroGroup]:
        """Lay out all groups, experts over their own ranks."""
        moe, data = self.options.has_moe_layers, self._data_group
        wheres = [f"group {i}, ZeroOptimizer" for i in range(len(self.param_groups))]
        experts = [
            expert_of_group(group, moe, where)
            for group, where in zip(self.param_groups, wheres, strict=True)
        ]
        if moe:
            check_has_experts(experts, "ZeroOptimizer")
        check_names([names[param] for param in trained(self.optimizer) if param in names])
        named = {name for name in experts if name is not None}
        check_expert_groups(named, self.expert_groups, self.expert_data_groups, data)
        return [
            zero_group(
                cast(list[Tensor], group["params"]),
                names,
                data if expert is None else self.expert_data_groups[expert],
                where,
                options=self.options,
                round_robin=round_robin,
                data_world=1 if data is None else dist.get_world_size(data),
                expert=expert,
            )
            for group, expert, where in zip(self.param_groups, experts, wheres, strict=True)
        ]

    def _agree(self) -> None:
        options = {**self.options.alike(), **{name: float(getattr(self, name)) for name in ALIKE}}
        same = {name: lambda _, number=number: number for name, number in options.items()}
        device = self.groups[0].master.device
        on_all_ranks(lambda: None, self.ranks, device, same=same)
        agree_on_layouts(self.groups, self.ranks)

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Run backward from the loss, in fp32, times `loss_scale`; take the gradients.

        Stage 2 reduces them, which all ranks must do.
        """
        with self._taking_its_own():
            super().backward(loss, create_graph=create_graph, retain_graph=retain_graph)
            if self.options.partition_grads:
                self.reduce_gradients()
            else:
                self.fill_grad_accum_attribute()

    @torch.no_grad()
    def fill_grad_accum_attribute(self) -> None:
        """Take the gradients of a micro-batch into the sums of this rank; nothing is sent.

        Raises:
            RuntimeError: a gradient is sparse. Nothing has changed.
        """
        check_dense_gradients(self._params(), "ZeroOptimizer")
        self._take()

    def _take(self) -> None:
        self._note_taken()
        for group in self.groups:
            self._taken |= take_gradients(group)

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Take the gradients, and reduce all sums of this rank; every rank must call it.

        Args:
            pipeline_parallel: accepted; stages of a pipeline reduce alike.

        Raises:
            RuntimeError: a gradient of this rank is sparse.
            ValueError: one of another rank is. In either case nothing has changed.
        """
        del pipeline_parallel
        self._reduce(lambda: None)

    def _reduce(self, ready: Callable[[], None]) -> None:
        """The same, if every rank is ready."""

        def check() -> None:
            ready()
            check_dense_gradients(self._params(), "ZeroOptimizer")

        on_all_ranks(check, self.ranks, self.groups[0].master.device)
        self._take()
        for group in self.groups:
            reduce_group(group, self.options)

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
            RuntimeError: a closure was given, a gradient is sparse, or there is no gradient since
                the last step on any rank.
            TypeError: a hyper-parameter is no number.
            MinimumLossScale: overflow at the floor of a scale that makes this an error.
            ValueError: another rank refuses, or has another loss scale.
                In each case no weight, master, state or scale has changed.
        """

        def ready() -> None:
            self._refuse(closure)
            check_numbers(self.param_groups, "ZeroOptimizer.step")

        self._reduce(ready)
        told = report(
            self.groups,
            self._everyone(),
            taken=self._taken,
            loss_scale=self.loss_scale,
            tensor_rank=tensor_parallel_rank(self.mpu),
        )
        if not told.taken:
            raise RuntimeError(
                "there is no gradient on any rank since the last step, but should be: call "
                "backward before each step [ZeroOptimizer.step]"
            )
        brain = self.groups[0].flat.dtype is torch.bfloat16
        found_inf = told.overflow and (self.check_grad_overflow or not brain)
        after = self.loss_scaler.after(found_inf)
        self._norm = unscaled(told.norm, float64(self.loss_scale))
        if found_inf:
            for name in STEP_TIMERS:
                with self._timed(name):
                    pass
        else:
            scale, limit = self._scale_of_step(after), float64(self.clip_grad)
            self._update(clip_factor(norm=told.norm, scale=scale, max_norm=limit))
        self._clear_sums()
        self._enter(found_inf, after)
        if self.timers is not None:
            self.timers.log(STEP_TIMERS)
        return None

    def _update(self, factor: Tensor) -> None:
        """Reduced gradients to masters, a step, masters to model weights of all ranks."""
        with self._timed("optimizer_gradients"):
            for group in self.groups:
                group.master.grad = fp32(group.reduced) * factor
        with self._timed("optimizer_step"):
            self.optimizer.step()
        drop_gradients(self.single_partition_of_fp32_groups)
        with self._timed("optimizer_allgather"):
            self.update_lp_params()

    def _scale_of_step(self, after: ScaleState) -> Tensor:
        """The scale that multiplied the loss of these gradients; float64, shape ().

        Upstream divides an external scale out here, unlike in its FP16 optimizers.
        """
        updated = self.compat.unscale_with_updated_scale and self.external_loss_scale is None
        return float64(after.scale if updated else self.loss_scale)

    def _everyone(self) -> list[dist.ProcessGroup]:
        """Data-parallel ranks, then those that hold one model together."""
        model = None if self.mpu is None else self.mpu.get_model_parallel_group()
        return [group for group in (self._data_group, model) if group is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' own gradients, or zero them, and forget all sums."""
        drop_gradients(self._params(), set_to_none=set_to_none)
        self._clear_sums()

    def _clear_sums(self) -> None:
        self._taken = False
        for group in self.groups:
            clear_sums(group)

    def destroy(self) -> None:
        """Nothing: there are no hooks. On the fast side it removes them."""


def trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters of an optimizer that are trained."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [param for param in params if param.requires_grad]
