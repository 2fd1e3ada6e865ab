"""Ways to replay a trace, and how what a way did is compared with what was recorded.

    reference   the rule by itself, or the reference's class around torch's optimizer
    stepped     the reference's class around its `FusedAdam`; rules inside its FP16Optimizer
    fast        the fast side's class around its `FusedAdam`, on the engine that is active: the rule
                runs inside the finalise kernel

Scales, counters, norms and skipped steps agree to the bit everywhere. Weights agree to the bit too,
except where `FusedAdam` repeats torch's AdamW, and where DeepSpeed's ZeRO clips: they then lie
within what roundings allow. Those of the fast side are always the bits of `stepped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from twinstep.contract.compat import CORRECT, Compat
from twinstep.golden.drive import START
from twinstep.golden.trace import Header, Step, Trace, Value
from twinstep.parity.proof.golden import rules, runs, whole_steps

WAYS = ("reference", "stepped", "fast")
KNOWN = (*rules.RULES, *whole_steps.KINDS, *runs.RULES)
U = 2.0**-24  # half an ULP of fp32, relative


def replayed(header: Header, compat: Compat = CORRECT, way: str = "reference") -> list[Step]:
    """Run one of our sides through the steps of a trace.

    Args:
        header: of the trace.
        compat: what whole steps reproduce; a rule alone has no choice to make.
        way: of `WAYS`.

    Raises:
        ValueError: the rule is unknown.
    """
    side = "fast" if way == "fast" else "reference"
    if header.rule in rules.RULES:
        alone = way == "reference"
        return rules.by_itself(header) if alone else rules.in_a_step(side, "flat", header, compat)
    if header.rule in whole_steps.KINDS:
        return whole_steps.whole_steps(side, header, compat)
    if header.rule in runs.RULES:
        return runs.run(side, header, compat, fused=way != "reference")
    raise ValueError(
        f"rule={header.rule!r}, but should be one of {', '.join(KNOWN)} [{header.name}]"
    )


def is_rounded(header: Header, way: str) -> bool:
    """True where weights are repeated by other arithmetic than the recorded one."""
    given = header.constants
    adam = header.rule == "adam" or (way != "reference" and bool(given.get("adamw")))
    # ZeRO of DeepSpeed multiplies the scale and the clip factor in fp32 before it divides.
    return adam or (header.rule == "zero" and float(given["clip_grad"]) > 0.0)


def first_difference(trace: Trace, steps: Sequence[Step], *, rounded: bool = False) -> str:
    """Name the first step and field that differ; empty when nothing does.

    Args:
        trace: what was recorded.
        steps: what a side did, in the same order.
        rounded: weights may differ by what roundings allow.
    """
    found = differences(trace, steps, rounded=rounded)
    return next(iter(found.values()), "")


def differences(trace: Trace, steps: Sequence[Step], *, rounded: bool = False) -> dict[str, str]:
    """The first difference of each field that differs; see `first_difference`."""
    name = trace.header.name
    if len(steps) != len(trace.steps):
        said = f"{name}: {len(steps)} steps were replayed, but {len(trace.steps)} were recorded"
        return {"steps": said}
    found: dict[str, str] = {}
    allowed = allowed_distances(trace) if rounded else [0.0] * len(steps)
    for index, (wanted, got) in enumerate(zip(trace.steps, steps, strict=True)):
        for field in sorted(wanted.keys() | got.keys()):
            at = _differs(got.get(field), wanted.get(field), allowed[index], field)
            if at is None or field in found:
                continue
            found[field] = (
                f"{name}, step {index} ({trace.header.steps[index]}), {field}{at}: "
                f"{_shown(got.get(field), at)} was replayed, but "
                f"{_shown(wanted.get(field), at)} was recorded"
            )
    return found


def _differs(got: Value | None, wanted: Value | None, allowed: float, field: str) -> str | None:
    """The place of a difference, `[index]` in a list; None where there is none."""
    if not (isinstance(got, tuple) and isinstance(wanted, tuple) and len(got) == len(wanted)):
        return None if _equal(got, wanted) else ""
    limit = allowed if field == "weights" else 0.0
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if not _equal(one, other) and not abs(one - other) <= limit:
            return f"[{index}]"
    return None


def _equal(one: Value | None, other: Value | None) -> bool:
    """Equality in which NaN is equal to NaN."""
    return one == other or (one != one and other != other)


def _shown(value: Value | None, at: str) -> Value | None:
    return value[int(at[1:-1])] if at and isinstance(value, tuple) else value


def allowed_distances(trace: Trace) -> list[float]:
    """Largest distance of a weight after each step, for two ways of rounding the same formula.

    Gradients of one sign make the moments sums without cancellation: after t steps each carries at
    most 2t + 1 roundings, and its square root, the two bias corrections, the quotient and the
    product with the learning rate add 10 at most. The update and the decay, which is at most 1/64
    of a weight, are thus uncertain by (4t + 12) U of themselves on either side, and the weight by
    U of itself, or by 2 U where it decays; both sides round.
    """
    roundings = 2 if trace.header.constants["weight_decay"] else 1
    weights = [step["weights"] for step in trace.steps]
    known = [tuple(chain(*START)), *(row for row in weights if isinstance(row, tuple))]
    allowed, found = 0.0, []
    for t, (before, after) in enumerate(pairwise(known), start=1):
        largest = max(map(abs, (*before, *after)))
        moved = max(abs(a - b) for a, b in zip(after, before, strict=True))
        allowed += 2 * (4 * t + 12) * U * (moved + largest / 64) + 2 * roundings * U * largest
        found.append(allowed)
    return found
