"""Parameters of kernels that have names: the expression of each has the bits that are passed."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from twinstep import replay
from twinstep.replay.machine.named import HostNumber
from twinstep.replay.names.evaluate import evaluate
from twinstep.replay.names.naming import names_of, naming
from twinstep.replay.names.session import NotNamed
from twinstep.replay.names.triton_arguments import named_arguments

VALUES = (0.1, -1.0000001, 6.1e-5, 3e-8, 65519.9, 1e-40, 0.0, -0.0, 7.0)
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
BYTES = """.visible .entry k(.param .u64 out, .param .f32 x) {
    .reg .b64 %rd<2>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [out];
    ld.param.u8 %r1, [x];
    st.global.b32 [%rd1], %r1;
    ret;
}"""
COMPUTED = """.visible .entry k(.param .u64 out, .param .f32 x) {
    .reg .b64 %rd<3>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [out];
    mov.b64 %rd2, x;
    ld.param.b32 %r1, [%rd2];
    st.global.b32 [%rd1], %r1;
    ret;
}"""


class Number(HostNumber):
    """A number of the host without arithmetic."""

    def __init__(self, value: float, number: int) -> None:
        self.value, self.number = value, number


@triton.jit
def _half(out, x: "fp16"):  # type: ignore[name-defined]  # noqa: F821
    tl.store(out, x)


@triton.jit
def _brain(out, x: "bf16"):  # type: ignore[name-defined]  # noqa: F821
    tl.store(out, x)


@triton.jit
def _single(out, x):
    tl.store(out, x)


@triton.jit
def _double(out, x: "fp64"):  # type: ignore[name-defined]  # noqa: F821
    tl.store(out, x)


@triton.jit
def _pair(out, x):
    tl.store(out, x[1])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (_half, torch.float16),
        (_brain, torch.bfloat16),
        (_single, torch.float32),
        (_double, torch.float64),
        (_pair, torch.float32),
    ],
)
def test_the_name_of_an_argument_has_its_bits(
    kernel: Any, dtype: torch.dtype, value: float
) -> None:
    out = torch.zeros(1, dtype=dtype)
    replay.activate()
    try:
        with naming() as session, named_arguments():
            leaf = session.table.leaf("x", 4)
            x = Number(value, leaf)
            kernel[(1,)](out, (1, x) if kernel is _pair else x)
            (number,) = names_of(session, out).tolist()
    finally:
        replay.deactivate()
    assert number >= 0
    bits = np.array([[value]]).view(np.uint64)
    found = evaluate(session.table, [number], {leaf: bits})[number]
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert int(found.flat[0]) == int(out.view(kind)) % (1 << 8 * dtype.itemsize)


@pytest.mark.parametrize("text", [BYTES, COMPUTED])
def test_a_part_of_a_named_parameter_and_a_computed_address_are_refused(text: str) -> None:
    out = torch.zeros(1)
    replay.run_ptx(HEAD + text, "k", (1,), (1,), [out, 0.1])
    with naming() as session:
        replay.run_ptx(HEAD + text, "k", (1,), (1,), [out, 0.1])
        x = Number(0.1, session.table.leaf("x", 4))
        with pytest.raises(NotNamed, match=r"ld\.param"):
            replay.run_ptx(HEAD + text, "k", (1,), (1,), [out, x])
