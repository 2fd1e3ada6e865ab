"""Replay: a compiled GPU kernel's PTX executed on the CPU, instruction by instruction.

    from twinstep import replay

    replay.activate()
    kernel[grid](x, y, n, BLOCK=1024)        # CPU tensors; the code a GPU would run

    with replay.launches() as log:    # what each launch did
        kernel[grid](x, y, n, BLOCK=1024)
    log[0].bytes_read, log[0].opcodes

Accesses outside the tensors of a launch, misaligned ones, unknown instructions and deadlocks are
errors with kernel, source line, block and thread; `options` adds checks of races, of memory never
written and of accesses that leave the tensor of their address, and shuffles the order of blocks.
"""

from __future__ import annotations

if __name__ != "twinstep.replay":
    raise ImportError("import twinstep.replay, not replay")

from twinstep.replay.checks.uninitialised import Unwritten
from twinstep.replay.cuda.nvrtc import CudaKernel, cuda_kernel
from twinstep.replay.errors import (
    CannotReplay,
    Deadlock,
    InvalidArithmetic,
    KernelTrap,
    LimitReached,
    Misaligned,
    NoProgress,
    OutOfBounds,
    Race,
    ReplayError,
    UninitialisedRead,
    UnknownInstruction,
    UnsupportedArgument,
    UnsupportedTriton,
)
from twinstep.replay.launch.options import Options, allow, options, register_buffer_provider
from twinstep.replay.launch.record import Launch, Traffic, launches
from twinstep.replay.launch.run import run_ptx
from twinstep.replay.launch.virtual import (
    ends_of,
    folded_tensor,
    forget_pages,
    virtual_ends,
    virtual_tensor,
)
from twinstep.replay.triton.driver import activate, active, deactivate
from twinstep.replay.triton.torch_cuda import modelled_gpu

__all__ = [
    "CannotReplay",
    "CudaKernel",
    "Deadlock",
    "InvalidArithmetic",
    "KernelTrap",
    "Launch",
    "LimitReached",
    "Misaligned",
    "NoProgress",
    "Options",
    "OutOfBounds",
    "Race",
    "ReplayError",
    "Traffic",
    "UninitialisedRead",
    "UnknownInstruction",
    "UnsupportedArgument",
    "UnsupportedTriton",
    "Unwritten",
    "activate",
    "active",
    "allow",
    "cuda_kernel",
    "deactivate",
    "ends_of",
    "folded_tensor",
    "forget_pages",
    "launches",
    "modelled_gpu",
    "options",
    "register_buffer_provider",
    "run_ptx",
    "virtual_ends",
    "virtual_tensor",
]
