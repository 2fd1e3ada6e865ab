"""The integers of a kernel as affine expressions of its program and its size.

An integer is a + b p + c s in every thread: p is the number of the program, s what the size exceeds
the end of its chunk by, and a, b, c are known. Loops run as they would, since what decides
them is known; what is not affine, and what comes from data, is marked so, and is an error where it
reaches an address or decides where threads go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from twinstep.parity.prove.affine_values import (
    ANY,
    KNOWN,
    SAME,
    Bounds,
    Value,
    chosen,
    data,
    is_plain,
    logic,
    merged,
    number,
    product,
    total,
)
from twinstep.replay.dtypes import Array
from twinstep.replay.ptx.flow import family
from twinstep.replay.ptx.syntax import Imm, Instruction, Kernel, Mem, Operand, Reg, Symbol, Vec

FAR, END, STEPS = 1 << 61, 1 << 30, 200_000


class NotAffine(Exception):
    """An address or a branch is no affine expression."""


class Branch(Exception):
    """A branch on data whose side is not chosen yet.

    Attributes:
        at: index of its instruction.
        own: each thread may have data of its own.
    """

    def __init__(self, at: int, own: bool) -> None:
        super().__init__(at)
        self.at, self.own = at, own


Access = Callable[[str, Instruction, Array, Value, int, bool], None]
"""Called with what is done, the threads, the first byte, the bytes, and whether data decides it."""


@dataclass
class Machine:
    """Runs the integers of one kernel.

    Attributes:
        kernel: the code.
        bounds: the domain.
        params: values of parameters, by name.
        special: values of special registers.
        lanes: number of threads.
        access: is told of each access of global memory.
        sides: chosen sides of branches on data.
    """

    kernel: Kernel
    bounds: Bounds
    params: Mapping[str, Value]
    special: Mapping[str, Value]
    lanes: int
    access: Access
    sides: Mapping[int, bool]
    registers: dict[str, Value] = field(default_factory=dict)

    def run(self) -> None:
        """Run all threads to their end, those that are behind first.

        Raises:
            NotAffine: an address or a branch is no affine expression.
            Branch: a branch on data has no side yet.
        """
        pc = np.zeros(self.lanes, np.int64)
        code = self.kernel.code
        for _ in range(STEPS):
            at = int(pc.min())
            if at >= len(code):
                return
            mask = pc == at
            pc[mask] = self._step(code[at], at, mask, pc)[mask]
        raise NotAffine("the kernel runs on and on")

    def _step(self, i: Instruction, at: int, mask: Array, pc: Array) -> Array:
        name = family(i)
        taken = mask
        maybe = False
        if i.guard is not None:
            guard = self._guard(i.guard)
            held = np.broadcast_to(guard.state, mask.shape)[mask]
            if held.any() and name in ("bra", "ret", "exit"):
                if name == "bra" and self._again(i, at, mask):
                    return pc + 1
                if at not in self.sides:
                    raise Branch(at, bool(held.max() == ANY))
                side = np.broadcast_to(np.bool_(self.sides[at]), mask.shape)
                taken = mask & np.where(guard.state == KNOWN, guard.a != 0, side)
            else:
                maybe = bool(held.any())
                taken = mask & ((guard.a != 0) | (guard.state != KNOWN))
        if name in ("ret", "exit"):
            return np.where(taken, END, pc + 1)
        if name == "bra":
            target = i.operands[0]
            assert isinstance(target, (Symbol, Reg))
            return np.where(taken, self.kernel.labels[target.name], pc + 1)
        if name in ("brx", "call"):
            raise NotAffine(f"not followed: {_shown(i)}")
        if taken.any():
            self._execute(name, i, taken, maybe)
        return pc + 1

    def _again(self, i: Instruction, at: int, mask: Array) -> bool:
        """Leave a loop of numbers whose end data decides; all that it writes is not known then."""
        start = self.kernel.labels[getattr(i.operands[0], "name", "")]
        body = self.kernel.code[start:at]
        if start > at:
            return False
        if any(family(x) in (*TOUCHES, "bra", "ret", "exit", "call") for x in body):
            raise NotAffine(f"data decides how often a loop touches memory: {_shown(i)}")
        for x in body:
            for target in _targets(x.operands[0]) if x.operands else ():
                self._put(target, data(), mask, False)
        return True

    def _guard(self, register: Reg) -> Value:
        found = self._register(register.name)
        return logic("not", [found]) or found if register.negated else found

    def _register(self, name: str) -> Value:
        return self.registers.get(name) or self.special.get(name.lstrip("%")) or data()

    # --- instructions ----------------------------------------------------------------------

    def _execute(self, name: str, i: Instruction, mask: Array, maybe: bool) -> None:
        if name in TOUCHES:
            self._memory(name, i, mask, maybe)
            return
        if not i.operands or isinstance(i.operands[0], (Mem, Symbol, Imm)):
            return
        found = None
        if not isinstance(i.operands[0], Vec):
            found = self._value(name, i)
        for target in _targets(i.operands[0]):
            self._put(target, found or self._unknown(i), mask, maybe)

    def _unknown(self, i: Instruction) -> Value:
        """A result that depends on what its operands depend on."""
        if family(i) in ("shfl", "redux", "vote", "match", "activemask", "elect"):
            return data()
        states = [self._register(r).state for r in _sources(i)]
        worst: Array = np.asarray(SAME)
        for state in states:
            worst = np.maximum(worst, np.where(state == KNOWN, SAME, state))
        unaware = any(self._register(r).state.max() == KNOWN for r in _sources(i))
        # An integer that is known differs from thread to thread.
        return data(ANY if unaware or not states else worst)

    def _put(self, target: Reg, value: Value, mask: Array, maybe: bool) -> None:
        if maybe:
            value = data()
        old = self.registers.get(target.name)
        if old is not None and not mask.all():
            value = merged(mask, value, old)
        self.registers[target.name] = value

    def _memory(self, name: str, i: Instruction, mask: Array, maybe: bool) -> None:
        parts = i.parts
        writes = name in ("st", "red")
        if "param" in parts and name == "ld":
            self._parameter(i, mask)
            return
        place = i.operands[0 if writes else 1]
        shared = any(p.startswith(("shared", "local", "const")) for p in parts)
        address = None
        if not shared:
            address = self._address(i, place)
            count = len(_targets(i.operands[1 if writes else 0])) if name != "red" else 1
            size = _bytes(parts[-1]) * count
            self.access("write" if writes or name == "atom" else "read", i, mask, address, size,
                        maybe or name in ("red", "atom"))  # fmt: skip
        if writes:
            return
        state: int = ANY
        if address is not None and name != "atom":
            held = np.broadcast_to(address.a, mask.shape)[mask]
            fixed = not (address.b.any() or address.c.any()) and (held == held[0]).all()
            tags = np.broadcast_to(address.tag, mask.shape)[mask]
            state = SAME if fixed and (tags == tags[0]).all() else ANY
        for target in _targets(i.operands[0]):
            self._put(target, data(state), mask, maybe)

    def _parameter(self, i: Instruction, mask: Array) -> None:
        place = i.operands[1]
        base = getattr(getattr(place, "base", place), "name", "")
        for target in _targets(i.operands[0]):
            self._put(target, self.params.get(base) or data(SAME), mask, False)

    def _address(self, i: Instruction, place: Operand) -> Value:
        if not isinstance(place, Mem) or not isinstance(place.base, Reg):
            raise NotAffine(f"not followed: {_shown(i)}")
        base = self._read(place.base, "s64")
        return Value(base.a + place.offset, base.b, base.c, base.tag, base.state)

    # --- integers --------------------------------------------------------------------------

    def _value(self, name: str, i: Instruction) -> Value | None:
        """The result of an instruction; None where it is not affine."""
        parts, args = i.parts, i.operands[1:]
        kind = parts[-1]
        if kind == "pred":
            return logic(name, [self._predicate(x) for x in args])
        if kind not in KINDS:
            return None
        if name == "setp":
            return self._compared(parts, args)
        if name == "selp":
            return self._selected(kind, args)
        if name == "cvt":
            return self._read(args[0], kind) if parts[-2] in KINDS and len(parts) == 3 else None
        if any(isinstance(x, (Vec, Mem, Symbol)) for x in args):
            return None
        values = [self._read(x, kind) for x in (args[:2] if name == "mad" else args)]
        if any((v.state != KNOWN).all() for v in values):
            return None
        if name == "mov":
            return values[0]
        if name == "mul" and parts[1] in ("lo", "wide"):
            return self._checked(product(values[0], values[1]), values)
        if name == "mad" and parts[1] in ("lo", "wide"):
            wide = f"s{2 * int(kind[1:])}" if parts[1] == "wide" else kind
            third = self._read(args[2], wide)
            return self._checked(total(product(values[0], values[1]), third, 1), [*values, third])
        if len(parts) != 2 or len(values) != 2:
            return None
        a, b = values
        if name in ("add", "sub"):
            return self._checked(total(a, b, 1 if name == "add" else -1), values)
        a, b = (self._positive(v, kind[0] == "u" and name not in ("shl", "and")) for v in values)
        if name in ("min", "max"):
            low, high = self._order(a, b)
            first = high <= 0 if name == "min" else low >= 0
            second = low >= 0 if name == "min" else high <= 0
            found = chosen(first, a, b)
            undecided = np.where(first | second, KNOWN, ANY)
            return self._checked(found, values, undecided)
        return self._bits(name, a, b, kind)

    def _bits(self, name: str, a: Value, b: Value, kind: str) -> Value | None:
        """Shifts and masks: of plain numbers, or where they are products, remainders or sums."""
        plain = [is_plain(v) for v in (a, b)]
        if name in ("shl", "shr") and plain[1].all():
            unit = np.left_shift(np.int64(1), np.clip(b.a, 0, 62))
            if name == "shl":
                return self._checked(product(a, number(unit)), [a, b])
            exact = (a.b % unit == 0) & (a.c % unit == 0) & (a.tag < 0)
            found = Value(a.a >> b.a, a.b // unit, a.c // unit, a.tag, a.state)
            return self._checked(found, [a, b], np.where(exact, KNOWN, ANY))
        word = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.get(name)
        if word is None:
            return None
        both = plain[0] & plain[1]
        found = number(word(a.a, b.a))
        if name == "or" and not both.all():
            apart = both
            for x, y in ((a, b), (b, a)):
                top = np.int64(1 << int(max(int(y.a.max()), 0)).bit_length())
                multiple = (x.a % top == 0) & (x.b % top == 0) & (x.c % top == 0) & (x.tag < 0)
                apart = apart | (multiple & is_plain(y) & (y.a >= 0))
            return self._checked(total(a, b, 1), [a, b], np.where(apart & ~both, KNOWN, ANY))
        if name == "and" and not both.all():
            for x, y in ((a, b), (b, a)):
                unit = y.a + 1
                ones = is_plain(y) & (unit > 0) & (unit & y.a == 0)
                if ones.all() and ((x.b % unit == 0) & (x.c % unit == 0) & (x.tag < 0)).all():
                    return self._checked(number(x.a & y.a), [a, b])
        return self._checked(found, [a, b], np.where(both, KNOWN, ANY))

    def _checked(self, v: Value, operands: list[Value], extra: Array | int = KNOWN) -> Value:
        """A result whose operands are known, and which stays within 61 bits."""
        state = np.asarray(extra)
        for operand in operands:
            state = np.maximum(state, np.where(operand.state == KNOWN, KNOWN, ANY))
        inside = (self.bounds.low(v) > -FAR) & (self.bounds.high(v) < FAR)
        tag = np.where(v.tag < -1, ANY, KNOWN)
        state = np.maximum(np.maximum(state, np.where(inside, KNOWN, ANY)), tag)
        return Value(v.a, v.b, v.c, v.tag, state.astype(np.int64))

    def _positive(self, v: Value, unsigned: bool) -> Value:
        """A number that is read without a sign: one below 0 is not known."""
        if not unsigned:
            return v
        below = (self.bounds.low(v) < 0) & (v.tag < 0)
        return Value(v.a, v.b, v.c, v.tag, np.where(below, ANY, v.state))

    def _order(self, a: Value, b: Value) -> tuple[Array, Array]:
        """Least and largest difference of two numbers."""
        gap = total(a, b, -1)
        return self.bounds.low(gap), self.bounds.high(gap)

    def _compared(self, parts: tuple[str, ...], args: tuple[Operand, ...]) -> Value | None:
        if len(parts) != 3 or len(args) != 2:
            return None
        unsigned = parts[-1][0] == "u" or parts[1] in ("lo", "ls", "hi", "hs")
        a, b = (self._positive(self._read(x, parts[-1]), unsigned) for x in args)
        low, high = self._order(a, b)
        word = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(parts[1], parts[1])
        yes = {"eq": (low == 0) & (high == 0), "ne": (low > 0) | (high < 0), "lt": high < 0,
               "le": high <= 0, "gt": low > 0, "ge": low >= 0}[word]  # fmt: skip
        no = {"eq": (low > 0) | (high < 0), "ne": (low == 0) & (high == 0), "lt": low >= 0,
              "le": low > 0, "gt": high <= 0, "ge": high < 0}[word]  # fmt: skip
        # An address is no small number: what is compared with 0 is whether there is one.
        one = (a.tag >= 0) != (b.tag >= 0)
        yes, no = (np.where(one, word == "ne", yes), np.where(one, word == "eq", no))
        mixed = np.where(one & (word not in ("eq", "ne")), ANY, KNOWN)
        state = np.where(yes | no, KNOWN, ANY)
        unknown = (a.state != KNOWN) | (b.state != KNOWN)
        found = np.where(unknown, ANY, np.maximum(state, mixed))
        # Data that is one value in all threads, beside a plain constant, decides for all of them.
        shared = [v for v in (a, b) if v.state.ndim == 0 and v.state == SAME]
        rest = [v for v in (a, b) if all(v is not x for x in shared)]
        if shared and all(v.a.ndim == 0 and v.state.ndim == 0 and is_plain(v) for v in rest):
            found = np.asarray(max([SAME, *(int(v.state) for v in rest)]))
        result = number(yes.astype(np.int64))
        result.state = np.asarray(found, np.int64)
        return result

    def _selected(self, kind: str, args: tuple[Operand, ...]) -> Value:
        a, b = (self._read(x, kind) for x in args[:2])
        p = self._predicate(args[2])
        found = chosen(p.a != 0, a, b)
        state = np.where(p.state == KNOWN, found.state, ANY)
        return Value(found.a, found.b, found.c, found.tag, state)

    def _predicate(self, operand: Operand) -> Value:
        if isinstance(operand, Imm):
            return number(int(bool(operand.value)))
        assert isinstance(operand, Reg)
        return self._guard(operand)

    def _read(self, operand: Operand, kind: str) -> Value:
        """An operand as a number of a type; what may have wrapped is not known."""
        if isinstance(operand, Imm):
            value = int(operand.value) if isinstance(operand.value, int) else 0
            bits = int(kind[1:])
            value %= 1 << bits
            if kind[0] != "u" or bits == 64:
                value -= (value >> (bits - 1)) << bits
            return number(value) if isinstance(operand.value, int) else data()
        assert isinstance(operand, Reg), operand
        v = self._register(operand.name)
        bits = int(kind[1:])
        if bits == 64:
            return v
        low = 0 if kind[0] == "u" else -(1 << (bits - 1))
        turn = (self.bounds.low(v) - low) >> bits
        moved = Value(v.a - (turn << bits), v.b, v.c, v.tag, v.state)
        fits = (self.bounds.high(moved) < low + (1 << bits)) & (v.tag < 0)
        return Value(moved.a, v.b, v.c, v.tag, np.where(fits, v.state, np.maximum(v.state, ANY)))


TOUCHES = ("st", "red", "atom", "ld", "ldu", "cp")
KINDS = frozenset(f"{sign}{bits}" for sign in "bus" for bits in (16, 32, 64))


def _targets(operand: Operand) -> list[Reg]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    return [x for x in items if isinstance(x, Reg)]


def _sources(i: Instruction) -> list[str]:
    found = []
    for operand in i.operands[1:]:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        found += [x.name for x in items if isinstance(x, Reg)]
    return found


def _bytes(kind: str) -> int:
    return max(int("".join(c for c in kind if c.isdigit()) or 32) // 8, 1) if kind != "bf16" else 2


def _shown(i: Instruction) -> str:
    return f"`{i.text}`, {i.place}"
