"""Both sides take every step of one training run: `python -m twinstep.scenarios.lockstep`.

On every step the same state and gradients go through the reference and the fast side, as lists of
parameters and as one flat buffer, whole (`mixed_step`) and in parts (`global_norm`, `clip_factor`,
`adamw_step`, `unscale`, `flatten`, `unflatten`, `cast_copy`), and every written bit is compared.
Training goes on from what the reference wrote, so each step is judged by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinstep.scenarios import calls
from twinstep.scenarios.calls import Answer, Call, Written, reference_answer
from twinstep.scenarios.difference import Difference, elements, written_differences
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.sides import fast_side
from twinstep.scenarios.state import State
from twinstep.scenarios.trace import StepRecord, Trace
from twinstep.scenarios.train import Progress, Trainer, one_thread

SLOT = 16  # elements; every tensor of a flat buffer starts at a multiple of it
Layouts = Sequence[str]
LAYOUTS: Layouts = ("list", "flat")


@dataclass
class Judge:
    """Asks both sides, compares what they wrote, and hands on the reference's answer.

    Attributes:
        fast: the side under test.
        names: names of the parameters, for the report.
        differences: all found so far.
        compared: elements compared so far.
        step: the step in progress, for the report.
    """

    fast: Answer
    names: list[str]
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    operations: set[str] = field(default_factory=set)
    step: int = 0

    def both(self, call: Call) -> Written:
        """Answer a call with both sides; return the reference's answer."""
        expected = reference_answer(call)
        self.expect(call, expected, "list")
        return expected

    def expect(self, call: Call, expected: Written, layout: str) -> None:
        """Answer a call with the fast side and compare with what it should write."""
        self.operations.add(call.operation)
        self.compare(f"{call.operation}[{layout}]", expected, self.fast(call))

    def compare(self, what: str, expected: Written, written: Written) -> None:
        """Note every difference between two answers."""
        self.compared += elements(expected)
        where = f"step {self.step} {what}"
        self.differences += written_differences(where, expected, written, self.names)


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a lockstep run ended.

    Attributes:
        trace: the reference's run, up to and including the first step that differs.
        differences: what differs in that step; empty when the sides agree.
        compared: elements compared.
        operations: operations compared, sorted.
    """

    trace: Trace
    differences: list[Difference]
    compared: int
    operations: list[str]


def flat(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors as one flat buffer of 16-element slots; an empty list stays empty."""
    if not tensors:
        return []
    slots = sum(-(-tensor.numel() // SLOT) for tensor in tensors)
    buffer = torch.empty(slots * SLOT, dtype=tensors[0].dtype)
    return calls.tensors(reference_answer(calls.flatten(tensors, buffer, SLOT)), "flat")


def flat_state(state: State) -> State:
    """The same state with every list laid into one buffer; all tensors share one step counter."""
    lists = ("params", "exp_avgs", "exp_avg_sqs", "copies")
    entries = dict(state.clone().items())
    flattened: Written = {name: flat(calls.tensors(entries, name)) for name in lists}
    return calls.state_of({**entries, **flattened, "steps": state.steps[:1]})


def whole_step(judge: Judge, trainer: Trainer, grads: list[Tensor], layouts: Layouts) -> Written:
    """Compare `mixed_step` in both layouts; return what the reference wrote, as lists.

    What the flat buffer should hold is the reference's list answer laid out flat: the layout must
    not change a bit, and gaps must stay +0.
    """
    call = trainer.mixed_step(grads)
    expected = reference_answer(call)
    if "list" in layouts:
        judge.expect(call, expected, "list")
    if "flat" in layouts:
        flat_call = calls.mixed_step(
            flat_state(trainer.state), flat(grads), trainer.settings, trainer.lr
        )
        after = dict(flat_state(calls.state_of(expected)).items())
        judge.expect(flat_call, after, "flat")
    return expected


def parts(judge: Judge, trainer: Trainer, grads: list[Tensor], whole: Written) -> None:
    """Compare the smaller operations of one step, each fed with the reference's results.

    Their chain must also end in the bits of the whole step, on the reference itself.
    """
    state, settings = trainer.state, trainer.settings
    measured = judge.both(calls.global_norm(grads))
    norm, found = calls.scalar(measured, "norm"), calls.scalar(measured, "found_inf")
    clipped = judge.both(calls.clip_factor(norm, state.scale, settings))
    update = calls.adamw_step(
        state,
        grads,
        settings,
        lr=trainer.lr,
        factor=calls.scalar(clipped, "factor"),
        found_inf=found,
    )
    chained = judge.both(update)
    judge.compare("adamw_step against mixed_step", {n: whole[n] for n in chained}, chained)
    judge.both(calls.unscale(grads, state.scale))
    if state.copies:
        judge.both(calls.cast_copy(calls.tensors(whole, "params"), state.copies))


def layout_change(judge: Judge, grads: list[Tensor]) -> None:
    """Compare `flatten` and `unflatten` on the gradients; there and back must change nothing."""
    (buffer,) = flat(grads)
    judge.both(calls.flatten(grads, torch.full_like(buffer, 7.0), SLOT))
    back = calls.unflatten(buffer, [torch.empty_like(grad) for grad in grads], SLOT)
    judge.compare("unflatten after flatten", {"tensors": grads}, judge.both(back))


def run(
    plan: Plan,
    *,
    layouts: Layouts = LAYOUTS,
    fast: Answer | None = None,
    progress: Progress | None = None,
) -> Report:
    """Train on the reference and have the fast side repeat every step; stop where it differs.

    Args:
        plan: what to run.
        layouts: which of "list" and "flat" `mixed_step` is compared in.
        fast: the side under test; None takes our own kernels.
        progress: called with every step's record.
    """
    if fast is None:
        with fast_side() as ours:
            return run(plan, layouts=layouts, fast=ours, progress=progress)
    with one_thread():
        trainer = Trainer(plan)
        judge = Judge(fast=fast, names=trainer.names)
        before, records = trainer.held_out_loss(), []
        while trainer.step < plan.steps and not judge.differences:
            records.append(take_step(judge, trainer, layouts))
            if progress is not None:
                progress(records[-1])
        header, held_out = trainer.header("lockstep"), (before, trainer.held_out_loss())
        return Report(
            trace=Trace(header=header, records=records, held_out=held_out),
            differences=judge.differences,
            compared=judge.compared,
            operations=sorted(judge.operations),
        )


def take_step(judge: Judge, trainer: Trainer, layouts: Layouts) -> StepRecord:
    """One step of the run, everything compared; the trainer goes on from the reference's answer."""
    gradients = trainer.draw()
    judge.step = trainer.step
    grads = trainer.reduce(gradients, judge.both)
    whole = whole_step(judge, trainer, grads, layouts)
    parts(judge, trainer, grads, whole)
    layout_change(judge, grads)
    return trainer.apply(whole, gradients)


if __name__ == "__main__":
    from twinstep.scenarios.cli import main

    sys.exit(main(["lockstep", *sys.argv[1:]]))
