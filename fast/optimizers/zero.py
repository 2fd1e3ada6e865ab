"""ZeroOptimizer: fp32 masters, their state and reduced gradients split over ranks (ZeRO 1 and 2).

Gradients go bucket by bucket to the ranks that own them (`zero_buckets`): in stage 2 from hooks
while backward runs, in stage 1 once, in the step. One message for each group of ranks brings norm,
overflow, refusals and the scale together (`zero_report`); a kernel decides on the device whether
the step is skipped and how far it clips; another one writes master, moments and this rank's part
of the model weights in one pass; then weights of all ranks are gathered in place. Nothing waits for
the device until something is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinstep.contract.agreement import (
    agree_on_layouts,
    constructed_by_all,
    device_of,
    on_all_ranks,
)
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import check_numbers
from twinstep.contract.loss_scale import name_idle
from twinstep.contract.parallel import ExpertGroups, ModelParallelUnit
from twinstep.contract.tensors import check_dense_gradients, drop_gradients
from twinstep.contract.timers import Timers
from twinstep.contract.zero import ALIKE, OffloadConfig, ZeroOptions, refuse_unbuilt
from twinstep.fast.optimizers.norms import GIVEN
from twinstep.fast.optimizers.scalers import zero_loss_scale
from twinstep.fast.optimizers.zero_buckets import BucketedReduction
from twinstep.fast.optimizers.zero_masters import ALLGATHER, GRADIENTS, STEP, trained
from twinstep.fast.optimizers.zero_offload import offload_of, require_updatable
from twinstep.fast.optimizers.zero_report import NO_GRADIENT, ZeroDriver, no_gradient
from twinstep.fast.optimizers.zero_steps import ZeroSteps


class ZeroOptimizer(ZeroSteps):
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
            see `reference.optimizers.zero_groups`.
        round_robin_gradients: lay parameters in another order, dealt to the ranks in turn.
        has_moe_layers: groups marked `moe` hold experts, and only experts.
        check_grad_overflow: False takes every step of a bf16 model; others skip overflows always.
        allgather_bucket_size: largest number of elements, of all ranks together, that one message
            gathers; even.
        reduce_bucket_size: largest number of elements that are reduced together.
        contiguous_gradients: copy the gradients of a bucket into one buffer; False sends each
            gradient by itself.
        overlap_comm: send one bucket while the next is filled, from two buffers; on a GPU on a
            stream of its own.
        offload_optimizer_config: with the device "cpu" masters, state and reduced gradients are in
            the memory of the CPU, which updates them (`zero_offload`).
        elastic_checkpoint: load states of any number of ranks; False for as many as there are.
        use_multi_rank_bucket_allreduce, gradient_accumulation_steps, optimizer_params: accepted,
            without effect: a bucket of several ranks is never all-reduced, which sends twice as
            much.
        ignore_unused_parameters, fp16_master_weights_and_gradients,
            bf16_master_weights_and_gradients, bf16_optimizer_states, zenflow_config: refused but
            for their defaults.
        compat: upstream behaviour to reproduce; the default is correct.

    Gradients are taken by `backward`, `fill_grad_accum_attribute`, `reduce_gradients` and `step`,
    and are None afterwards. What is taken at once is one micro-batch. `step` reduces where nothing
    has since the sums last changed; a loop that calls `loss.backward()` itself multiplies the loss
    by `loss_scale`, and calls `reduce_gradients` after each in stage 2. All ranks make the same
    calls. A rank that cannot go on (a sparse gradient, a closure, an error in backward) meets the
    messages of the others with zeros, and raises in `step`; all ranks skip that step and forget its
    gradients, and the next value read on the others raises a ValueError.

    Writes model weights, masters, the state of the inner optimizer, and drops gradients. Around
    another class than `FusedAdam` and `FusedLamb` its own `step` is called, and the host waits.

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
        del optimizer_params, gradient_accumulation_steps, use_multi_rank_bucket_allreduce
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
        names = dict(param_names.items())
        self._offload = offload_of(offload_optimizer_config, device_of(init_optimizer))
        if self._offload is not None:
            require_updatable(init_optimizer, self._fused())
        self.groups = self._laid_out(names, round_robin_gradients)
        for options, group in zip(self.param_groups, self.groups, strict=True):
            options["params"] = [group.master]
        device = self.groups[0].flat.device
        finish = self._finish(reports_scaled_norm=False)
        # Models in fp32 skip overflows in any case, as upstream.
        if not check_grad_overflow and self.groups[0].flat.dtype is torch.bfloat16:
            finish = replace(finish, norm_kind=GIVEN)
        self._step: ZeroDriver = ZeroDriver(
            device, self.loss_scaler, finish, self._everyone(), offloads=self._offload is not None
        )
        self._buckets = BucketedReduction(
            self.groups,
            self.options,
            names,
            overlaps=overlap_comm,
            device=device,
            offload=self._offload,
        )
        self._reduced = False  # since a call has changed the sums
        self._hooks = self._buckets.hooks() if partition_grads else []

    def _agree(self) -> None:
        numbers = {**self.options.alike(), **{name: float(getattr(self, name)) for name in ALIKE}}
        same = {name: lambda _, number=number: number for name, number in numbers.items()}
        on_all_ranks(lambda: None, self.ranks, self.groups[0].flat.device, same=same)
        agree_on_layouts(self.groups, self.ranks, self._buckets.shared)

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Run backward from the loss, in fp32, times `loss_scale`; take the gradients.

        Stage 2 reduces them meanwhile, which all ranks must do.

        Raises:
            Exception: that of the graph; with other ranks, `step` raises it once more.
            RuntimeError: as `reduce_gradients` does; buckets before that gradient are reduced.
        """
        with self._taking_its_own():
            self._backward(loss, create_graph=create_graph, retain_graph=retain_graph)

    def _backward(self, loss: Tensor, *, create_graph: bool, retain_graph: bool) -> None:
        if not self.partition_gradients:
            super().backward(loss, create_graph=create_graph, retain_graph=retain_graph)
            try:
                self.fill_grad_accum_attribute()
            except RuntimeError as error:
                if not self._everyone():
                    raise
                self._buckets.refusal = error
            return
        try:
            with self._buckets.opened():
                super().backward(loss, create_graph=create_graph, retain_graph=retain_graph)
        except Exception as error:
            if self._everyone():
                self._buckets.refusal = error
            # Other ranks have met no error, and wait; but not in messages that have failed.
            if not self._buckets.failed:
                self._finish_round()
            raise
        self.reduce_gradients()

    @torch.no_grad()
    def fill_grad_accum_attribute(self) -> None:
        """Take the gradients of a micro-batch into the sums of this rank; nothing is sent.

        Raises:
            RuntimeError: a gradient is sparse. Nothing has changed.
        """
        self._note_taken()
        self._buckets.take()
        self._reduced = False

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Take the gradients, and reduce all sums of this rank; every rank must call it.

        Args:
            pipeline_parallel: accepted; stages of a pipeline reduce alike.

        Raises:
            RuntimeError: a gradient is sparse, and there are no other ranks, which would wait;
                with them `step` raises. Nothing has changed.
        """
        del pipeline_parallel
        if not self._everyone():
            check_dense_gradients(self._params(), "ZeroOptimizer")
        self._note_taken()
        self._finish_round()

    def _finish_round(self) -> None:
        self._buckets.finish()
        self._reduced = True

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, or skip it; does not wait for the device.

        `overflow` and `get_global_norm()` report on it afterwards. An overflow at the floor of a
        scale that makes this an error changes nothing but drops the gradients; the next value that
        is read raises `MinimumLossScale`.

        Args:
            closure: refused.

        Raises:
            RuntimeError: a closure was given, a gradient is sparse, there is no gradient since the
                last step, or one that came after `reduce_gradients`.
            TypeError: a hyper-parameter is no number.
                In each case no weight, master, state or scale has changed on any rank. Where other
                ranks have gradients, or other loss scales, the next value that is read raises.
        """
        refusal, alone = self._refusal(closure), not self._everyone()
        if refusal is not None and alone:
            raise refusal
        if not self._reduced:
            self.reduce_gradients()
        refusal = refusal or self._buckets.refusal
        if alone and refusal is None and not self._buckets.taken:
            self._reduced = False
            raise no_gradient()
        try:
            inside = self._fused()
            if inside is None:
                self._step_by_torch(refusal)
            else:
                self._step_by_kernels(inside, refusal)
        finally:
            drop_gradients(self._params())
            self._clear_sums()
        if self.timers is not None:
            self.timers.log([GRADIENTS, STEP, ALLGATHER])
        return None

    def _refusal(self, closure: object) -> Exception | None:
        """The reason why this rank cannot step, as far as it is known before the sums are."""
        try:
            self._refuse(closure)
            if self._offload is not None:
                require_updatable(self._held(), self._fused())
            check_numbers(self.param_groups, "ZeroOptimizer.step")
            self.sync_hyperparameters()
            if self._reduced and any(param.grad is not None for param in self._params()):
                raise RuntimeError(
                    "a parameter has a gradient that came after reduce_gradients, but should not: "
                    "call it again before the step, on all ranks [ZeroOptimizer.step]"
                )
        except Exception as error:
            return error
        return None

    def _external_scale(self) -> float | None:
        """The scale from outside; upstream divides it out here, unlike in its FP16 optimizers."""
        return self.external_loss_scale

    def _sync_state(self) -> None:
        if self._stepped and int(self._step.control["exhausted"]) == NO_GRADIENT:
            self._stepped = False
            self._step.control["exhausted"].zero_()
            raise no_gradient()
        super()._sync_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' own gradients, or zero them, and forget all sums."""
        drop_gradients(self._params(), set_to_none=set_to_none)
        self._clear_sums()

    def _clear_sums(self) -> None:
        self._reduced = False
        self._buckets.clear()

    def destroy(self) -> None:
        """Remove the hooks; backward then leaves gradients for `reduce_gradients`."""
        while self._hooks:
            self._hooks.pop().remove()
