"""The loss scale of both FP16 optimizers, from outside."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.contract.compat import Compat
from twinstep.contract.hyper import check_numbers
from twinstep.contract.loss_scale import checked_scale
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.scaled import Scaled
from twinstep.contract.tensors import check_dense_gradients
from twinstep.contract.timers import Timers
from twinstep.reference.arithmetic import float64, fp32, fp64
from twinstep.reference.loss_scale import ScaleState
from twinstep.reference.optimizers.model_norm import check_norm_type
from twinstep.reference.optimizers.parallelism import Pairs, Parallelism, with_gradients
from twinstep.reference.optimizers.scalers import LossScale

LOG = logging.getLogger(__name__)


class ScaledWrapper(Scaled):
    """A wrapper that scales the loss; see `FP16Optimizer` for the arguments.

    Attributes:
        loss_scaler: whose rule moves the scale after every step.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        norm_type: of that norm: 1, 2, infinity (exact) or another positive number.
        overflow: True if the last step was skipped.
        custom_loss_scaler: True while an external scale is in force.
        external_loss_scale: that scale, or None.
    """

    # Whose dtype decides that the loss is not scaled, in messages.
    _unscaled = "low_precision_dtype"

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
        super().__init__(optimizer, timers, split=mpu is not None or bool(expert_groups))
        self.loss_scaler = loss_scaler
        self.scales = scales
        self.clip_grad = float(clip_grad)
        self.norm_type = check_norm_type(norm_type, type(self).__name__)
        self.mpu = mpu
        self.deepspeed = deepspeed
        self.expert_groups = dict(expert_groups or {})
        self.expert_data_groups = dict(expert_data_groups or {})
        self._parallelism = Parallelism(
            mpu=mpu,
            engine=deepspeed,
            expert_groups=self.expert_groups,
            expert_data_groups=self.expert_data_groups,
        )
        self.verbose = verbose
        self.compat = compat
        self.overflow = False
        self.external_loss_scale: float | None = None
        self._norm = torch.zeros(())

    @property
    def custom_loss_scaler(self) -> bool:
        """True while an external scale is in force."""
        return self.external_loss_scale is not None

    @property
    def loss_scale(self) -> float:
        """The multiplier of the loss. Assigning sets the scaler's own scale."""
        if self.external_loss_scale is not None:
            return self.external_loss_scale
        return self.loss_scaler.loss_scale

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
        checked = None if loss_scale is None else checked_scale(loss_scale, type(self).__name__)
        if checked != self.external_loss_scale:
            LOG.info("external loss scale %s -> %s", self.external_loss_scale, checked)
        self.external_loss_scale = checked

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Run backward from the loss, in fp32, multiplied by `loss_scale`.

        An fp16 loss whose scaled gradient passes 65504 overflows at its own cast; compute the loss
        in fp32 (edge LS-14).
        """
        scaled = fp32(loss) * self.loss_scale
        scaled.backward(  # type: ignore[no-untyped-call]
            create_graph=create_graph, retain_graph=retain_graph
        )
        self._note_gradients()

    def get_global_norm(self) -> float:
        """Norm of the unscaled gradients of the last step, before clipping.

        Non-finite after a step with overflow, 0.0 before the first step.
        """
        return self._norm.item()

    def _require_scaling(self) -> None:
        if not self.scales:
            raise RuntimeError(
                "the loss is not scaled, but should be to have its scale set: "
                f"{self._unscaled} is not float16 [{type(self).__name__}]"
            )

    def _agreed(self, closure: object, params: Sequence[Tensor]) -> tuple[Pairs, float]:
        """Parameters with gradients, and the worst gradient of all ranks.

        Raises:
            RuntimeError: a closure was given, or a gradient is sparse.
            TypeError: a hyper-parameter is no number.
            ValueError: another rank raises one of these, or has another scale.
        """

        def prepare() -> Pairs:
            where = f"{type(self).__name__}.step"
            self._refuse(closure)
            check_dense_gradients(params, where)
            check_numbers(self.param_groups, where)
            return with_gradients(params)

        stays = self.compat.external_scale_stays
        scale = self.loss_scaler.loss_scale if stays else self.loss_scale
        return self._parallelism.worst(prepare, scale)

    def _scale_of_step(self, after: ScaleState) -> Tensor:
        """The scale that multiplied the loss of these gradients; float64, shape ()."""
        if self.external_loss_scale is not None and not self.compat.external_scale_stays:
            return float64(self.external_loss_scale)
        updated = self.compat.unscale_with_updated_scale
        return float64(after.scale if updated else self.loss_scaler.loss_scale)

    def _enter(self, found_inf: bool, after: ScaleState) -> None:
        """Move the scale, after everything that used the old one."""
        before = self.loss_scaler.loss_scale
        self.overflow = found_inf
        self.loss_scaler.state = after
        if self.verbose and (found_inf or after.scale != before):
            what = "overflow, step skipped" if found_inf else "clean window"
            LOG.info("%s: loss scale %s -> %s", what, before, after.scale)


def unscaled(scaled_norm: Tensor, scale: Tensor) -> Tensor:
    """The norm divided by the scale in float64, rounded once to fp32."""
    return fp32(fp64(scaled_norm) / scale)
