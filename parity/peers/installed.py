"""Peers that are no dependency: imported by name, in a process group of one where they want it."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def is_installed(package: str) -> bool:
    """Whether a distribution is there."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def without_compiler() -> str:
    """Empty, or why a peer that compiles itself cannot."""
    return "" if shutil.which("g++") else "it compiles C++ on first use, and there is no g++"


@cache
def deepspeed(module: str) -> ModuleType:
    """A module of DeepSpeed, on its CPU accelerator, in a gloo group of one."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return import_module(module)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
