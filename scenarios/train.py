"""Train the language model with one side's optimizer step: `python -m twinstep.scenarios.train`.

    loss = model(copies);  grads = d(scale * loss)/d(copies);  state = mixed_step(state, grads)

Forward and backward run in the model's dtype (in fp16 they truly overflow at a high loss scale);
only the step in between belongs to a side, so two runs with the same seed differ only if the two
sides do. That step is the operation `mixed_step` here, and one of the optimizer classes in
`scenarios.class_trainer`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.scenarios import calls, checkpoint, trace
from twinstep.scenarios.calls import Answer, Call, Written, reference_answer
from twinstep.scenarios.class_trainer import ClassTrainer
from twinstep.scenarios.learner import CPU, Learner
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.sides import answer_of, device_of
from twinstep.scenarios.state import State, initial_state, model_weights

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


class Trainer(Learner):
    """A run whose step is the operation `mixed_step`.

    Args:
        plan: what to run.
        answer: the side that takes the step.
    """

    def __init__(self, plan: Plan, answer: Answer = reference_answer) -> None:
        super().__init__(plan, CPU)
        self.answer = answer
        self.names = self.lesson.names
        self.state: State = initial_state(self.lesson.initial_weights(), plan.dtype, self.settings)

    def weights(self) -> list[Tensor]:
        """The copies, or the masters where there are none."""
        return model_weights(self.state)

    @property
    def lr(self) -> float:
        """Learning rate of the step in progress."""
        return self.settings.lr * self.settings.share(self.step)

    def draw(self) -> list[Gradients]:
        """Begin the next step: draw each rank's windows and take their gradients, in rank order.

        Each rank's loss is divided by the number of ranks before backward, so the sum of the
        ranks' gradients is the gradient of the mean loss.
        """
        self.step += 1
        share = float(self.state.scale) / self.plan.ranks
        return [self._backward(share, rank) for rank in range(self.plan.ranks)]

    def _backward(self, multiplier: float, rank: int) -> Gradients:
        leaves = [weight.detach().requires_grad_() for weight in self.weights()]
        loss = self.lesson.loss(leaves, rank)
        grads = torch.autograd.grad(loss * multiplier, leaves)
        return Gradients(loss=float(loss.detach()), grads=[grad.contiguous() for grad in grads])

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

    def advance(self) -> trace.StepRecord:
        """Take one whole step with the side's arithmetic."""
        parts = self.draw()
        grads = self.reduce(parts, self.answer)
        return self.apply(self.answer(self.mixed_step(grads)), parts)

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

    def state_dict(self) -> dict[str, object]:
        """The state, the draws and the number of steps."""
        return {
            "state": dict(self.state.clone().items()),
            "lesson": self.lesson.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken."""
        self.state = State(**cast(dict[str, Any], saved["state"])).clone()
        self.lesson.load_state_dict(cast(Mapping[str, Tensor], saved["lesson"]))
        self.step = cast(int, saved["step"])


@contextmanager
def learner_of(side: str, plan: Plan) -> Iterator[Learner]:
    """A run on one side, ready for its first step; that side's engine runs inside the block."""
    if plan.optimizer == "mixed_step":
        with answer_of(side) as answer:
            yield Trainer(plan, answer)
    else:
        with device_of(side) as device:
            yield ClassTrainer(plan, side, device)


def run(
    side: str,
    plan: Plan,
    progress: Progress | None = None,
    *,
    resume: Path | None = None,
    stop: int | None = None,
    save: Path | None = None,
) -> trace.Trace:
    """Train with one side's arithmetic.

    Args:
        side: "reference", or "fast" (on the GPU, or replayed on the CPU where there is none).
        plan: what to run.
        progress: called with every step's record; not with those before `resume`.
        resume: a checkpoint to go on from, of either side.
        stop: stop after this step of the plan, which stays the plan of the whole run.
        save: a checkpoint to write after the last step.

    Returns:
        The trace from the first step on, before `resume` too; two runs with equal arguments on one
        machine are equal to the last bit, and so are a run and one broken by save and resume.

    Raises:
        CheckpointUnfit: `resume` holds no run of this plan.
    """
    with one_thread(), learner_of(side, plan) as learner:
        header, records = learner.header(side), list[trace.StepRecord]()
        if resume is None:
            before = learner.held_out_loss()
        else:
            before, records = checkpoint.enter(resume, learner, header)
        while learner.step < (plan.steps if stop is None else min(stop, plan.steps)):
            records.append(learner.advance())
            if progress is not None:
                progress(records[-1])
        if save is not None:
            checkpoint.write(save, learner, header, before, records)
        held_out = (before, learner.held_out_loss())
        return trace.Trace(header=header, records=records, held_out=held_out)


if __name__ == "__main__":
    from twinstep.scenarios.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
