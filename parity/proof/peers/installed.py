"""Peers that are no dependency: imported by name, in a process group of one where they want it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def is_installed(package: str) -> bool:
    """True if a distribution is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def installed_version(package: str) -> str:
    """The version of a distribution that is there."""
    return version(package)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what a peer prints from the screen."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def start_compiling() -> None:
    """Let DeepSpeed compile its two C++ optimizers beside us, unless it has.

    They are waited for where they are used: builds hold a lock.
    """
    if without_compiler():
        return
    names = ("FusedAdamBuilder", "CPUAdamBuilder")
    program = "from deepspeed.ops import op_builder as o; " + "; ".join(
        f"o.{name}().load()" for name in names
    )
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1", "MAX_JOBS": "1"}
    subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def without_compiler() -> str:
    """Empty, or why a peer that compiles itself cannot."""
    return "" if shutil.which("g++") else "it compiles C++ on first use, and there is no g++"


@cache
def deepspeed(module: str) -> ModuleType:
    """A module of DeepSpeed, on its CPU accelerator, in a gloo group of one."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls torch.compile on import, for an optimizer that nothing here uses.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    package = import_module("deepspeed")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    # Its collective over shared memory would be compiled first; gloo does the same.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Its CPU accelerator declares fp16 unsupported, which torch has had for years.
    vars(package.accelerator.get_accelerator())["is_fp16_supported"] = lambda: True
    package.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return import_module(module)


EXPERTS = "ep_size_1"


@cache
def make_expert_group() -> None:
    """Make DeepSpeed's expert-parallel group of one rank, which it calls `EXPERTS`."""
    deepspeed("deepspeed.utils.groups")._create_expert_and_data_parallel(1)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """DeepSpeed's group while it lasts, where DeepSpeed is installed; the environment is restored.

    What was made is forgotten on both sides, so that a next call makes a group anew.
    """
    kept = dict(os.environ)
    try:
        if is_installed("deepspeed"):
            deepspeed("deepspeed")
        yield
    finally:
        if is_installed("deepspeed"):
            # torch's own would leave groups that DeepSpeed keeps, and its flag.
            import_module("deepspeed.comm").destroy_process_group()
        deepspeed.cache_clear()
        make_expert_group.cache_clear()
        os.environ.clear()
        os.environ.update(kept)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
