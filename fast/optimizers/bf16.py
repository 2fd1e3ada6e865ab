"""BF16Optimizer: fp32 masters and state split over ranks, gradients summed in fp32 or bf16.

Backward gives every parameter a gradient in its own dtype; a kernel adds it to a flat accumulator,
at the end of backward or at once. A step reduces the accumulators to their norm, decides on the
device whether it is skipped and how far it clips, and writes masters, moments and model weights
in one pass. Nothing waits for the device until somebody asks for `overflow` or the norm.

Ranks of a group have to hold equal accumulators when a step begins; their caller reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinstep.contract.accumulated import Accumulated
from twinstep.contract.agreement import agree_on_layouts, constructed_by_all
from twinstep.contract.checkpoint import partitions, universal
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import check_numbers
from twinstep.contract.moe import check_has_experts, expert_name, expert_of_group
from twinstep.contract.moments import MOMENTS, StateDict
from twinstep.contract.parallel import (
    ExpertGroups,
    ModelParallelUnit,
    counts_in_norm,
    tensor_parallel_rank,
)
from twinstep.contract.refusals import check_accumulation_dtype, check_bucket
from twinstep.contract.tensors import drop_gradients
from twinstep.contract.wrapper import initialize
from twinstep.fast.optimizers.agreement import raise_told
from twinstep.fast.optimizers.bf16_groups import (
    PartitionedGroup,
    copy_masters_to_model,
    copy_model_to_masters,
    gather,
    immediate_hooks,
    partitioned_group,
)
from twinstep.fast.optimizers.bf16_plan import Accumulation, Runs
from twinstep.fast.optimizers.driver import StepDriver
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.norms import GIVEN, kind_of_norm
from twinstep.fast.optimizers.parallelism import Gradients, Parallelism
from twinstep.fast.optimizers.wrapper import Wrapper
from twinstep.fast.optimizers.zeros import clear_gradients


class BF16Optimizer(Wrapper, Accumulated):
    """Master weights for bf16 models, split over data-parallel ranks.

    Args:
        init_optimizer: fresh; each of its groups gets this rank's flat master as its only
            parameter. Frozen parameters are left alone. Around any other than `fast.FusedAdam`
            the host waits for the device in every step.
        param_names: a name for every parameter, by which checkpoints address it.
        mpu: the model-parallel unit; norms are then those of the whole model.
        clip_grad: largest norm of the gradients; 0 or below does not clip.
        norm_type: of that norm: 1, 2, infinity (exact) or another positive number, which the host
            forms.
        allgather_bucket_size: largest number of elements, of all ranks together, that one message
            gathers.
        dp_process_group: over which masters are split; None for the whole job, or for the
            data-parallel ranks of `mpu`. Gradients are averaged by the loop.
        grad_acc_dtype: of the accumulators, fp32 or bf16.
        immediate_grad_update: accumulate each gradient as soon as backward has it.
        has_moe_layers: groups marked `moe` hold experts, and only experts.
        expert_groups: expert-parallel process groups by name.
        expert_data_groups: over which the masters of experts are split, by name.
        compat: upstream behaviour to reproduce; the default is correct.

    Writes model weights, masters, accumulators and the state of the optimizer inside. State of a
    group appears when its first step has been taken; asking for it waits for the device once.

    Source: names as in DeepSpeed's `BF16_Optimizer`.
    """

    @constructed_by_all
    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        *,
        param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
        mpu: ModelParallelUnit | None = None,
        clip_grad: float = 0.0,
        norm_type: float = 2.0,
        allgather_bucket_size: int = 5_000_000_000,
        dp_process_group: dist.ProcessGroup | None = None,
        grad_acc_dtype: torch.dtype = torch.float32,
        immediate_grad_update: bool = False,
        has_moe_layers: bool = False,
        expert_groups: ExpertGroups | None = None,
        expert_data_groups: ExpertGroups | None = None,
        compat: Compat = CORRECT,
    ) -> None:
        check_accumulation_dtype(grad_acc_dtype, "BF16Optimizer")
        kind_of_norm(norm_type, "BF16Optimizer")
        super().__init__(init_optimizer)
        self.mpu = mpu
        self.clip_grad, self.norm_type = float(clip_grad), float(norm_type)
        self.allgather_bucket_size = check_bucket(allgather_bucket_size, "BF16Optimizer")
        self.grad_acc_dtype = grad_acc_dtype
        self.immediate_grad_update = immediate_grad_update
        self.has_moe_layers = has_moe_layers
        self.expert_groups = dict(expert_groups or {})
        self.compat = compat
        splits: dict[str | None, dist.ProcessGroup | None] = {None: dp_process_group}
        splits.update(expert_data_groups or {})
        self.groups = self._laid_out(dict(param_names.items()), splits)
        for options, group in zip(self.param_groups, self.groups, strict=True):
            options["params"] = [group.master]
        if has_moe_layers:
            check_has_experts([group.expert for group in self.groups], "BF16Optimizer")
        self._parallelism = Parallelism(mpu=mpu, expert_groups=self.expert_groups)
        device = self.groups[0].flat.device
        self._step = StepDriver(device, None, None, self.norm_type)
        self._runs = Runs(self.groups, self._parallelism)
        self._accumulation = Accumulation(self.groups, "BF16Optimizer.update_hp_grads")
        self._hooks = immediate_hooks(self.groups) if immediate_grad_update else []

    def _partitions(self) -> list[PartitionedGroup]:
        return self.groups

    def _agree(self) -> None:
        agree_on_layouts(self.groups, self.ranks)

    def initialize_optimizer_states(self) -> None:
        """Make the state of the optimizer inside; no value changes, under any `Compat`."""
        inside = self.optimizer
        self._pending.clear()
        initialize(inside, self.fp32_groups_flat_partition, CORRECT)

    def _laid_out(
        self,
        names: Mapping[Tensor, str],
        splits: Mapping[str | None, dist.ProcessGroup | None],
    ) -> list[PartitionedGroup]:
        """Lay out every group over its own ranks."""
        given: list[list[Tensor]] = [options["params"] for options in self._held().param_groups]
        device = next(chain.from_iterable(given)).device
        groups = []
        for index, (options, params) in enumerate(zip(self.param_groups, given, strict=True)):
            where = f"group {index}, BF16Optimizer"
            expert = expert_of_group(options, self.has_moe_layers, where)
            split, dtype = splits.get(expert), self.grad_acc_dtype
            groups.append(
                partitioned_group(params, names, split, dtype, device, where, expert=expert)
            )
        return groups

    def backward(
        self,
        loss: Tensor,
        update_hp_grads: bool = True,
        clear_lp_grads: bool = False,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Run backward from gradients of zero, and accumulate.

        Args:
            loss: a scalar; nothing scales it.
            update_hp_grads: add what backward gave to the accumulators.
            clear_lp_grads: drop the parameters' own gradients afterwards.
            retain_graph: of torch.
            create_graph: of torch.
        """
        self.clear_lp_grads()
        torch.autograd.backward(loss, retain_graph=retain_graph, create_graph=create_graph)
        if update_hp_grads:
            self.update_hp_grads(clear_lp_grads)

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Add the parameters' gradients to the accumulators; immediate updates have done so."""
        self._accumulation.add(by_hooks=self.immediate_grad_update)
        self._mark.look(self._trained())
        if clear_lp_grads:
            self.clear_lp_grads(set_to_none=True)

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The flat accumulators, padding included: shared ones, and those of experts by name."""
        experts: dict[str | None, list[Tensor]] = {None: []}
        for group in self.groups:
            experts.setdefault(group.expert, []).append(group.accumulator)
        shared = experts.pop(None)
        return shared, {str(name): flats for name, flats in experts.items()}

    def get_grads_for_norm(
        self, for_clipping: bool = False
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]] | list[Tensor]:
        """Accumulated gradients, 1-D views.

        Args:
            for_clipping: True gives all of them in one list. False gives those that count in the
                norm on this rank: shared ones, and those of experts by name.
        """
        accumulated = [pair for group in self.groups for pair in group.accumulated()]
        if for_clipping:
            return [grad for _, grad in accumulated]
        rank = tensor_parallel_rank(self.mpu)
        named: dict[str | None, list[Tensor]] = {None: []}
        for param, grad in accumulated:
            if counts_in_norm(param, rank):
                named.setdefault(expert_name(param), []).append(grad)
        shared = named.pop(None)
        return shared, {str(name): grads for name, grads in named.items()}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, or skip it; `overflow` and `get_global_norm()` tell about it afterwards.

        Args:
            closure: refused.

        Raises:
            RuntimeError: a closure was given, gradients are there of which none is accumulated, or
                nothing here can run kernels on the parameters' device. Nothing has changed, and
                ranks of the same model or with other experts skip the step; the next value read
                there raises a ValueError.
        """
        try:
            self._refuse(closure)
            self.sync_hyperparameters()
            gradients = self._runs.gradients()
            inside = self._fused()
            if inside is None:
                check_numbers(self.param_groups, "BF16Optimizer.step")
            groups = [] if inside is None else self._group_tensors()
            apart = self._clipped_apart()
        except Exception as error:
            self._step.refuse(self._parallelism, error)
        if inside is None:
            self._step_by_torch(gradients)
        else:
            self._step.run(gradients, groups, inside, clip_apart=apart)
        gather(self.groups, self.allgather_bucket_size)
        self.clear_hp_grads()
        return None

    def _fused(self) -> FusedAdam | None:
        """The optimizer inside, where kernels can do all that its `step` would do."""
        inside = self._held()
        # Its hooks want to be called.
        hooked = inside._optimizer_step_pre_hooks or inside._optimizer_step_post_hooks
        able = type(inside) is FusedAdam and not hooked and self._step.kind != GIVEN
        return cast(FusedAdam, inside) if able else None

    def _step_by_torch(self, gradients: Gradients) -> None:
        """Clip, call the inner optimizer, and copy to the model; the host waits."""
        self._step.decide(gradients)
        self._sync_state()
        if self._step.control["found_inf"].item():
            return
        if self.clip_grad > 0.0:
            self._step.clip(self._runs.whole())
        for group in self.groups:
            group.master.grad = group.own(group.accumulator).to(torch.float32, copy=True)
        self._held().step()
        drop_gradients(self.fp32_groups_flat_partition)
        copy_masters_to_model(self.groups)

    def _group_tensors(self) -> list[GroupTensors]:
        placed = [[group.master, group.accumulator, group.flat] for group in self.groups]
        count = len(self.groups)
        return self._groups_laid_out(
            self.groups, placed, lambda: [self._laid(index) for index in range(count)]
        )

    def _laid(self, index: int) -> GroupTensors:
        group = self.groups[index]
        state = self._state_to_step(group.master)
        moments = [state[name] for name in MOMENTS]
        row = [group.master, group.accumulator, *moments, group.flat]
        fixed = self._fixed[index].of(row, partial(group.lists, moments))
        bias_correction = bool(self.param_groups[index]["bias_correction"])
        return GroupTensors(lists=fixed, steps=[state["step"]], bias_correction=bias_correction)

    def _clipped_apart(self) -> list[Tensor]:
        """Accumulators that are rounded when they are clipped, because they have 16 bits."""
        if self.clip_grad <= 0.0 or self.grad_acc_dtype == torch.float32:
            return []
        return self._runs.whole()

    def sync_hyperparameters(self) -> None:
        """Send changed hyper-parameters; before replaying a captured graph, call this."""
        self._step.sync_hyperparameters(self._held(), self.clip_grad)

    def _sync_state(self) -> None:
        super()._sync_state()
        if self.ranks:
            raise_told(self._step.control["exhausted"])

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped; waits for the device."""
        self._sync_state()
        return bool(self._step.control["found_inf"].item())

    def get_global_norm(self) -> float:
        """Norm of the gradients of the last step, before clipping; 0.0 before the first step.

        Waits for the device.
        """
        self._sync_state()
        return float(self._step.control["norm"].item())

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Model weights := masters of all ranks."""
        copy_masters_to_model(self.groups)
        gather(self.groups, self.allgather_bucket_size)

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after somebody has loaded or changed these."""
        copy_model_to_masters(self.groups)

    def clear_hp_grads(self) -> None:
        """Zero the accumulators and forget which parameters have a gradient."""
        for group in self.groups:
            group.accumulator.zero_()
            group.has_gradient = [False] * len(group.params)

    def clear_lp_grads(self, set_to_none: bool = False) -> None:
        """Zero the parameters' own gradients, or drop them."""
        clear_gradients(self._params(), set_to_none=set_to_none)
        self._mark.look(self._trained())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' own gradients and the accumulators."""
        self.clear_lp_grads(set_to_none)
        self.clear_hp_grads()

    def destroy(self) -> None:
        """Remove the hooks of immediate updates."""
        while self._hooks:
            self._hooks.pop().remove()

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """This rank's state, or a copy on the CPU; see `contract.checkpoint.partitions`. Waits."""
        return partitions.saved(self.groups, self.optimizer, self.clip_grad, cpu_offload)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict_list: Sequence[StateDict],
        checkpoint_folder: Path | None = None,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
    ) -> None:
        """Load states of this class, of the reference's or of DeepSpeed's.

        Args:
            state_dict_list: one dict is a list of it, with `load_from_fp32_weights`. Otherwise one
                per rank that saved. If as many ranks load, each takes its own
                entry; otherwise all entries are joined and cut anew.
            checkpoint_folder: of a universal checkpoint to read instead, masters included.
            load_optimizer_states: False leaves the state of the optimizer inside.
            load_from_fp32_weights: take the saved masters; otherwise they follow the model.

        Raises:
            ValueError: something does not fit; the sentence says what. Nothing has changed.
        """
        given, states = (self.groups, self.optimizer), load_optimizer_states
        if checkpoint_folder is not None:
            loaded = universal.read_partitions(*given, checkpoint_folder, self.ranks, states=states)
        else:
            loaded = partitions.checked(*given, state_dict_list, self.ranks, states=states)
        if loaded.inner is not None:
            self._load_inner(loaded.inner)
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        if load_from_fp32_weights or checkpoint_folder is not None:
            for group, master in zip(self.groups, loaded.masters, strict=True):
                group.master.detach().copy_(master)
            self.update_lp_params()
        elif not self.compat.keep_masters_on_load:
            self.refresh_fp32_params()
