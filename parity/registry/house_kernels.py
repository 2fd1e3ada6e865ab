"""Our own kernels, one row each, registered like anybody else's.

Every launcher in `fast/kernels/` (a function whose name ends with `_`) has two rows: `triton.*` for
what its kernels compute, `fast.*` for what it refuses. Those in `fast/kernels/cpu/` have a row
`cpu.*`, and run on the CPU. All claim `exact`. `tests/parity/test_registry.py` names a launcher
without a row.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from importlib import import_module

from twinstep.parity.operations.operation import LAYOUTS, Operation
from twinstep.parity.operations.table import HOUSE
from twinstep.parity.registry.kernels import add_kernel, kernels, register, registrations

GPU_ENGINES = ("cuda", "replay")
# The file in `fast/kernels/` with the launcher.
FILES = {
    "sgd_step": "sgd",
    "adam_step": "adam",
    "adamw_step": "adam",
    "lamb_step": "lamb",
    "unscale": "unscale",
    "global_norm": "reduce",
    "clip_factor": "clip",
    "clip_coefficient": "clip",
    "update_scale_dynamic": "loss_scale",
    "update_scale_wrapper": "loss_scale",
    "update_scale_torch": "loss_scale",
    "flatten": "pack",
    "unflatten": "pack",
    "accumulate": "accumulate",
    "cast_copy": "cast",
    "mixed_step": "mixed_step",
}
# The file in `fast/kernels/cpu/`.
CPU_FILES = {
    "adam_step": "adam",
    "adamw_step": "adam",
    "global_norm": "reduce",
    "accumulate": "accumulate",
}
# What these claim, where it is not everything: `mixed` has tensors of all pure combinations, and
# both steps share all but one line.
CPU_DTYPES = {
    "adam_step": ("fp32-to-bf16", "mixed"),
    "adamw_step": ("fp16", "bf16", "fp32-to-bf16", "mixed"),
}


def register_house() -> None:
    """Register our kernels; does nothing the second time."""
    known = {kernel.name for kernel in kernels()}
    with registrations() as rows:
        _register(known)
    for row in rows:
        # A repro file loads the launcher's file.
        add_kernel(replace(row, source=""))


def _register(known: Container[str]) -> None:
    for operation in HOUSE:
        # Checks are no arithmetic: one combination and one layout show them.
        every = tuple(operation.combinations)
        _row(operation, "triton", every, LAYOUTS, ("capturable",), known)
        _row(operation, "fast", every[-1:], ("list",), ("capturable", "strided"), known)
    for operation in HOUSE:
        if operation.name in CPU_FILES:
            every = CPU_DTYPES.get(operation.name, tuple(operation.combinations))
            _row(operation, "cpu", every, LAYOUTS, ("strided",), known)


def _row(
    operation: Operation,
    prefix: str,
    dtypes: tuple[str, ...],
    layouts: tuple[str, ...],
    claims: tuple[str, ...],
    known: Container[str],
) -> None:
    """Register a launcher, unless its name is known."""
    name, on_cpu = f"{prefix}.{operation.name}", prefix == "cpu"
    if name in known:
        return
    file = f"cpu.{CPU_FILES[operation.name]}" if on_cpu else FILES[operation.name]
    module = import_module(f"twinstep.fast.kernels.{file}")
    row = register(
        operation.name,
        name=name,
        arithmetic="exact",
        dtypes=dtypes,
        layouts=layouts,
        engines=("cpu",) if on_cpu else GPU_ENGINES,
        claims=claims,
    )
    row(getattr(module, f"{operation.name}_"))
