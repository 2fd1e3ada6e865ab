"""Part: compute-sanitizer watches small runs of every exact kernel for bad accesses and races."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

import torch

from twinstep.benchmarks import part
from twinstep.benchmarks.engines import exact_kernels, first_cases
from twinstep.benchmarks.part import Broken, Figures, Job, Skipped
from twinstep.parity.cases.case import Case
from twinstep.parity.registry.kernels import Kernel

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
# Under the sanitizer every launch is slow: 16 bit, all dtypes in one list, and no lists at all.
DTYPES = ("bf16", "mixed", "scalar")
FOUND = 99  # the exit status that the sanitizer is told to use for a finding
# Its words where the driver or a sandbox does not let it watch.
REFUSALS = ("Device not supported", "not supported on this", "Unable to initialize")


def run() -> Iterator[Figures]:
    """Run the kernels once under each tool."""
    if shutil.which(PROGRAM) is None:
        raise Skipped(f"{PROGRAM} is not on the PATH")
    for tool in TOOLS:
        yield {tool: watch(tool)}


def watch(tool: str) -> str:
    """Run this module's child process under one tool; its closing line.

    Raises:
        Broken: a finding, or the child failed.
        Skipped: the sanitizer cannot watch this device.
    """
    prefix = [PROGRAM, "--tool", tool, "--error-exitcode", str(FOUND)]
    # Without torch's pool every tensor is an allocation of its own, and a step past it is seen.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    job = Job("benchmarks.sanitizer", prefix=prefix, environment=alone)
    return judge(tool, *part.run_job(job))


def judge(tool: str, status: int | None, output: str) -> str:
    """The closing line of a clean run of the sanitizer.

    Raises:
        Broken: a finding, or the child failed.
        Skipped: the sanitizer cannot watch this device.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    refusals = [line for line in lines if any(words in line for words in REFUSALS)]
    if refusals:
        raise Skipped(f"{PROGRAM} refuses this device: {refusals[0]}")
    if status:
        findings = [line for line in lines if line.startswith("=========")]
        raise Broken(f"{tool} ended with {status}: {' | '.join((findings or lines)[:6])}")
    summary = [line for line in lines if "SUMMARY" in line]
    if not summary:
        raise Broken(f"{tool} printed no summary: {' | '.join(lines[-3:])}")
    return summary[-1].strip("= ")


def call_apart(kernel: Kernel, case: Case, device: torch.device) -> None:
    """Call a kernel with every tensor in an allocation of its own."""
    names = [argument.name for argument in case.operation.lists]
    lists = [[tensor.to(device) for tensor in case.lists[name]] for name in names]
    controls = {name: value.to(device) for name, value in case.controls.items()}
    kernel.function(*lists, **controls, **case.options)


def main(_: Sequence[str] = ()) -> int:
    """Child process: the first case of every kernel and layout in a few dtypes."""
    device = torch.device("cuda")
    for kernel in exact_kernels():
        for case in first_cases(kernel):
            if case.combination in DTYPES:
                call_apart(kernel, case, device)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
