"""Declarations in PTX text: parameters of kernels and functions, variables, and their numbers."""

from __future__ import annotations

import re

from twinstep.replay.dtypes import NUMPY, width
from twinstep.replay.isa.limits import construct_of
from twinstep.replay.ptx.syntax import Kernel, Variable, refusal

_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b(?:\s*\.[a-z]+(?:\s+\d+)?)*\s+)?"
    r"([\w$%]+)\s*(?:\[(\d+)\])?"
)
_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+((?:\.\w+\s+(?:\d+\s+)?)*)([\w$]+)\s*((?:\[\d*\])*)\s*"
    r"(?:=\s*(\{.*?\}|[^;]+))?$",
    re.S,
)
_NUMBER = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?(?:0[xX][0-9a-fA-F]+|\d+)U?")


def parameters(text: str, kernel: Kernel, line: int) -> list[tuple[Variable, str]]:
    """The parameters in a header, with their types; raises as `parameter`."""
    params: list[tuple[Variable, str]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        variable, kind = parameter(item, kernel, line)
        params.append((variable, kind))
    return params


def parameter(text: str, kernel: Kernel, line: int) -> tuple[Variable, str]:
    """One `.param` declaration and its type; an array is aligned as it says.

    Raises:
        UnknownInstruction: it is of a kind that replay does not know.
    """
    match = _PARAMETER.fullmatch(text)
    if not match or match[2] not in NUMPY or match[2] == "pred":
        kinds = re.findall(r"\.(\w+)", text)
        construct = next((c for k in kinds if (c := construct_of(k)) != k), ".param")
        raise refusal(
            "This kind of parameter",
            construct,
            kernel.name,
            f"PTX line {line}",
            " ".join(text.split()),
        )
    align, kind, name, count = match.groups()
    size = width(kind)
    return Variable(name, "param", size * int(count or 1), int(align or size)), kind


def module_variables(text: str) -> list[Variable]:
    """The variables that are declared outside kernels and functions."""
    text = re.sub(r"\.section\s+\S+\s*\{.*?\}", "", text, flags=re.S)
    found = []
    for statement in text.split(";"):
        match = re.search(r"\.(?:shared|global|const)\b.*", statement, re.S)
        if match and (variable := variable_of(match[0].strip())):
            found.append(variable)
    return found


def variable_of(statement: str) -> Variable | None:
    """Read one variable declaration (without its semicolon).

    Returns:
        None if it is none, or holds what cannot be read (a type, the address of another variable):
        then the instruction that uses it is refused.
    """
    match = _VARIABLE.search(statement)
    if not match:
        return None
    space, attributes, name, dimensions, initial = match.groups()
    kind = next((a for a in re.findall(r"\.(\w+)", attributes) if a in NUMPY), "")
    if not kind:
        return None
    align = re.search(r"\.align\s+(\d+)", attributes)
    vector = re.search(r"\.v([248])\b", attributes)
    size = width(kind) * (int(vector[1]) if vector else 1)
    count = 1
    for extent in re.findall(r"\[(\d*)\]", dimensions):
        count *= int(extent or 0)
    data = b""
    if initial:
        numbers = re.findall(r"0[fFdD][0-9a-fA-F]+|-?\w+", initial)
        if not all(map(_NUMBER.fullmatch, numbers)):
            return None
        data = b"".join(
            (_number(n) & ((1 << (8 * width(kind))) - 1)).to_bytes(width(kind), "little")
            for n in numbers
        )
        if len(data) > count * size:
            return None
    return Variable(name, space, count * size, int(align[1]) if align else size, data)


def _number(text: str) -> int:
    return int(text[2:], 16) if text[:2].lower() in ("0f", "0d") else integer(text)


def integer(text: str) -> int:
    """The value of an integer literal."""
    text = text.rstrip("U")
    negative = text.startswith("-")
    digits = text.lstrip("+-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8) if octal else int(digits, 0)
    return -value if negative else value
