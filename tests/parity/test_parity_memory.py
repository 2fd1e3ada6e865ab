"""Memory that nothing has written, memory of another tensor: what depends on it, and what may."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from twinstep.parity.cases.garbage import GARBAGE, spoil
from twinstep.parity.laws import LAWS
from twinstep.parity.proof.corpus import Entry, Variant, harmless
from twinstep.parity.proof.corpus.calls import AccumulateCall
from twinstep.parity.proof.corpus.judged import judged
from twinstep.parity.proof.corpus.shelf import wrong
from twinstep.parity.proof.corpus.wrong_by_memory import SHELF
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named, running
from twinstep.parity.runner.calls.allocations import Allocations
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.recipes import Effort

EFFORT = Effort(shrink_seconds=0.5, repros="unused")
TWINS = {
    "scratch_behind_the_partial_sums_added": (
        "triton_scratch_zeroed",
        "triton_scratch_read_and_dropped",
    ),
    "nan_of_the_old_copy_kept": ("triton_cast_copy",),
}


def cell_of(subject: Entry | Variant) -> Cell:
    dtypes = subject.dtypes[:1]
    (cell,) = judged(subject, laws=("uninitialised",), dtypes=dtypes, effort=EFFORT).cells.values()
    return cell


@pytest.mark.parametrize("entry", SHELF[:2], ids=lambda entry: entry.name)
def test_the_first_read_of_unwritten_memory_is_named_and_right_twins_pass(entry: Entry) -> None:
    cell = cell_of(entry)
    assert cell.status is Status.FAILED
    line = r"\S*memory_kernels\.py:\d+"
    assert "depends on memory that nothing has written: read of" in cell.failure
    assert re.search(rf"of \d+ bytes of \S+ at byte offset \d+ that .*{line}", cell.failure)
    for variant in harmless():
        if variant.name in TWINS[entry.name]:
            assert cell_of(variant).status is Status.PASSED


def test_a_tensor_is_not_reached_from_another() -> None:
    """Though what is stored there is overwritten later."""
    (cell,) = judged(SHELF[2], laws=("nothing_else_written",), effort=EFFORT).cells.values()
    assert cell.status is Status.FAILED
    assert re.search(
        r"OutOfBounds: write of 2 bytes .* of \S*copies\[\d\] .* outside", cell.failure
    )


def added(call: AccumulateCall, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for total, grad in zip(call.accumulators, call.grads, strict=True):
        total.add_(made(grad).to(total.dtype))


def taken(entry: Callable[[torch.Tensor], torch.Tensor]) -> Entry:
    shelf: list[Entry] = []

    def kernel(call: AccumulateCall) -> None:
        """Adds what it makes of each gradient."""
        added(call, entry)

    wrong(shelf, "accumulate", component="memory", arithmetic="exact", dtypes=("fp32",))(kernel)
    return shelf[0]


def partly(grad: torch.Tensor) -> torch.Tensor:
    """A copy without its last element."""
    made = torch.empty_like(grad).view(-1)
    made[:-1].copy_(grad.view(-1)[:-1])
    return made.view(grad.shape)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty_like": partly,
    "empty": lambda grad: torch.empty(grad.shape).clamp_(-0.0, 0.0) + grad,
    "new_empty": lambda grad: grad + (grad.new_empty(1)[0] != 0),
    "empty_strided": lambda grad: grad + torch.empty_strided((2,), (4,))[1].isnan(),
    "resize_": lambda grad: grad + grad.new_ones(2).resize_(4000)[3999],
    "Tensor": lambda grad: grad + torch.Tensor(5)[4],
    "flag of one": lambda grad: grad + (torch.empty(1, dtype=torch.int32)[0] == 1),
    "flag of -1": lambda grad: grad + (torch.empty(1, dtype=torch.int32)[0] == -1),
}
RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copied": lambda grad: torch.empty_like(grad).copy_(grad),
    "out": lambda grad: torch.mul(grad, 1.0, out=torch.empty(0)),
    "zeroed": lambda grad: torch.empty_like(grad).zero_() + grad,
    "kept": lambda grad: grad + grad.new_zeros(3).resize_(4000)[2],
    "multiplied by nothing of it": lambda grad: torch.where(
        torch.ones_like(grad, dtype=torch.bool), grad, torch.empty_like(grad)
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_way_to_allocate_without_values_is_noticed(name: str) -> None:
    cell = cell_of(taken(WRONG[name]))
    assert cell.status is Status.FAILED
    assert "depends on memory that nothing has written" in cell.failure


@pytest.mark.parametrize("name", RIGHT)
def test_memory_that_is_written_before_it_is_used_may_be_allocated_so(name: str) -> None:
    cell = cell_of(taken(RIGHT[name]))
    assert cell.status is Status.PASSED, cell.failure or cell.reason


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bool, torch.uint8, torch.complex64])
def test_garbage_exists_for_every_dtype(dtype: torch.dtype) -> None:
    seen = set()
    for kind in GARBAGE:
        tensor = torch.zeros(4, dtype=dtype)
        spoil(tensor, kind, kept=2 * tensor.element_size())
        first, last = tensor.view(torch.uint8)[:1], tensor[3:].view(torch.uint8)
        assert not first.any()
        seen.add(bytes(last.tolist()))
    assert len(seen) == (2 if dtype == torch.bool else 4)


def test_the_line_that_allocates_is_named() -> None:
    with Allocations("ones", None) as mode:
        made = torch.empty(3)
    assert made.tolist() == [1.0, 1.0, 1.0]
    assert re.search(r"without values \[\S*test_parity_memory\.py:\d+\]$", mode.remark)


TABLE = """
import torch, triton, triton.language as tl
from twinstep.parity import register

@triton.jit
def by_table(table, n, BLOCK: tl.constexpr):
    a = tl.load(table).to(tl.pointer_type(tl.float32))
    g = tl.load(table + 1).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    here = at < n
    total = tl.load(a + at, mask=here) + tl.load(g + at, mask=here)
    tl.store(a + at, total + 1, mask=here)

@register("accumulate", name="mine", arithmetic="exact", dtypes=("fp32",))
def mine(accumulators, grads):
    for a, g in zip(accumulators, grads):
        if a.numel():
            length = triton.next_power_of_2(a.numel())
            table = torch.tensor([a.data_ptr(), g.data_ptr()], device=a.device)
            by_table[(1,)](table, a.numel(), BLOCK=length)
"""


def test_a_repro_file_reaches_what_the_judge_reached(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(TABLE)
    (kernel,) = load_file(str(file)).kernels
    effort = Effort(examples=1, repros=str(tmp_path / "repros"), shrink_seconds=1.0)
    with running(engine_named("replay")):
        cell = judge_cell(kernel, "fp32", LAWS["value"], engine_named("replay"), effort)
    assert cell.status is Status.FAILED
    command = [sys.executable, cell.repro]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "wanted" in done.stdout
    assert "OutOfBounds" not in done.stdout
