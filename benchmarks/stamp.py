"""Machine, versions and time of a measurement. A number without them is not a result.

`simulated` is true where replay stands in for the GPU: times of such a run mean nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
import triton

from twinstep.benchmarks.part import Figures
from twinstep.fast.runtime.dispatch import executes_cpu_tensors


def stamp() -> Figures:
    """Machine, versions, commit and time; no host name and no paths."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _first_line(["git", "rev-parse", "--short", "HEAD"]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpu": gpu(),
        "simulated": executes_cpu_tensors(),
    }


def report(figures: Figures, output: Path | None) -> None:
    """Print figures as JSON, and write them where asked."""
    text = json.dumps(figures, indent=1) + "\n"
    print(text, end="")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


def gpu() -> Figures | None:
    """Name, memory and driver of the current GPU; None where there is none."""
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "processors": facts.multi_processor_count,
        "capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
        "driver": _first_line(query),
    }


def _first_line(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else "unknown"
