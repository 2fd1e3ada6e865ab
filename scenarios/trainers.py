"""Training runs of the language model, step by step.

    loss = model(weights);  grads = d(scale * loss)/d(weights);  weights = step(weights, grads)

Forward and backward run in the model's dtype (in fp16 they truly overflow at a high loss scale);
only the step belongs to a side, so two runs with the same seed differ only if the two sides do.
The step is the operation `mixed_step`, or that of an optimizer class in a user's loop:
micro-batches, a learning-rate schedule of torch's, clipping by the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from twinstep.scenarios import calls, model, text, trace
from twinstep.scenarios.calls import CPU, Answer, Call, State, Value, Written, reference_answer
from twinstep.scenarios.optimizers import (
    Saved,
    accumulated,
    load,
    loss_scale_of,
    observed,
    optimizer_of,
)
from twinstep.scenarios.plan import DTYPES, Plan
from twinstep.scenarios.ranks import Ranks, exact_addend

BATCH = 8  # windows per micro-batch
ALONE = Ranks()
Windows = tuple[Tensor, Tensor]  # inputs and targets


class Trainer(ABC):
    """One run in progress; every random number comes from generators it owns.

    Args:
        plan: what is run.
        device: where windows are put; they are drawn on the CPU, alike everywhere.
        ranks: that share the micro-batches of each step.

    Attributes:
        names: of the weights, in the order in which all lists hold them.
        text: the corpus.
        step: steps taken, skipped ones included.
    """

    def __init__(self, plan: Plan, device: torch.device = CPU, ranks: Ranks = ALONE) -> None:
        self.plan, self.device, self.ranks = plan, device, ranks
        self.names = list(model.sizes(plan.shape))
        self.text = text.load()
        self.step = 0
        self._draws = _generator(plan.seed, 1)

    @property
    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """The model's weights, in the order of `names`."""

    @abstractmethod
    def advance(self) -> trace.StepRecord:
        """Take one whole step: draw, backward, update."""

    def state_dict(self) -> dict[str, object]:
        """Everything that later steps depend on: tensors, numbers, and dicts and lists of them."""
        return {"lesson": self._draws.get_state(), "step": self.step}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on, bit for bit, from where `state_dict` was taken with the same plan."""
        self._draws.set_state(cast(Tensor, saved["lesson"]))
        self.step = cast(int, saved["step"])

    def initial_weights(self) -> list[Tensor]:
        """The fp32 weights before the first step, drawn on the CPU."""
        drawn = model.initial_weights(self.plan.shape, _generator(self.plan.seed, 0))
        return [weight.to(self.device) for weight in drawn.values()]

    def micro_batches(self) -> Iterator[Windows]:
        """Draw the next step's micro-batches, as all ranks do; those of this rank."""
        share = self.ranks.share(self.plan.accumulate)
        for index in range(self.plan.accumulate):
            windows = self._windows(self.text.train, self._draws)
            if index in share:
                yield windows

    def loss(self, weights: Sequence[Tensor], windows: Windows) -> Tensor:
        """Mean loss on a micro-batch, fp32, shape ()."""
        inputs, targets = (tokens.to(self.device) for tokens in windows)
        named = dict(zip(self.names, weights, strict=True))
        return model.loss(self.plan.shape, named, inputs, targets)

    def held_out_loss(self) -> float:
        """Loss on text that training never sees: always the same windows."""
        generator, batches = _generator(0, 0), range(self.plan.held_out)
        with torch.no_grad():
            drawn = (self._windows(self.text.held_out, generator) for _ in batches)
            losses = [self.loss(self.weights, windows) for windows in drawn]
        return sum(map(float, losses)) / self.plan.held_out

    def _windows(self, tokens: Tensor, generator: torch.Generator) -> Windows:
        context = self.plan.shape.context
        return text.batch(tokens, size=BATCH, context=context, generator=generator)

    def header(self, side: str) -> trace.Header:
        """The origin of a trace of this run."""
        return trace.Header(
            side=side,
            optimizer=self.plan.optimizer,
            ranks=self.ranks.count,
            accumulate=self.plan.accumulate,
            dtype=self.plan.dtype,
            rule=self.plan.scaling[0],
            scale_window=self.plan.scale_window,
            steps=self.plan.steps,
            seed=self.plan.seed,
            batch=BATCH,
            held_out_batches=self.plan.held_out,
            broken=self.plan.broken,
            exact_sums=self.plan.exact_sums,
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

    def __init__(self, plan: Plan, answer: Answer = reference_answer, ranks: Ranks = ALONE) -> None:
        super().__init__(plan, ranks=ranks)
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
        """Begin the next step: the gradients of its micro-batches, in order.

        Each loss is divided by the number of micro-batches before backward, so the sum of the
        gradients is the gradient of the mean loss.
        """
        self.step += 1
        multiplier = float(self.state.scale) / self.plan.accumulate
        own = [self._backward(multiplier, windows) for windows in self.micro_batches()]
        losses = self.ranks.gather_numbers([part.loss for part in own])
        # Rank by rank, as the micro-batches are.
        rows = zip(*(self.ranks.gather(part.grads) for part in own), strict=True)
        grads = [part for row in rows for part in row]
        return [Gradients(*part) for part in zip(losses, grads, strict=True)]

    def _backward(self, multiplier: float, windows: Windows) -> Gradients:
        leaves = [weight.detach().requires_grad_() for weight in self.weights]
        loss = self.loss(leaves, windows)
        grads = torch.autograd.grad(loss * multiplier, leaves)
        return Gradients(float(loss.detach()), [grad.contiguous() for grad in grads])

    def reduce(self, parts: Sequence[Gradients], answer: Answer) -> list[Tensor]:
        """Add the gradients of micro-batches in order, in fp32, and round the sum once.

        Args:
            parts: what `draw` returned; the gradients of a single one are returned unchanged.
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

    def __init__(self, plan: Plan, side: str, device: torch.device, ranks: Ranks = ALONE) -> None:
        super().__init__(plan, device, ranks)
        self._weights = [
            weight.to(self._dtype(name)).requires_grad_()
            for name, weight in zip(self.names, self.initial_weights(), strict=True)
        ]
        if plan.exact_sums:
            for weight in self._weights:
                weight.register_hook(self._exact_addend)  # type: ignore[no-untyped-call]
        self.optimizer, self.wrapper = optimizer_of(
            side, plan, self.names, self._weights, ranks.group
        )
        self.schedule = LambdaLR(self.optimizer, lambda taken: plan.share(taken + 1))
        self._scale = 1.0

    @property
    def weights(self) -> list[Tensor]:
        """The model's weights, which the optimizer writes."""
        return self._weights

    def _dtype(self, name: str) -> torch.dtype:
        wide = self.plan.wide_norms and "norm" in name
        return torch.float32 if wide else DTYPES[self.plan.dtype]

    def _exact_addend(self, grad: Tensor) -> Tensor:
        return exact_addend(grad, self._scale, self.plan.accumulate)

    def advance(self) -> trace.StepRecord:
        """Take one whole step, and note everything that it wrote."""
        scale, lr = loss_scale_of(self.wrapper), float(self.optimizer.param_groups[0]["lr"])
        losses = self.learn()
        return trace.StepRecord(
            step=self.step,
            loss=sum(losses) / len(losses),
            lr=lr,
            scale=scale,
            norm=self.wrapper.get_global_norm(),
            skipped=self.wrapper.overflow,
            state=trace.digest(self._written()),
        )

    def learn(self) -> list[float]:
        """Take one step.

        Each micro-batch's loss is divided by their number, so their gradients add up to that of
        the mean loss: in the model's dtype with the FP16 optimizers, in fp32 with BF16Optimizer
        and ZeroOptimizer. Each rank adds up those of its own, then all ranks add their sums;
        ZeroOptimizer does so itself.

        Returns:
            Losses of the micro-batches of all ranks.
        """
        self.step += 1
        parts, self._scale = self.plan.accumulate, loss_scale_of(self.wrapper)
        self.optimizer.zero_grad()
        losses = []
        for windows in self.micro_batches():
            loss = self.loss(self._weights, windows)
            self.wrapper.backward(loss / parts)
            losses.append(float(loss.detach()))
        self.ranks.add_(accumulated(self.optimizer, self._weights))
        losses = self.ranks.gather_numbers(losses)
        self.wrapper.step()
        self.schedule.step()
        return losses

    def _written(self) -> dict[str, Value]:
        """Everything that a step writes."""
        return {
            "weights": self._weights,
            "scale": calls.control(loss_scale_of(self.wrapper)),
            "norm": torch.tensor(self.wrapper.get_global_norm()),
            **dict(observed(self.optimizer, self.names)),
        }

    def state_dict(self) -> dict[str, object]:
        """Weights, optimizer, schedule, draws and the number of steps."""
        return {
            "weights": [weight.detach().clone() for weight in self._weights],
            "optimizer": self.ranks.gather_states(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken, on either side."""
        with torch.no_grad():
            pairs = zip(self._weights, cast(list[Tensor], saved["weights"]), strict=True)
            for weight, value in pairs:
                weight.copy_(value)
        load(self.optimizer, cast("list[Saved]", saved["optimizer"]), self.ranks.number)
        self.schedule.load_state_dict(cast(dict[str, object], saved["schedule"]))
        super().load_state_dict(saved)
