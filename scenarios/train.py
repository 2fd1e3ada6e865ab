"""Train the language model with one side's optimizer step: `python -m scenarios.train`.

    loss = model(copies);  grads = d(scale * loss)/d(copies);  state = mixed_step(state, grads)

Forward and backward run in the model's dtype (in fp16 they truly overflow at a high loss scale);
only the step in between belongs to a side, so two runs with the same seed differ only if the two
sides do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from scenarios import calls, model, text, trace
from scenarios.calls import Answer, Call, Written
from scenarios.plan import Plan, Settings
from scenarios.sides import answer_of
from scenarios.state import State, initial_state, model_weights

BATCH = 8  # windows per rank and step
HELD_OUT_BATCHES = 8
Progress = Callable[[trace.StepRecord], None]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, and restore the number of threads afterwards.

    The number of threads decides how sums are split, and the bits of a run must not depend on how
    many cores the machine has. In one thread torch's CPU algorithms are deterministic; a test
    holds every one of them to that with `torch.use_deterministic_algorithms`, which would cost
    each run two seconds of imports.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What backward leaves: the mean unscaled loss, and one scaled gradient per weight."""

    loss: float
    grads: list[Tensor]


class Trainer:
    """The model, its text and its state; every random number comes from generators it owns."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.settings: Settings = plan.settings()
        self.shape = plan.shape
        self.names = list(model.sizes(self.shape))
        self.text = text.load()
        weights = model.initial_weights(self.shape, _generator(plan.seed, 0))
        self.state: State = initial_state(list(weights.values()), plan.dtype, self.settings)
        self.step = 0
        self._draws = [_generator(plan.seed, rank + 1) for rank in range(plan.ranks)]

    @property
    def parameters(self) -> int:
        """Number of trained elements."""
        return sum(weight.numel() for weight in self.state.params)

    @property
    def lr(self) -> float:
        """Learning rate of the step in progress: a linear warm-up, then constant."""
        return self.settings.lr * min(1.0, self.step / self.settings.warm_up)

    def draw(self) -> list[Gradients]:
        """Begin the next step: draw each rank's windows and take their gradients, in rank order.

        Each rank's loss is divided by the number of ranks before backward, so the sum of the
        ranks' gradients is the gradient of the mean loss.
        """
        self.step += 1
        share = float(self.state.scale) / len(self._draws)
        return [self._backward(share, generator) for generator in self._draws]

    def _backward(self, multiplier: float, generator: torch.Generator) -> Gradients:
        inputs, targets = text.batch(
            self.text.train, size=BATCH, context=self.shape.context, generator=generator
        )
        leaves = [weight.detach().requires_grad_() for weight in model_weights(self.state)]
        weights = dict(zip(self.names, leaves, strict=True))
        loss = model.loss(self.shape, weights, inputs, targets)
        grads = torch.autograd.grad(loss * multiplier, leaves)
        return Gradients(loss=float(loss.detach()), grads=[grad.contiguous() for grad in grads])

    def held_out_loss(self) -> float:
        """Loss on text that training never sees: always the same windows."""
        generator = _generator(0, 0)
        weights = dict(zip(self.names, model_weights(self.state), strict=True))
        total = 0.0
        with torch.no_grad():
            for _ in range(HELD_OUT_BATCHES):
                inputs, targets = text.batch(
                    self.text.held_out, size=BATCH, context=self.shape.context, generator=generator
                )
                total += float(model.loss(self.shape, weights, inputs, targets))
        return total / HELD_OUT_BATCHES

    def reduce(self, parts: Sequence[Gradients], answer: Answer) -> list[Tensor]:
        """Add the ranks' gradients in rank order, in fp32, and round the sum once.

        Args:
            parts: what `draw` returned; a single rank's gradients are returned as they are.
            answer: the side that adds and rounds.
        """
        if len(parts) == 1:
            return parts[0].grads
        sums = [torch.zeros_like(grad, dtype=torch.float32) for grad in parts[0].grads]
        for part in parts:
            sums = calls.tensors(answer(calls.accumulate(sums, part.grads)), "accumulators")
        rounded = [torch.empty_like(grad) for grad in parts[0].grads]
        return calls.tensors(answer(calls.cast_copy(sums, rounded)), "copies")

    def advance(self, answer: Answer) -> trace.StepRecord:
        """Take one whole step with a side's arithmetic."""
        parts = self.draw()
        grads = self.reduce(parts, answer)
        return self.apply(answer(self.mixed_step(grads)), parts)

    def mixed_step(self, grads: list[Tensor]) -> Call:
        """The optimizer step for these gradients."""
        return calls.mixed_step(self.state, grads, self.settings, self.lr)

    def apply(self, written: Written, parts: Sequence[Gradients]) -> trace.StepRecord:
        """Go on from what a side wrote, and say what happened."""
        scale = float(self.state.scale)
        self.state = calls.state_of(written)
        return trace.StepRecord(
            step=self.step,
            loss=sum(part.loss for part in parts) / len(parts),
            lr=self.lr,
            scale=scale,
            norm=float(self.state.norm),
            skipped=bool(self.state.found_inf),
            state=trace.digest(self.state),
        )

    def header(self, side: str) -> trace.Header:
        """Where a trace of this run comes from."""
        return trace.Header(
            side=side,
            ranks=self.plan.ranks,
            dtype=self.plan.dtype,
            rule=self.settings.rule,
            scale_window=self.settings.scale_window,
            steps=self.plan.steps,
            seed=self.plan.seed,
            batch=BATCH,
            parameters=self.parameters,
            text_sha256=self.text.digest,
            **trace.environment(),
        )


def run(side: str, plan: Plan, progress: Progress | None = None) -> trace.Trace:
    """Train with one side's arithmetic.

    Args:
        side: "reference", or "fast" (on the GPU, or replayed on the CPU where there is none).
        plan: what to run.
        progress: called with every step's record.

    Returns:
        The trace; two runs with equal arguments on one machine are equal to the last bit.
    """
    with one_thread(), answer_of(side) as answer:
        trainer = Trainer(plan)
        before = trainer.held_out_loss()
        records = []
        for _ in range(plan.steps):
            records.append(trainer.advance(answer))
            if progress is not None:
                progress(records[-1])
        return trace.Trace(
            header=trainer.header(side),
            records=records,
            held_out=(before, trainer.held_out_loss()),
        )


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1009 + stream)


if __name__ == "__main__":
    from scenarios.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
