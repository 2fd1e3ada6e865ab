"""PTX text to a `Module`: variables, kernels and their instructions with source lines.

Only the text is read here; what an instruction means is decided by `isa`.
"""

from __future__ import annotations

import re

from twinstep.replay.dtypes import NUMPY, width
from twinstep.replay.errors import UnknownInstruction
from twinstep.replay.ptx.syntax import (
    Imm,
    Instruction,
    Kernel,
    Location,
    Mem,
    Module,
    Operand,
    Reg,
    Symbol,
    Variable,
    Vec,
)

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*', re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{", re.S)
_FUNCTION = re.compile(r"\.func\b[^{;]*\{", re.S)
_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+((?:\.\w+\s+(?:\d+\s+)?)*)([\w$]+)\s*((?:\[\d*\])*)\s*"
    r"(?:=\s*(\{.*?\}|[^;]+))?$",
    re.S,
)
_BRACKET = re.compile(r"[{\[(]")
_NAME = r"[%$_a-zA-Z][\w$%.]*"


def parse(text: str) -> Module:
    """Parse PTX text.

    Raises:
        UnknownInstruction: where the text holds something that this grammar does not know.
    """
    files = {
        int(number): (f"{first}/{second}" if second else first)
        for number, first, second in _FILE.findall(text)
    }
    text = _COMMENT.sub(_blank, text)
    kernels: dict[str, Kernel] = {}
    outside = text
    for match in _ENTRY.finditer(text):
        end = _closing(text, match.end() - 1)
        kernel = Kernel(match[1], _parameters(match[2] or ""))
        first_line = text.count("\n", 0, match.end()) + 1
        _Body(kernel, files).read(text[match.end() : end], first_line)
        kernels[kernel.name] = kernel
        outside = outside.replace(text[match.start() : end + 1], "")
    for match in list(_FUNCTION.finditer(outside)):
        outside = outside.replace(outside[match.start() : _closing(outside, match.end() - 1)], "")
    version = re.search(r"\.version\s+(\S+)", text)
    target = re.search(r"\.target\s+([^\n]+)", text)
    return Module(
        version[1] if version else "",
        target[1].strip() if target else "",
        _module_variables(outside),
        kernels,
    )


def _blank(match: re.Match[str]) -> str:
    found = match[0]
    if mark := re.fullmatch(r"//\s*(begin|end) inline asm\s*", found):
        return f".inline_asm {mark[1]}"
    return found if found.startswith('"') else "\n" * found.count("\n") + " "


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r'"(?:\\.|[^"\\])*"|[{}]').finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise UnknownInstruction(f"PTX text ends inside the braces opened at character {start}.")


def _parameters(text: str) -> list[tuple[Variable, str]]:
    params: list[tuple[Variable, str]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        words = item.split()
        name, count = words[-1], 1
        if array := re.match(r"([\w$]+)\[(\d+)\]", name):
            name, count = array[1], int(array[2])
        kind = next(word[1:] for word in words[1:] if word[1:] in NUMPY)
        params.append((Variable(name, "param", width(kind) * count, width(kind)), kind))
    return params


def _module_variables(text: str) -> list[Variable]:
    text = re.sub(r"\.section\s+\S+\s*\{.*?\}", "", text, flags=re.S)
    found = []
    for statement in text.split(";"):
        match = re.search(r"\.(?:shared|global|const)\b.*", statement, re.S)
        if match and (variable := variable_of(match[0].strip())):
            found.append(variable)
    return found


def variable_of(statement: str) -> Variable | None:
    """Read one variable declaration (without its semicolon); None if it is not one."""
    match = _VARIABLE.search(statement)
    if not match:
        return None
    space, attributes, name, dimensions, initial = match.groups()
    kind = next((a for a in re.findall(r"\.(\w+)", attributes) if a in NUMPY), "b8")
    align = re.search(r"\.align\s+(\d+)", attributes)
    count = 1
    for extent in re.findall(r"\[(\d*)\]", dimensions):
        count *= int(extent or 0)
    data = b""
    if initial:
        numbers = re.findall(r"0[fFdD][0-9a-fA-F]+|-?\w+", initial)
        data = b"".join(
            (_number(n) & ((1 << (8 * width(kind))) - 1)).to_bytes(width(kind), "little")
            for n in numbers
        )
    return Variable(name, space, count * width(kind), int(align[1]) if align else width(kind), data)


def _number(text: str) -> int:
    if text[:2].lower() in ("0f", "0d"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


class _Body:
    """Reads one kernel body statement by statement; nested braces open a scope of registers."""

    _TOKEN = re.compile(
        r"\s*(?:(?P<loc>\.loc\s[^\n]*)|\.inline_asm\s(?P<asm>begin|end)"
        r"|(?P<file>\.file\s[^\n]*)|(?P<pragma>\.pragma\s[^;]*;)"
        r"|(?P<label>[%$_a-zA-Z][\w$]*):(?!:)|(?P<open>\{)(?=\s*(?:\.|@|[a-z\}]|//))|(?P<close>\})"
        r"|(?P<statement>[^;]+);)",
        re.S,
    )

    def __init__(self, kernel: Kernel, files: dict[int, str]) -> None:
        self.kernel = kernel
        self.files = files
        self.location: Location | None = None
        self.scopes: list[dict[str, str]] = [{}]
        self.scope_count = 0
        self.inline = 0

    def read(self, body: str, first_line: int) -> None:
        position, line, counted = 0, first_line, 0
        pending: list[str] = []
        while match := self._TOKEN.match(body, position):
            start = match.start(match.lastgroup or 0)
            line, counted = line + body.count("\n", counted, start), start
            position = match.end()
            if match["asm"]:
                # Some compilers give each line of inline assembly the next source line.
                self.inline = {"begin": 1, "end": 0}[match["asm"]]
            elif match["loc"]:
                if self.inline < 2:
                    self._locate(match["loc"])
                self.inline *= 2
            elif match["label"]:
                pending.append(match["label"])
                self.kernel.labels[match["label"]] = len(self.kernel.code)
            elif match["open"]:
                self.scope_count += 1
                self.scopes.append({})
            elif match["close"]:
                self.scopes.pop()
            elif match["statement"]:
                self._statement(match["statement"].strip(), line, pending)
        if body[position:].strip():
            raise UnknownInstruction(
                f"Cannot read the PTX of {self.kernel.name} from line {line}: "
                f"{body[position:].strip()[:60]!r}."
            )

    def _locate(self, text: str) -> None:
        file, line, column = (int(number) for number in re.findall(r"\d+", text)[:3])
        caller = ""
        if inlined := re.search(r"inlined_at\s+(\d+)\s+(\d+)", text):
            name = self.files.get(int(inlined[1]), f"file {inlined[1]}")
            caller = f"{name}:{inlined[2]}"
        if line:
            name = self.files.get(file, f"file {file}")
            self.location = Location(name, line, column, caller)

    def _statement(self, text: str, line: int, pending: list[str]) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith((".branchtargets", ".calltargets")):
            names = re.findall(r"[\w$]+", text.split(None, 1)[1])
            self.kernel.targets[pending[-1]] = names
        elif text.startswith("."):
            if variable := variable_of(text):
                self.kernel.variables.append(variable)
            elif not text.startswith((".param", ".pragma", ".maxnreg", ".noreturn")):
                raise UnknownInstruction(
                    f"Unknown directive {text.split()[0]} in {self.kernel.name}, PTX line {line}."
                )
        else:
            self.kernel.code.append(self._instruction(text, line))

    def _registers(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        for item in names.split(","):
            item = item.strip()
            if ranged := re.match(rf"({_NAME})<(\d+)>", item):
                declared = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))]
            else:
                declared = [item]
            for name in declared:
                unique = name if len(self.scopes) == 1 else f"{name}@{self.scope_count}"
                self.scopes[-1][name] = unique
                self.kernel.registers[unique] = kind[1:]

    def _instruction(self, text: str, line: int) -> Instruction:
        guard: Reg | None = None
        rest = text
        if text.startswith("@"):
            mark, rest = text.split(None, 1)
            guard = Reg(self._register(mark.lstrip("@!")), "!" in mark)
        opcode, _, operands = rest.partition(" ") if " " in rest else (rest, "", "")
        if "\t" in opcode or "\n" in opcode:
            opcode, operands = re.split(r"\s+", rest, maxsplit=1)
        parsed = tuple(self._operand(item) for item in _split(operands))
        return Instruction(opcode, parsed, guard, self.location, " ".join(text.split()), line)

    def _register(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text[0] in "{(":
            return Vec(tuple(self._operand(item) for item in _split(text[1:-1])))
        if text[0] == "[":
            return self._memory(text[1:-1].strip())
        if text[0] == "%" and "|" not in text:
            return Reg(self._register(text))
        if text[0] == "!":
            return Reg(self._register(text[1:].strip()), True)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Imm(int(text[2:], 16), "f32")
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Imm(int(text[2:], 16), "f64")
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            return Imm(_integer(text))
        if re.fullmatch(r"-?\d*\.\d+([eE][-+]?\d+)?|-?\d+\.\d*([eE][-+]?\d+)?", text):
            return Imm(float(text))
        if "|" in text:
            return Vec(tuple(self._operand(item) for item in text.split("|")))
        name = self._register(text)
        if name == "_" or name in self.kernel.registers or text.startswith("%"):
            return Reg(name)
        if match := re.fullmatch(rf"({_NAME})\s*([-+])\s*(\w+)", text):
            return Symbol(match[1], int(match[3], 0) * (1 if match[2] == "+" else -1))
        return Symbol(text)

    def _memory(self, text: str) -> Mem:
        match = re.fullmatch(rf"({_NAME})?\s*(?:([-+])?\s*([-+]?\w+))?", text)
        if not match:
            raise UnknownInstruction(f"Unknown address [{text}] in {self.kernel.name}.")
        offset = _integer(match[3]) if match[3] else 0
        if match[2] == "-":
            offset = -offset
        if not match[1]:
            return Mem(None, offset)
        base = self._operand(match[1])
        assert isinstance(base, Reg | Symbol)
        return Mem(base, offset)


def _integer(text: str) -> int:
    text = text.rstrip("U")
    negative = text.startswith("-")
    digits = text.lstrip("+-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8) if octal else int(digits, 0)
    return -value if negative else value


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and braces."""
    if not _BRACKET.search(text):
        items = text.split(",")
        return items if items[-1].strip() else items[:-1]
    items, depth, current = [], 0, ""
    for char in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += char
    if current.strip():
        items.append(current)
    return items
