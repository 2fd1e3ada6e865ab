"""Launchers that ask for a GPU are judged on replay; what only a GPU has is a named limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.helpers.command import parity
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named, running
from twinstep.parity.registry.kernels import CLAIMS, Kernel
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort

Tensors = list[Tensor]
QUICK = Effort(examples=2, repros=None, shrink_seconds=0.0)


@triton.jit
def add(a_ptr, g_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a_ptr + at, mask=at < n) + tl.load(g_ptr + at, mask=at < n)
    tl.store(a_ptr + at, total, mask=at < n)


def launched(accumulators: Tensors, grads: Tensors, scratch: Callable[[Tensor], Tensor]) -> None:
    """As it is written for a GPU: everything is asked of the device, and scratch made there."""
    for a, g in zip(accumulators, grads, strict=True):
        assert a.is_cuda
        assert g.device == torch.device("cuda", torch.cuda.current_device())
        assert torch.cuda.get_device_capability(a.device) >= (8, 0)
        wide = scratch(a)
        wide.copy_(a)
        with torch.cuda.device(a.device), torch.cuda.stream(torch.cuda.Stream()):
            if a.numel():
                add[(triton.cdiv(a.numel(), 64),)](wide, g, a.numel(), BLOCK=64)
        a.copy_(wide)


def on_device(accumulators: Tensors, grads: Tensors) -> None:
    launched(accumulators, grads, lambda a: torch.empty(a.shape, dtype=a.dtype, device="cuda"))


def on_host(accumulators: Tensors, grads: Tensors) -> None:
    launched(accumulators, grads, lambda a: torch.empty(a.shape))


def waiting(accumulators: Tensors, grads: Tensors) -> None:
    on_device(accumulators, grads)
    torch.cuda.synchronize()


def into_a_graph(accumulators: Tensors, grads: Tensors) -> None:
    on_device(accumulators, grads)
    torch.cuda.CUDAGraph()


def wrong_shape(accumulators: Tensors, grads: Tensors) -> None:
    on_device(accumulators, grads)
    torch.mm(torch.ones(2, device="cuda"), torch.ones(2, device="cuda"))


def judged(function: Callable[..., object], law: str = "value") -> Cell:
    contract, engine = operation_named("accumulate", "test"), engine_named("replay")
    kernel = Kernel(
        name=function.__name__,
        operation=contract,
        function=function,
        arithmetic="exact",
        dtypes=("fp32",),
        layouts=contract.layouts,
        engines=("replay",),
        place=f"{__file__}:1",
        claims=CLAIMS,
    )
    with running(engine):
        return judge_cell(kernel, "fp32", LAWS[law], engine, QUICK)


@pytest.mark.parametrize("law", ["value", "process_state", "large_index", "no_host_read"])
def test_a_launcher_for_a_gpu_keeps_the_law(law: str) -> None:
    cell = judged(on_device, law)
    # All of a large tensor is copied here, which replay cannot do.
    wanted = Status.SKIPPED if law == "large_index" else Status.PASSED
    assert cell.status is wanted, cell.reason
    assert not torch.cuda.is_available()


def test_host_memory_given_to_a_kernel_is_a_fault() -> None:
    cell = judged(on_host)
    assert cell.status is Status.FAILED
    assert "Argument a_ptr is a tensor on the CPU" in cell.failure


def test_a_launcher_that_waits_for_the_device_is_not_capturable() -> None:
    cell = judged(waiting, "no_host_read")
    assert cell.status is Status.FAILED
    assert f"synchronize at {__file__}" in cell.failure
    assert judged(waiting).status is Status.PASSED


def test_what_only_a_gpu_has_is_a_limit_and_no_fault() -> None:
    cell = judged(into_a_graph)
    assert cell.status is Status.CANNOT_JUDGE
    assert "asks for a GPU (torch.cuda.CUDAGraph), and there is none here" in cell.reason


def test_an_error_of_the_kernel_is_its_own() -> None:
    cell = judged(wrong_shape)
    assert cell.status is Status.FAILED
    assert "raises RuntimeError: self must be a matrix" in cell.failure


GRAPH = """
import torch
from twinstep.parity import register

@register("accumulate", name="mine", dtypes=("fp32",), engines=("replay",))
def mine(accumulators, grads):
    torch.cuda.CUDAGraph()
"""


def test_the_limit_has_the_line_and_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(GRAPH)
    flags = ("--quick", "--law", "value", "--jobs", "1")
    assert parity("check", "mine.py", *flags) == 3
    assert "torch.cuda.CUDAGraph" in capsys.readouterr().out
