"""Every law can say no, and says yes to a plain kernel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import HOUSE, operation_named
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import CLAIMS, Kernel
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort

Tensors = list[Tensor]
QUICK = Effort(examples=6, repros=None, shrink_seconds=1.0, call_seconds=5.0)


def kernel_of(
    operation: str, function: Callable[..., object], arithmetic: str = "exact", dtype: str = "bf16"
) -> Kernel:
    contract = operation_named(operation, "test")
    return Kernel(
        name=function.__name__,
        operation=contract,
        function=function,
        arithmetic=arithmetic,
        dtypes=(dtype,),
        layouts=contract.layouts,
        engines=("cpu",),
        place="tests/parity/test_parity_laws.py:1",
        claims=CLAIMS,
    )


def judged(kernel: Kernel, law: str, effort: Effort = QUICK) -> Cell:
    return judge_cell(kernel, kernel.dtypes[0], LAWS[law], engine_named("cpu"), effort)


def accumulate(accumulators: Tensors, grads: Tensors) -> None:
    for a, g in zip(accumulators, grads, strict=True):
        a.copy_(a.float() + g.float())


def subtracting(accumulators: Tensors, grads: Tensors) -> None:
    for a, g in zip(accumulators, grads, strict=True):
        a.copy_(a.float() - g.float())


def clearing(accumulators: Tensors, grads: Tensors) -> None:
    accumulate(accumulators, grads)
    for g in grads:
        g.zero_()


def past_the_end(accumulators: Tensors, grads: Tensors) -> None:
    accumulate(accumulators, grads)
    for a in accumulators:
        if a.numel():
            a.as_strided((1,), (1,), a.storage_offset() + a.numel()).fill_(3.0)


def without_tails(accumulators: Tensors, grads: Tensors) -> None:
    for a, g in zip(accumulators, grads, strict=True):
        whole = a.numel() // 4 * 4
        a.view(-1)[:whole] += g.reshape(-1)[:whole].float()


def finite_only(accumulators: Tensors, grads: Tensors) -> None:
    accumulate(accumulators, [g.nan_to_num(0.0) for g in grads])


def by_position(accumulators: Tensors, grads: Tensors) -> None:
    accumulate(accumulators, grads)
    for a in accumulators[1:2]:
        a += 1.0


calls = itertools.count()


def drifting(accumulators: Tensors, grads: Tensors) -> None:
    accumulate(accumulators, grads)
    for a in accumulators:
        a += float(next(calls))


def cast_unless_zero(sources: Tensors, copies: Tensors) -> None:
    for s, c in zip(sources, copies, strict=True):
        c.copy_(torch.where(s == 0, c, s.to(c.dtype)))


def counting_skips(
    params: Tensors,
    grads: Tensors,
    momentums: Tensors,
    copies: Tensors,
    steps: Tensors,
    **controls: object,
) -> None:
    for step in steps:
        step += 1


def raising(accumulators: Tensors, grads: Tensors) -> None:
    raise ValueError("no such grid")


def hanging(accumulators: Tensors, grads: Tensors) -> None:
    while True:
        pass


def waiting(accumulators: Tensors, grads: Tensors) -> None:
    threading.Event().wait()


def returning(accumulators: Tensors, grads: Tensors) -> list[Tensor]:
    return [a + g for a, g in zip(accumulators, grads, strict=True)]


@pytest.mark.parametrize("law", operation_named("accumulate", "test").laws)
@pytest.mark.parametrize("arithmetic", ["exact", "bounded"])
def test_a_plain_kernel_keeps(law: str, arithmetic: str) -> None:
    cell = judged(kernel_of("accumulate", accumulate, arithmetic), law)
    if "cpu" not in LAWS[law].engines:
        assert cell.status is Status.SKIPPED
        assert "is judged on" in cell.reason
        return
    assert cell.status is Status.PASSED, cell.failure
    assert cell.calls > 0


def test_a_law_that_has_to_be_claimed_is_not_claimed_by_default() -> None:
    unclaimed = replace(kernel_of("accumulate", accumulate), claims=())
    for law in ("strided", "no_host_read", "graph_capture"):
        assert judged(unclaimed, law).status is Status.NOT_CLAIMED


def test_a_refusal_with_a_clear_error_is_accepted_and_a_crash_is_not() -> None:
    def refusing(accumulators: Tensors, grads: Tensors) -> None:
        if not all(t.is_contiguous() for t in (*accumulators, *grads)):
            raise ValueError("tensors should be contiguous")
        accumulate(accumulators, grads)

    def refusing_late(accumulators: Tensors, grads: Tensors) -> None:
        accumulate(accumulators, grads)
        refusing(accumulators, grads)

    def asserting(accumulators: Tensors, grads: Tensors) -> None:
        assert all(t.is_contiguous() for t in (*accumulators, *grads))
        accumulate(accumulators, grads)

    cell = judged(kernel_of("accumulate", refusing), "strided")
    assert cell.status is Status.PASSED
    assert cell.sees["refused calls"]
    assert judged(kernel_of("accumulate", asserting), "strided").status is Status.FAILED
    late = judged(kernel_of("accumulate", refusing_late), "strided")
    assert late.status is Status.FAILED
    assert "it may refuse here, but had written accumulators before" in late.failure


def test_laws_of_one_row_share_calls() -> None:
    cache, row = CallCache(), kernel_of("accumulate", accumulate)
    for law in ("value", "nothing_else_written", "permutation"):
        cell = judge_cell(row, "bf16", LAWS[law], engine_named("cpu"), QUICK, cache)
        assert cell.status is Status.PASSED
        assert (cell.shared > 0) == (law != "value")


def test_no_host_read_names_the_line() -> None:
    def reading(accumulators: Tensors, grads: Tensors) -> None:
        if bool(grads[0].isnan().any()):
            return
        accumulate(accumulators, grads)

    cell = judged(kernel_of("accumulate", reading), "no_host_read")
    assert cell.status is Status.FAILED
    assert "_local_scalar_dense at" in cell.failure
    assert "test_parity_laws.py:" in cell.failure


@pytest.mark.parametrize(
    ("law", "operation", "function", "says"),
    [
        ("value", "accumulate", subtracting, "differs from the reference"),
        ("nothing_else_written", "accumulate", clearing, "read-only"),
        ("nothing_else_written", "accumulate", past_the_end, "past the end"),
        ("every_output_written", "cast_copy", cast_unless_zero, "held before the call"),
        ("skipped_step", "sgd_step", counting_skips, "although the step is skipped"),
        ("non_finite", "accumulate", finite_only, "differs from the reference"),
        ("boundary_sizes", "accumulate", without_tails, "differs from the reference"),
        ("permutation", "accumulate", by_position, "depends on the order of the tensors"),
        ("repeat", "accumulate", drifting, "differs"),
    ],
)
def test_law_rejects(law: str, operation: str, function: Callable[..., object], says: str) -> None:
    cell = judged(kernel_of(operation, function), law)
    assert cell.status is Status.FAILED
    assert says in cell.failure
    assert f"breaks `{law}`" in cell.failure


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raising, "raises ValueError: no such grid"),
        (hanging, "hangs: no return after 0.2 s of work"),
        (waiting, "hangs: no return after 0.4 s of waiting"),
        (returning, "returns list, but should write in place"),
    ],
)
def test_a_kernel_that_does_not_return_none_breaks_the_law(
    function: Callable[..., object], says: str
) -> None:
    effort = Effort(examples=1, repros=None, shrink_seconds=0.0, call_seconds=0.2)
    cell = judged(kernel_of("accumulate", function), "value", effort)
    assert cell.status is Status.FAILED
    assert says in cell.failure


def test_every_law_is_declared_by_some_operation_and_every_declared_law_exists() -> None:
    declared = {law for operation in HOUSE for law in operation.laws}
    assert declared == set(LAWS)


def test_every_law_says_which_bugs_it_exists_for() -> None:
    from importlib import import_module

    for name in LAWS:
        assert "Real bugs:" in (import_module(f"twinstep.parity.laws.{name}").__doc__ or "")


def test_a_law_without_an_object_is_skipped_with_a_reason() -> None:
    function = counting_skips
    cell = judged(kernel_of("sgd_step", function, dtype="fp32"), "every_output_written")
    assert cell.status is Status.SKIPPED
    assert "only written" in cell.reason


def test_the_same_cases_are_drawn_in_every_run_and_others_with_a_seed() -> None:
    sizes: list[list[int]] = []

    def recording(accumulators: Tensors, grads: Tensors) -> None:
        sizes[-1] += [a.numel() for a in accumulators]
        accumulate(accumulators, grads)

    for seed in (None, None, 7):
        sizes.append([])
        effort = Effort(examples=6, seed=seed, repros=None)
        assert judged(kernel_of("accumulate", recording), "value", effort).status is Status.PASSED
    assert sizes[0] == sizes[1] != sizes[2]


def test_a_reference_that_raises_is_not_the_kernels_fault() -> None:
    def refusing(accumulators: Tensors, grads: Tensors) -> tuple[Tensors]:
        raise ValueError("no such window")

    row = kernel_of("accumulate", accumulate)
    broken = replace(row, operation=replace(row.operation, reference=refusing))
    cell = judged(broken, "value")
    assert cell.status is Status.CANNOT_JUDGE
    assert "its reference raises ValueError: no such window" in cell.reason


def test_a_kernel_that_always_raises_shrinks_to_a_case_that_the_reference_accepts() -> None:
    def raising_scaler(**controls: object) -> None:
        raise ValueError("no such scale")

    cell = judged(kernel_of("update_scale_dynamic", raising_scaler, dtype="scalar"), "value")
    assert cell.status is Status.FAILED
    assert "scale_window=0" not in cell.failure
