"""Part: every variant of our kernels, compiled on all cores before anything is run.

Triton keeps binaries and launchers in its cache folder, where the parts that follow find them, and
so do our kernels in CUDA C++, where NVRTC is installed: one after the other they would take longer
than all that is judged.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton

from twinstep.benchmarks import part
from twinstep.benchmarks.part import Broken, Figures, Job
from twinstep.fast.kernels.cuda import library
from twinstep.parity.proof.gates.compile.cuda import PREFIX, CudaVariant, cuda_variants_of
from twinstep.parity.proof.gates.compile.variants import Variant, variants_of
from twinstep.parity.proof.gates.compile.worker import source_of
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.replay.cuda import nvrtc

WORKERS = os.cpu_count() or 1


def run() -> Iterator[Figures]:
    """Compile on as many processes as there are cores.

    Raises:
        Broken: a variant does not compile, or a process died.
    """
    found = chosen()
    yield {"variants": len(found), "processes": WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for first in range(WORKERS):
            file = Path(folder) / str(first)
            file.write_bytes(pickle.dumps(found[first::WORKERS]))
            jobs.append(Job("benchmarks.compiled", [str(file)]))
        ended = [end for _, end in part.run_jobs(jobs, WORKERS)]
    wrong = [
        f"a process ended with {status}: {output[-1000:]}" for status, output in ended if status
    ]
    if wrong:
        raise Broken(wrong[0])


def chosen() -> list[Variant | CudaVariant]:
    """Variants of all our kernels for a GPU, and of what only our classes launch."""
    register_house()
    ours = [kernel for kernel in kernels() if kernel.name.startswith("triton.")]
    found: list[Variant | CudaVariant] = [*variants_of(ours, optimizers=True)]
    if not nvrtc.missing():
        found += cuda_variants_of([one for one in kernels() if one.name.startswith(PREFIX)])
    return found


def main(arguments: Sequence[str]) -> int:
    """Child process: compile and load the variants of a file; 1 if one cannot be."""
    variants: list[Variant | CudaVariant] = pickle.loads(Path(arguments[0]).read_bytes())
    target, wrong = triton.runtime.driver.active.get_current_target(), 0
    for variant in variants:
        try:
            if isinstance(variant, CudaVariant):
                library.compiled(variant.file, "cubin", target.arch, variant.macros)
                continue
            source, options = source_of(variant)
            # The first access makes the launcher and loads the binary.
            _ = triton.compile(source, target=target, options=options).run
        except Exception as error:
            print(f"{variant.name}: {type(error).__name__}: {error}")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
