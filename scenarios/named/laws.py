"""Laws of scenarios: facts that hold of a run, each with the sentence of a run that breaks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from twinstep.scenarios.named.scenario import Law, Outcome, Seen
from twinstep.scenarios.trace import StepRecord, first_difference

# Of an fp32 sum of up to 4,096 squares, in any order, and of its root.
NORM_ERROR = 4100 * 2.0**-24


def steps_of(run: Outcome) -> Iterator[tuple[StepRecord, Seen]]:
    """Each step's record and facts."""
    return zip(run.trace.records, run.seen, strict=True)


def first(run: Outcome, wrong: Callable[[StepRecord, Seen], str | None]) -> str | None:
    """The first step that breaks a law, and how."""
    for record, seen in steps_of(run):
        if said := wrong(record, seen):
            return f"step {record.step}: {said}"
    return None


def _finite(run: Outcome) -> str | None:
    if not all(map(math.isfinite, run.trace.held_out)):
        return f"the held-out loss is {run.trace.held_out[1]} at the end"
    return first(run, lambda _, seen: None if seen.finite else "a master is infinite or NaN")


def _skips(run: Outcome) -> str | None:
    # A sum of several finite fp16 gradients can overflow where no part does.
    exact = run.plan.accumulate == 1 or run.plan.exact_sums

    def wrong(record: StepRecord, seen: Seen) -> str | None:
        if seen.overflowed and not record.skipped:
            return "a gradient is infinite or NaN, but the step was taken"
        if record.skipped and not seen.overflowed and exact:
            return "every gradient is finite, but the step was skipped"
        return None

    return first(run, wrong)


def _skipped_steps_keep_all(run: Outcome) -> str | None:
    for (_, before), (record, after) in pairwise(steps_of(run)):
        if record.skipped and (after.moved or after.kept != before.kept):
            return f"step {record.step}: skipped, but masters, moments or counters changed"
        if not record.skipped and not after.moved:
            return f"step {record.step}: taken, but no master changed"
    return None


def _rounded(run: Outcome) -> str | None:
    wrong = "a model weight is not its master, rounded"
    return first(run, lambda _, seen: None if seen.rounded else wrong)


def adam_reach(beta1: float, beta2: float, taken: int) -> float:
    """The most by which Adam moves a weight in a step, in learning rates.

    m / sqrt(v) by the inequality of Cauchy and Schwarz, with both corrections of the bias:
    (1 - b1) / sqrt(1 - b2) sqrt(sum over i < t of (b1^2 / b2)^i) sqrt(1 - b2^t) / (1 - b1^t).
    """
    total = sum((beta1**2 / beta2) ** power for power in range(min(taken, 1000)))
    plain = (1.0 - beta1) / math.sqrt(1.0 - beta2) * math.sqrt(total)
    return plain * math.sqrt(1.0 - beta2**taken) / (1.0 - beta1**taken)


def _reach(run: Outcome) -> str | None:
    taken = 0
    for record, seen in steps_of(run):
        taken += not record.skipped
        most = adam_reach(run.plan.beta1, run.plan.beta2, max(1, taken)) * 1.001
        if seen.reach > most:
            return f"step {record.step}: a weight moved by {seen.reach:.4g} lr, at most {most:.4g}"
    return None


def scale_after(run: Outcome) -> list[float]:
    """The loss scale of each step by the rule, from the skipped steps and changes alone."""
    plan, scale, clean, left = run.plan, run.plan.scaling[1], 0, run.plan.delayed_shift
    found = []
    set_to = {c.step: c.value for c in run.scenario.changes if c.name == "loss_scale"}
    for record in run.trace.records:
        scale = set_to.get(record.step, scale)
        found.append(scale)
        if record.skipped:
            if plan.rule == "dynamic" and left > 1:
                left -= 1
            elif plan.rule == "torch":
                scale /= plan.scale_factor
            else:
                scale = max(scale / plan.scale_factor, plan.min_scale)
            clean = 0
            continue
        clean += 1
        # Torch grows with the last step of a window, the others with the step after it.
        due = clean if plan.rule == "torch" else clean - 1
        if due > 0 and due % plan.scale_window == 0:
            scale, left = scale * plan.scale_factor, plan.delayed_shift
            clean = 0 if plan.rule == "torch" else clean
    return found


def _scale(run: Outcome) -> str | None:
    for record, want in zip(run.trace.records, scale_after(run), strict=True):
        if record.scale != want:
            return f"step {record.step}: the scale is {record.scale:g}, by the rule {want:g}"
    return None


FINITE = Law("every master and the loss at the end are finite", _finite)
SKIPS = Law("a step is skipped if a gradient is infinite or NaN, on any rank, only then", _skips)
KEEPS = Law(
    "a skipped step leaves masters, moments and counters as they were; others move masters",
    _skipped_steps_keep_all,
)
ROUNDED = Law("after every step the model's weights are the masters, rounded", _rounded)
REACH = Law("no step moves a weight further than Adam can, whatever the gradient is", _reach)
SCALE = Law("the loss scale is that of the rule, worked out from the skipped steps", _scale)


def laws_of(run: Outcome) -> list[Law]:
    """The laws of all runs that apply to this one, then those of its scenario."""
    plan, found = run.plan, [FINITE, SKIPS, KEEPS]
    scales = plan.dtype == "fp16"
    if plan.broken == "none":
        found.append(ROUNDED)
    if plan.optimizer != "lamb":
        found.append(REACH)
    if scales and plan.optimizer in ("adam", "lamb"):
        found.append(SCALE)
    return [*found, *run.scenario.laws]


def skips_exactly(*steps: int, within: int = 40) -> Law:
    """Of the first steps, those are skipped and no others; a longer run may overflow by itself."""

    def broken(run: Outcome) -> str | None:
        skipped = [step for step in run.trace.skipped if step <= within]
        return None if skipped == [*steps] else f"steps {skipped} are skipped"

    shown = ", ".join(map(str, steps)) if len(steps) < 5 else f"{steps[0]} to {steps[-1]}"
    return Law(f"of the first {within} steps are skipped: {shown or 'none'}", broken)


def scale_at(step: int, scale: float) -> Law:
    """The loss scale that the gradients of a step carried."""

    def broken(run: Outcome) -> str | None:
        found = run.trace.records[step - 1].scale
        return None if found == scale else f"it is {found:g}"

    return Law(f"in step {step} the loss scale is {scale:g}", broken)


def scale_comes_back(low: float) -> Law:
    """The scale falls to a lowest value, and ends no lower than it began."""

    def broken(run: Outcome) -> str | None:
        scales = run.trace.column("scale")
        if min(scales) != low:
            return f"the lowest is {min(scales):g}"
        return None if scales[-1] >= scales[0] else f"it ends at {scales[-1]:g}"

    return Law(f"the loss scale falls to {low:g} and is back at the end", broken)


def learns(least: float) -> Law:
    """The loss on unseen text falls."""

    def broken(run: Outcome) -> str | None:
        fell = run.trace.held_out[0] - run.trace.held_out[1]
        return None if fell >= least else f"it fell by {fell:.4f}"

    return Law(f"the loss on unseen text falls by at least {least:g} nats per byte", broken)


def _same(run: Outcome) -> str | None:
    assert run.twin is not None
    found = first_difference(run.trace, run.twin)
    ends = run.trace.held_out == run.twin.held_out
    return found or (None if ends else f"held-out loss: {run.trace.held_out}, {run.twin.held_out}")


def same_as_twin(twin: str) -> Law:
    """Every step is that of the other run, to the bit."""
    return Law(f"every step has the bits of {twin}", _same)


def parts_from_twin(step: int) -> Law:
    """Equal to the other run before a step, and not from there on."""

    def broken(run: Outcome) -> str | None:
        assert run.twin is not None
        pairs = zip(run.trace.records, run.twin.records, strict=True)
        parted = [ours.step for ours, twin in pairs if ours.state != twin.state]
        want = [record.step for record in run.trace.records][step - 1 :]
        return None if parted == want else f"it differs first in step {min(parted, default=None)}"

    return Law(
        f"the run is that without changes before step {step}, and another from there", broken
    )


def ends_below_twin(least: float, twin: str) -> Law:
    """The loss on unseen text is lower than the other run's."""

    def broken(run: Outcome) -> str | None:
        assert run.twin is not None
        gain = run.twin.held_out[1] - run.trace.held_out[1]
        return None if gain >= least else f"it is lower by {gain:.4f}"

    return Law(f"the loss at the end is lower by at least {least:g} than {twin}", broken)


def _untouched(run: Outcome) -> str | None:
    touched = set[str]()
    for record, seen in steps_of(run):
        touched |= seen.touched
        if strange := seen.moved - touched:
            return f"step {record.step}: {min(strange)} moved, but never had a gradient"
    return None


UNTOUCHED = Law("a weight that never had a gradient has not moved by a bit", _untouched)


def still_until(only: str, step: int | None) -> Law:
    """Weights with this in their name stand still before a step, and move in it; or never."""

    def broken(run: Outcome) -> str | None:
        for record, seen in steps_of(run):
            moved = any(only in name for name in seen.moved)
            if moved and (step is None or record.step < step):
                return f"step {record.step}: moved"
            if not moved and record.step == step:
                return f"step {step}: did not move"
        return None

    when = "never move" if step is None else f"move from step {step} on, not before"
    return Law(f"{only}: {when}", broken)


def all_move(only: str) -> Law:
    """Weights with this in their name move in some step."""

    def broken(run: Outcome) -> str | None:
        moved = any(only in name for seen in run.seen for name in seen.moved)
        return None if moved else "they stand still"

    return Law(f"{only}: moves", broken)


def norm_is_exact() -> Law:
    """The norm that the optimizer gives is that of the sum of all gradients in float64."""

    def broken(run: Outcome) -> str | None:
        def wrong(record: StepRecord, seen: Seen) -> str | None:
            off = abs(record.norm - seen.norm64)
            if record.skipped or off <= NORM_ERROR * seen.norm64:
                return None
            return f"the norm is {record.norm!r}, in float64 {seen.norm64!r}"

        return first(run, wrong)

    return Law("the gradient norm is that of the sum of all micro-batches in float64", broken)


def norm_spikes(step: int, times: float) -> Law:
    """The gradient norm of a step is many times that of the step before."""

    def broken(run: Outcome) -> str | None:
        before, spike = (run.trace.records[at].norm for at in (step - 2, step - 1))
        return None if spike >= times * before else f"{spike:.3g} after {before:.3g}"

    return Law(f"in step {step} the gradient norm is at least {times:g} times that before", broken)


def lr_begins_again(cycle: int) -> Law:
    """The learning rate's curve is that of one cycle, again and again."""

    def broken(run: Outcome) -> str | None:
        rates = run.trace.column("lr")
        for at, (rate, again) in enumerate(zip(rates, rates[cycle:], strict=False)):
            if rate != again:
                return f"steps {at + 1} and {at + 1 + cycle}: {rate:g} and {again:g}"
        return None if rates[cycle] < max(rates) else "it never rises"

    return Law(f"the learning rate is the same {cycle} steps later", broken)


def skips_at_most(share: float) -> Law:
    """A share of steps that is skipped, at most, and not none."""

    def broken(run: Outcome) -> str | None:
        skipped = len(run.trace.skipped) / len(run.trace.records)
        return None if 0.0 < skipped <= share else f"{100 * skipped:.2f}%"

    return Law(f"some steps are skipped, at most {100 * share:g}%", broken)
