"""Error bounds derived by running the reference's own formula on numbers that carry their bound.

Such a number (`bounded.py`) is a real value in float64 with the largest error that an honest
implementation of the same formula can have there. Each operator of the reference has a rule
(`bounds_table.py`), which adds its charge; here are those of the four operations:

- a rounding is charged twice half an ULP of fp32, so that a kernel may contract, rearrange or round
  one intermediate result more;
- a sum is charged for its operands too, because cancellation exposes their roundings (not if both
  are inputs, which are not rounded);
- approximate instructions and `.ftz` are charged where the compiled code has them
  (`parity/expected/instruction_error.py`): a relative error on top of quotients and roots, and for
  subnormal operands
  and results that may be taken for zero their own magnitude;
- a sum or product of two inputs that is an fp32 number itself is charged nothing;
- near zero there is an absolute term of two of the smallest subnormals, magnified by the divisions
  on the way (`gain`), because a kernel may scale before it divides;
- where a product of factors passes the largest fp32 number (`peak`), the order of the
  multiplications decides between a finite and a non-finite result: the element is in a `zone`;
  the interval reaches from the evaluation in real numbers to that in which the zone overflows as
  it does in the reference (`overflowing`), each with errors of its own;
- a comparison that an honest implementation may decide otherwise leaves both branches open: the
  reference's norm may round to zero, or its square root overflow, where a wider one does not.

The last rounding, to the dtype that is stored, is not charged: the judge rounds both ends of the
interval instead, which is the same and stays tight for outputs of few bits.

Not charged on purpose: 1 - beta formed in fp32, a power of beta in fp32, state of fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.expected.carried import (
    Arguments,
    Carried,
    Function,
    Keywords,
    Operands,
    operand,
)
from twinstep.parity.expected.instruction_error import IEEE, InstructionError

HALF_ULP = 2.0**-24
ROUNDING = 2 * HALF_ULP
SMALLEST = 2 * 2.0**-149
TINY = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127
_INSTRUCTION_ERROR: ContextVar[InstructionError] = ContextVar("instruction_error", default=IEEE)
_OVERFLOWING: ContextVar[bool] = ContextVar("overflowing", default=False)


@contextmanager
def allowing_for(instruction_error: InstructionError) -> Iterator[None]:
    """Add these errors to every operation inside the context."""
    token = _INSTRUCTION_ERROR.set(instruction_error)
    try:
        yield
    finally:
        _INSTRUCTION_ERROR.reset(token)


def instruction_error() -> InstructionError:
    """The errors of the context."""
    return _INSTRUCTION_ERROR.get()


@contextmanager
def overflowing() -> Iterator[None]:
    """Go on from the reference's own infinity or NaN, inside the context, where a zone has one."""
    token = _OVERFLOWING.set(True)
    try:
        yield
    finally:
        _OVERFLOWING.reset(token)


def settled(c: Carried, plain: Tensor) -> Carried:
    """Add the absolute term, find overflow zones, and give non-finite results no error."""
    # Zero of zeros alone: there is nothing that could underflow.
    absolute = torch.where((c.exact == 0) & (c.error == 0), 0.0, SMALLEST * c.gain)
    error = c.error + absolute
    finite = torch.isfinite(c.exact)
    error = torch.where(finite, error.nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
    overflows = (c.peak > LARGEST) | (c.exact.abs() + error >= LARGEST * (1 - 2.0**-20))
    # From an infinite operand one order makes an infinity and another a NaN.
    zone = c.zone | ~finite | overflows | torch.isinf(error)
    return replace(c, value=plain, error=error, zone=zone)


def followed(c: Carried) -> Carried:
    """In the zones the reference's own overflow, if the context follows it."""
    if not _OVERFLOWING.get():
        return c
    over = c.zone & ~torch.isfinite(c.value)
    exact = torch.where(over, c.value.to(torch.float64), c.exact)
    return replace(c, exact=exact, error=torch.where(over, 0.0, c.error))


def decided(a: Carried, b: Carried) -> Tensor:
    """Places where infinity or NaN is divided by a number other than zero: it stays what it is."""
    whole = torch.isfinite(b.exact) & (b.exact != 0) & (b.error == 0) & ~b.zone
    return ~torch.isfinite(a.exact) & ~a.zone & whole


def flushable(c: Carried, operation: str) -> Tensor | float:
    """The loss where this operation takes c for zero because it may be subnormal."""
    if operation not in _INSTRUCTION_ERROR.get().flushed:
        return 0.0
    magnitude = c.exact.abs()
    lost = (magnitude + c.error).clamp_max(TINY)
    return torch.where(magnitude - c.error < TINY, lost, torch.zeros_like(lost))


def _merged(a: Carried, b: Carried, exact: Tensor, error: Tensor, peak: Tensor) -> Carried:
    gain = torch.maximum(a.gain, b.gain).clamp_min(1.0) + torch.zeros_like(exact)
    zone = a.zone | b.zone
    return Carried(value=exact, exact=exact, error=error, peak=peak, gain=gain, zone=zone)


def _unless_exact(a: Carried, b: Carried, c: Carried) -> Carried:
    """No error where two inputs have an exact fp32 result: there is nothing to round."""
    if a.computed or b.computed:
        return c
    exact = (c.exact.to(torch.float32) == c.exact) & (a.error == 0) & (b.error == 0)
    for operation in _INSTRUCTION_ERROR.get().flushed & {"add", "mul"}:
        for each in (a, b, c):
            exact = exact & (torch.as_tensor(flushable(each, operation)) == 0)
    zero = torch.zeros_like(c.exact)
    return replace(
        c, error=torch.where(exact, zero, c.error), gain=torch.where(exact, zero, c.gain)
    )


def add(operands: Operands, sign: float = 1.0) -> Carried:
    """A sum, or a difference."""
    a, b = operands
    exact = a.exact + sign * b.exact
    magnitude = exact.abs()
    if a.computed or b.computed:
        magnitude = magnitude + a.exact.abs() + b.exact.abs()
    error = a.error + b.error + ROUNDING * magnitude
    error = error + flushable(a, "add") + flushable(b, "add")
    # lerp takes the difference first and scales it then: what must not overflow is unscaled.
    result = _merged(a, b, exact, error, a.peak + b.peak)
    return _unless_exact(a, b, replace(result, error=error + flushable(result, "add")))


def sum_of(sign: float, turned: bool = False) -> Callable[[Function, Arguments, Keywords], Carried]:
    """A sum or difference with a factor `alpha` of its second operand; `turned`: of its first."""

    def rule(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
        a, b = (operand(x) for x in args[:2])
        factor = operand(args[2] if len(args) > 2 else kwargs.get("alpha", 1))
        a, b = (b, a) if turned else (a, b)
        scaled = b if bool(factor.exact == 1) else settled(multiply([b, factor]), b.value)
        return add([a, scaled], sign)

    return rule


def multiply(operands: Operands) -> Carried:
    """A product."""
    a, b = operands
    exact = a.exact * b.exact
    lost_a, lost_b = a.error + flushable(a, "mul"), b.error + flushable(b, "mul")
    through = a.exact.abs() * lost_b + b.exact.abs() * lost_a + lost_a * lost_b
    # A factor below one may come last: the product of the others is what must not overflow.
    peak = torch.maximum(a.peak, a.exact.abs()).clamp_min(1.0) * b.peak.clamp_min(1.0)
    result = _merged(a, b, exact, through + ROUNDING * exact.abs(), peak)
    return _unless_exact(a, b, replace(result, error=result.error + flushable(result, "mul")))


def divide(operands: Operands) -> Carried:
    """A quotient."""
    a, b = operands
    exact = a.exact / b.exact
    smallest = (b.exact.abs() - b.error - flushable(b, "div")).clamp_min(0.0)
    through = (a.error + flushable(a, "div") + exact.abs() * b.error) / smallest
    # 0/0 of two exact zeros is NaN on every side: no error, whatever the quotient of errors is.
    through = torch.where((a.error == 0) & (b.error == 0), torch.zeros_like(through), through)
    error = through + (ROUNDING + _INSTRUCTION_ERROR.get().quotient) * exact.abs()
    # By another order the divisor may be infinite, and then the quotient is zero.
    error = torch.where(b.zone, error + exact.abs(), error)
    merged = _merged(a, b, exact, error, torch.maximum(a.peak, exact.abs()))
    magnified = torch.maximum(a.gain, b.gain) * (1.0 / smallest).clamp(1.0, 1e300)
    error = merged.error + flushable(merged, "div")
    return replace(merged, error=error, gain=magnified + torch.zeros_like(exact))


def square_root(operands: Operands) -> Carried:
    """A square root; below zero is taken for zero."""
    (a,) = operands
    exact = a.exact.sqrt()
    lowest = (a.exact - a.error).clamp_min(0.0).sqrt()
    highest = (a.exact + a.error).sqrt()
    error = torch.maximum(highest - exact, exact - lowest)
    error = error + (ROUNDING + _INSTRUCTION_ERROR.get().root) * exact
    if "sqrt" in _INSTRUCTION_ERROR.get().flushed:
        flushed = (a.exact - a.error < TINY * a.gain.clamp_min(1.0)) & (a.exact > 0)
        error = torch.where(flushed, torch.maximum(error, exact), error)
    # The root may be taken before a division by what the gain is from, and the quotient's divisor
    # be multiplied by that number's root.
    return replace(a, exact=exact, error=error, peak=exact, gain=a.gain.sqrt())


def negate(operands: Operands) -> Carried:
    """The negative: nothing is rounded."""
    (a,) = operands
    return replace(a, exact=-a.exact)


def absolute(operands: Operands) -> Carried:
    """The magnitude: nothing is rounded."""
    (a,) = operands
    return replace(a, exact=a.exact.abs())


def extremum(pick: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operands], Carried]:
    """The larger or smaller of two, which grows with each of them: so do the ends."""

    def rule(operands: Operands) -> Carried:
        a, b = operands
        exact = pick(a.exact, b.exact)
        below = exact - pick(a.exact - a.error, b.exact - b.error)
        above = pick(a.exact + a.error, b.exact + b.error) - exact
        peak = torch.maximum(a.exact.abs(), b.exact.abs())
        return _merged(a, b, exact, torch.maximum(below, above), peak)

    return rule


def where_rule(operands: Operands) -> Carried:
    """The branch of real numbers; where the condition is open, as far as the other one too."""
    condition, a, b = operands
    yes, open_ = condition.exact != 0, condition.error != 0

    def pick(left: Tensor, right: Tensor) -> Tensor:
        return torch.where(yes, left, right)

    exact, error = pick(a.exact, b.exact), pick(a.error, b.error)
    reach = (pick(b.exact, a.exact) - exact).abs() + pick(b.error, a.error)
    return Carried(
        value=a.value,
        exact=exact,
        error=torch.where(open_, torch.maximum(error, reach), error),
        peak=torch.where(open_, torch.maximum(a.peak, b.peak), pick(a.peak, b.peak)),
        gain=torch.where(open_, torch.maximum(a.gain, b.gain), pick(a.gain, b.gain)),
        zone=torch.where(open_, a.zone | b.zone, pick(a.zone, b.zone)),
    )


def reciprocal(operands: Operands) -> Carried:
    """A quotient with the dividend 1."""
    return divide([operand(torch.ones_like(operands[0].exact)), *operands])
