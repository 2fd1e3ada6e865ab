"""A translated kernel: what the machine executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from twinstep.replay.dtypes import Array
from twinstep.replay.ptx.flow import Block, waits_for_blocks
from twinstep.replay.ptx.syntax import Kernel, Variable

BlockFunction = Callable[[list[Array | None], object], Array | None]


@dataclass
class Layout:
    """Addresses of variables.

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


@dataclass(eq=False)
class Program:
    """A translated kernel; compared by identity, so that what follows from it can be cached.

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

    @cached_property
    def waits_for_blocks(self) -> bool:
        """True if a block may wait for another."""
        return waits_for_blocks(self.blocks)
