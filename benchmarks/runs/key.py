"""Key of a history: what must be equal for two times to be comparable at all."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import torch
import triton

from twinstep.benchmarks.offload import processor
from twinstep.benchmarks.stamp import gpu

Key = dict[str, str]


def key_of() -> Key:
    """Device, driver, clock, and versions of torch, Triton and Python."""
    found = gpu()
    device = str(found["name"]) if found else f"{processor()} x{torch.get_num_threads()}"
    return {
        "device": device,
        "driver": str(found["driver"]) if found else f"{platform.system()} {platform.release()}",
        "clock": _gpu_clock() if found else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _gpu_clock() -> str:
    """Highest clock that the GPU may have now, in MHz."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm,clocks.applications.graphics"]
    done = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else "unknown"


def slug(key: Key) -> str:
    """A file name for a device.

    >>> slug({"device": "AMD EPYC x2"})
    'amd-epyc-x2'
    """
    return re.sub(r"[^a-z0-9]+", "-", key["device"].lower()).strip("-")


def differences(old: Key, new: Key) -> list[str]:
    """Parts of two keys that differ, in words.

    >>> differences({"torch": "2.12"}, {"torch": "2.13"})
    ['torch was 2.12, is 2.13']
    """
    names = sorted({*old, *new})
    return [
        f"{name} was {old.get(name, 'unknown')}, is {new.get(name, 'unknown')}"
        for name in names
        if old.get(name) != new.get(name)
    ]
