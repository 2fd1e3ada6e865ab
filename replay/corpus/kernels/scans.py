"""Prefix operations and sorted orders."""

import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Draw, Run, case


@triton.jit
def cumsum_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.cumsum(tl.load(x + at), axis=0))


@case(cumsum_kernel, "x: *i32, out: *i32", constants={"BLOCK": 256}, grid=(2,))
def running_sum_of_integers(draw: Draw) -> Run:
    x = draw.integers(-(2**31), 2**31, 2, 256)
    return Run({"x": x, "out": torch.empty_like(x)}, {"out": x.long().cumsum(1).int()})


@case(cumsum_kernel, "x: *fp32, out: *fp32", constants={"BLOCK": 128}, warps=1)
def running_sum_in_one_warp(draw: Draw) -> Run:
    """Small integers: every order gives the same sums."""
    x = draw.integers(-1000, 1000, 128).float()
    return Run({"x": x, "out": torch.empty_like(x)}, {"out": x.cumsum(0)})


@triton.jit
def compose(a_scale, a_shift, b_scale, b_shift):
    return a_scale * b_scale, a_shift * b_scale + b_shift


@triton.jit
def recurrence_kernel(scale, shift, out, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    pair = (tl.load(scale + at), tl.load(shift + at))
    _, state = tl.associative_scan(pair, 0, compose, reverse=BACKWARDS)
    tl.store(out + at, state)


def recurrence(draw: Draw, backwards: bool) -> Run:
    """The state scale * state + shift in int32, which wraps around alike in every order."""
    scale, shift = draw.integers(-9, 9, 128), draw.integers(-999, 999, 128)
    state, states = 0, []
    order = range(127, -1, -1) if backwards else range(128)
    for index in order:
        state = int(scale[index]) * state + int(shift[index])
        states.append((state + 2**31) % 2**32 - 2**31)
    want = torch.tensor(states[:: -1 if backwards else 1], dtype=torch.int32)
    return Run({"scale": scale, "shift": shift, "out": torch.empty_like(want)}, {"out": want})


@case(
    recurrence_kernel,
    "scale: *i32, shift: *i32, out: *i32",
    constants={"BLOCK": 128, "BACKWARDS": False},
)
def recurrence_forwards(draw: Draw) -> Run:
    return recurrence(draw, False)


@case(
    recurrence_kernel,
    "scale: *i32, shift: *i32, out: *i32",
    constants={"BLOCK": 128, "BACKWARDS": True},
)
def recurrence_backwards(draw: Draw) -> Run:
    return recurrence(draw, True)


@triton.jit
def sort_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sort(tl.load(x + at)))


@case(sort_kernel, "x: *i32, out: *i32", constants={"BLOCK": 64}, grid=(2,), warps=2)
def sorted_integers(draw: Draw) -> Run:
    x = draw.integers(-99, 99, 2, 64)
    return Run({"x": x, "out": torch.empty_like(x)}, {"out": x.sort(1).values})
