"""What every training run has, whoever takes its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinstep.scenarios import trace
from twinstep.scenarios.lesson import BATCH, Lesson
from twinstep.scenarios.plan import Plan

CPU = torch.device("cpu")


class Learner(ABC):
    """One run in progress.

    Attributes:
        plan: what is run.
        settings: hyper-parameters.
        lesson: model and text.
        step: steps taken, skipped ones included.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.settings = plan.settings()
        self.lesson = Lesson(plan, device)
        self.step = 0

    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """What the model computes with, in the order of `lesson.names`."""

    @abstractmethod
    def advance(self) -> trace.StepRecord:
        """Take one whole step: draw, backward, update."""

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Everything that later steps depend on: tensors, numbers, and dicts and lists of them."""

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on, bit for bit, from where `state_dict` was taken with the same plan."""

    @property
    def parameters(self) -> int:
        """Number of trained elements."""
        return sum(weight.numel() for weight in self.weights())

    def held_out_loss(self) -> float:
        """Loss on text that training never sees."""
        return self.lesson.held_out_loss(self.weights())

    def header(self, side: str) -> trace.Header:
        """Where a trace of this run comes from."""
        return trace.Header(
            side=side,
            optimizer=self.plan.optimizer,
            ranks=self.plan.ranks,
            accumulate=self.plan.accumulate,
            dtype=self.plan.dtype,
            rule=self.settings.rule,
            scale_window=self.settings.scale_window,
            steps=self.plan.steps,
            seed=self.plan.seed,
            batch=BATCH,
            held_out_batches=self.plan.held_out,
            broken=self.plan.broken,
            parameters=self.parameters,
            text_sha256=self.lesson.text.digest,
            **trace.environment(),
        )
