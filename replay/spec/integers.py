"""The meaning of integer and bit instructions, in Python's unbounded integers.

The other half of the independent statement (see `floats`). Each function takes bit patterns and
returns a bit pattern.
"""

from __future__ import annotations

from collections.abc import Callable

from twinstep.replay.spec.floats import clamped, integer, wrapped

Meaning = Callable[..., int]


def _width(kind: str) -> int:
    return int(kind.removesuffix("x2")[1:])


def meaning_of(opcode: str) -> Meaning:
    """The function on bit patterns of an integer or bit instruction.

    Raises:
        KeyError: if there is no statement for it.
    """
    parts = opcode.split(".")
    return _TABLE[parts[0]](parts)


def _arithmetic(parts: list[str]) -> Meaning:
    family, kind = parts[0], parts[-1]
    sat = "sat" in parts

    def function(a: int, b: int, c: int = 0) -> int:
        x, y = integer(a, kind), integer(b, kind)
        if family in ("add", "sub"):
            value = x + y if family == "add" else x - y
            return wrapped(clamped(value, kind) if sat else value, kind)
        if family in ("min", "max"):
            found = min(x, y) if family == "min" else max(x, y)
            return wrapped(max(found, 0) if "relu" in parts else found, kind)
        if family == "sad":
            return wrapped(abs(x - y) + c, kind)
        return _division(family, x, y, kind)

    return function


def _division(family: str, x: int, y: int, kind: str) -> int:
    if y == 0:
        return wrapped(-1 if family == "div" else x, kind)
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return wrapped(quotient if family == "div" else x - quotient * y, kind)


def _product(parts: list[str]) -> Meaning:
    kind, part = parts[-1], parts[1]
    bits = _width(kind)
    result = f"u{2 * bits}" if part == "wide" else kind

    def function(a: int, b: int, c: int = 0) -> int:
        full = integer(a, kind) * integer(b, kind)
        return wrapped((full >> bits if part == "hi" else full) + c, result)

    return function


def _unary(parts: list[str]) -> Meaning:
    family, kind = parts[0], parts[-1]
    bits = 1 if kind == "pred" else _width(kind)
    functions: dict[str, Meaning] = {
        "abs": lambda a: wrapped(abs(integer(a, kind)), kind),
        "neg": lambda a: wrapped(-integer(a, kind), kind),
        "not": lambda a: a ^ ((1 << bits) - 1),
        "cnot": lambda a: int(a == 0),
        "popc": lambda a: a.bit_count(),
        "clz": lambda a: bits - a.bit_length(),
        "brev": lambda a: int(format(a, f"0{bits}b")[::-1], 2),
    }
    return functions[family]


def _logic(parts: list[str]) -> Meaning:
    functions: dict[str, Meaning] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    return functions[parts[0]]


def _shift(parts: list[str]) -> Meaning:
    kind = parts[-1]

    def function(a: int, amount: int) -> int:
        if parts[0] == "shl":
            return wrapped(a << min(amount, 64), f"u{_width(kind)}")
        return wrapped(integer(a, kind) >> min(amount, 64), kind)

    return function


def _funnel(parts: list[str]) -> Meaning:
    def function(low: int, high: int, amount: int) -> int:
        n = min(amount, 32) if parts[2] == "clamp" else amount % 32
        both = high << 32 | low
        return (both << n >> 32 if parts[1] == "l" else both >> n) & 0xFFFFFFFF

    return function


def _extract(parts: list[str]) -> Meaning:
    kind = parts[-1]
    bits = _width(kind)

    def function(a: int, position: int, length: int) -> int:
        start, size = position & 0xFF, length & 0xFF
        # As the ISA's pseudo-code: bits past the end, and fill, are the sign bit or zero.
        no_sign = kind[0] == "u" or size == 0
        sign = 0 if no_sign else a >> min(start + size - 1, bits - 1) & 1
        found = 0
        for i in range(bits):
            inside = i < size and start + i < bits
            found |= (a >> (start + i) & 1 if inside else sign) << i
        return found

    return function


def _insert(parts: list[str]) -> Meaning:
    bits = _width(parts[-1])

    def function(a: int, b: int, position: int, length: int) -> int:
        start, size = position & 0xFF, length & 0xFF
        for i in range(size):
            if start + i >= bits or i >= bits:
                break
            b = b & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
        return b

    return function


def _permute(parts: list[str]) -> Meaning:
    if len(parts) > 2:
        return _permute_by_mode(parts[2])

    def function(a: int, b: int, selector: int) -> int:
        whole = (b << 32 | a).to_bytes(8, "little")
        result = []
        for i in range(4):
            nibble = selector >> 4 * i & 0xF
            byte = whole[nibble & 7]
            result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(result), "little")

    return function


def _permute_by_mode(mode: str) -> Meaning:
    """The bytes that a mode picks, lowest first, for each value of the selector's low two bits."""
    picks = {
        "f4e": ("0123", "1234", "2345", "3456"),
        "b4e": ("0765", "1076", "2107", "3210"),
        "rc8": ("0000", "1111", "2222", "3333"),
        "ecl": ("0123", "1123", "2223", "3333"),
        "ecr": ("0000", "0111", "0122", "0123"),
        "rc16": ("0101", "2323", "0101", "2323"),
    }[mode]

    def function(a: int, b: int, selector: int) -> int:
        whole = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(whole[int(i)] for i in picks[selector & 3]), "little")

    return function


def _mask(parts: list[str]) -> Meaning:
    def function(a: int, b: int) -> int:
        if parts[1] == "wrap":
            a, b = a & 31, b & 31
        return sum(1 << i for i in range(32) if a <= i < a + b)

    return function


def _extend(parts: list[str]) -> Meaning:
    def function(a: int, n: int) -> int:
        if parts[1] == "wrap":
            n &= 31
        if n == 0 or n >= 32:
            return a if n else 0
        low = a & ((1 << n) - 1)
        negative = parts[-1] == "s32" and low >> (n - 1)
        return wrapped(low - (1 << n) if negative else low, "u32")

    return function


def _find(parts: list[str]) -> Meaning:
    kind = parts[-1]

    def function(a: int) -> int:
        value = integer(a, kind)
        found = (~value if value < 0 else value).bit_length()
        if not found:
            return 0xFFFFFFFF
        return _width(kind) - found if "shiftamt" in parts else found - 1

    return function


def _compare(parts: list[str]) -> Meaning:
    name, kind = parts[1], parts[-1]
    kind = f"u{kind[1:]}" if kind[0] == "b" or name in ("lo", "ls", "hi", "hs") else kind
    name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)

    def function(a: int, b: int) -> int:
        x, y = integer(a, kind), integer(b, kind)
        return int(
            {
                "eq": x == y,
                "ne": x != y,
                "lt": x < y,
                "le": x <= y,
                "gt": x > y,
                "ge": x >= y,
            }[name]
        )

    return function


def _dot(parts: list[str]) -> Meaning:
    def lanes(x: int, kind: str) -> list[int]:
        return [integer(x >> 8 * i, f"{kind[0]}8") for i in range(4)]

    def function(a: int, b: int, c: int) -> int:
        pairs = zip(lanes(a, parts[1]), lanes(b, parts[2]), strict=True)
        return (c + sum(x * y for x, y in pairs)) & 0xFFFFFFFF

    return function


def _halves_and_bytes(parts: list[str]) -> Meaning:
    """dp2a: c plus two products of a's halves with the lower or the upper two bytes of b."""
    first = {"lo": 0, "hi": 16}[parts[1]]

    def function(a: int, b: int, c: int) -> int:
        low = integer(a & 0xFFFF, f"{parts[2][0]}16") * integer(
            b >> first & 0xFF, f"{parts[3][0]}8"
        )
        high = integer(a >> 16, f"{parts[2][0]}16") * integer(
            b >> first + 8 & 0xFF, f"{parts[3][0]}8"
        )
        return (c + low + high) % 2**32

    return function


def _product24(parts: list[str]) -> Meaning:
    """mul24, mad24: operands of 24 bits, signed ones in two's complement; 32 bits of 48."""
    kind = parts[-1]

    def number(x: int) -> int:
        low = x % 2**24
        return low - 2**24 if kind == "s32" and low >= 2**23 else low

    def function(a: int, b: int, c: int = 0) -> int:
        product = number(a) * number(b) % 2**48
        part = product // 2**16 if parts[1] == "hi" else product % 2**32
        total = integer(part, kind) + integer(c, kind)
        return wrapped(clamped(total, kind) if "sat" in parts else total, kind)

    return function


_TABLE: dict[str, Callable[[list[str]], Meaning]] = {
    **dict.fromkeys(("add", "sub", "min", "max", "sad", "div", "rem"), _arithmetic),
    **dict.fromkeys(("mul", "mad"), _product),
    **dict.fromkeys(("abs", "neg", "not", "cnot", "popc", "clz", "brev"), _unary),
    **dict.fromkeys(("and", "or", "xor"), _logic),
    **dict.fromkeys(("shl", "shr"), _shift),
    "shf": _funnel,
    "bfe": _extract,
    "bfi": _insert,
    "prmt": _permute,
    "bfind": _find,
    "setp": _compare,
    "dp4a": _dot,
    "dp2a": _halves_and_bytes,
    **dict.fromkeys(("mul24", "mad24"), _product24),
    "bmsk": _mask,
    "szext": _extend,
}
