"""Fused operations of torch on names, in the form that they have on this machine.

`addcmul`, `add` and `sub` with `alpha`, and `lerp` round twice where torch has no fused product
for its CPU, and once where it has (AVX2, AVX512). The form is found by experiment, on lists of
every length and stride that a loop of torch treats apart: the one that explains every bit, or none,
and then the operation is refused. float32 roots are not correctly rounded; they are a function of
their own: nothing is taken for granted but that equal numbers have equal roots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from twinstep.replay.dtypes import Array
from twinstep.replay.names.evaluate import evaluate_row
from twinstep.replay.names.session import NotNamed, Session

FORMATS = {torch.float32: ("f32", 2), torch.float64: ("f64", 4)}
SCALARS = {"addcmul": "value", "addcdiv": "value", "add": "alpha", "sub": "alpha"}
"""The plain number among an operation's keywords."""

Apply = Callable[..., Any]
"""An opcode applied to numbers of expressions, or to bits."""


def _formula(
    word: str, apply: Apply, fused: bool, a: Any, b: Any, c: Any, one: Any, half: Any
) -> Any:
    """An operation in terms of opcodes.

    Args:
        word: `addcmul`, `addcdiv`, `add`, `sub` or `lerp`.
        apply: an opcode to its operands.
        fused: a product and the sum after it are rounded together.
        a: the first operand.
        b: the second; of `add` and `sub` the one that `c` multiplies.
        c: the third, with the plain number in it: `value x`, `alpha`, `weight`.
        one: 1.
        half: 0.5.
    """

    def _product_and(x: Any, y: Any, z: Any) -> Any:
        return apply("fma.rn", x, y, z) if fused else apply("add.rn", z, apply("mul.rn", x, y))

    if word == "addcdiv":
        return apply("add.rn", a, apply("div.rn", c, b))
    if word == "sub":
        c = apply("neg", c)
    if word != "lerp":
        return _product_and(c, b, a)
    apart = apply("sub.rn", b, a)
    near = _product_and(c, apart, a)
    far = _product_and(apply("neg", apart), apply("sub.rn", one, c), b)
    return apply("if", apply("lt", apply("abs", c), half), near, far)


def extremum(
    mode: Naming, name: str, func: Callable[..., Tensor], pair: Sequence[Array], target: Tensor
) -> Array:
    """Numbers of a maximum of constants and selections of them; of others it is refused."""
    table = mode.session.table

    def _single(a: int, b: int) -> int:
        """Of two constants, or of selections of them, case by case."""
        for at, number in enumerate((a, b)):
            row = table.rows[number]
            if row.op == "if":
                sides = [_single(*((n, b) if at == 0 else (a, n))) for n in row.args[1:]]
                return table.row("if", (row.args[0], *sides), 2, row.site)
        bits = [table.constant_bits(a), table.constant_bits(b)]
        if None in bits and target.dtype == torch.float32:
            mode.assumed["minima and maxima of +0 and -0 take the operand that PTX takes"] = None
            return table.row(f"{name.removesuffix('imum')}.NaN.f32", (a, b), 2)
        if None in bits or target.dtype != torch.float32:
            raise mode.refusal(name)
        values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
        found = int(func(values[0], values[1]).view(torch.int32))
        return table.const(found % (1 << 32), 2)

    numbers = [_single(int(a), int(b)) for a, b in np.broadcast(*pair)]
    return np.array(numbers, np.int64).reshape(np.broadcast(*pair).shape)


class Naming(Protocol):
    """Torch on names, as far as these operations need it."""

    session: Session
    given: int | None
    assumed: dict[str, None]

    def each(self, op: str, columns: Sequence[Array], granules: int) -> Array:
        """Numbers of one operation."""

    def converted(self, numbers: Array, source: torch.dtype, target: torch.dtype) -> Array:
        """Numbers of values in another type."""

    def refusal(self, name: str) -> NotNamed:
        """The error for an operation that is not followed."""


@cache
def form(word: str, dtype: torch.dtype) -> bool | None:
    """True for a fused form, False for one that rounds twice, None for neither."""
    known = [fused for fused in (False, True) if all(_explained(word, dtype, fused))]
    return known[0] if len(known) == 1 or word == "addcdiv" and known else None


def _explained(word: str, dtype: torch.dtype, fused: bool) -> Iterator[bool]:
    """For each experiment, whether a form explains all its bits."""
    kind, granules = FORMATS[dtype]
    whole = np.dtype(f"u{2 * granules}")

    def _applied(op: str, *bits: Array) -> Array:
        if op == "if":
            return np.where(bits[0], bits[1], bits[2])
        return evaluate_row(f"{op}.{kind}", bits)

    def _bits(x: Tensor) -> Array:
        return np.ascontiguousarray(x.contiguous().numpy()).view(whole).reshape(1, -1)

    for a, b, c in _experiments(dtype):
        for number in (0.3, 0.7, -1.9) if word != "add" else (0.3, -1.9):
            n, one, half = (torch.tensor([x], dtype=dtype) for x in (number, 1.0, 0.5))
            third = n.expand(a.shape) if word in ("add", "sub", "lerp") else n * b
            second = c if word in ("addcmul", "addcdiv") else b
            given = (_bits(x) for x in (a, second, third, one, half))
            with np.errstate(all="ignore"):
                expected = _formula(word, _applied, fused, *given)
            keyword = SCALARS.get(word)
            operands = (a, b, c) if word in ("addcmul", "addcdiv") else (a, b)
            function = getattr(torch, word)
            results = [function(*operands, **{keyword: number})] if keyword else []
            if word == "lerp":
                results = [function(a, b, number), function(a, b, n.expand(a.shape).clone())]
            for got in map(_bits, results):
                yield bool(np.array_equal(got, np.broadcast_to(expected, got.shape)))


def _experiments(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Operands of every length and stride that a loop of torch treats apart."""
    random = torch.Generator().manual_seed(1)

    def _drawn(length: int) -> Tensor:
        size = torch.exp2(torch.randint(-3, 4, (length,), generator=random).to(dtype))
        return torch.randn(length, generator=random, dtype=dtype) * size

    for length in (*range(1, 36), 203, 1003, 40_003):
        yield _drawn(length), _drawn(length), _drawn(length)
    for length in (5, 19, 67, 1003):
        yield _drawn(2 * length)[::2], _drawn(length), _drawn(3 * length)[::3]
        yield _drawn(length + 1)[1:], _drawn(length), _drawn(length + 3)[3:]


@cache
def root_is_a_function() -> bool:
    """True if torch's float32 root of a number is the same wherever it stands in a tensor."""
    for x, *_ in _experiments(torch.float32):
        values, alone = x.abs(), [y.abs().sqrt() for y in x]
        apart = torch.stack([values, values, values], dim=1)[:, 1].sqrt()
        if not torch.equal(values.sqrt(), torch.stack(alone)) or not torch.equal(
            apart, values.sqrt()
        ):
            return False
    return True


def fused(
    mode: Naming,
    word: str,
    args: Sequence[object],
    words: Mapping[str, object],
    target: Tensor,
    operand: Callable[[object], Array],
) -> Array | None:
    """Numbers of a fused operation of torch; None for any other, and where a form is not known.

    Args:
        mode: gives numbers to expressions.
        word: name of the operation, without an underscore at its end.
        args: positional arguments.
        words: keywords.
        target: the result.
        operand: numbers of an argument.
    """
    keyword = SCALARS.get(word)
    plain = words.get(keyword, 1) if keyword else 1
    operands = args[: 3 if word in ("addcmul", "addcdiv") else 2]
    if target.dtype not in FORMATS or word not in (*SCALARS, "lerp"):
        return None
    if word in ("add", "sub") and plain == 1 and mode.given is None:
        return None
    tensors = [x for x in (*args, *words.values()) if isinstance(x, Tensor)]
    # An operand that is one number for many elements has a loop, and roundings, of its own.
    alike = all(
        t.dtype == target.dtype and t.shape == target.shape and 0 not in t.stride() for t in tensors
    )
    if not alike or not isinstance(operands[1], Tensor):
        return None
    rounded = form(word, target.dtype)
    if rounded is None:
        return None
    kind, granules = FORMATS[target.dtype]

    def _applied(op: str, *numbers: Array) -> Array:
        g = 0 if op == "lt" else granules
        columns = np.broadcast_arrays(*numbers)
        return mode.each(op if op == "if" else f"{op}.{kind}", columns, g)

    if word == "lerp" and mode.given is None:
        plain = args[2]
    given = operand(plain)
    if mode.given is not None:
        wide = np.full(target.shape, mode.given, np.int64)
        given, mode.given = mode.converted(wide, torch.float64, target.dtype), None
    if word != "addcdiv":
        words_of = "one rounding for product and sum" if rounded else "two roundings"
        mode.assumed[f"torch's {word} has {words_of} (measured)"] = None
    numbers = [operand(x) for x in operands]
    if word in ("addcmul", "addcdiv"):
        a, b, second = numbers
        third = _applied("mul.rn", given, b)
    else:
        (a, second), third = numbers, given
    one, half = operand(1.0), operand(0.5)
    return np.asarray(_formula(word, _applied, rounded, a, second, third, one, half))
