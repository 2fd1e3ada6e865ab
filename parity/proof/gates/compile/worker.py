"""The child process: compiles one variant after the other and writes its facts, a line each.

A compiler that crashes takes this process with it; the parent knows which variant it was at.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinstep.parity.proof.gates.compile import shortest_way
from twinstep.parity.proof.gates.compile.artefacts import (
    Facts,
    code_bytes,
    cuobjdump,
    of_amdgcn,
    of_ptx,
    of_usage,
    run_tool,
    spilled,
)
from twinstep.parity.proof.gates.compile.cuda import CudaVariant, facts_of_cuda
from twinstep.parity.proof.gates.compile.main_loop import (
    KERNELS,
    NVIDIA,
    code_of,
    facts_of_loop,
    of_assembly,
    of_sass,
)
from twinstep.parity.proof.gates.compile.variants import Variant


def target_named(name: str) -> GPUTarget:
    """The target that Triton knows by `sm_90` or `gfx942`.

    >>> target_named("sm_90").warp_size
    32
    """
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def source_of(variant: Variant) -> tuple[ASTSource, dict[str, object]]:
    """Source and options, as `triton.compile` takes them and as a launch gives them."""
    source = ASTSource(
        fn=variant.function(),
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=variant.attributes,
    )
    return source, {"enable_fp_fusion": variant.fusion, "num_warps": variant.warps}


class _Target:
    """All of Triton's driver that compiling asks for: kernels may differ by target."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target


def facts_of(variant: Variant | CudaVariant, target: str) -> Facts:
    """Compile one variant and read its facts."""
    if isinstance(variant, CudaVariant):
        return facts_of_cuda(variant, target)
    triton.runtime.driver.set_active(_Target(target_named(target)))
    source, options = source_of(variant)
    compiled = triton.compile(source, target=target_named(target), options=options)
    if "hsaco" in compiled.asm:
        facts = of_amdgcn(compiled.asm["amdgcn"])
        loop = of_assembly(compiled.asm["amdgcn"]) if variant.kernel in KERNELS else {}
        return {**facts, **loop, "code": code_bytes(compiled.asm["hsaco"])}
    with tempfile.TemporaryDirectory() as folder:
        return _of_cubin(compiled.asm["ptx"], compiled.asm["cubin"], Path(folder), target, variant)


def _of_cubin(ptx: str, cubin: bytes, folder: Path, target: str, variant: Variant) -> Facts:
    binary, text = folder / "kernel.cubin", folder / "kernel.ptx"
    binary.write_bytes(cubin)
    usage = of_usage(cuobjdump("-res-usage", str(binary)))
    spills = 0
    if usage["local"]:
        # Local memory is spills, arrays, or both: only the assembler's own report shows it.
        text.write_text(ptx)
        architecture = target + ("a" if int(target[3:]) >= 90 else "")
        flags = ["-v", "--fmad=false", "--regAllocOptLevel=2", f"--gpu-name={architecture}"]
        spills = spilled(
            run_tool(assembler(target), *flags, str(text), "-o", str(folder / "again"))
        )
    loop: Facts = {}
    if variant.kernel in KERNELS:
        loop = of_sass(cuobjdump("-sass", str(binary)))
    elif variant.kernel in shortest_way.KERNELS:
        code = code_of(cuobjdump("-sass", str(binary)))
        loop = facts_of_loop(shortest_way.main_loop(code), NVIDIA)
    return {**usage, "spilled": spills, **of_ptx(ptx), **loop, "code": code_bytes(cubin)}


def assembler(target: str) -> str:
    """Path of the ptxas that Triton uses for a target."""
    tools = triton.knobs.nvidia
    return str((tools.ptxas_blackwell if int(target[3:]) >= 100 else tools.ptxas).path)


def main() -> None:
    """Read (target, variants) from standard input, write one JSON line for each variant."""
    target, variants = pickle.load(sys.stdin.buffer)
    for index, variant in enumerate(variants):
        print(json.dumps({"start": index}), flush=True)
        try:
            answer: dict[str, object] = {"facts": facts_of(variant, target)}
        except Exception as error:  # whatever the compiler raises is its answer
            first = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {first[0]}"}
        print(json.dumps({"done": index, **answer}), flush=True)


if __name__ == "__main__":
    main()
