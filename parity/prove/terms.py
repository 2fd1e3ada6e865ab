"""Expressions as terms of bitwuzla: bit-vectors, and IEEE numbers where an opcode computes.

A leaf is a bit-vector. The solver's numbers know one NaN, without a sign; where integers look at
the bits of a computed number, these are a bit-vector of their own that stands for the number, and
for a NaN the canonical one of PTX. An operation that has no term here is a function of which
nothing is known but that equal operands give equal results.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from twinstep.replay.names.evaluate import needed
from twinstep.replay.names.table import Row, Table

if TYPE_CHECKING:
    from bitwuzla import Sort, Term, TermManager

FORMATS = {"f16": (5, 11), "bf16": (8, 8), "f32": (8, 24), "f64": (11, 53)}
CANONICAL = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFF_FFFF, "f64": 0x7FF8 << 48}
"""NaN of PTX; that of bf16 is 0x7fff too."""
MODES = {"rn": "RNE", "rz": "RTZ", "rm": "RTN", "rp": "RTP"}
ARITHMETIC = {"add": "FP_ADD", "sub": "FP_SUB", "mul": "FP_MUL", "div": "FP_DIV", "fma": "FP_FMA"}
COMPARE = {"eq": "FP_EQUAL", "lt": "FP_LT", "le": "FP_LEQ"}
SIGNED = {"lt": "BV_SLT", "le": "BV_SLE"}
UNSIGNED = {"lt": "BV_ULT", "le": "BV_ULE", "lo": "BV_ULT", "ls": "BV_ULE"}
WORDS = {"and": "BV_AND", "or": "BV_OR", "xor": "BV_XOR", "add": "BV_ADD", "sub": "BV_SUB"}
LOGIC = {"and": "AND", "or": "OR", "xor": "XOR", "not": "NOT"}
TO_INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


class Terms:
    """Terms of the expressions of one table.

    Args:
        table: that holds them.
    """

    def __init__(self, table: Table) -> None:
        import bitwuzla

        self.table = table
        self.kinds = bitwuzla.Kind
        self.manager: TermManager = bitwuzla.TermManager()
        self.modes = bitwuzla.RoundingMode
        self.side: list[Term] = []
        self.leaves: dict[int, Term] = {}
        self.unknown: set[str] = set()
        self._words: dict[int, Term] = {}
        self._values: dict[int, tuple[str, Term]] = {}
        self._functions: dict[tuple[object, ...], Term] = {}

    def make(self, numbers: Iterable[int]) -> None:
        """Form the terms of expressions, parts first."""
        for number in needed(self.table, numbers):
            if number not in self._words and number not in self._values:
                row = self.table.rows[number]
                value = self._computed(row)
                if value is not None:
                    self._values[number] = value
                else:
                    self._words[number] = self._word(number, row)

    def bits(self, number: int) -> Term:
        """The bits of an expression; a truth value for a predicate."""
        self.make([number])
        if number not in self._words:
            kind, value = self._values[number]
            own = self.manager.mk_const(self.word_sort(sum(FORMATS[kind])), f"bits of {number}")
            self.side.append(self.term("EQUAL", self._read(own, kind), value))
            nan = self.term("FP_IS_NAN", value)
            same = self.term("EQUAL", own, self.word(CANONICAL[kind], sum(FORMATS[kind])))
            self.side.append(self.term("IMPLIES", nan, same))
            self._words[number] = own
        return self._words[number]

    def number(self, number: int, kind: str) -> Term:
        """The value of an expression in a float format."""
        self.make([number])
        known = self._values.get(number)
        return known[1] if known and known[0] == kind else self._read(self.bits(number), kind)

    # --- words of the solver ---------------------------------------------------------------

    def term(self, kind: str, *args: Term, indices: tuple[int, ...] = ()) -> Term:
        """A term by the name of its kind."""
        return self.manager.mk_term(getattr(self.kinds, kind), list(args), list(indices))

    def word_sort(self, width: int) -> Sort:
        """The sort of bit-vectors of a width."""
        return self.manager.mk_bv_sort(width)

    def word(self, bits: int, width: int) -> Term:
        """A constant bit-vector."""
        return self.manager.mk_bv_value(self.word_sort(width), f"{bits:0{width}b}", 2)

    def _read(self, bits: Term, kind: str) -> Term:
        return self.term("FP_TO_FP_FROM_BV", bits, indices=FORMATS[kind])

    def _mode(self, word: str) -> Term:
        return self.manager.mk_rm_value(getattr(self.modes, MODES[word]))

    def _flushed(self, value: Term, kind: str) -> Term:
        sort = self.manager.mk_fp_sort(*FORMATS[kind])
        zero = self.term(
            "ITE",
            self.term("FP_IS_NEG", value),
            self.manager.mk_fp_neg_zero(sort),
            self.manager.mk_fp_pos_zero(sort),
        )
        return self.term("ITE", self.term("FP_IS_SUBNORMAL", value), zero, value)

    # --- floats ----------------------------------------------------------------------------

    def _computed(self, row: Row) -> tuple[str, Term] | None:
        """The value of an opcode of floats; None for any other."""
        if row.granules == 0 or "." not in row.op:
            return None
        name, *middle, kind = row.op.split(".")
        if name == "cvt" and middle:
            return self._converted(row, middle[:-1], middle[-1], kind)
        if kind not in FORMATS or set(middle) - {*MODES, "ftz", "NaN"}:
            return None
        flush = "ftz" in middle
        args = [self.number(n, kind) for n in row.args]
        if flush:
            args = [self._flushed(a, kind) for a in args]
        found = self._operation(name, middle, kind, args)
        if found is None:
            return None
        return kind, self._flushed(found, kind) if flush else found

    def _operation(self, name: str, middle: list[str], kind: str, args: list[Term]) -> Term | None:
        mode = self._mode(next((m for m in middle if m in MODES), "rn"))
        if name in ARITHMETIC and len(args) == (3 if name == "fma" else 2):
            return self.term(ARITHMETIC[name], mode, *args)
        if name == "sqrt" and set(middle) & set(MODES):
            return self.term("FP_SQRT", mode, *args)
        if name == "rcp" and set(middle) & set(MODES):
            one = {"f16": 0x3C00, "f32": 0x3F80_0000, "f64": 0x3FF << 52}[kind]
            unit = self._read(self.word(one, sum(FORMATS[kind])), kind)
            return self.term("FP_DIV", mode, unit, *args)
        if name in ("neg", "abs"):
            return self.term(f"FP_{name.upper()}", *args)
        if name in ("min", "max") and len(args) == 2:
            return self._extremum(name, "NaN" in middle, kind, *args)
        return None

    def _extremum(self, name: str, strict: bool, kind: str, a: Term, b: Term) -> Term:
        """The smaller or larger of two numbers; -0 is below 0, a NaN loses unless it is `.NaN`."""
        less = self.term("FP_LT", a, b)
        zeros = self.term("AND", self.term("FP_IS_ZERO", a), self.term("FP_IS_ZERO", b))
        below = self.term("OR", less, self.term("AND", zeros, self.term("FP_IS_NEG", a)))
        chosen = self.term("ITE", below, *((a, b) if name == "min" else (b, a)))
        odd = [self.term("FP_IS_NAN", x) for x in (a, b)]
        if strict:
            nan = self.manager.mk_fp_nan(self.manager.mk_fp_sort(*FORMATS[kind]))
            return self.term("ITE", self.term("OR", *odd), nan, chosen)
        return self.term("ITE", odd[0], b, self.term("ITE", odd[1], a, chosen))

    def _converted(
        self, row: Row, middle: list[str], target: str, source: str
    ) -> tuple[str, Term] | None:
        if target not in FORMATS:
            return None
        modes = [m for m in middle if m in MODES]
        if source not in FORMATS:
            if set(middle) - set(MODES):
                return None
            signed = "SBV" if source[0] == "s" else "UBV"
            bits, mode = self.bits(row.args[0]), self._mode(modes[0] if modes else "rn")
            kind = f"FP_TO_FP_FROM_{signed}"
            return target, self.term(kind, mode, bits, indices=FORMATS[target])
        whole = [m for m in middle if m in TO_INTEGRAL]
        if set(middle) - {*MODES, *TO_INTEGRAL, "ftz"}:
            return None
        value = self.number(row.args[0], source)
        if "ftz" in middle:
            if whole or "f32" not in (target, source):
                return None
            if source == "f32":
                value = self._flushed(value, source)
        if whole:
            if target != source:
                return None
            return target, self.term("FP_RTI", self._mode(TO_INTEGRAL[whole[0]]), value)
        mode = self._mode(modes[0] if modes else "rn")
        found = self.term("FP_TO_FP_FROM_FP", mode, value, indices=FORMATS[target])
        return target, self._flushed(
            found, target
        ) if "ftz" in middle and target == "f32" else found

    # --- bits ------------------------------------------------------------------------------

    def _word(self, number: int, row: Row) -> Term:
        width = 16 * row.granules
        if row.op == "leaf":
            self.leaves[number] = self.manager.mk_const(
                self.word_sort(width), f"{self.table.leaves[row.args[0]]} ({number})"
            )
            return self.leaves[number]
        if row.op == "const":
            if not row.granules:
                return self.manager.mk_true() if row.args[0] else self.manager.mk_false()
            return self.word(row.args[0], width)
        if row.op == "part":
            at = 16 * (self.table.constant_bits(row.args[1]) or 0)
            return self._cut(self.bits(row.args[0]), at + 15, at)
        found = None
        if row.op in LOGIC or "." in row.op:
            found = self._predicate(row) if row.granules == 0 else self._integer(row, width)
        if found is not None:
            return found
        args = [self.bits(n) for n in row.args]
        if row.op == "if":
            return self.term("ITE", *args)
        if row.op == "join":
            return self.term("BV_CONCAT", *reversed(args)) if len(args) > 1 else args[0]
        return self._function(row, args)

    def _cut(self, bits: Term, high: int, low: int) -> Term:
        return self.term("BV_EXTRACT", bits, indices=(high, low))

    def _predicate(self, row: Row) -> Term | None:
        if row.op in LOGIC:
            return self.term(LOGIC[row.op], *(self.bits(n) for n in row.args))
        name, *middle, kind = row.op.split(".")
        if kind in FORMATS and name in COMPARE and not set(middle) - {"ftz"}:
            values = [self.number(n, kind) for n in row.args]
            if "ftz" in middle:
                values = [self._flushed(v, kind) for v in values]
            return self.term(COMPARE[name], *values)
        if kind[:1] not in ("b", "u", "s") or not kind[1:].isdigit() or middle:
            return None
        args = [self.bits(n) for n in row.args]
        if name == "eq":
            return self.term("EQUAL", *args)
        words = SIGNED if kind[0] == "s" else UNSIGNED
        return self.term(words[name], *args) if name in words else None

    def _integer(self, row: Row, width: int) -> Term | None:
        name, *middle, kind = row.op.split(".")
        if kind[:1] not in ("b", "u", "s") or not kind[1:].isdigit():
            return None
        if name == "cvt":
            own = int(kind[1:])
            if middle[-1][0] == "f" or middle[:-1] or middle[-1] == "bf16":
                return None
            bits = self._resized(self.bits(row.args[0]), own, int(middle[-1][1:]), kind[0] == "s")
            return self._resized(bits, int(middle[-1][1:]), width, middle[-1][0] == "s")
        args = [self.bits(n) for n in row.args]
        if not middle:
            return self._plain(name, kind, args, row, width)
        if middle == ["lo"] and name in ("mul", "mad"):
            product = self.term("BV_MUL", *args[:2])
            return self.term("BV_ADD", product, args[2]) if name == "mad" else product
        if middle == ["wide"] and name in ("mul", "mad"):
            wide = [self._resized(a, width // 2, width, kind[0] == "s") for a in args[:2]]
            product = self.term("BV_MUL", *wide)
            return self.term("BV_ADD", product, args[2]) if name == "mad" else product
        return None

    def _plain(self, name: str, kind: str, args: list[Term], row: Row, width: int) -> Term | None:
        if name in WORDS and len(args) == 2:
            return self.term(WORDS[name], *args)
        if name in ("not", "neg"):
            return self.term(f"BV_{name.upper()}", *args)
        if name in ("shl", "shr"):
            amount = self._amount(args[1], 16 * self.table.rows[row.args[1]].granules, width)
            shift = "BV_SHL" if name == "shl" else "BV_ASHR" if kind[0] == "s" else "BV_SHR"
            return self.term(shift, args[0], amount)
        if name in ("min", "max") and kind[0] in "us":
            less = self.term("BV_SLT" if kind[0] == "s" else "BV_ULT", *args)
            return self.term("ITE", less, *(args if name == "min" else args[::-1]))
        if name in ("div", "rem") and kind[0] in "us" and self.table.constant_bits(row.args[1]):
            sign = "S" if kind[0] == "s" else "U"
            return self.term(f"BV_{sign}{name.upper()}", *args)
        return None

    def _amount(self, bits: Term, own: int, width: int) -> Term:
        """The amount of a shift, as wide as what is shifted; large ones stay large."""
        if own <= width:
            return self._resized(bits, own, width, False)
        large = self.term("BV_UGE", bits, self.word(width, own))
        return self.term("ITE", large, self.word(width, width), self._cut(bits, width - 1, 0))

    def _resized(self, bits: Term, own: int, width: int, signed: bool) -> Term:
        if width == own:
            return bits
        if width < own:
            return self._cut(bits, width - 1, 0)
        kind = "BV_SIGN_EXTEND" if signed else "BV_ZERO_EXTEND"
        return self.term(kind, bits, indices=(width - own,))

    def _function(self, row: Row, args: list[Term]) -> Term:
        """An operation of which nothing is known."""
        self.unknown.add(row.op)
        sorts = [a.sort() for a in args]
        key = (row.op, row.granules, *(str(s) for s in sorts))
        if key not in self._functions:
            result = self.word_sort(16 * row.granules) if row.granules else self._truth
            sort = self.manager.mk_fun_sort(sorts, result)
            self._functions[key] = self.manager.mk_const(sort, row.op)
        return self.term("APPLY", self._functions[key], *args)

    @cached_property
    def _truth(self) -> Sort:
        return self.manager.mk_bool_sort()
