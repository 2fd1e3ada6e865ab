"""Our own kernels, one row each, registered like anybody else's.

Every launcher in `fast/kernels/` (a function whose name ends with `_`) has two rows: `triton.*` for
what its kernels compute, `fast.*` for what it refuses. All of them claim `exact`, on the GPU and on
replay. `tests/parity/test_registry.py` names a launcher without a row.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from importlib import import_module

from twinstep.parity.operations.operation import LAYOUTS
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
        module = import_module(f"twinstep.fast.kernels.{FILES[operation.name]}")
        function = getattr(module, f"{operation.name}_")
        every = tuple(operation.combinations)
        # Checks are no arithmetic: one combination and one layout show them.
        rows = (
            ("triton", every, ("capturable",)),
            ("fast", every[-1:], ("capturable", "strided")),
        )
        for prefix, dtypes, claims in rows:
            name = f"{prefix}.{operation.name}"
            if name in known:
                continue
            row = register(
                operation.name,
                name=name,
                arithmetic="exact",
                dtypes=dtypes,
                layouts=LAYOUTS if prefix == "triton" else ("list",),
                engines=GPU_ENGINES,
                claims=claims,
            )
            row(function)
