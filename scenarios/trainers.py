"""Training runs of the language model, step by step.

    loss = model(weights);  grads = d(scale * loss)/d(weights);  weights = step(weights, grads)

Forward and backward run in the model's dtype (in fp16 they truly overflow at a high loss scale);
only the step belongs to a side, so two runs with the same seed differ only if the two sides do.
The step is the operation `mixed_step`, or that of an optimizer class in a user's loop:
micro-batches, a learning-rate schedule of torch's, clipping by the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from twinstep.scenarios import calls, model, text, trace
from twinstep.scenarios.calls import CPU, Answer, Call, State, Value, Written, reference_answer
from twinstep.scenarios.optimizers import Saved, load, loss_scale_of, observed, optimizer_of
from twinstep.scenarios.plan import DTYPES, Plan

BATCH = 8  # windows per rank, or micro-batch, and step


class Trainer(ABC):
    """One run in progress; every random number comes from generators it owns.

    Args:
        plan: what is run.
        device: where windows are put; they are drawn on the CPU, alike everywhere.

    Attributes:
        names: of the weights, in the order in which all lists hold them.
        text: the corpus.
        step: steps taken, skipped ones included.
    """

    def __init__(self, plan: Plan, device: torch.device = CPU) -> None:
        self.plan, self.device = plan, device
        self.names = list(model.sizes(plan.shape))
        self.text = text.load()
        self.step = 0
        self._draws = [_generator(plan.seed, rank + 1) for rank in range(plan.ranks)]

    @property
    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """The model's weights, in the order of `names`."""

    @abstractmethod
    def advance(self) -> trace.StepRecord:
        """Take one whole step: draw, backward, update."""

    def state_dict(self) -> dict[str, object]:
        """Everything that later steps depend on: tensors, numbers, and dicts and lists of them."""
        draws = {str(rank): draw.get_state() for rank, draw in enumerate(self._draws)}
        return {"lesson": draws, "step": self.step}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on, bit for bit, from where `state_dict` was taken with the same plan."""
        draws = cast(Mapping[str, Tensor], saved["lesson"])
        for rank, draw in enumerate(self._draws):
            draw.set_state(draws[str(rank)])
        self.step = cast(int, saved["step"])

    def initial_weights(self) -> list[Tensor]:
        """The fp32 weights before the first step, drawn on the CPU."""
        drawn = model.initial_weights(self.plan.shape, _generator(self.plan.seed, 0))
        return [weight.to(self.device) for weight in drawn.values()]

    def loss(self, weights: Sequence[Tensor], rank: int = 0) -> Tensor:
        """Draw a rank's next windows; the mean loss on them, fp32, shape ()."""
        return self._loss(weights, self.text.train, self._draws[rank])

    def held_out_loss(self) -> float:
        """Loss on text that training never sees: always the same windows."""
        generator, batches = _generator(0, 0), range(self.plan.held_out)
        with torch.no_grad():
            losses = [self._loss(self.weights, self.text.held_out, generator) for _ in batches]
        return sum(map(float, losses)) / self.plan.held_out

    def _loss(
        self, weights: Sequence[Tensor], tokens: Tensor, generator: torch.Generator
    ) -> Tensor:
        inputs, targets = text.batch(
            tokens, size=BATCH, context=self.plan.shape.context, generator=generator
        )
        named = dict(zip(self.names, weights, strict=True))
        return model.loss(self.plan.shape, named, inputs.to(self.device), targets.to(self.device))

    def header(self, side: str) -> trace.Header:
        """The origin of a trace of this run."""
        return trace.Header(
            side=side,
            optimizer=self.plan.optimizer,
            ranks=self.plan.ranks,
            accumulate=self.plan.accumulate,
            dtype=self.plan.dtype,
            rule=self.plan.scaling[0],
            scale_window=self.plan.scale_window,
            steps=self.plan.steps,
            seed=self.plan.seed,
            batch=BATCH,
            held_out_batches=self.plan.held_out,
            broken=self.plan.broken,
            parameters=sum(weight.numel() for weight in self.weights),
            text_sha256=self.text.digest,
            **trace.environment(),
        )


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1009 + stream)


class Gradients(NamedTuple):
    """The results of backward: the mean unscaled loss, and one scaled gradient per weight."""

    loss: float
    grads: list[Tensor]


class OperationTrainer(Trainer):
    """A run whose step is the operation `mixed_step`, answered by one side."""

    def __init__(self, plan: Plan, answer: Answer = reference_answer) -> None:
        super().__init__(plan)
        self.answer = answer
        self.state = State.initial(self.initial_weights(), plan)

    @property
    def weights(self) -> list[Tensor]:
        """The copies, or the masters where there are none."""
        return self.state.weights

    @property
    def lr(self) -> float:
        """Learning rate of the step in progress."""
        return self.plan.lr * self.plan.share(self.step)

    def draw(self) -> list[Gradients]:
        """Begin the next step: draw each rank's windows and take their gradients, in rank order.

        Each rank's loss is divided by the number of ranks before backward, so the sum of the
        ranks' gradients is the gradient of the mean loss.
        """
        self.step += 1
        share = float(self.state.scale) / self.plan.ranks
        return [self._backward(share, rank) for rank in range(self.plan.ranks)]

    def _backward(self, multiplier: float, rank: int) -> Gradients:
        leaves = [weight.detach().requires_grad_() for weight in self.weights]
        loss = self.loss(leaves, rank)
        grads = torch.autograd.grad(loss * multiplier, leaves)
        return Gradients(float(loss.detach()), [grad.contiguous() for grad in grads])

    def reduce(self, parts: Sequence[Gradients], answer: Answer) -> list[Tensor]:
        """Add the ranks' gradients in rank order, in fp32, and round the sum once.

        Args:
            parts: what `draw` returned; a single rank's gradients are returned unchanged.
            answer: the side that adds and rounds.
        """
        first = parts[0].grads
        if len(parts) == 1:
            return first
        sums = [torch.zeros_like(grad, dtype=torch.float32) for grad in first]
        for part in parts:
            added = answer(Call("accumulate", {"accumulators": sums, "grads": part.grads}))
            sums = calls.tensors(added, "accumulators")
        copies = [torch.empty_like(grad) for grad in first]
        rounded = answer(Call("cast_copy", {"sources": sums, "copies": copies}))
        return calls.tensors(rounded, "copies")

    def advance(self) -> trace.StepRecord:
        """Take one whole step with the side's arithmetic."""
        parts = self.draw()
        grads = self.reduce(parts, self.answer)
        return self.apply(self.answer(self.mixed_step(grads)), parts)

    def mixed_step(self, grads: list[Tensor]) -> Call:
        """The optimizer step for these gradients."""
        return calls.mixed_step(self.state, grads, self.plan, self.lr)

    def apply(self, written: Written, parts: Sequence[Gradients]) -> trace.StepRecord:
        """Go on from what a side wrote; the record of the step."""
        scale = float(self.state.scale)
        self.state = State.of(written)
        return trace.StepRecord(
            step=self.step,
            loss=sum(part.loss for part in parts) / len(parts),
            lr=self.lr,
            scale=scale,
            norm=float(self.state.norm),
            skipped=bool(self.state.found_inf),
            state=trace.digest(self.state.entries),
        )

    def state_dict(self) -> dict[str, object]:
        """The optimizer's state, the draws and the number of steps."""
        return {"state": self.state.clone().entries, **super().state_dict()}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken, on either side."""
        self.state = State.of(cast(Written, saved["state"])).clone()
        super().load_state_dict(saved)


class ClassTrainer(Trainer):
    """A run whose step is that of one side's optimizer class."""

    def __init__(self, plan: Plan, side: str, device: torch.device) -> None:
        super().__init__(plan, device)
        dtype = DTYPES[plan.dtype]
        self._weights = [weight.to(dtype).requires_grad_() for weight in self.initial_weights()]
        self.optimizer, self.wrapper = optimizer_of(side, plan, self.names, self._weights)
        self.schedule = LambdaLR(self.optimizer, lambda taken: plan.share(taken + 1))

    @property
    def weights(self) -> list[Tensor]:
        """The model's weights, which the optimizer writes."""
        return self._weights

    def advance(self) -> trace.StepRecord:
        """Take one whole step.

        Each micro-batch's loss is divided by their number, so their gradients add up to that of
        the mean loss: in the model's dtype with the FP16 optimizers, in fp32 with BF16Optimizer.
        """
        self.step += 1
        parts = self.plan.accumulate
        scale, lr = loss_scale_of(self.wrapper), float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()
        losses = []
        for _ in range(parts):
            loss = self.loss(self._weights)
            self.wrapper.backward(loss / parts)
            losses.append(float(loss.detach()))
        self.wrapper.step()
        self.schedule.step()
        return trace.StepRecord(
            step=self.step,
            loss=sum(losses) / parts,
            lr=lr,
            scale=scale,
            norm=self.wrapper.get_global_norm(),
            skipped=self.wrapper.overflow,
            state=trace.digest(self._written()),
        )

    def _written(self) -> dict[str, Value]:
        """Everything that a step writes."""
        return {
            "weights": self._weights,
            "scale": calls.control(loss_scale_of(self.wrapper)),
            "norm": torch.tensor(self.wrapper.get_global_norm()),
            **dict(observed(self.optimizer)),
        }

    def state_dict(self) -> dict[str, object]:
        """Weights, optimizer, schedule, draws and the number of steps."""
        return {
            "weights": [weight.detach().clone() for weight in self._weights],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken, on either side."""
        with torch.no_grad():
            pairs = zip(self._weights, cast(list[Tensor], saved["weights"]), strict=True)
            for weight, value in pairs:
                weight.copy_(value)
        load(self.optimizer, cast(Saved, saved["optimizer"]))
        self.schedule.load_state_dict(cast(dict[str, object], saved["schedule"]))
        super().load_state_dict(saved)
