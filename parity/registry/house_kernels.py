"""Our own kernels, one row each, registered like anybody else's.

Every launcher in `fast/kernels/` (a function whose name ends with `_`) has two rows: `triton.*` for
what its kernels compute, `fast.*` for what it refuses. Those in `fast/kernels/cuda/` have a row
`cuda.*`, those in `fast/kernels/cpu/` a row `cpu.*`. The launchers of Triton's kernels start the
native kernels for tensors on the CPU: a row `native.*`. All claim `exact`.
`tests/parity/test_registry.py` names a launcher without a row.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
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
    "adamw_remainder_step": "adam_remainder",
    "lamb_step": "lamb",
    "apex_lamb_step": "apex_lamb",
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


@dataclass(frozen=True)
class Backend:
    """Launchers in C++, with the same names as those in Triton.

    Attributes:
        folder: in `fast/kernels/`, and the first part of their names.
        engines: that they run on.
        files: the file with the launcher of an operation.
        claims: optional laws.
        dtypes: what a row claims, where it is not everything.
    """

    folder: str
    engines: tuple[str, ...]
    files: Mapping[str, str]
    claims: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, ...]]


# `mixed` has tensors of all pure combinations, and both steps share all but one line.
CPU = Backend(
    folder="cpu",
    engines=("cpu",),
    files={
        "adam_step": "adam",
        "adamw_step": "adam",
        "adamw_remainder_step": "adam_remainder",
        "global_norm": "reduce",
        "accumulate": "accumulate",
    },
    claims=("strided",),
    dtypes={
        "adam_step": ("fp32-to-bf16", "mixed"),
        "adamw_step": ("fp16", "bf16", "fp32-to-bf16", "mixed"),
    },
)
CUDA = Backend(
    folder="cuda",
    engines=GPU_ENGINES,
    files={
        "adam_step": "adam",
        "adamw_step": "adam",
        "adamw_remainder_step": "adam_remainder",
        "global_norm": "reduce",
        "lamb_step": "lamb",
    },
    claims=("capturable", "strided"),
    dtypes={
        "adam_step": ("mixed",),
        "adamw_step": ("bf16", "mixed"),
        "adamw_remainder_step": ("bf16",),
        "lamb_step": ("mixed",),
        "global_norm": ("mixed",),
    },
)


# Combinations of Triton's row where not all are judged: `mixed` has tensors of all pure ones, and
# the loops over them are those of `lamb_step`, judged in each. The twin in C++ claims all of them.
NARROWED = {"apex_lamb_step": ("mixed",)}


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
        every, file = tuple(operation.combinations), FILES[operation.name]
        name, checks = f"triton.{operation.name}", f"fast.{operation.name}"
        taken = NARROWED.get(operation.name, every)
        _row(operation, name, file, taken, LAYOUTS, GPU_ENGINES, ("capturable",), known)
        claims = ("capturable", "strided")
        _row(operation, checks, file, every[-1:], ("list",), GPU_ENGINES, claims, known)
        # What dtypes share is one function: `mixed` has tensors of all pure combinations.
        dtypes = every[1:2] if operation.name == "mixed_step" else every[-1:]
        dtypes = every if operation.name in NARROWED else dtypes
        name = f"native.{operation.name}"
        _row(operation, name, file, dtypes, LAYOUTS, ("cpu",), ("strided",), known)
    for backend in (CUDA, CPU):
        for operation in HOUSE:
            if operation.name in backend.files:
                dtypes = backend.dtypes.get(operation.name, tuple(operation.combinations))
                name = f"{backend.folder}.{operation.name}"
                file = f"{backend.folder}.{backend.files[operation.name]}"
                _row(operation, name, file, dtypes, LAYOUTS, backend.engines, backend.claims, known)


def _row(
    operation: Operation,
    name: str,
    file: str,
    dtypes: tuple[str, ...],
    layouts: tuple[str, ...],
    engines: tuple[str, ...],
    claims: tuple[str, ...],
    known: Container[str],
) -> None:
    """Register a launcher, unless its name is known."""
    if name in known:
        return
    module = import_module(f"twinstep.fast.kernels.{file}")
    row = register(
        operation.name,
        name=name,
        arithmetic="exact",
        dtypes=dtypes,
        layouts=layouts,
        engines=engines,
        claims=claims,
    )
    row(getattr(module, f"{operation.name}_"))
