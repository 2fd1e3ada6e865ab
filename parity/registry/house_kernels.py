"""Our own kernels, one row each, registered like anybody else's.

Every launcher in `fast/kernels/` (a function whose name ends with `_`) has a row, and so has every
public function of `fast` in front of it, which checks its arguments first. All of them claim
`exact`, on the GPU and on replay. `tests/parity/test_registry.py` names a launcher without a row.
"""

from __future__ import annotations

from importlib import import_module

from twinstep.parity.operations.operation import LAYOUTS
from twinstep.parity.operations.table import HOUSE
from twinstep.parity.registry.kernels import kernels, register

GPU_ENGINES = ("cuda", "replay")
# The file in `fast/kernels/` with the launchers, and the file in `fast/` with the public functions.
FILES = {
    "sgd_step": ("sgd", "sgd"),
    "adam_step": ("adam", "adam"),
    "adamw_step": ("adam", "adam"),
    "lamb_step": ("lamb", "lamb"),
    "unscale": ("unscale", "overflow"),
    "global_norm": ("reduce", "clip"),
    "clip_factor": ("clip", "clip"),
    "clip_coefficient": ("clip", "clip"),
    "update_scale_dynamic": ("loss_scale", "loss_scale"),
    "update_scale_wrapper": ("loss_scale", "loss_scale"),
    "update_scale_torch": ("loss_scale", "loss_scale"),
    "flatten": ("pack", "flatten"),
    "unflatten": ("pack", "flatten"),
    "accumulate": ("accumulate", "accumulate"),
    "cast_copy": ("cast", "cast"),
    "mixed_step": ("mixed_step", "mixed_step"),
}


def register_house() -> None:
    """Register our kernels; does nothing the second time."""
    known = {kernel.name for kernel in kernels()}
    for operation in HOUSE:
        launcher, public = FILES[operation.name]
        every = tuple(operation.combinations)
        # The public function adds checks, not arithmetic: one combination and one layout show it.
        rows = (
            ("triton", f"twinstep.fast.kernels.{launcher}", every, ("capturable",)),
            ("fast", f"twinstep.fast.{public}", every[-1:], ("capturable", "strided")),
        )
        for prefix, module, dtypes, claims in rows:
            name = f"{prefix}.{operation.name}"
            if name in known:
                continue
            function = getattr(import_module(module), f"{operation.name}_")
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
