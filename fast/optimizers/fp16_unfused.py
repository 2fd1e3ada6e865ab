"""FP16UnfusedOptimizer: mixed precision with one fp32 master per parameter, and LAMB.

Around `FusedLamb` a step is five launches, around `FusedAdam` three, and one more for a first group
of over 512 parameters. Gradients of the model weights stay where they are after a step that was
taken; those of a skipped step are dropped as soon as something tells the host of it, and are zeroed
on the device before a backward pass that comes earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.agreement import constructed_by_all
from twinstep.contract.checkpoint import fp16
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import check_numbers
from twinstep.contract.loss_scale import ScaleArguments
from twinstep.contract.moments import MOMENTS, StateDict
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.refusals import check_legacy_lamb
from twinstep.contract.tensors import check_param, drop_gradients
from twinstep.fast.kernels._arith import INV_SCALE
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.parallelism import Gradients
from twinstep.fast.optimizers.scaled_wrapper import Given, ScaledWrapper
from twinstep.fast.optimizers.scalers import LossScale, saved_scale, wrapper_loss_scale
from twinstep.fast.optimizers.zeros import clear_gradients, clear_where
from twinstep.fast.runtime.lists import FixedTensors
from twinstep.fast.runtime.strides import contiguous_lists
from twinstep.fast.runtime.watch import NotedGradients, gradient

_CONTIGUOUS: Callable[[GroupTensors], bool] = attrgetter("contiguous")
WRITTEN = (0, 2, 3, 4)  # masters, both moments and model weights, among the lists of a group


class FP16UnfusedOptimizer(ScaledWrapper):
    """Loss scaling and fp32 master weights for fp16 (or bf16) models, tensor by tensor.

    Args:
        init_optimizer: fresh; the parameters of its groups become their masters. Frozen parameters
            and empty ones are left alone, dtypes may be mixed. With another class than
            `FusedAdam` and `FusedLamb`, with hooks on its step, with LAMB's max_grad_norm, or with
            Adam's shared counter, its own `step` is called: slower, and the host waits to know
            whether the step is skipped.
        deepspeed: an engine handle; asked whether backward reduces gradients over ranks.
        loss_scale_config: a scaler, which then decides instead of the four arguments below.
        low_precision_dtype: float16 scales the loss; anything else does not without a scaler.
        static_loss_scale: the scale without dynamic_loss_scale.
        dynamic_loss_scale: let the scale move by the wrapper rule of `fast.kernels.loss_scale`.
        dynamic_loss_args: `init_scale`, `scale_window` and `min_scale`; without it 65536, 1000
            and 0.25.
        verbose: log skipped steps, when something is read after them.
        mpu: the model-parallel unit; norms and overflows are then those of the whole model.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        norm_type: as in `FP16Optimizer`.
        fused_lamb_legacy: hand gradients, copies and a divisor to the optimizer inside, which has
            to take them, as `FusedLamb` does; around `FusedLamb` it changes nothing but that.
        has_moe_layers: accepted; parameters carry marks of their own.
        expert_groups: expert-parallel process groups by name, whose ranks hold different experts.
        expert_data_groups: by name, groups whose ranks hold the same experts; norms of these are
            averaged over them.
        compat: upstream behaviour to reproduce; the default is correct.

    Writes model weights, masters and the state of the optimizer inside.

    Source: Micikevicius et al. (2018); names as in DeepSpeed's `FP16_UnfusedOptimizer`.
    """

    _copies = False  # the update reads gradients in any layout

    _counts_together = False

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
        groups = init_optimizer.param_groups
        everything = [param for group in groups for param in group["params"]]
        scales = low_precision_dtype is torch.float16 or loss_scale_config is not None
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
        for index, param in enumerate(everything):
            check_param(param, f"parameter {index}, FP16UnfusedOptimizer")
        trained = [[p for p in group["params"] if p.requires_grad] for group in groups]
        self.fp16_groups = [[p for p in params if p.numel()] for params in trained]
        self.fp32_groups = [[_master(p) for p in params] for params in self.fp16_groups]
        for group, masters in zip(groups, self.fp32_groups, strict=True):
            group["params"] = masters
        self._stale: NotedGradients | None = None
        self._prepare(
            self._params(),
            reports_scaled_norm=compat.report_scaled_norm,
            without_experts=compat.clip_without_experts,
        )
        if compat.step_at_construction:
            self.initialize_optimizer_states()

    def _params(self) -> list[Tensor]:
        return list(chain(*self.fp16_groups))

    def _masters(self) -> list[Tensor]:
        return list(chain(*self.fp32_groups))

    def initialize_optimizer_states(self) -> None:
        """Make the state of the optimizer inside; values change with `step_at_construction` alone.

        An optimizer that is not ours makes its state when it first steps.
        """
        self._initialize(self._masters())

    def _sync_state(self) -> None:
        stale, self._stale = self._stale, None
        if stale is not None and self._step.control["found_inf"].item():
            drop_gradients(stale.still())
        super()._sync_state()

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Run backward from the loss, in fp32, multiplied by `loss_scale`; does not wait.

        See `FP16Optimizer.backward`.
        """
        if self._stale is not None:
            # Nothing may add up to gradients that overflowed, and the host does not know yet.
            grads = [gradient(param) for param in self._stale.still()]
            clear_where(grads, self._step.control["found_inf"])
            self._stale = None
        super().backward(loss, create_graph, retain_graph)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, or skip it; does not wait for the device.

        `overflow` and `get_global_norm()` tell about it afterwards. An overflow at the floor of a
        scale that makes this an error changes nothing; the next value that is read raises
        `MinimumLossScale`.

        Args:
            closure: refused.

        Raises:
            RuntimeError: a closure was given, or a gradient is sparse.
            TypeError: a hyper-parameter is no number.
                Over ranks as in `FP16Optimizer.step`. Nothing has changed.
        """
        lent: ExitStack | None = None
        try:
            self._refuse(closure)
            gradients, given = self._read(self.fp16_groups)
            self.sync_hyperparameters()
            inside = self._fused()
            if inside is None:
                check_numbers(self.param_groups, f"{type(self).__name__}.step")
                self._sync_state()
            groups = [] if inside is None else self._group_tensors(given)
            if not all(map(_CONTIGUOUS, groups)):
                lent = ExitStack()
                groups = [_lent(lent, group) for group in groups]
        except Exception as error:
            self._step.refuse(self._parallelism, error)
        external = self._external_scale() is not None
        if inside is None:
            self._step_inside(self._params(), gradients, external)
            return None
        if lent is None:
            self._step.run(gradients, groups, inside, external=external)
        else:
            with lent:
                self._step.run(gradients, groups, inside, external=external)
        self._stepped = True
        self._stale = NotedGradients(self._params()) if self._plan is None else self._plan.noted()
        return None

    def _group_tensors(self, given: Given) -> list[GroupTensors]:
        """Groups as the kernels take them."""

        def make() -> list[GroupTensors]:
            return [self._laid(index, grads) for index, grads in enumerate(given())]

        return self._groups_laid_out(self._plan, self.fp32_groups, make)

    def _laid(self, index: int, grads: Sequence[Tensor]) -> GroupTensors:
        states = [self._state_to_step(master) for master in self.fp32_groups[index]]
        moments = [[state[name] for state in states] for name in MOMENTS]
        columns = [self.fp32_groups[index], *moments, self.fp16_groups[index]]
        masters, *others = self._fixed[index].of(chain(*columns), partial(_detached, columns))
        return GroupTensors(
            lists=[masters, grads, *others],
            steps=FixedTensors(state["step"] for state in states),
            bias_correction=bool(self.param_groups[index]["bias_correction"]),
        )

    def _gradient(self, param: Tensor) -> Tensor:
        return self._zeros(param) if param.grad is None else param.grad

    def _step_inside(self, params: list[Tensor], gradients: Gradients, external: bool) -> None:
        """Let the inner optimizer step; the host waits."""
        legacy, before = self.fused_lamb_legacy, self.loss_scaler.loss_scale
        block = self._step.decide(gradients, external=external, leaves_scaled_norm=legacy)
        divisor = self._divisor(before) if legacy else None
        self._stepped = True
        self._sync_state()
        if self._step.control["found_inf"].item():
            drop_gradients(params, set_to_none=True)
        elif divisor is not None:
            self._hand_over(divisor)
        else:
            factor = block[INV_SCALE.value]
            for param, master in zip(params, self._masters(), strict=True):
                master.grad = self._gradient(param).to(torch.float32) * factor
            self._held().step()
            drop_gradients(self._masters(), set_to_none=True)
            self._copy_masters_to_model()

    def _divisor(self, before: float) -> Tensor:
        """What gradients are divided by, to unscale and clip at once; float64, shape ().

        Leaves the norm that is to be reported where the scaled one was.
        """
        late = self.compat.unscale_with_updated_scale
        external = self._external_scale()
        applied = self.loss_scaler.loss_scale if late else before
        norm = self._step.control["norm"]
        scale = norm.to(torch.float64).fill_(applied if external is None else external)
        limit = torch.full_like(scale, self.clip_grad)
        unscaled = norm.to(torch.float64) / scale
        c = (unscaled + 1e-6) / limit
        if not self.compat.report_scaled_norm:
            norm.copy_(unscaled)
        return torch.where((limit > 0.0) & (c > 1.0), scale * c, scale)

    def _hand_over(self, divisor: Tensor) -> None:
        """Let the inner optimizer unscale, step and copy to the model."""
        cast(FusedLamb, self._held()).step(
            grads=[[self._gradient(p) for p in group] for group in self.fp16_groups],
            output_params=[[param.detach() for param in group] for group in self.fp16_groups],
            scale=divisor,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model weights, or zero them."""
        clear_gradients(self._params(), set_to_none=set_to_none)

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after somebody has loaded or changed these."""
        for param, master in zip(self._params(), self._masters(), strict=True):
            master.copy_(param)

    def _copy_masters_to_model(self) -> None:
        for param, master in zip(self._params(), self._masters(), strict=True):
            param.detach().copy_(master)

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients and the state of the optimizer inside."""
        return self._bytes(
            model_weights=self._params(),
            master_weights=self._masters(),
            gradients=[param.grad for param in self._params()],
        )

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """Loss scale, clip norm, masters by group and the dict inside; copies, not views.

        The format is the reference's: either loads what the other has saved. `cpu_offload` copies
        to the CPU; the device needs no memory for it.
        """
        self._sync_state()
        scale = saved_scale(self.loss_scaler)
        return fp16.saved(
            self._held(), self.fp32_groups, self.clip_grad, scale, cpu_offload=cpu_offload
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Load a state of this class, the reference's or DeepSpeed's; its masters go to the model.

        Args:
            state_dict: copied; later steps do not write into it. Constants of the loss-scale rule
                come from the constructor, whatever the dict says. Without `clip_grad`, which
                DeepSpeed does not save, the constructor's stays.
            load_optimizer_states: False leaves the state of the optimizer inside.

        Raises:
            ValueError: something does not fit; the sentence says what. Nothing has changed.
        """
        self._sync_state()
        where = "FP16UnfusedOptimizer.load_state_dict"
        loaded, scaling = fp16.checked(
            self._held(),
            state_dict,
            self.fp32_groups,
            where,
            self.ranks,
            restored=self.loss_scaler.restored,
            states=load_optimizer_states,
        )
        # Everything fits from here on.
        if loaded.inner is not None:
            self._load_inner(loaded.inner)
        self.loss_scaler.enter(scaling or {})
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        for master, saved in zip(self._masters(), loaded.masters, strict=True):
            master.copy_(saved)
        self._copy_masters_to_model()


def _master(param: Tensor) -> Tensor:
    return param.detach().to(torch.float32, copy=True).requires_grad_()


def _detached(columns: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.detach() for tensor in column] for column in columns]


def _lent(to: ExitStack, group: GroupTensors) -> GroupTensors:
    """The same group with contiguous lists, which are written back at the end of a context."""
    return replace(group, lists=to.enter_context(contiguous_lists(group.lists, WRITTEN)))
