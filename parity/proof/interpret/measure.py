"""Runs every construct in the interpreter, on replay and on a GPU, and compares bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from twinstep.parity.proof.interpret.constructs import CONSTRUCTS, COUNT, Construct
from twinstep.replay.conformance.run import same
from twinstep.replay.dtypes import width

TORCH = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "s32": torch.int32,
}
GUARD = 64


@dataclass(frozen=True)
class Measured:
    """What one engine made of one construct.

    Attributes:
        differ: Elements that differ from the statement; -1 where there is none.
        first: The first of them.
        said: What happened instead of a result, or beside it.
    """

    differ: int = -1
    first: str = ""
    said: str = ""

    def __str__(self) -> str:
        if self.said:
            return self.said
        return f"{self.differ} of {COUNT} differ" if self.differ else "as stated"


def launched(construct: Construct, device: str) -> tuple[list[int], str]:
    """Output bits and, where the launch ended in an error, what kind."""
    from twinstep.parity.proof.interpret import kernels

    kernel = getattr(kernels, construct.kernel)
    tensors = []
    for bits in construct.inputs():
        raw = torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}").copy())
        tensors.append(raw.view(TORCH[construct.source]).to(device))
    whole = torch.zeros(COUNT + GUARD, dtype=TORCH[construct.result], device=device)
    out = whole[:COUNT]
    scalar = GUARD if construct.kernel == "beyond" else construct.scalar
    options: dict[str, object] = {} if construct.fused else {"enable_fp_fusion": False}
    error = ""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[(construct.blocks,)](*tensors, out, scalar, BLOCK=COUNT, **options)
    except Exception as cause:
        error = type(cause).__name__
    size = width(construct.result)
    unsigned = whole.cpu().view(getattr(torch, f"int{8 * size}")).numpy().view(f"u{size}")
    if not error and unsigned[COUNT:].any():
        error = "wrote beyond it silently"
    return [int(x) for x in unsigned[:COUNT]], error


def judged(construct: Construct, bits: list[int], error: str) -> Measured:
    """Output bits against the statement."""
    if error:
        return Measured(said=error)
    if construct.stated is None:
        return Measured(said="nothing noticed" if construct.blocks > 1 else "ran")
    inputs = [x.tolist() for x in construct.inputs()]
    wanted = construct.stated(*inputs)
    kind = "u32" if construct.result == "s32" else construct.result
    wrong = [
        i
        for i, (got, want) in enumerate(zip(bits, wanted, strict=True))
        if want is not None and not same(kind, got, want)
    ]
    if not wrong:
        return Measured(0)
    at = wrong[0]
    want = wanted[at]
    assert want is not None
    given = ", ".join(hex(column[at]) for column in inputs)
    return Measured(len(wrong), f"of {given}: {bits[at]:#x}, should be {want:#x}")


def on_replay(construct: Construct) -> Measured:
    """One construct on replay, with the check of races."""
    import twinstep.replay

    twinstep.replay.activate()
    try:
        with twinstep.replay.options(check_races=construct.blocks > 1):
            bits, error = launched(construct, "cpu")
    finally:
        twinstep.replay.deactivate()
    return judged(construct, bits, error)


def on_cuda(construct: Construct) -> Measured:
    """One construct on the GPU; one that writes outside its tensors is left out there."""
    if construct.kernel == "beyond":
        return Measured(said="left out")
    return judged(construct, *launched(construct, "cuda"))


def in_interpreter() -> dict[str, Measured]:
    """All constructs in one child process under TRITON_INTERPRET=1."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "twinstep.parity.proof.interpret.measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the interpreter's process ended badly: {done.stderr[-500:]}")
    outputs = json.loads(done.stdout.splitlines()[-1])
    by_name = {construct.name: construct for construct in CONSTRUCTS}
    return {name: judged(by_name[name], bits, error) for name, (bits, error) in outputs.items()}


def everywhere(cuda: bool) -> dict[str, dict[str, Measured]]:
    """Engine to construct to what was measured."""
    engines: dict[str, Callable[[Construct], Measured]] = {"replay": on_replay}
    if cuda:
        engines["cuda"] = on_cuda
    found = {
        name: {construct.name: run(construct) for construct in CONSTRUCTS}
        for name, run in engines.items()
    }
    return {"interpret": in_interpreter(), **found}


def main() -> None:
    """The child process: every construct's output as one line of JSON."""
    print(json.dumps({each.name: launched(each, "cpu") for each in CONSTRUCTS}))


if __name__ == "__main__":
    main()
