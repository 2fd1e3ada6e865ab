"""DeepSpeed's C++ Adam, which compiles itself on first use: built before any clock runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from functools import cache

import torch
from torch.nn import Parameter

from twinstep.benchmarks.beside.peers import Absent, Stepping, version_of
from twinstep.fast.runtime import native
from twinstep.fast.runtime.cache_folder import cache_folder
from twinstep.parity.proof.peers.installed import deepspeed, quiet, without_compiler

NAME = "cpu_adam"


def prepare() -> None:
    """Build what rows on the CPU need: our kernels, and DeepSpeed's where it is installed."""
    if torch.cuda.is_available():
        return
    with contextlib.suppress(RuntimeError):  # rows say by themselves what they lack
        native.library()
    # A peer's build may raise anything, and its row will say it again.
    with contextlib.suppress(Exception):
        version_of("deepspeed")
        build()


def cpu_adam(params: list[Parameter], **given: object) -> Stepping:
    """DeepSpeed's C++ Adam over some parameters.

    Raises:
        Absent: it is not built, and there is no compiler.
    """
    lacking = without_compiler()
    if lacking:
        raise Absent(lacking)
    build()
    found: Stepping = deepspeed("deepspeed.ops.adam").DeepSpeedCPUAdam(params, **given)
    return found


@cache
def build() -> None:
    """Build its library in a folder of ours, where nobody else builds."""
    folder = cache_folder() / "deepspeed"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    with (cache_folder() / "deepspeed.lock").open("w") as lock, quiet():
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A build that was cut off leaves torch's own lock behind, and the next waits for ever.
        (folder / NAME / "lock").unlink(missing_ok=True)
        deepspeed("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)
