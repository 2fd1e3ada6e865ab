"""Both sides take every step of one training run.

On every step the same state and gradients go through the reference and the fast side, as lists of
parameters and as one flat buffer, whole (`mixed_step`) and in parts (`global_norm`, `clip_factor`,
`adamw_step`, `unscale`, `flatten`, `unflatten`, `cast_copy`), and every written bit is compared:
the sign of zero counts, a NaN equals every NaN, nothing is tolerated. Training goes on from what
the reference wrote, so each step is judged by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.parity.expected.ulp import same
from twinstep.parity.laws.finding import Finding, element, shown
from twinstep.scenarios import calls
from twinstep.scenarios.calls import (
    Answer,
    Call,
    State,
    Value,
    Written,
    adam_controls,
    answer_of,
    control,
    device_of,
    output,
    reference_answer,
    step_lists,
)
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import StepRecord, Trace
from twinstep.scenarios.train import Progress, one_thread
from twinstep.scenarios.trainers import OperationTrainer

SLOT = 16  # elements; every tensor of a flat buffer starts at a multiple of it
Layouts = Sequence[str]
LAYOUTS: Layouts = ("list", "flat")


def tensor_difference(where: str, want: Tensor, got: Tensor) -> str:
    """The first element in which two tensors differ, and both values; empty if none does.

    Args:
        where: step, operation, layout, argument and parameter.
        want: what the reference wrote.
        got: what the fast side wrote; another dtype or number of elements differs as a whole.
    """
    if want.dtype != got.dtype or want.numel() != got.numel():
        has, should = f"{got.numel()} {got.dtype}", f"{want.numel()} {want.dtype}"
        return f"{where} has {has}, but should have {should}"
    differs = ~same(got.detach().reshape(-1), want.detach().reshape(-1))
    if not differs.any():
        return ""
    index = int(differs.int().argmax())
    ours, theirs = element(want, index), element(got, index)
    distance = Finding(says="", call=0, got=theirs, want=ours).distance()
    return (
        f"{where}{f'[{index}]' if want.dim() else ''} differs from the reference, "
        f"{int(differs.sum())} of {want.numel()} elements do\n"
        f"  got      {shown(theirs)}\n  want     {shown(ours)}\n  distance {distance}"
    )


def differences(where: str, want: Written, got: Written, names: Sequence[str]) -> list[str]:
    """Every written tensor in which two answers to one call differ.

    Args:
        where: names the call in the report.
        want: what the reference wrote.
        got: what the fast side wrote.
        names: of the tensors in lists of that length.
    """
    found = []
    for name, value in want.items():
        assert isinstance(value, Tensor) == isinstance(got[name], Tensor), name
        ours, theirs = as_list(value), as_list(got[name])
        listed = names if len(names) == len(ours) else [str(index) for index in range(len(ours))]
        labels = [""] if isinstance(value, Tensor) else [f"[{label}]" for label in listed]
        for label, one, other in zip(labels, ours, theirs, strict=True):
            found.append(tensor_difference(f"{where} {name}{label}", one, other))
    return [difference for difference in found if difference]


def as_list(value: Value) -> list[Tensor]:
    """The tensors of a written argument."""
    return value if isinstance(value, list) else [value]


def flat(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors as one flat buffer of 16-element slots; an empty list stays empty."""
    if not tensors:
        return []
    slots = sum(-(-tensor.numel() // SLOT) for tensor in tensors)
    buffer = torch.empty(slots * SLOT, dtype=tensors[0].dtype)
    return calls.tensors(reference_answer(flatten(tensors, buffer)), "flat")


def flatten(tensors: list[Tensor], buffer: Tensor) -> Call:
    """Tensors laid into one buffer, each at the next slot."""
    return Call("flatten", {"tensors": tensors, "flat": [buffer]}, options={"slot": SLOT})


def flat_state(state: State) -> State:
    """The same state with every list laid into one buffer; all tensors share one step counter."""
    entries = state.clone().entries
    lists = ("params", "exp_avgs", "exp_avg_sqs", "copies")
    flattened: Written = {name: flat(calls.tensors(entries, name)) for name in lists}
    return State.of({**entries, **flattened, "steps": state.steps[:1]})


class Lockstep:
    """A run on the reference, every step of which the fast side repeats.

    Args:
        plan: what to run.
        fast: the side under test.
        layouts: which of "list" and "flat" `mixed_step` is compared in.

    Attributes:
        trace: the reference's run, up to and including the first step that differs.
        differences: what differs in that step; empty when the sides agree.
        compared: elements compared so far.
        operations: compared so far.
    """

    trace: Trace

    def __init__(self, plan: Plan, fast: Answer, layouts: Layouts = LAYOUTS) -> None:
        self.plan, self.fast, self.layouts = plan, fast, layouts
        self.trainer = OperationTrainer(plan)
        self.differences: list[str] = []
        self.compared = 0
        self.operations: set[str] = set()

    def run(self, progress: Progress | None = None) -> None:
        """Take every step, or stop at the first that differs."""
        before, records = self.trainer.held_out_loss(), list[StepRecord]()
        while self.trainer.step < self.plan.steps and not self.differences:
            records.append(self.take_step())
            if progress is not None:
                progress(records[-1])
        header, held_out = self.trainer.header("lockstep"), (before, self.trainer.held_out_loss())
        self.trace = Trace(header=header, records=records, held_out=held_out)

    def take_step(self) -> StepRecord:
        """One step, everything compared; the trainer goes on from the reference's answer."""
        gradients = self.trainer.draw()
        grads = self.trainer.reduce(gradients, self.both)
        whole = self.whole_step(grads)
        self.parts(grads, whole)
        self.layout_change(grads)
        return self.trainer.apply(whole, gradients)

    def whole_step(self, grads: list[Tensor]) -> Written:
        """Compare `mixed_step` in both layouts; return what the reference wrote, as lists.

        What the flat buffer should hold is the reference's list answer laid out flat: the layout
        must not change a bit, and gaps must stay +0.
        """
        call = self.trainer.mixed_step(grads)
        expected = reference_answer(call)
        if "list" in self.layouts:
            self.expect(call, expected, "list")
        if "flat" in self.layouts:
            state = flat_state(self.trainer.state)
            flat_call = calls.mixed_step(state, flat(grads), self.plan, self.trainer.lr)
            self.expect(flat_call, flat_state(State.of(expected)).entries, "flat")
        return expected

    def parts(self, grads: list[Tensor], whole: Written) -> None:
        """Compare the smaller operations of one step, each fed with the reference's results.

        Their chain must also end in the bits of the whole step, on the reference itself.
        """
        state = self.trainer.state
        outputs = {"norm": output(), "found_inf": output()}
        measured = self.both(Call("global_norm", {"grads": grads}, outputs))
        factor = {
            "norm": calls.scalar(measured, "norm"),
            "scale": state.scale,
            "max_norm": control(self.plan.max_norm),
            "factor": output(),
        }
        clipped = self.both(Call("clip_factor", {}, factor))
        controls = {
            **adam_controls(self.plan, self.trainer.lr),
            "factor": calls.scalar(clipped, "factor"),
            "found_inf": calls.scalar(measured, "found_inf"),
        }
        options = {"bias_correction": True}
        chained = self.both(Call("adamw_step", step_lists(state, grads), controls, options))
        same_step = {name: whole[name] for name in chained}
        self.compare("adamw_step against mixed_step", same_step, chained)
        inverse = {"inv_scale": (1.0 / state.scale).float(), "found_inf": output()}
        self.both(Call("unscale", {"grads": grads}, inverse))
        if state.copies:
            masters = calls.tensors(whole, "params")
            self.both(Call("cast_copy", {"sources": masters, "copies": state.copies}))

    def layout_change(self, grads: list[Tensor]) -> None:
        """Compare `flatten` and `unflatten` on gradients; there and back must change nothing."""
        (buffer,) = flat(grads)
        self.both(flatten(grads, torch.full_like(buffer, 7.0)))
        empty = [torch.empty_like(grad) for grad in grads]
        back = Call("unflatten", {"flat": [buffer], "tensors": empty}, options={"slot": SLOT})
        self.compare("unflatten after flatten", {"tensors": grads}, self.both(back))

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
        self.compared += sum(t.numel() for value in expected.values() for t in as_list(value))
        where = f"step {self.trainer.step} {what}"
        self.differences += differences(where, expected, written, self.trainer.names)


def run(
    plan: Plan,
    *,
    layouts: Layouts = LAYOUTS,
    fast: Answer | None = None,
    progress: Progress | None = None,
) -> Lockstep:
    """Train on the reference and have the fast side repeat every step; stop where it differs.

    Args:
        plan: what to run.
        layouts: which of "list" and "flat" `mixed_step` is compared in.
        fast: the side under test; None takes our own kernels.
        progress: called with every step's record.
    """
    if fast is None:
        with device_of("fast", replays=True) as device:
            ours = answer_of("fast", device)
            return run(plan, layouts=layouts, fast=ours, progress=progress)
    with one_thread():
        lockstep = Lockstep(plan, fast, layouts)
        lockstep.run(progress)
        return lockstep
