"""PTX to Python: each basic block becomes one function of NumPy calls, made once per kernel.

A register is a local variable of the generated function while the block runs; registers that
live across blocks pass through the list `R`. Every operand is viewed in the type its instruction
asks for, so the translation depends on nothing but single instructions.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from twinstep.replay.errors import ReplayError
from twinstep.replay.isa.forms import NO_EFFECT
from twinstep.replay.machine.program import Layout, Program
from twinstep.replay.ptx.exchanged import keep_terms
from twinstep.replay.ptx.flow import build, defined
from twinstep.replay.ptx.inline import inlined
from twinstep.replay.ptx.syntax import Kernel, Module, Variable
from twinstep.replay.translate import emit_memory, emit_threads
from twinstep.replay.translate.emit import Emitter, Handler
from twinstep.replay.translate.registers import RegisterTypes

HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(NO_EFFECT, lambda emitter, instruction: None),
    **emit_memory.HANDLERS,
    **emit_threads.HANDLERS,
}
"""The function that emits each family of instructions that touch memory or other threads."""


def _place(offset: int, variable: Variable) -> int:
    return -(-offset // variable.align) * variable.align


def lay_out(module: Module, kernel: Kernel) -> Layout:
    """Assign addresses to parameters and variables."""
    layout = Layout()
    for variable, _ in kernel.params:
        offset = _place(layout.param_size, variable)
        layout.params[variable.name] = offset
        layout.param_size = offset + variable.size
    variables = [*module.variables, *kernel.variables]
    # Dynamic shared memory, which has no size here, begins in one place, behind all that has one.
    variables.sort(key=lambda v: -v.align if v.space == "shared" and not v.size else -math.inf)
    for variable in variables:
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
        CannotReplay: naming opcode, kernel and source line.
        ReplayError: there is no such kernel.
    """
    if name not in module.kernels:
        raise ReplayError(f"No kernel {name} in this PTX; it has {sorted(module.kernels)}.")
    if name in module.refused:
        raise module.refused[name]
    kernel = inlined(module, module.kernels[name])
    keep_terms(kernel)
    layout = lay_out(module, kernel)
    return emitted(kernel, layout, Emitter(kernel, RegisterTypes(kernel), layout, HANDLERS))


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
        np.array([[count[opcode] for opcode in opcodes] for count in counts], np.float64),
        emitter.charges,
        [b.index for b in blocks if b.waits == "block" or emitter.charges[b.index]],
        emitter.charged_at,
        [emitter.empty(register) for register in slots],
        layout,
        source,
    )
