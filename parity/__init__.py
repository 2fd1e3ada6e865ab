"""The judge: every kernel against its reference, law by law.

    from parity import register

    @register("adamw_step", name="my_adamw", dtypes=("fp16", "bf16", "fp32"))
    def my_adamw(params, grads, exp_avgs, exp_avg_sqs, copies, steps, *, lr, beta1, ...): ...

`parity check my_kernel.py` judges what a file registers; `parity.check(my_adamw)` does the same
from a program. `docs/adding-a-kernel.md` tells the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parity.checker import Verdict, check
    from parity.registry import Kernel, register, register_operation
    from parity.twins.registry import register_optimizer

_HOMES = {
    "Kernel": "parity.registry",
    "Verdict": "parity.checker",
    "check": "parity.checker",
    "register": "parity.registry",
    "register_operation": "parity.registry",
    "register_optimizer": "parity.twins.registry",
}

__all__ = [
    "Kernel",
    "Verdict",
    "check",
    "register",
    "register_operation",
    "register_optimizer",
]


def __getattr__(name: str) -> object:
    """Import public names when they are first used: `parity.replay` alone needs no judge."""
    if name not in _HOMES:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
