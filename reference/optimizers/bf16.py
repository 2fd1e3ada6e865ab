"""BF16Optimizer: fp32 masters and state split over ranks, gradients summed in fp32 or bf16.

Backward gives every parameter a gradient in its own dtype; it is added to an accumulator, at the
end of backward or at once. One step, in order:

    1. norm        of the accumulators, each element of the model once
    2. skip        if it is infinite or NaN: clear the accumulators and change nothing else
    3. clip        the accumulators
    4. step        of the inner optimizer, on the master of this rank
    5. copy        masters to model weights, each rounded once
    6. gather      model weights of all ranks, after a skip, too
    7. clear       the accumulators

Ranks that share a group must hold the same accumulators when a step begins: reducing what
`get_grads_for_reduction` gives is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from twinstep.contract.moe import check_has_experts, expert_of_group, is_moe_param
from twinstep.contract.moments import StateDict
from twinstep.contract.parallel import ExpertGroups, ModelParallelUnit
from twinstep.contract.refusals import check_accumulation_dtype, check_bucket
from twinstep.contract.tensors import check_dense_gradients, drop_gradients
from twinstep.contract.wrapper import initialize
from twinstep.reference.arithmetic import float64, fp32, fp64
from twinstep.reference.clip import clip_coefficient
from twinstep.reference.optimizers.model_norm import check_norm_type
from twinstep.reference.optimizers.parallelism import Pairs, Parallelism
from twinstep.reference.optimizers.partitioned_groups import (
    PartitionedGroup,
    accumulate_gradient,
    copy_masters_to_model,
    copy_model_to_masters,
    gather,
    immediate_hooks,
    partitioned_group,
)
from twinstep.reference.unscale import past_squares


class BF16Optimizer(Accumulated):
    """Master weights for bf16 models, split over data-parallel ranks.

    Args:
        init_optimizer: fresh; each of its groups gets this rank's flat master as its only
            parameter. Frozen parameters are left alone, empty ones are fine.
        param_names: a name for every parameter, by which checkpoints address it.
        mpu: the model-parallel unit; norms are then those of the whole model.
        clip_grad: largest norm of the gradients; 0 or below does not clip.
        norm_type: of that norm: 1, 2, infinity (exact) or another positive number.
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

    Writes model weights, masters, accumulators and the state of the inner optimizer.

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
        super().__init__(init_optimizer, None)
        self.clip_grad = float(clip_grad)
        self.norm_type = check_norm_type(norm_type, "BF16Optimizer")
        self.allgather_bucket_size = check_bucket(allgather_bucket_size, "BF16Optimizer")
        self.grad_acc_dtype = grad_acc_dtype
        self.immediate_grad_update = immediate_grad_update
        self.has_moe_layers = has_moe_layers
        self.mpu = mpu
        self.expert_groups = dict(expert_groups or {})
        self._parallelism = Parallelism(mpu=mpu, expert_groups=self.expert_groups)
        self.compat = compat
        self.overflow = False
        self._norm = torch.zeros(())
        splits = dict(expert_data_groups or {})
        names: dict[Tensor, str] = dict(param_names.items())
        self.groups = [
            self._laid_out(index, group, names, dp_process_group, splits)
            for index, group in enumerate(init_optimizer.param_groups)
        ]
        for group, laid_out in zip(init_optimizer.param_groups, self.groups, strict=True):
            group["params"] = [laid_out.master]
        if has_moe_layers:
            check_has_experts([group.expert for group in self.groups], "BF16Optimizer")
        self._hooks = immediate_hooks(self.groups) if immediate_grad_update else []

    def _partitions(self) -> list[PartitionedGroup]:
        return self.groups

    def _agree(self) -> None:
        agree_on_layouts(self.groups, self.ranks)

    def initialize_optimizer_states(self) -> None:
        """Allocate the state of the inner optimizer; no value changes, under any `Compat`."""
        initialize(self.optimizer, self.fp32_groups_flat_partition, CORRECT)

    def _laid_out(
        self,
        index: int,
        group: Mapping[str, object],
        names: Mapping[Tensor, str],
        data_group: dist.ProcessGroup | None,
        expert_data_groups: ExpertGroups,
    ) -> PartitionedGroup:
        """Lay out one group over its own ranks."""
        where = f"group {index}, BF16Optimizer"
        params = cast(list[Tensor], group["params"])
        expert = expert_of_group(group, self.has_moe_layers, where)
        split = data_group if expert is None else expert_data_groups.get(expert)
        return partitioned_group(params, names, split, self.grad_acc_dtype, where, expert=expert)

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
        loss.backward(  # type: ignore[no-untyped-call]
            retain_graph=retain_graph, create_graph=create_graph
        )
        if update_hp_grads:
            self.update_hp_grads(clear_lp_grads)

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Add the parameters' gradients to the accumulators; immediate updates have done so."""
        check_dense_gradients(self._params(), "BF16Optimizer.update_hp_grads")
        if not self.immediate_grad_update:
            for group in self.groups:
                for index in range(len(group.params)):
                    accumulate_gradient(group, index)
        self._mark.look(self._trained())
        if clear_lp_grads:
            self.clear_lp_grads(set_to_none=True)

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The flat accumulators, padding included: shared ones, and those of experts by name."""
        shared = [group.accumulator for group in self.groups if group.expert is None]
        experts: dict[str, list[Tensor]] = {}
        for group in self.groups:
            if group.expert is not None:
                experts.setdefault(group.expert, []).append(group.accumulator)
        return shared, experts

    def get_grads_for_norm(
        self, for_clipping: bool = False
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]] | list[Tensor]:
        """Accumulated gradients, 1-D views.

        Args:
            for_clipping: True gives all of them in one list. False gives those that count in the
                norm on this rank: shared ones, and those of experts by name.
        """
        pairs = self._accumulated()
        if for_clipping:
            return [grad for _, grad in pairs]
        shared, experts = [], dict[str, list[Tensor]]()
        for param, grad in self._parallelism.counted(pairs):
            if is_moe_param(param):
                experts.setdefault(str(getattr(param, "group_name", "")), []).append(grad)
            else:
                shared.append(grad)
        return shared, experts

    def _accumulated(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that were accumulated since the last step, with their gradients."""
        return [
            (param, grad)
            for group in self.groups
            for param, grad, has in zip(
                group.params, group.gradients(), group.has_gradient, strict=True
            )
            if has
        ]

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
            RuntimeError: a closure was given, gradients are there of which none is accumulated.
            TypeError: a hyper-parameter is no number.
            ValueError: a rank of the same model, or with other experts, raises one of these.
                In each case nothing has changed.
        """

        def prepare() -> Pairs:
            self._refuse(closure)
            check_numbers(self.param_groups, "BF16Optimizer.step")
            return self._parallelism.counted(self._accumulated())

        counted, worst = self._parallelism.worst(prepare)
        self._norm = self._parallelism.global_norm(counted, self.norm_type, worst)
        norm = fp64(self._norm).item()
        self.overflow = not math.isfinite(norm) or past_squares(norm, self.norm_type)
        if not self.overflow:
            factor = clip_coefficient(norm=self._norm, max_norm=float64(self.clip_grad))
            for group in self.groups:
                for grad in group.gradients():
                    grad.copy_(fp32(grad) * factor)
                group.master.grad = fp32(group.own(group.accumulator)).clone()
            self.optimizer.step()
            drop_gradients(self.fp32_groups_flat_partition)
            for group in self.groups:
                copy_masters_to_model(group)
        # After a skip, too: a rank that left this out would leave the others waiting.
        self._gather()
        self.clear_hp_grads()
        return None

    def get_global_norm(self) -> float:
        """Norm of the gradients of the last step, before clipping; 0.0 before the first step."""
        return fp64(self._norm).item()

    def update_lp_params(self) -> None:
        """Model weights := masters of all ranks."""
        with torch.no_grad():
            for group in self.groups:
                copy_masters_to_model(group)
            self._gather()

    def _gather(self) -> None:
        for group in self.groups:
            gather(group, self.allgather_bucket_size)

    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after these were loaded or changed."""
        for group in self.groups:
            copy_model_to_masters(group)

    def clear_hp_grads(self) -> None:
        """Zero the accumulators and forget which parameters have a gradient."""
        for group in self.groups:
            group.accumulator.zero_()
            group.has_gradient = [False] * len(group.params)

    def clear_lp_grads(self, set_to_none: bool = False) -> None:
        """Zero the parameters' own gradients, or drop them."""
        drop_gradients(self._params(), set_to_none=set_to_none)
        self._mark.look(self._trained())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' own gradients and the accumulators."""
        self.clear_lp_grads(set_to_none)
        self.clear_hp_grads()

    def destroy(self) -> None:
        """Remove the hooks of immediate updates."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """The entry of this rank; see `contract.checkpoint.partitions`.

        `cpu_offload` copies to the CPU; the device needs no memory for it.
        """
        return partitions.saved(self.groups, self.optimizer, self.clip_grad, cpu_offload)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict_list: Sequence[StateDict],
        checkpoint_folder: Path | None = None,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
    ) -> None:
        """Load states of this class or of DeepSpeed's; every rank must call it.

        Args:
            state_dict_list: one dict is a list of it, with `load_from_fp32_weights`. Otherwise one
                per rank that saved. If as many ranks load, each takes its own
                entry; otherwise all entries are joined and cut anew.
            checkpoint_folder: read a universal checkpoint from there instead.
            load_optimizer_states: False leaves the state of the inner optimizer.
            load_from_fp32_weights: take the saved masters, and write them to the model; otherwise
                masters come from the model weights, which the caller has loaded. A universal
                checkpoint always brings its masters.

        Raises:
            ValueError: something does not fit; the sentence names it. Nothing has changed.
        """
        given, states = (self.groups, self.optimizer), load_optimizer_states
        if checkpoint_folder is None:
            loaded = partitions.checked(*given, state_dict_list, self.ranks, states=states)
        else:
            loaded = universal.read_partitions(*given, checkpoint_folder, self.ranks, states=states)
        if loaded.inner is not None:
            self.optimizer.load_state_dict(loaded.inner)
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        if load_from_fp32_weights or checkpoint_folder is not None:
            for group, master in zip(self.groups, loaded.masters, strict=True):
                group.master.detach().copy_(master)
            self.update_lp_params()
        elif not self.compat.keep_masters_on_load:
            self.refresh_fp32_params()
