"""PTX to Python: each basic block becomes one function of NumPy calls, made once per kernel.

A register is a local variable of the generated function while the block runs; registers that
live across blocks pass through the list `R`. Every operand is viewed in the type its instruction
asks for, so the translation depends on nothing but single instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twinstep.replay import approximate, bitwise, compare, convert, integer
from twinstep.replay.dtypes import Array
from twinstep.replay.emit import Emitter
from twinstep.replay.errors import UnknownInstruction
from twinstep.replay.flow import Block, build, defined
from twinstep.replay.registers import RegisterTypes
from twinstep.replay.syntax import Kernel, Module, Variable

FAMILIES = (approximate, bitwise, compare, convert, integer)
"""Modules whose import registers the pure instructions."""

BlockFunction = Callable[[list[Array | None], object], Array | None]


@dataclass
class Layout:
    """Where variables live.

    Attributes:
        shared: Byte offset of each shared variable.
        shared_size: Bytes of shared memory that the text itself declares.
        local: Byte offset of each local variable.
        local_size: Bytes of local memory per thread.
        params: Byte offset of each parameter.
        param_size: Bytes of all parameters.
        constants: Module-scope `.global` and `.const` variables, in memory of our own.
    """

    shared: dict[str, int] = field(default_factory=dict)
    shared_size: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_size: int = 0
    params: dict[str, int] = field(default_factory=dict)
    param_size: int = 0
    constants: dict[str, tuple[Variable, Array]] = field(default_factory=dict)


@dataclass
class Program:
    """A translated kernel.

    Attributes:
        functions: One per block.
        slots: Index in the register list of every register (specials included).
        specials: Special registers read, by name.
        live_in, live_out: Slots per block that it reads, and that are needed after it.
        writes: Slots per block that it writes.
        opcodes: Every opcode of the kernel, without operands.
        census: How often each block holds each of them: one row per block.
        charges: Approximate instructions per block.
        noted: The blocks that hold approximate instructions or begin with a barrier.
        charged_at: Source line of the first approximate instruction of each name.
        undefined: Per slot, what an unwritten register holds.
        source: The generated Python, for the curious.
    """

    kernel: Kernel
    blocks: list[Block]
    functions: list[BlockFunction]
    slots: dict[str, int]
    specials: dict[str, int]
    live_in: list[list[int]]
    live_out: list[list[int]]
    writes: list[set[int]]
    opcodes: list[str]
    census: Array
    charges: list[Counter[str]]
    noted: list[int]
    charged_at: dict[str, str]
    undefined: list[Array]
    layout: Layout
    source: str


def _place(offset: int, variable: Variable) -> int:
    return -(-offset // variable.align) * variable.align


def lay_out(module: Module, kernel: Kernel) -> Layout:
    """Assign addresses to parameters and variables."""
    layout = Layout()
    for variable, _ in kernel.params:
        offset = _place(layout.param_size, variable)
        layout.params[variable.name] = offset
        layout.param_size = offset + variable.size
    for variable in [*module.variables, *kernel.variables]:
        if variable.space == "shared":
            offset = _place(layout.shared_size, variable)
            layout.shared[variable.name] = offset
            layout.shared_size = offset + variable.size
        elif variable.space == "local":
            offset = _place(layout.local_size, variable)
            layout.local[variable.name] = offset
            layout.local_size = offset + variable.size
        else:
            memory = np.zeros(variable.size + 16, np.uint8)
            memory[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            layout.constants[variable.name] = (variable, memory)
    return layout


def translate(module: Module, name: str) -> Program:
    """Translate one kernel of a module.

    Raises:
        UnknownInstruction: naming opcode, kernel and source line.
    """
    if name not in module.kernels:
        raise UnknownInstruction(f"No kernel {name} in this PTX; it has {sorted(module.kernels)}.")
    kernel = module.kernels[name]
    layout = lay_out(module, kernel)
    return emitted(kernel, layout, Emitter(kernel, RegisterTypes(kernel), layout))


def emitted(kernel: Kernel, layout: Layout, emitter: Emitter) -> Program:
    """The program that an emitter makes of a kernel."""
    blocks = build(kernel)
    lines: list[str] = []
    for block in blocks:
        lines.extend(emitter.block(block))
    source = "\n".join(lines)
    namespace: dict[str, object] = emitter.namespace
    exec(compile(source, f"<replay of {kernel.name}>", "exec"), namespace)
    functions = [namespace[f"block_{block.index}"] for block in blocks]
    live_in = [emitter.places(block.live_in) for block in blocks]
    live_out = [emitter.places(block.live_out) for block in blocks]
    writes = [set(emitter.places({r for i in b.code for r in defined(i)})) for b in blocks]
    slots = emitter.slots
    counts = [Counter(i.opcode for i in block.code) for block in blocks]
    opcodes = list(dict.fromkeys(opcode for count in counts for opcode in count))
    return Program(
        kernel,
        blocks,
        functions,  # type: ignore[arg-type]
        slots,
        {r: s for r, s in slots.items() if r in emitter.specials},
        live_in,
        live_out,
        writes,
        opcodes,
        np.array([[count[opcode] for opcode in opcodes] for count in counts], np.int64),
        emitter.charges,
        [b.index for b in blocks if b.waits == "block" or emitter.charges[b.index]],
        emitter.charged_at,
        [emitter.empty(register) for register in slots],
        layout,
        source,
    )
