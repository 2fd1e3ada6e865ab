"""The instruction check without a GPU: its PTX assembles, operands reach edges, it can say no."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from twinstep.benchmarks.engines import exact_kernels, first_cases
from twinstep.benchmarks.opcodes import (
    COUNT,
    FLOATS,
    INSTRUCTIONS,
    VERSION,
    first_difference,
    operands,
    replayed,
)
from twinstep.benchmarks.ptx import Instruction, module
from twinstep.benchmarks.ptx import kernel as ptx_kernel
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay import launches
from twinstep.replay.isa.forms import pure_families

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def test_kernel_names_are_distinct() -> None:
    assert len({instruction.entry for instruction in INSTRUCTIONS}) == len(INSTRUCTIONS)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_assembler_accepts_every_kernel(target: str, tmp_path: Path) -> None:
    present = [known for known in INSTRUCTIONS if known.oldest <= int(target[3:])]
    (tmp_path / "all.ptx").write_text(module(present, VERSION, target))
    command = [str(PTXAS), f"-arch={target}", "all.ptx", "-o", "all.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda item: item.entry[2:])
def test_replay_knows_every_instruction(instruction: Instruction) -> None:
    values = replayed(instruction, operands(instruction))
    assert values.shape == (COUNT,)
    assert len(np.unique(values)) > 1, "one result for all operands shows nothing"


@pytest.mark.parametrize("kernel", exact_kernels(), ids=lambda kernel: kernel.name)
def test_the_list_holds_every_pure_instruction_of_our_kernels(replay: None, kernel: Kernel) -> None:
    listed = {instruction.opcode for instruction in INSTRUCTIONS}
    used: set[str] = set()
    for case in first_cases(kernel):
        with launches() as log:
            GuardedMemory.of(case, torch.device("cpu")).call(kernel.function)
        used.update(*(launch.opcodes for launch in log))
    assert used, "nothing was launched"
    pure = {opcode for opcode in used if opcode.split(".")[0] in pure_families()}
    assert pure - listed == set()


@pytest.mark.parametrize("kind", FLOATS)
def test_operands_hold_zeros_infinities_nans_and_subnormals(kind: str) -> None:
    (values,) = operands(Instruction(f"abs.{kind}", (kind,), kind))
    exponent, mantissa = FLOATS[kind]
    sign, infinity = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa
    wanted = {0, sign, 1, sign + 1, infinity, sign + infinity, infinity + 1, infinity - 1}
    assert wanted <= set(values.tolist())


def test_operands_are_the_same_on_every_machine() -> None:
    (values,) = operands(Instruction("abs.f32", ("f32",), "f32"))
    again = operands(Instruction("abs.f32", ("f32",), "f32"))[0]
    assert np.array_equal(values, again)


ADD = Instruction("add.rn.f32", ("f32", "f32"), "f32")


def bits(*patterns: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(patterns, np.uint32)


def test_a_different_bit_and_a_flipped_zero_are_found() -> None:
    assert first_difference(ADD, bits(0, 1, 2), bits(0, 1, 3)) == 2
    assert first_difference(ADD, bits(0x80000000), bits(0)) == 0
    assert first_difference(ADD, bits(0x7FC00000), bits(0x7F800000)) == 0


def test_nan_payloads_are_not_compared_where_the_result_is_a_float() -> None:
    assert first_difference(ADD, bits(0x7FC00001), bits(0x7FFFFFFF)) == -1
    integer = Instruction("add.u32", ("u32", "u32"), "u32")
    assert first_difference(integer, bits(0x7FC00001), bits(0x7FFFFFFF)) == 0


def test_halves_of_packed_results_are_compared_apart() -> None:
    pack = Instruction("cvt.rn.f16x2.f32", ("f32", "f32"), "f16x2")
    assert first_difference(pack, bits(0, 0x7E010001), bits(0, 0x7FFF0001)) == -1
    assert first_difference(pack, bits(0, 0x7E010001), bits(0, 0x7FFF0002)) == 1


def test_an_immediate_stands_in_the_text() -> None:
    assert "lop3.b32 %r, %s0, %s1, %s2, 150;" in ptx_kernel(
        Instruction("lop3.b32", ("b32", "b32", "b32"), "b32", immediate=(0x96,))
    )
