"""PTX text to a `Module`: variables, kernels and their instructions with source lines.

Only the text is read here; what an instruction means is decided by `isa`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from twinstep.replay.errors import CannotReplay, UnknownInstruction
from twinstep.replay.isa.limits import construct_of
from twinstep.replay.ptx.declarations import (
    integer,
    module_variables,
    parameter,
    parameters,
    variable_of,
)
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
    Vec,
    refusal,
)

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*', re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.M)
_ROUTINE = re.compile(r"\.(entry|func)\b([^{;]*)([{;])")
_HEADER = re.compile(r"\s*(?:\(([^)]*)\))?\s*([\w$%]+)\s*(?:\(([^)]*)\))?(.*)", re.S)
_CLUSTER = re.compile(r"\.reqnctapercluster\s+([\d\s,]+)")
_BRACKET = re.compile(r"[{\[(]")
_NAME = r"[%$_a-zA-Z][\w$%.]*"


def parse(text: str) -> Module:
    """Parse PTX text; what cannot be read of one kernel is kept for its launch.

    Raises:
        UnknownInstruction: where braces do not match.
    """
    files = {
        int(number): (f"{first}/{second}" if second else first)
        for number, first, second in _FILE.findall(text)
    }
    text = _COMMENT.sub(_blank, text)
    module = Module("", "", [], {}, {}, {})
    outside, position = [], 0
    while match := _ROUTINE.search(text, position):
        outside.append(text[position : match.start()])
        position = match.end()
        if match[3] == "{":
            end = _closing(text, match)
            _routine(module, files, match, text[match.end() : end])
            position = end + 1
    outside.append(text[position:])
    version = re.search(r"\.version\s+(\S+)", text)
    target = re.search(r"\.target\s+([^\n]+)", text)
    module.version = version[1] if version else ""
    module.target = target[1].strip() if target else ""
    module.variables += module_variables("".join(outside))
    return module


def _blank(match: re.Match[str]) -> str:
    found = match[0]
    if mark := re.fullmatch(r"//\s*(begin|end) inline asm\s*", found):
        return f".inline_asm {mark[1]}"
    return '""' if found.startswith('"') else "\n" * found.count("\n") + " "


def _closing(text: str, head: re.Match[str]) -> int:
    depth, start = 0, head.end() - 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    place = f"PTX line {_line(text, start)}"
    header = _HEADER.fullmatch(head[2])
    name = header[2] if header else "(unknown)"
    raise refusal("The brace opened here does not close", "{", name, place)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _routine(module: Module, files: dict[int, str], match: re.Match[str], body: str) -> None:
    """Read one kernel or device function into the module."""
    header = _HEADER.fullmatch(match[2])
    line = _line(match.string, match.start())
    name = header[2] if header else " ".join(match[2].split())[:60]
    kernel = Kernel(name, [])
    try:
        if header is None:
            raise refusal(
                f"Header of .{match[1]} cannot be read", match[1], name, f"PTX line {line}"
            )
        kernel.params = parameters(header[3] or "", kernel, line)
        kernel.results = parameters(header[1] or "", kernel, line)
        _no_cluster(header[4], kernel, line)
        _Body(kernel, files).read(body, _line(match.string, match.end()))
    except CannotReplay as error:
        module.refused[name] = error
    routines = module.kernels if match[1] == "entry" else module.functions
    routines[name] = kernel


def _no_cluster(directives: str, kernel: Kernel, line: int) -> None:
    found = _CLUSTER.search(directives)
    if found and {int(n) for n in re.findall(r"\d+", found[1])} != {1}:
        place = f"PTX line {line}"
        raise refusal(
            "A cluster of several blocks", "cluster", kernel.name, place, found[0].strip()
        )


class _Body:
    """Reads one body statement by statement; nested braces open a scope of names."""

    _TOKEN = re.compile(
        r"\s*(?:(?P<loc>\.loc\s[^\n]*)|\.inline_asm\s(?P<asm>begin|end)"
        r"|(?P<file>\.file\s[^\n]*)|(?P<pragma>\.pragma\s[^;]*;)"
        r"|(?P<label>[%$_a-zA-Z][\w$]*):(?!:)|(?P<open>\{)|(?P<close>\})"
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
        self.line = 0

    def read(self, body: str, first_line: int) -> None:
        """Read all statements.

        Raises:
            UnknownInstruction: naming the statement that cannot be read, and its place.
        """
        position, counted = 0, 0
        self.line = first_line
        pending: list[str] = []
        while match := self._TOKEN.match(body, position):
            start = match.start(match.lastgroup or 0)
            self.line, counted = self.line + body.count("\n", counted, start), start
            position = match.end()
            try:
                self._token(match, pending)
            except CannotReplay:
                raise
            except Exception as error:
                raise self._refusal(match[0].strip()) from error
        if rest := body[position:].strip():
            raise self._refusal(rest)

    def _refusal(self, text: str, what: str = "") -> UnknownInstruction:
        """The error for a statement that cannot be read."""
        words = re.sub(r"^@!?\S+\s+", "", text).split()
        head = words[0].rstrip(";") if words else ""
        head = head or text[:1]
        place = str(self.location) if self.location else f"PTX line {self.line}"
        kind = "Directive" if head.startswith(".") else "Instruction"
        return refusal(
            what or f"{kind} {head} cannot be read",
            construct_of(head),
            self.kernel.name,
            place,
            " ".join(text.rstrip(";").split())[:200],
        )

    def _token(self, match: re.Match[str], pending: list[str]) -> None:
        if match["asm"]:
            # Some compilers give each line of inline assembly the next source line.
            self.inline = {"begin": 1, "end": 0}[match["asm"]]
        elif match["loc"]:
            if self.inline < 2:
                self._locate(match["loc"])
            self.inline *= 2
        elif match["label"]:
            pending.append(match["label"])
            if match["label"] in self.kernel.labels:
                raise self._refusal(match["label"], f"Label {match['label']} stands twice")
            self.kernel.labels[match["label"]] = len(self.kernel.code)
        elif match["open"]:
            self.scope_count += 1
            self.scopes.append({})
        elif match["close"]:
            self.scopes.pop()
        elif match["statement"]:
            self._statement(match["statement"].strip(), pending)

    def _locate(self, text: str) -> None:
        file, line, column = (int(number) for number in re.findall(r"\d+", text)[:3])
        caller = ""
        if inlined := re.search(r"inlined_at\s+(\d+)\s+(\d+)", text):
            name = self.files.get(int(inlined[1]), f"file {inlined[1]}")
            caller = f"{name}:{inlined[2]}"
        if line:
            name = self.files.get(file, f"file {file}")
            self.location = Location(name, line, column, caller)

    def _statement(self, text: str, pending: list[str]) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith((".branchtargets", ".calltargets")):
            names = re.findall(r"[\w$]+", text.split(None, 1)[1])
            self.kernel.targets[pending[-1]] = names
        elif text.startswith(".param"):
            variable, _ = parameter(text, self.kernel, self.line)
            unique = self._declare(variable.name)
            self.kernel.arguments[unique] = replace(variable, name=unique)
        elif text.startswith("."):
            if variable_found := variable_of(text):
                unique = self._declare(variable_found.name)
                self.kernel.variables.append(replace(variable_found, name=unique))
            elif not text.startswith((".pragma", ".maxnreg", ".noreturn", ".callprototype")):
                raise self._refusal(text)
        else:
            self.kernel.code.append(self._instruction(text, self.line))

    def _declare(self, name: str) -> str:
        """Enter a name into the scope at hand; the name by which it is known in the kernel."""
        unique = name if len(self.scopes) == 1 else f"{name}@{self.scope_count}"
        self.scopes[-1][name] = unique
        return unique

    def _registers(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        for item in names.split(","):
            item = item.strip()
            if ranged := re.match(rf"({_NAME})<(\d+)>", item):
                declared = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))]
            else:
                declared = [item]
            for name in declared:
                self.kernel.registers[self._declare(name)] = kind[1:]

    def _instruction(self, text: str, line: int) -> Instruction:
        guard: Reg | None = None
        rest = text
        if text.startswith("@"):
            mark, rest = text.split(None, 1)
            guard = Reg(self._register(_name(mark.lstrip("@!"))), "!" in mark)
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
        if (name := self._register(text)) in self.kernel.registers:
            return Reg(name)
        if text[0] in "{([" and text[-1] != {"{": "}", "(": ")", "[": "]"}[text[0]]:
            raise ValueError(f"a bracket does not close: {text}")
        if text[0] in "{(":
            return Vec(tuple(self._operand(item) for item in _split(text[1:-1])))
        if text[0] == "[":
            return self._memory(text[1:-1].strip())
        if "|" in text:
            return Vec(tuple(self._operand(item) for item in text.split("|")))
        if text[0] == "!":
            return Reg(self._register(_name(text[1:].strip())), True)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Imm(int(text[2:], 16), "f32")
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Imm(int(text[2:], 16), "f64")
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            return Imm(integer(text))
        if re.fullmatch(r"-?\d*\.\d+([eE][-+]?\d+)?|-?\d+\.\d*([eE][-+]?\d+)?", text):
            return Imm(float(text))
        if match := re.fullmatch(rf"({_NAME})\s*([-+])\s*(\w+)", text):
            sign = 1 if match[2] == "+" else -1
            return Symbol(self._register(match[1]), sign * integer(match[3]))
        name = self._register(_name(text))
        if name == "_" or name in self.kernel.registers or text.startswith("%"):
            return Reg(name)
        return Symbol(name)

    def _memory(self, text: str) -> Mem:
        match = re.fullmatch(rf"({_NAME})?\s*(?:([-+])?\s*([-+]?\w+))?", text)
        if not match:
            raise ValueError(f"no address: {text}")
        offset = integer(match[3]) if match[3] else 0
        if match[2] == "-":
            offset = -offset
        base = self._operand(match[1]) if match[1] else None
        assert base is None or isinstance(base, Reg | Symbol)
        return Mem(base, offset)


def _name(text: str) -> str:
    """A name, as it is.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(_NAME, text):
        raise ValueError(f"no name: {text}")
    return text


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
