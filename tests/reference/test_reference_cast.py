"""Casts and accumulation: one rounding, to nearest, ties to even."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest
import torch

from tests.oracles.rational import BF16, FP16, FP32, rounded
from twinstep.parity.cases.fixed_inputs import anything, bits, from_bits, moderate, words
from twinstep.parity.operations import buffers
from twinstep.reference.accumulate import accumulate
from twinstep.reference.buffers import cast_copy

FORMATS = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}


def halfway(dtype: torch.dtype) -> torch.Tensor:
    """Every finite 16-bit value as fp32, and the ties above it with their neighbours."""
    width = 13 if dtype == torch.float16 else 16
    every = from_bits(list(range(0x10000)), dtype).float()
    base = every[torch.isfinite(every)].view(torch.int32)
    steps = [0, 1 << (width - 1), (1 << (width - 1)) - 1, (1 << (width - 1)) + 1]
    made = torch.cat([base + step for step in steps]).view(torch.float32)
    return made[torch.isfinite(made)]


def test_cast_to_fp16_agrees_with_the_standard_library_at_every_tie() -> None:
    x = halfway(torch.float16)
    x = x[x.abs() < 65520]
    (got,) = cast_copy([x], [torch.float16])
    truth = [struct.unpack("<H", struct.pack("<e", value))[0] for value in x.tolist()]
    assert bits(got) == truth


def test_cast_to_bf16_agrees_with_integer_rounding_at_every_tie() -> None:
    x = halfway(torch.bfloat16)
    (got,) = cast_copy([x], [torch.bfloat16])
    words32 = x.view(torch.int32).long() & 0xFFFFFFFF
    truth = (words32 + 0x7FFF + ((words32 >> 16) & 1)) >> 16
    assert bits(got) == (truth & 0xFFFF).tolist()


@pytest.mark.parametrize("dtype", list(FORMATS), ids=str)
def test_cast_copy_rounds_once(dtype: torch.dtype) -> None:
    x = anything(500, 4, torch.float32)
    x = x[torch.isfinite(x) & (x != 0)]
    (got,) = cast_copy([x], [dtype])
    assert got.tolist() == [rounded(Fraction(value), FORMATS[dtype]) for value in x.tolist()]


def test_cast_copy_keeps_specials() -> None:
    x = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, 1e30])
    (got,) = cast_copy([x], [torch.float16])
    wanted = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, torch.inf]).half()
    assert bits(got) == bits(wanted)


@pytest.mark.parametrize("held", list(FORMATS), ids=str)
@pytest.mark.parametrize("added", list(FORMATS), ids=str)
def test_accumulate_adds_in_fp32_and_rounds_once(held: torch.dtype, added: torch.dtype) -> None:
    a, g = moderate(300, 1, held), moderate(300, 2, added)
    (got,) = accumulate([a], [g])
    pairs = zip(a.tolist(), g.tolist(), strict=True)
    sums = [rounded(Fraction(x) + Fraction(y), FP32) for x, y in pairs]
    assert got.tolist() == [rounded(Fraction(x), FORMATS[held]) for x in sums]
    assert got.dtype == held


def test_small_gradients_stall_in_bf16_and_add_up_in_fp32() -> None:
    grad = torch.full((1,), 2.0**-9)
    for dtype, wanted in ((torch.bfloat16, 1.0), (torch.float32, 1.25)):
        held = torch.ones(1, dtype=dtype)
        for _ in range(128):
            (held,) = accumulate([held], [grad])
        assert held.item() == wanted


def test_accumulate_writes_nothing_and_takes_empties() -> None:
    a, g = torch.ones(2), torch.ones(2)
    accumulate([a], [g])
    assert a.tolist() == [1.0, 1.0]
    assert accumulate([], []) == []
    assert accumulate([a[:0]], [g[:0]])[0].numel() == 0


def test_lists_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match=r"grads\[0\] has shape \(1,\), but should have \(2,\)"):
        accumulate([torch.ones(2)], [torch.ones(1)])
    with pytest.raises(ValueError, match="sources has 1 tensors, but should have 0 like copies"):
        buffers.cast_copy([torch.ones(1)], [])


def test_words_repeat() -> None:
    assert words(5, 42) == words(5, 42)
    assert words(5, 42) != words(5, 43)
