"""Triton's interpreter on request: its verdicts name what it is known to do otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import triton
import triton.language as tl

from tools.source import ROOT
from twinstep.parity.registry.engines import engine_among
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.parity.runner.interpreter import (
    CAVEAT,
    DIVERGENCES,
    Facts,
    divergences,
    jitted,
    read,
    remarks,
)

RECORD = ROOT / "docs" / "decisions" / "0010-triton-interpreter-measured-once.md"
CAST = """
import triton
import triton.language as tl
from twinstep.parity import register


@triton.jit
def kernel(source, copy, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < n)
    tl.store(copy + i, x.to(copy.dtype.element_ty), mask=i < n)


@register("cast_copy", dtypes=("bf16",))
def right(sources, copies):
    for source, copy in zip(sources, copies, strict=True):
        if n := source.numel():
            kernel[(triton.cdiv(n, 256),)](source, copy, n, BLOCK=256)
"""


def test_a_right_bf16_kernel_is_rejected_in_the_interpreter_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "cast.py").write_text(CAST)
    command = [
        sys.executable,
        "-m",
        "twinstep.parity",
        "check",
        "cast.py",
        "--law",
        "value",
        "--quick",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--engine", "interpret"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cast_copy[right, bf16, interpret] breaks `value`" in done.stdout
    assert "right meets what Triton's interpreter is known to do otherwise" in done.stdout
    assert "fp32 stored as bf16" in done.stdout


def test_the_list_is_the_rows_of_the_record_that_differ() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .*\|$", RECORD.read_text(), re.MULTILINE)
    differ = [name for name, outcome in rows[2:] if outcome != "as stated"]
    assert differ == list(DIVERGENCES)


@triton.jit
def positions_alone(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def arithmetic(x, beta, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < 7)
    scaled = value * (1.0 - beta) + value / tl.sqrt_rn(value)
    tl.store(x + i, scaled.to(tl.int32))


def launcher() -> None:
    arithmetic[(1,)](None, 0.5, BLOCK=8)


def facts(function: Callable[..., object]) -> Facts:
    found = Facts()
    (inner,) = jitted(function)
    read(inner, found)
    return found


def test_positions_are_no_arithmetic() -> None:
    assert facts(positions_alone) == Facts(calls={"program_id", "arange", "load", "store"})


def test_facts_are_read_from_the_source_through_launchers() -> None:
    found = facts(launcher)
    assert found.computes
    assert found.contracts
    assert found.casts_to_int
    assert found.scalar_arithmetic
    assert "sqrt_rn" in found.calls


def test_our_adamw_meets_bf16_and_nothing_that_it_does_not_use() -> None:
    register_house()
    kernel = next(kernel for kernel in kernels() if kernel.name == "fast.adamw_step")
    assert "fp32 stored as bf16" in divergences(kernel)
    assert "tl.exp2" not in divergences(kernel)
    assert remarks([kernel])[-1] == CAVEAT
    assert remarks([]) == []


def test_the_interpreter_takes_any_triton_kernel_on_request() -> None:
    assert engine_among(("cuda", "replay"), True, "interpret").name == "interpret"
    assert "not on interpret" in engine_among(("cpu",), False, "interpret").missing
