"""Imports of every worker, made once: the server that forks workers imports this module.

It starts no thread, touches no GPU and registers nothing, so that a process forked from it is as
good as a fresh one.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from importlib.util import find_spec

import torch

from twinstep.parity.registry.house_kernels import FILES

# torch imports these by itself: with the first optimizer, with the first tensor of another class.
LATER = (
    "twinstep.parity.runner.scheduler",
    "twinstep.parity.runner.source",
    "torch._dynamo",
    "torch.distributed.tensor",
)


def preload() -> None:
    """Import the kernels and the engine, and let Triton find out its own version."""
    torch.set_num_threads(1)
    for name in LATER:
        with contextlib.suppress(ImportError):
            import_module(name)
    if find_spec("triton") is None:
        return
    for launcher in FILES.values():
        import_module(f"twinstep.fast.kernels.{launcher}")
    import_module("twinstep.replay")
    name_of_triton()


def name_of_triton() -> None:
    """Hash Triton's libraries, more than a second's work, which Triton does once per process."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()


preload()
