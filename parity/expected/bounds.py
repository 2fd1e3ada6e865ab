"""Error bounds derived by running the reference's own formula on numbers that carry their bound.

A `Bounded` tensor is a real value in float64 with the largest error that an honest implementation
of the same formula can have there. Every operation of the reference adds its charge:

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.expected.bounds_conditions import CONDITIONS
from twinstep.parity.expected.bounds_sum import bounded_l2_norm
from twinstep.parity.expected.carried import Carried, known
from twinstep.parity.expected.instruction_error import IEEE, InstructionError
from twinstep.reference.norm import root_of_squares

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


@contextmanager
def overflowing() -> Iterator[None]:
    """Go on from the reference's own infinity or NaN, inside the context, where a zone has one."""
    token = _OVERFLOWING.set(True)
    try:
        yield
    finally:
        _OVERFLOWING.reset(token)


class Bounded(Tensor):
    """A tensor that the reference takes for an ordinary one."""

    carried: Carried
    pending: bool

    @staticmethod
    def __new__(cls, carried: Carried, *, pending: bool = False) -> Bounded:
        """Wrap; `pending` means that `error` lacks the rounding to the dtype of `value`."""
        value = carried.value
        bounded = Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device
        )
        bounded.carried = carried
        bounded.pending = pending
        return bounded

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Leave everything to the dispatcher but the exact norm, which calls no tensor operation.

        The inherited handler would wrap every plain result in this class, with nothing carried.
        """
        if func is root_of_squares:
            return _root_of_squares(cast("Sequence[Tensor]", args[0]))
        return torch._C._disabled_torch_function_impl(func, types, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation on the values, and its rule on what they carry."""
        plain = func(*_values(args), **(kwargs or {}))
        name = str(getattr(func, "overloadpacket", func)).rsplit(".", 1)[-1]
        if isinstance(plain, Tensor) and name in CONDITIONS:
            operands = [_carried(x, plain) for x in args if isinstance(x, Tensor | float | int)]
            condition = CONDITIONS[name](operands)
            return Bounded(replace(condition, value=plain)) if condition.error.any() else plain
        if isinstance(plain, tuple | list):
            raise TypeError(f"no error bound is known for {func}, which gives several tensors")
        if not isinstance(plain, Tensor):
            return plain
        if name in WHOLE_RULES:
            rule = WHOLE_RULES[name]
            found = rule(cast("Callable[..., Tensor]", func), args, dict(kwargs or {}))
            return Bounded(_followed(replace(found, value=plain)))
        if name == "_to_copy" and not plain.dtype.is_floating_point:
            return _to_integers(cast("Bounded", args[0]), plain)
        if not plain.dtype.is_floating_point:
            return plain
        if name == "_to_copy":
            return _converted(cast("Bounded", args[0]), plain)
        if name in CREATORS:
            return Bounded(known(plain))
        if name not in RULES:
            raise TypeError(
                f"no error bound is known for {func}; add a rule to parity/expected/bounds.py"
            )
        operands = [_carried(x, plain) for x in args if isinstance(x, Tensor | float | int)]
        settled = _settled(RULES[name](operands), plain)
        if name == "div":
            settled = replace(settled, zone=settled.zone & ~_decided(*operands))
        return Bounded(settled)


def _root_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The exact norm of the reference with its bound."""
    carried = [charged(x) if isinstance(x, Bounded) else known(x) for x in tensors]
    value = root_of_squares([c.value for c in carried]).to(torch.float32)
    exact, error, zone = bounded_l2_norm(
        value, [c.exact for c in carried], [c.error for c in carried]
    )
    zone = zone | torch.tensor(any(bool(c.zone.any()) for c in carried))
    norm = replace(known(value), exact=exact, error=error, zone=zone, computed=True)
    return Bounded(_followed(norm))


def _values(args: Sequence[object]) -> list[object]:
    return [x.carried.value if isinstance(x, Bounded) else x for x in args]


def _carried(x: object, like: Tensor) -> Carried:
    if isinstance(x, Bounded):
        return charged(x)
    if isinstance(x, Tensor):
        return known(x)
    return known(torch.tensor(x, dtype=torch.float64, device=like.device))


def charged(x: Bounded) -> Carried:
    """Facts of x, with the rounding to its storage if that is still to be charged."""
    c = x.carried
    if not x.pending:
        return c
    unit = torch.finfo(x.dtype)
    half = (c.exact.abs() + c.error) * (unit.eps / 2) + unit.smallest_normal * unit.eps
    return replace(c, error=c.error + half)


def _converted(x: Bounded, plain: Tensor) -> Bounded:
    if x.dtype == torch.bool:
        return Bounded(replace(x.carried, value=plain))
    if not x.dtype.is_floating_point:
        return Bounded(replace(x.carried, value=plain))
    narrower = torch.finfo(plain.dtype).eps > torch.finfo(x.dtype).eps
    return Bounded(replace(charged(x), value=plain), pending=narrower and plain.itemsize < 4)


def _settled(c: Carried, plain: Tensor) -> Carried:
    """Add the absolute term, find overflow zones, and give non-finite results no error."""
    # Zero of zeros alone: there is nothing that could underflow.
    absolute = torch.where((c.exact == 0) & (c.error == 0), 0.0, SMALLEST * c.gain)
    error = c.error + absolute
    finite = torch.isfinite(c.exact)
    error = torch.where(finite, error.nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
    overflows = (c.peak > LARGEST) | (c.exact.abs() + error >= LARGEST * (1 - 2.0**-20))
    # From an infinite operand one order makes an infinity and another a NaN.
    zone = c.zone | ~finite | overflows | torch.isinf(error)
    return _followed(replace(c, value=plain, error=error, zone=zone))


def _followed(c: Carried) -> Carried:
    """In the zones the reference's own overflow, if the context follows it."""
    if not _OVERFLOWING.get():
        return c
    over = c.zone & ~torch.isfinite(c.value)
    exact = torch.where(over, c.value.to(torch.float64), c.exact)
    return replace(c, exact=exact, error=torch.where(over, 0.0, c.error))


def _decided(a: Carried, b: Carried) -> Tensor:
    """Where infinity or NaN is divided by a number other than zero: it stays what it is."""
    whole = torch.isfinite(b.exact) & (b.exact != 0) & (b.error == 0) & ~b.zone
    return ~torch.isfinite(a.exact) & ~a.zone & whole


def _flushable(c: Carried, operation: str) -> Tensor | float:
    """How much is lost if this operation takes c for zero where it may be subnormal."""
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
    exact = c.exact.to(torch.float32) == c.exact
    for operation in _INSTRUCTION_ERROR.get().flushed & {"add", "mul"}:
        for each in (a, b, c):
            exact = exact & (torch.as_tensor(_flushable(each, operation)) == 0)
    zero = torch.zeros_like(c.exact)
    return replace(
        c, error=torch.where(exact, zero, c.error), gain=torch.where(exact, zero, c.gain)
    )


def _add(operands: Sequence[Carried], sign: float = 1.0) -> Carried:
    a, b = operands
    exact = a.exact + sign * b.exact
    magnitude = exact.abs()
    if a.computed or b.computed:
        magnitude = magnitude + a.exact.abs() + b.exact.abs()
    error = a.error + b.error + ROUNDING * magnitude
    error = error + _flushable(a, "add") + _flushable(b, "add")
    # lerp takes the difference first and scales it then: what must not overflow is unscaled.
    result = _merged(a, b, exact, error, a.peak + b.peak)
    return _unless_exact(a, b, replace(result, error=error + _flushable(result, "add")))


def _subtract(operands: Sequence[Carried]) -> Carried:
    return _add(operands, -1.0)


def _multiply(operands: Sequence[Carried]) -> Carried:
    a, b = operands
    exact = a.exact * b.exact
    lost_a, lost_b = a.error + _flushable(a, "mul"), b.error + _flushable(b, "mul")
    through = a.exact.abs() * lost_b + b.exact.abs() * lost_a + lost_a * lost_b
    # A factor below one may come last: the product of the others is what must not overflow.
    peak = torch.maximum(a.peak, a.exact.abs()).clamp_min(1.0) * b.peak.clamp_min(1.0)
    result = _merged(a, b, exact, through + ROUNDING * exact.abs(), peak)
    return _unless_exact(a, b, replace(result, error=result.error + _flushable(result, "mul")))


def _divide(operands: Sequence[Carried]) -> Carried:
    a, b = operands
    exact = a.exact / b.exact
    smallest = (b.exact.abs() - b.error - _flushable(b, "div")).clamp_min(0.0)
    through = (a.error + _flushable(a, "div") + exact.abs() * b.error) / smallest
    # 0/0 of two exact zeros is NaN on every side: no error, whatever the quotient of errors is.
    through = torch.where((a.error == 0) & (b.error == 0), torch.zeros_like(through), through)
    error = through + (ROUNDING + _INSTRUCTION_ERROR.get().quotient) * exact.abs()
    # By another order the divisor may be infinite, and then the quotient is zero.
    error = torch.where(b.zone, error + exact.abs(), error)
    merged = _merged(a, b, exact, error, torch.maximum(a.peak, exact.abs()))
    magnified = torch.maximum(a.gain, b.gain) * (1.0 / smallest).clamp(1.0, 1e300)
    error = merged.error + _flushable(merged, "div")
    return replace(merged, error=error, gain=magnified + torch.zeros_like(exact))


def _sqrt(operands: Sequence[Carried]) -> Carried:
    (a,) = operands
    exact = a.exact.sqrt()
    lowest = (a.exact - a.error).clamp_min(0.0).sqrt()
    highest = (a.exact + a.error).sqrt()
    error = torch.maximum(highest - exact, exact - lowest)
    error = error + (ROUNDING + _INSTRUCTION_ERROR.get().root) * exact
    if "sqrt" in _INSTRUCTION_ERROR.get().flushed:
        flushed = (a.exact - a.error < TINY) & (a.exact > 0)
        error = torch.where(flushed, torch.maximum(error, exact), error)
    return replace(a, exact=exact, error=error, peak=exact, gain=torch.ones_like(exact))


def _negate(operands: Sequence[Carried]) -> Carried:
    (a,) = operands
    return replace(a, exact=-a.exact)


def _absolute(operands: Sequence[Carried]) -> Carried:
    (a,) = operands
    return replace(a, exact=a.exact.abs())


def _extremum(pick: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Sequence[Carried]], Carried]:
    """The larger or smaller of two, which grows with each of them: so do the ends."""

    def rule(operands: Sequence[Carried]) -> Carried:
        a, b = operands
        exact = pick(a.exact, b.exact)
        below = exact - pick(a.exact - a.error, b.exact - b.error)
        above = pick(a.exact + a.error, b.exact + b.error) - exact
        peak = torch.maximum(a.exact.abs(), b.exact.abs())
        return _merged(a, b, exact, torch.maximum(below, above), peak)

    return rule


def _same(operands: Sequence[Carried]) -> Carried:
    return operands[0]


def _where(operands: Sequence[Carried]) -> Carried:
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


def _to_integers(x: Bounded, plain: Tensor) -> Tensor:
    """A conversion to integers cuts fractions off; open where another honest number has another."""
    if x.dtype == torch.bool:
        return plain
    c = charged(x)
    low, high = (c.exact - c.error).trunc(), (c.exact + c.error).trunc()
    exact = c.exact.trunc()
    error = torch.maximum(high - exact, exact - low)
    return Bounded(replace(c, value=plain, exact=exact, error=error))


CREATORS = frozenset({"full_like", "ones_like", "zeros_like"})
RULES: dict[str, Callable[[Sequence[Carried]], Carried]] = {
    "abs": _absolute,
    "add": _add,
    "clone": _same,
    "div": _divide,
    "maximum": _extremum(torch.maximum),
    "minimum": _extremum(torch.minimum),
    "mul": _multiply,
    "neg": _negate,
    "reciprocal": lambda operands: _divide([known(torch.ones_like(operands[0].exact)), *operands]),
    "rsub": lambda operands: _subtract(operands[::-1]),
    "sqrt": _sqrt,
    "sub": _subtract,
    "where": _where,
}

# Rules that need all arguments of an operation, which are what it was called with.
WholeRule = Callable[[Callable[..., Tensor], Sequence[object], dict[str, object]], Carried]
WHOLE_RULES: dict[str, WholeRule] = {}
