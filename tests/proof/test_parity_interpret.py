"""Triton's interpreter beside replay: the table in the docs, the warnings of verdicts."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import triton
import triton.language as tl
from rich.console import Console

from twinstep.parity.proof.interpret.constructs import CONSTRUCTS
from twinstep.parity.proof.interpret.facts import Facts, jitted, read
from twinstep.parity.proof.interpret.measure import Measured, everywhere
from twinstep.parity.proof.interpret.report import (
    Found,
    markdown,
    print_warnings,
    surprises,
    touching,
)
from twinstep.parity.registry.engines import engine_among
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels


@pytest.fixture(scope="module")
def found() -> Found:
    return everywhere(cuda=False)


def test_the_documented_table_is_what_is_measured(found: Found) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "engines.md").read_text()
    assert page.split("<!-- measured -->\n")[1].split("\n<!-- end")[0] == markdown(found)


def test_replay_keeps_every_statement_and_the_interpreter_breaks_the_known_ones(
    found: Found,
) -> None:
    assert surprises(found) == []


def test_a_surprise_is_told(found: Found) -> None:
    name = "tl.div_rn"
    worse = {engine: {**column, name: Measured(3, "of 0x1")} for engine, column in found.items()}
    assert surprises(worse) == [
        f"{name}: replay differs of 0x1",
        f"{name}: the interpreter leaves what is stated",
    ]
    better = {**found, "interpret": {**found["interpret"], "tl.fma": Measured(0)}}
    assert surprises(better) == ["tl.fma: the interpreter keeps what is stated"]


def test_every_construct_that_differs_may_touch_some_kernel() -> None:
    everything = Facts(
        dtypes={"fp16", "bf16", "fp32"},
        calls={"fma", "div_rn", "sqrt", "sqrt_rn", "rsqrt", "exp2", "maximum", "max"}
        | {"atomic_add", "inline_asm_elementwise"},
        **{f.name: True for f in dataclasses.fields(Facts) if f.type == "bool"},
    )
    assert all(construct.touched(everything) for construct in CONSTRUCTS)
    touched = [construct.name for construct in CONSTRUCTS if construct.touched(Facts())]
    assert touched == ["store beyond the tensor", "race between programs"]


@triton.jit
def places_alone(x, n, BLOCK: tl.constexpr):
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
    assert facts(places_alone) == Facts(
        calls={"program_id", "arange", "load", "store"},
    )


def test_facts_are_read_from_the_source() -> None:
    found = facts(arithmetic)
    assert found.contracts
    assert found.divides
    assert found.casts_to_int
    assert found.masked_without_other
    assert found.scalar_arithmetic
    assert "sqrt_rn" in found.calls


def test_jitted_functions_are_found_through_launchers() -> None:
    assert [f.__name__ for f in jitted(launcher)] == ["arithmetic"]


def test_our_adamw_meets_bf16_and_nothing_that_it_does_not_use() -> None:
    register_house()
    kernel = next(k for k in kernels() if k.name == "fast.adamw_step")
    names = touching(kernel)
    assert "fp32 stored as bf16" in names
    assert "tl.exp2" not in names
    screen = Console(record=True, width=1000, file=io.StringIO())
    print_warnings(screen, [kernel])
    assert "fp32 stored as bf16" in screen.export_text()


def test_the_interpreter_takes_any_triton_kernel_on_request() -> None:
    assert engine_among(("cuda", "replay"), True, "interpret").name == "interpret"
    assert "not on interpret" in engine_among(("cpu",), False, "interpret").missing
