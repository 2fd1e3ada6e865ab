"""Errors that are not the kernel's: of the judge, of replay, of a machine that is too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep import replay
from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory, Span
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.errors import CannotJudge, CannotRun, JudgeFault
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.calls.invoke import invoke
from twinstep.parity.runner.calls.large_tensors import LargeTensors, call_large
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort
from twinstep.replay.machine.execute import Execution

CPU = torch.device("cpu")
Lists = list[Tensor]


@triton.jit
def dot_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    half = tl.load(x + at).to(tl.float16)
    tl.store(x + at, tl.dot(half, half))


@triton.jit
def store_kernel(x):
    tl.store(x, 1.0)


@pytest.fixture
def _on_replay() -> Iterator[None]:
    replay.activate()
    yield
    replay.deactivate()


def accumulation(size: int = 33) -> Case:
    recipe = Recipe(layout="flat", sizes=(size,), regime="ordinary")
    return generate(operation_named("accumulate", "test"), "fp32", recipe)


def memory() -> GuardedMemory:
    return GuardedMemory.of(accumulation(), CPU)


def add(accumulators: Lists, grads: Lists) -> None:
    torch._foreach_add_(accumulators, grads)


def broken(*args: object) -> None:
    raise KeyError("planted")


def kernel_of(function: Callable[..., None]) -> Kernel:
    return Kernel(
        name="right",
        operation=operation_named("accumulate", "test"),
        function=function,
        arithmetic="exact",
        dtypes=("fp32",),
        layouts=("flat",),
        engines=("cpu",),
        place=f"{__file__}:1",
    )


def test_an_error_of_the_kernel_is_reported_with_its_place() -> None:
    failure = invoke(broken, memory()).failure
    assert failure.startswith("raises KeyError: 'planted' [")
    assert __file__ in failure
    assert invoke(lambda accumulators: None, memory()).failure.startswith("raises TypeError")


def test_an_error_of_the_judge_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Span, block: Tensor) -> Tensor:
        return block[self.start : self.stop].view(3, 5, 7)

    held = memory()
    code = lost.__code__.replace(co_filename=GuardedMemory.call.__code__.co_filename)
    lost.__code__ = code
    monkeypatch.setattr(Span, "of", lost)
    with pytest.raises(JudgeFault, match="(?s)guarded_memory.py.*RuntimeError: "):
        invoke(add, held)


@pytest.mark.usefixtures("_on_replay")
def test_an_error_inside_replay_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    code = broken.__code__.replace(co_filename=Execution.run.__code__.co_filename)
    monkeypatch.setattr(Execution, "run", FunctionType(code, globals(), "run"))
    with pytest.raises(JudgeFault, match="KeyError: 'planted'"):
        invoke(lambda accumulators, grads: store_kernel[(1,)](accumulators[0]), memory())


@pytest.mark.usefixtures("_on_replay")
def test_an_instruction_that_replay_lacks_is_not_the_kernels() -> None:
    x = torch.zeros(16, 16)
    with pytest.raises(CannotRun, match="mma"):
        invoke(lambda accumulators, grads: dot_kernel[(1,)](x, BLOCK=16), memory())


def test_an_error_in_a_check_is_booked_as_the_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(add)
    monkeypatch.setattr("twinstep.parity.laws.plan.Values.violation", broken)
    effort = Effort(repros=None)
    cell = judge_cell(kernel, "fp32", LAWS["value"], engine_named("cpu"), effort)
    assert cell.status is Status.CANNOT_JUDGE
    assert "the judge itself failed, not the kernel: KeyError: 'planted'" in cell.reason
    assert cell.failure == ""


@pytest.mark.parametrize("error", [CannotRun, CannotJudge, RuntimeError])
def test_what_fails_on_the_way_to_a_better_report_leaves_the_failure(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(*arguments: object) -> None:
        raise error("planted")

    monkeypatch.setattr("twinstep.parity.runner.judge_cell.shrunk", fails)
    effort = Effort(repros=None)
    cell = judge_cell(kernel_of(broken), "fp32", LAWS["value"], engine_named("cpu"), effort)
    assert cell.status is Status.FAILED
    assert "the kernel raises KeyError: 'planted'" in cell.failure
    assert f"not shown again: {error.__name__}: planted" in cell.failure


@pytest.mark.usefixtures("_on_replay")
def test_torch_on_a_whole_virtual_tensor_cannot_be_judged() -> None:
    engine = engine_named("replay")
    large = LargeTensors(accumulation(250), engine)
    with pytest.raises(CannotJudge, match=r"calls aten.clone.default on all of 6442451021"):
        call_large(lambda accumulators, grads: accumulators[0].clone(), large, engine)
    assert call_large(lambda accumulators, grads: None, large, engine).failure == ""

    def ends(accumulators: Lists, grads: Lists) -> None:
        accumulators[0].view(-1)[:7].add_(grads[0][:7])

    assert call_large(ends, large, engine).failure == ""


@triton.jit
def striding_kernel(sums, grads, n, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for start in range(0, n, step):
        here = at + start
        added = tl.load(sums + here, here < n) + tl.load(grads + here, here < n)
        tl.store(sums + here, added, here < n)


@pytest.mark.usefixtures("_on_replay")
@pytest.mark.parametrize(("blocks", "status"), [(65_535, Status.SKIPPED), (2**31, Status.PASSED)])
def test_programs_that_walk_on_by_the_length_of_the_grid_are_left_out_and_others_not(
    blocks: int, status: Status
) -> None:
    def strides(accumulators: Lists, grads: Lists) -> None:
        for sums, grad in zip(accumulators, grads, strict=True):
            if n := sums.numel():
                grid = (min(triton.cdiv(n, 256), blocks),)
                striding_kernel[grid](sums, grad, n, BLOCK=256)

    law, engine = LAWS["large_index"], engine_named("replay")
    cell = judge_cell(kernel_of(strides), "fp32", law, engine, Effort(repros=None))
    assert cell.status is status
    assert ("by the length of the grid" in cell.reason) == (status is Status.SKIPPED)
