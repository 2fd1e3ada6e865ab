"""Devices that kernels may run on, and the one way in which kernels are launched.

CUDA tensors run on their GPU, CPU tensors through the native kernels, in C++
(`fast.runtime.native`). While a Triton driver that executes compiled kernels on CPU tensors is
active, or under Triton's interpreter, CPU tensors go to Triton.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.runtime import compiled, native
from twinstep.fast.runtime.compiled import FIRST, Driver, Jitted, Key, call_of, start
from twinstep.fast.runtime.recorder import recorder
from twinstep.fast.runtime.tables import TensorLists, live_tensors, reachable

TRITON_DTYPE = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int16: tl.int16,
}


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up.

    >>> cdiv(5, 4)
    2
    """
    return -(-count // size)


def executes_cpu_tensors() -> bool:
    """Say whether the active Triton driver, or the interpreter, takes CPU tensors."""
    # Where none is active yet, Triton would look for a GPU, for milliseconds at each launch.
    driver = triton.runtime.driver._active
    # The knob reads the environment.
    return bool(getattr(driver, "executes_cpu_tensors", False) or triton.knobs.runtime.interpret)


def _active_driver() -> Driver | None:
    """Return Triton's driver; None where there is neither a GPU nor replay."""
    try:
        return cast(Driver, triton.runtime.driver.active)
    except RuntimeError:
        return None


def device_of_kernels() -> torch.device:
    """Device on which the active driver runs kernels; the CPU where there is no driver."""
    driver: Any = _active_driver()
    if driver is None or triton.knobs.runtime.interpret:
        return torch.device("cpu")
    return cast(torch.device, driver.get_active_torch_device())


def require_engine(device: torch.device, where: str) -> None:
    """Raise unless kernels for a GPU can run on tensors of this device.

    Raises:
        RuntimeError: CPU tensors without an engine for them, or a device that is neither.
    """
    if device.type == "cuda" or (device.type == "cpu" and executes_cpu_tensors()):
        return
    remedies = "move them to a GPU, or call twinstep.replay.activate() to run compiled kernels here"
    raise RuntimeError(
        f"tensors are on {device}, but kernels for a GPU need one: {remedies} [{where}]"
    )


def launch(
    kernel: Jitted,
    programs: int,
    near: Tensor,
    args: Sequence[object],
    *,
    reaches: TensorLists = (),
    warps: int = 4,
    **options: object,
) -> None:
    """Launch a kernel of `programs` programs on the device of `near`; zero programs: nothing.

    `reaches` lists the tensors that the kernel finds through a pointer table among its arguments;
    `options` are the kernel's compile-time arguments. Contraction of a*b + c is off: it would
    drop a rounding that the reference performs.

    Raises:
        RuntimeError: nothing here can run kernels on that device: it is no GPU and not the CPU, or
            there is no C++ compiler. Nothing was launched.
    """
    device, notes = near.device, recorder()
    if device.type == "cpu":
        if not executes_cpu_tensors():
            if programs:
                call, words = native.launch(kernel, programs, args, options)
                if notes is not None:
                    notes.note_launch(call, words, args, by_address=True)
            return
    elif device.type != "cuda":
        require_engine(device, kernel.__name__)
    if programs == 0:
        return
    driver = _active_driver()
    options.update(num_warps=warps, enable_fp_fusion=False)
    ask = getattr(driver, "register_buffer_provider", None)
    if ask is not None:
        # A driver that executes kernels itself keeps to memory that it knows: it sees no tables.
        ask(live_tensors)
        with reachable(reaches):
            started = start(kernel, driver, programs, args, options)
    elif device.type == "cuda":
        with torch.cuda.device(device):
            started = start(kernel, driver, programs, args, options)
    else:
        started = start(kernel, driver, programs, args, options)
    if notes is None:
        return
    if driver is None or started is None:
        notes.complete = False
        return
    stream = driver.get_current_stream(driver.get_current_device())
    call, words = call_of(started, programs, stream, args)
    seen = () if ask is None else reaches
    notes.note_launch(call, words, args, first=FIRST, reaches=seen, kernel=started[0])


def surroundings(device: torch.device) -> Key | None:
    """Facts that decide about launches on the current device beside kernels and arguments.

    None where launches are left to Triton.
    """
    if device.type == "cpu" and not executes_cpu_tensors():
        return native.library, torch.get_num_threads()
    driver = _active_driver()
    around = None if driver is None else compiled.surroundings(driver)
    if driver is None or around is None:
        return None
    return *around, driver.get_current_stream(cast(int, around[1]))


def resident_programs(device: torch.device, chunks: int, each: int) -> int:
    """Return how many programs walk over `chunks`: at most what the device holds at once.

    `each`: what one multiprocessor holds of them.
    """
    if device.type == "cuda" and not executes_cpu_tensors():
        return min(chunks, each * torch.cuda.get_device_properties(device).multi_processor_count)
    # Few, so that small tensors too take every program through its loop more than once.
    return min(chunks, 8)
