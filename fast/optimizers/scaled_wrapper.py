"""Common part of both FP16 optimizers: the scaled loss, scalars read on request, refusals.

A step leaves its scalars on the device. `overflow`, `loss_scale`, `get_global_norm`, `state` and
the state dicts wait for it; `backward` and `step` do not.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from twinstep.contract.compat import Compat
from twinstep.contract.loss_scale import checked_scale
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.scaled import Scaled
from twinstep.contract.tensors import check_dense_gradients
from twinstep.contract.timers import Timers
from twinstep.contract.wrapper import initialize
from twinstep.fast.kernels.finalise import Finish
from twinstep.fast.optimizers.driver import KERNELS, StepDriver
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.norms import kind_of_norm
from twinstep.fast.optimizers.parallelism import Gradients, Parallelism, Place
from twinstep.fast.optimizers.plan import GradientPlan
from twinstep.fast.optimizers.scalers import LossScale
from twinstep.fast.optimizers.wrapper import Wrapper
from twinstep.fast.optimizers.zeros import ZeroGradients
from twinstep.fast.runtime.checks import require_one_device
from twinstep.fast.runtime.dispatch import device_of_kernels

Given = Callable[[], Sequence[Sequence[Tensor]]]

LOG = logging.getLogger(__name__)


class ScaledWrapper(Wrapper, Scaled):
    """A wrapper that scales the loss; see `FP16Optimizer` for the arguments.

    Attributes:
        loss_scaler: whose rule moves the scale after every step.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        norm_type: of that norm.
        external_loss_scale: a scale from outside, or None.
    """

    # Whose dtype decides that the loss is not scaled, in messages.
    _unscaled = "low_precision_dtype"
    # Whether the update reads contiguous copies of gradients.
    _copies = True
    # Whether kernels may advance one counter for all parameters of a group.
    _counts_together = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        loss_scaler: LossScale,
        scales: bool,
        clip_grad: float,
        norm_type: float,
        mpu: ModelParallelUnit | None,
        deepspeed: Engine | None,
        expert_groups: ExpertGroups | None,
        expert_data_groups: ExpertGroups | None,
        verbose: bool,
        timers: Timers | None,
        compat: Compat,
    ) -> None:
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        require_one_device(type(self).__name__, params)
        super().__init__(optimizer, timers, split=mpu is not None or bool(expert_groups))
        self._stepped = False
        self._plan: GradientPlan | None = None
        self._zero_gradients = ZeroGradients()
        self.mpu, self.deepspeed = mpu, deepspeed
        self.expert_groups = dict(expert_groups or {})
        self.expert_data_groups = dict(expert_data_groups or {})
        self.norm_type = float(norm_type)
        kind_of_norm(self.norm_type, type(self).__name__)
        self.loss_scaler, self.scales = loss_scaler, scales
        self.clip_grad = float(clip_grad)
        self.verbose, self.compat = verbose, compat
        self.external_loss_scale: float | None = None

    def _prepare(
        self,
        params: Sequence[Tensor],
        *,
        reports_scaled_norm: bool = False,
        without_experts: bool = False,
    ) -> None:
        """Get ready to step parameters, laid out for good."""
        device = params[0].device if len(params) else device_of_kernels()
        self._parallelism = Parallelism(
            mpu=self.mpu,
            engine=self.deepspeed,
            expert_groups=self.expert_groups,
            expert_data_groups=self.expert_data_groups,
        )
        self._without_experts = without_experts
        finish = self._finish(reports_scaled_norm)
        self._step = StepDriver(device, self.loss_scaler, finish, self.norm_type)

    def _zeros(self, param: Tensor) -> Tensor:
        """What is read in place of a parameter's gradient."""
        return self._zero_gradients.like(param).view(param.shape)

    def _finish(self, reports_scaled_norm: bool) -> Finish:
        """Choices of all steps, as the kernel takes them."""
        scaling = self.loss_scaler.scaling
        return Finish(
            rule=scaling.rule,
            norm_kind=kind_of_norm(self.norm_type, type(self).__name__),
            consecutive_hysteresis=scaling.consecutive_hysteresis,
            raise_error_at_min_scale=scaling.raise_error_at_min_scale,
            growth_counts_this_step=self.loss_scaler.compat.growth_counts_this_step,
            unscale_with_updated_scale=self.compat.unscale_with_updated_scale,
            reports_scaled_norm=reports_scaled_norm,
            bounded=True,
        )

    def _read(self, groups: Sequence[Sequence[Tensor]]) -> tuple[Gradients, Given]:
        """Gradients by what they count for, and what the update reads of each group.

        Raises:
            RuntimeError: one is sparse.
        """
        plan = self._plan
        if plan is None or not plan.read(groups):
            params = list(chain(*groups))
            check_dense_gradients(params, f"{type(self).__name__}.step")
            places = self._parallelism.places(params, without_experts=self._without_experts)
            plan = GradientPlan(groups, places, self._zeros)
            self._plan = plan if plan.fits and plan.read(groups) else None
            if self._plan is None:
                return self._read_strided(groups, places)
        return plan.gradients(self._parallelism), plan.given

    def _read_strided(
        self, groups: Sequence[Sequence[Tensor]], places: Sequence[Place]
    ) -> tuple[Gradients, Given]:
        """The same where gradients are not contiguous: those are copied, at most once."""
        held = [param.grad for param in chain(*groups)]
        copies = [None if grad is None else grad.contiguous() for grad in held]
        at: dict[Place, list[Tensor]] = {}
        for grad, place in zip(copies, places, strict=True):
            if grad is not None:
                at.setdefault(place, []).append(grad)

        def given() -> list[list[Tensor]]:
            rest = iter(copies if self._copies else held)
            pairs = [[(param, next(rest)) for param in group] for group in groups]
            return [[self._zeros(p) if g is None else g for p, g in group] for group in pairs]

        return self._parallelism.gradients(at), given

    def _fused(self) -> FusedAdam | FusedLamb | None:
        """The optimizer inside, where kernels can do all that its `step` would do."""
        inside = self._held()
        if not isinstance(inside, KERNELS) or type(inside) not in KERNELS:
            return None
        if inside.compat.shared_step_counter and not self._counts_together:
            return None
        # Its hooks want to be called, and clipping each gradient comes after unscaling it.
        if inside._optimizer_step_pre_hooks or inside._optimizer_step_post_hooks:
            return None
        for group in inside.param_groups:
            limit = group.get("max_grad_norm", 0.0)
            if isinstance(limit, Tensor) or limit > 0.0:
                return None
        return inside

    def _sync_state(self) -> None:
        """Take notice of the last step; waits for the device where there was one.

        Raises:
            MinimumLossScale: it met the floor of a scale that makes this an error.
        """
        super()._sync_state()
        if not self._stepped:
            return
        self._stepped = False
        inside = self._held()
        if isinstance(inside, FusedLamb) and not inside.state:
            inside.record_coeffs(())
        if self.verbose and self._step.control["found_inf"].item():
            LOG.info("overflow, step skipped: loss scale %s", self.loss_scaler.loss_scale)
        self.loss_scaler.raise_if_exhausted()

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped; waits for the device."""
        self._sync_state()
        return bool(self._step.control["found_inf"].item())

    @property
    def custom_loss_scaler(self) -> bool:
        """True while an external scale is in force."""
        return self.external_loss_scale is not None

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; waits for the device. Assigning sets the scaler's scale."""
        self._sync_state()
        external = self.external_loss_scale
        return self.loss_scaler.loss_scale if external is None else external

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._require_scaling()
        self.loss_scaler.loss_scale = scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the scaler can move its scale."""
        return self.loss_scaler.dynamic

    def override_loss_scale(self, loss_scale: float | None) -> None:
        """Multiply the loss, and divide the gradients, by this scale; None ends it.

        The scaler's own rule goes on counting steps and overflows meanwhile.

        Raises:
            RuntimeError: the optimizer does not scale its loss.
            ValueError: the scale is no positive finite number.
        """
        self._require_scaling()
        if loss_scale is not None:
            loss_scale = checked_scale(loss_scale, type(self).__name__)
        self.external_loss_scale = loss_scale

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Run backward from the loss, in fp32, multiplied by `loss_scale`; does not wait.

        An fp16 loss whose scaled gradient passes 65504 overflows at its own cast; compute the loss
        in fp32 (edge LS-14).
        """
        if self.external_loss_scale is None:
            scaled = self.loss_scaler.scale_loss(loss)
        else:
            scaled = loss.float() * self.external_loss_scale
        torch.autograd.backward(scaled, create_graph=create_graph, retain_graph=retain_graph)
        self._note_gradients()

    def get_global_norm(self) -> float:
        """Norm of the unscaled gradients of the last step, before clipping; waits for the device.

        Non-finite after a step with overflow, 0.0 before the first step.
        """
        self._sync_state()
        return float(self._step.control["norm"].item())

    def sync_hyperparameters(self) -> None:
        """Send hyper-parameters that have changed; before replaying a captured graph, call this."""
        external = self._external_scale()
        self._step.sync_hyperparameters(self._held(), self.clip_grad, external)

    def _external_scale(self) -> float | None:
        """The scale from outside that gradients are divided by, if any."""
        return None if self.compat.external_scale_stays else self.external_loss_scale

    def _require_scaling(self) -> None:
        if not self.scales:
            raise RuntimeError(
                "the loss is not scaled, but should be to have its scale set: "
                f"{self._unscaled} is not float16 [{type(self).__name__}]"
            )

    def _initialize(self, masters: Sequence[Tensor]) -> None:
        """Make the state of all masters; with `compat.step_at_construction`, by a step."""
        self._sync_state()
        self._pending.clear()
        initialize(self._held(), masters, self.compat)
