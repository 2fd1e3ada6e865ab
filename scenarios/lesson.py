"""What is learned: the model's loss on windows of the text, and the loss on unseen text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinstep.scenarios import model, text
from twinstep.scenarios.plan import Plan

BATCH = 8  # windows per rank, or micro-batch, and step


class Lesson:
    """Model and text of one run; every random number comes from generators it owns.

    Attributes:
        shape: sizes of the model.
        names: of the weights, in the order in which all lists hold them.
        text: what is read.
        device: where windows are put; they are drawn on the CPU, alike everywhere.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.shape = plan.shape
        self.names = list(model.sizes(self.shape))
        self.text = text.load()
        self.device = device
        self._held_out = plan.held_out
        self._seed = plan.seed
        self._draws = [_generator(plan.seed, rank + 1) for rank in range(plan.ranks)]

    def initial_weights(self) -> list[Tensor]:
        """The fp32 weights before the first step, drawn on the CPU."""
        weights = model.initial_weights(self.shape, _generator(self._seed, 0))
        return [weight.to(self.device) for weight in weights.values()]

    def loss(self, weights: Sequence[Tensor], rank: int = 0) -> Tensor:
        """Draw a rank's next windows; the mean loss on them, fp32, shape ()."""
        return self._loss(weights, self.text.train, self._draws[rank])

    def held_out_loss(self, weights: Sequence[Tensor]) -> float:
        """Loss on text that training never sees: always the same windows."""
        generator = _generator(0, 0)
        with torch.no_grad():
            losses = [
                float(self._loss(weights, self.text.held_out, generator))
                for _ in range(self._held_out)
            ]
        return sum(losses) / self._held_out

    def _loss(
        self, weights: Sequence[Tensor], tokens: Tensor, generator: torch.Generator
    ) -> Tensor:
        inputs, targets = text.batch(
            tokens, size=BATCH, context=self.shape.context, generator=generator
        )
        named = dict(zip(self.names, weights, strict=True))
        return model.loss(self.shape, named, inputs.to(self.device), targets.to(self.device))

    def state_dict(self) -> dict[str, Tensor]:
        """Where every rank's draws stand."""
        return {str(rank): draw.get_state() for rank, draw in enumerate(self._draws)}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on drawing from where `state_dict` was taken."""
        for rank, draw in enumerate(self._draws):
            draw.set_state(saved[str(rank)])


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1009 + stream)
