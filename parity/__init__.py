"""The judge: every kernel against its reference, law by law.

    from twinstep.parity import register

    @register("adamw_step", name="my_adamw", dtypes=("fp16", "bf16", "fp32"))
    def my_adamw(params, grads, exp_avgs, exp_avg_sqs, copies, steps, *, lr, beta1, ...): ...

`parity check my_kernel.py` judges what a file registers; `parity.check(my_adamw)` does the same
from a program. `docs/guide/adding-a-kernel.md` has the rest.
"""

from __future__ import annotations

if __name__ != "twinstep.parity":
    raise ImportError("import twinstep.parity, not parity")

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinstep.parity.registry.kernels import Kernel, register, register_operation
    from twinstep.parity.runner.check import Verdict, check
    from twinstep.parity.sequences.registry import register_optimizer

_HOMES = {
    "Kernel": "twinstep.parity.registry.kernels",
    "Verdict": "twinstep.parity.runner.check",
    "check": "twinstep.parity.runner.check",
    "register": "twinstep.parity.registry.kernels",
    "register_operation": "twinstep.parity.registry.kernels",
    "register_optimizer": "twinstep.parity.sequences.registry",
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
    """Import public names when they are first used: `replay` alone needs no judge."""
    if name not in _HOMES:
        raise AttributeError(f"module 'twinstep.parity' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
