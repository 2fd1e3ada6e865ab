"""The kernels in CUDA C++ among the variants: noted as they are launched, compiled by NVRTC.

What a GPU runs is NVRTC's own machine code; facts are read off that. AMD's targets do not apply.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from twinstep.fast.kernels.cuda import library
from twinstep.parity.proof.gates.compile.artefacts import (
    Facts,
    code_bytes,
    cuobjdump,
    of_ptx,
    of_usage,
)
from twinstep.parity.proof.gates.compile.main_loop import NVIDIA, code_of, facts_of_loop
from twinstep.parity.proof.gates.compile.shortest_way import main_loop
from twinstep.parity.proof.gates.compile.variants import launches, recorded
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay.cuda import nvrtc

PREFIX = "cuda."
# Kernels with a main loop, which is counted.
LOOPS = ("reduce_squares", "adam_update", "lamb_moments", "lamb_weights")
_LOCAL = re.compile(r"^(?:STL|LDL)(?:\.(64|128))?")
_WRITTEN = "__fmaf_rn"


@dataclass(frozen=True)
class CudaVariant:
    """One kernel of one source with its macros.

    Attributes:
        file: the source in `fast/kernels/cuda/`, without its ending.
        entry: the kernel in it.
        macros: names and values.
        threads: of a block.
        operations: names of those that launch it.
    """

    file: str
    entry: str
    macros: library.Macros
    threads: int
    operations: frozenset[str] = frozenset()

    @property
    def kernel(self) -> str:
        """The kernel's name among those of other backends."""
        return PREFIX + self.entry

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // 32)

    @property
    def name(self) -> str:
        """Kernel, dtypes of its arguments, and options that are on."""
        types = {number: str(dtype) for dtype, number in library.NUMBERS.items()}
        parts = [
            f"{name}={_SHORT[types[value]]}" if name in "PGC" else name * value
            for name, value in self.macros
        ]
        return " ".join([self.kernel, *filter(None, parts)])

    @property
    def source(self) -> str:
        """Everything that decides what the compiler makes of it."""
        facts = (self.entry, self.macros, library.FLAGS, library.files_of(self.file))
        return str(facts)


_SHORT = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.int16": "i16",
}


def applies(target: str) -> bool:
    """True of NVIDIA's targets."""
    return target.startswith("sm_")


def maker(variant: str, target: str) -> str:
    """Name of what compiles a variant for a target, among the recorded compilers.

    >>> maker("cuda.adam_update P=fp32", "sm_90"), maker("adam_flat_kernel", "sm_90")
    ('sm_90 cuda', 'sm_90')
    """
    return f"{target} cuda" if variant.startswith(PREFIX) else target


def compilers(targets: Sequence[str]) -> dict[str, str]:
    """The compiler of each target that applies; none where NVRTC is missing."""
    if nvrtc.missing():
        return {}
    return {maker(PREFIX, target): library.version() for target in targets if applies(target)}


@contextmanager
def noted() -> Iterator[dict[str, CudaVariant]]:
    """Collect, by name, what launches inside the block would compile; nothing runs."""
    found: dict[str, CudaVariant] = {}

    def note(source: str, kernel: str, threads: int, macros: library.Macros) -> bool:
        one = CudaVariant(source, kernel, macros, threads)
        known = found.setdefault(one.name, one)
        assert known == one, f"two variants are called {one.name}"
        return True

    before, library.listener = library.listener, note
    try:
        with recorded():  # its driver takes CPU tensors
            yield found
    finally:
        library.listener = before


def cuda_variants_of(kernels: Sequence[Kernel]) -> list[CudaVariant]:
    """Every variant that these kernels launch, sorted by name."""
    merged: dict[str, CudaVariant] = {}
    for user, launch in launches(kernels):
        with noted() as found:
            launch()
        for name, one in found.items():
            before = merged.get(name, one)
            merged[name] = replace(one, operations=before.operations | {user})
    return [merged[name] for name in sorted(merged)]


def facts_of_cuda(variant: CudaVariant, target: str) -> Facts:
    """Compile one variant and read its facts; `spilled` counts every access of local memory."""
    number = int(target.removeprefix("sm_"))
    cubin = library.compiled(variant.file, "cubin", number, variant.macros)
    ptx = library.compiled(variant.file, "ptx", number, variant.macros).decode()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = cuobjdump("-res-usage", file.name)
        code = code_of(cuobjdump("-sass", "-fun", variant.entry, file.name))
    local = [_LOCAL.match(one.mnemonic) for one in code]
    facts = of_ptx(_of_entry(ptx, variant.entry))
    facts["contracted"] -= _written(ptx, variant)
    loop = facts_of_loop(main_loop(code), NVIDIA) if variant.entry in LOOPS else {}
    return {
        **of_usage(usage.partition(f"Function {variant.entry}:")[2].partition("Function")[0]),
        "spilled": sum(int(found[1] or 32) // 8 for found in local if found),
        **facts,
        **loop,
        "code": code_bytes(cubin, variant.entry),
    }


def _of_entry(ptx: str, entry: str) -> str:
    """Text of one kernel of a module."""
    return re.split(rf"\.entry {entry}\b", ptx)[1].partition(".entry")[0]


def _written(ptx: str, variant: CudaVariant) -> int:
    """Fused multiply-adds of a kernel for which the source asks by name, line by line."""
    names = {number: Path(name).name for number, name in re.findall(r'\.file\s+(\d+) "(.+?)"', ptx)}
    lines = {name: text.splitlines() for name, text in library.files_of(variant.file).items()}
    here, count = "", 0
    for text in _of_entry(ptx, variant.entry).splitlines():
        if at := re.match(r"\s+\.loc\s+(\d+) (\d+)", text):
            here = lines[names[at[1]]][int(at[2]) - 1]
        count += _WRITTEN in here and re.match(r"\s+fma\.rn\.f32\s", text) is not None
    return count
