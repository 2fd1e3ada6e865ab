"""A training loop around the optimizer classes, as a user would write it.

Micro-batches, a learning-rate schedule of torch's, clipping by the optimizer, checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from twinstep.scenarios import trace
from twinstep.scenarios.learner import Learner
from twinstep.scenarios.optimizers import Saved, stepper_of
from twinstep.scenarios.plan import DTYPES, Plan


class ClassTrainer(Learner):
    """A run whose step is that of an optimizer class.

    Args:
        plan: what to run.
        side: whose class.
        device: where the model and the optimizer live.
    """

    def __init__(self, plan: Plan, side: str, device: torch.device) -> None:
        super().__init__(plan, device)
        self._weights = [
            weight.to(DTYPES[plan.dtype]).requires_grad_()
            for weight in self.lesson.initial_weights()
        ]
        self.stepper = stepper_of(side, plan, self.lesson.names, self._weights)
        share = self.settings.share
        self.schedule = LambdaLR(self.stepper.optimizer, lambda taken: share(taken + 1))

    def weights(self) -> Sequence[Tensor]:
        """The model's weights, which the optimizer writes."""
        return self._weights

    def advance(self) -> trace.StepRecord:
        """Take one whole step.

        Each micro-batch's loss is divided by their number, so their gradients add up to that of
        the mean loss: in the model's dtype with the FP16 optimizers, in fp32 with BF16Optimizer.
        """
        self.step += 1
        stepper, parts = self.stepper, self.plan.accumulate
        scale, lr = stepper.scale, float(stepper.optimizer.param_groups[0]["lr"])
        stepper.optimizer.zero_grad()
        losses = []
        for _ in range(parts):
            loss = self.lesson.loss(self._weights)
            stepper.backward(loss / parts)
            losses.append(float(loss.detach()))
        stepper.step()
        self.schedule.step()
        return trace.StepRecord(
            step=self.step,
            loss=sum(losses) / parts,
            lr=lr,
            scale=scale,
            norm=stepper.norm,
            skipped=stepper.skipped,
            state=trace.digest(self._observed()),
        )

    def _observed(self) -> dict[str, list[Tensor] | Tensor]:
        """Everything that a step writes."""
        scale = torch.tensor(self.stepper.scale, dtype=torch.float64)
        norm = torch.tensor(self.stepper.norm)
        weights = list(self._weights)
        return {"weights": weights, "scale": scale, "norm": norm, **dict(self.stepper.observed())}

    def state_dict(self) -> dict[str, object]:
        """Weights, optimizer, schedule, draws and the number of steps."""
        return {
            "weights": [weight.detach().clone() for weight in self._weights],
            "optimizer": self.stepper.state_dict(),
            "schedule": self.schedule.state_dict(),
            "lesson": self.lesson.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken, on either side."""
        with torch.no_grad():
            pairs = zip(self._weights, cast(list[Tensor], saved["weights"]), strict=True)
            for weight, value in pairs:
                weight.copy_(value)
        self.stepper.load_state_dict(cast(Saved, saved["optimizer"]))
        self.schedule.load_state_dict(cast(dict[str, object], saved["schedule"]))
        self.lesson.load_state_dict(cast(Mapping[str, Tensor], saved["lesson"]))
        self.step = cast(int, saved["step"])
