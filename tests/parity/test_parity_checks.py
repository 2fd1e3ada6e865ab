"""Defects of other projects' checks, held against this judge: none of them can happen here.

Each test cites its row of docs/reference/bugs.md by the letter J.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe, evaluate
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import HOUSE, operation_named
from twinstep.parity.proof.corpus import Entry
from twinstep.parity.proof.corpus.adam import step
from twinstep.parity.proof.corpus.buffers import cast_copy
from twinstep.parity.proof.corpus.calls import AdamCall, CastCopyCall
from twinstep.parity.proof.corpus.judged import judged
from twinstep.parity.proof.corpus.shelf import wrong
from twinstep.parity.proof.upstream.bugs import BUGS, CHECKS
from twinstep.parity.records.errors import EXIT_TOO_LITTLE
from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.kernels import register
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.check import check
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session

QUICK = Effort(examples=12, shrink_seconds=0.0, repros=None)
CPU = torch.device("cpu")
ADAMW = operation_named("adamw_step", "checks")
WRITTEN = ADAMW.writes
USUAL = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def drawn(
    operation: Operation,
    combination: str,
    *,
    layout: str = "flat",
    sizes: tuple[int, ...] = (33,),
    regime: str = "mixture",
    seed: int = 0,
) -> Case:
    """A case with the first choice of every option."""
    options = {row.name: row.choices[0] for row in operation.options}
    recipe = Recipe(layout=layout, sizes=sizes, regime=regime, seed=seed, options=options)
    return generate(operation, combination, recipe)


def entry(operation: str, run: Callable[..., None], dtype: str = "bf16") -> Entry:
    """A kernel before the judge, as the corpus holds them."""
    shelf: list[Entry] = []
    run.__doc__ = run.__doc__ or "A kernel."
    wrong(shelf, operation, component="checks", dtypes=(dtype,))(run)
    return shelf[0]


def rejected(operation: str, run: Callable[..., None], law: str = "value") -> bool:
    ledger = judged(entry(operation, run), laws=(law,), effort=QUICK)
    return bool(ledger.with_status(Status.FAILED))


def test_tolerance_cannot_hide_a_step_that_does_nothing() -> None:
    """J01: norms within one per cent of each other."""
    weights = torch.full((64,), 3.0, dtype=torch.float64)
    assert float(weights.norm()) == pytest.approx(float((weights - 1e-3).norm()), rel=0.01)
    assert rejected("adamw_step", lambda call: None)
    assert not rejected("adamw_step", step)


def test_sizes_cannot_shrink_unseen() -> None:
    """J02: a size that failed was taken out of the list."""
    law = LAWS["boundary_sizes"]
    lone, most = set(), 0
    for layout in ("flat", "list"):
        case = drawn(ADAMW, "bf16", layout=layout)
        for varied in law.vary(case):
            sizes = [tensor.numel() for tensor in varied.lists["params"]]
            lone |= set(sizes)
            most = max(most, len(sizes))
    assert {0, 1, 2, 3, 7, 8, 127, 128, 129, 257, 1023, 1025, 4095, 4096, 4097} <= lone
    assert most >= 70


@pytest.mark.parametrize("name", USUAL)
def test_no_customary_default_goes_unnoticed(name: str) -> None:
    """J03: with weight decay at its usual 0, two rules are one."""

    def ignorant(call: AdamCall) -> None:
        value = torch.tensor(USUAL[name], dtype=torch.float64)
        step(AdamCall(**{**vars(call), name: value}))

    assert rejected("adamw_step", ignorant)


def test_zeros_are_no_answer_to_tiny_values() -> None:
    """J04: an absolute tolerance above the signal."""
    tiny = torch.full((8,), 1e-6, dtype=torch.float64)
    assert torch.allclose(torch.zeros_like(tiny), tiny, rtol=1e-2, atol=1e-2)

    def flushed(call: CastCopyCall) -> None:
        cast_copy(call, lambda s: torch.where(s.abs() < 1e-5, torch.zeros_like(s), s))

    assert rejected("cast_copy", flushed)
    assert not rejected("cast_copy", cast_copy)


def test_outputs_hold_no_result_before_the_call() -> None:
    """J05: the reference's memory, just freed, is handed to the kernel as its output."""
    operation = operation_named("cast_copy", "checks")
    case = drawn(operation, "bf16", layout="list", sizes=(5, 64))
    memory = GuardedMemory.of(case, CPU)
    wanted = evaluate(case, case.lists)["copies"]
    held = [span.of(memory.block) for span in memory.spans if span.name == "copies"]
    assert not any(torch.equal(a, b) for a, b in zip(held, wanted, strict=True))
    assert rejected("cast_copy", lambda call: None)


def test_nothing_run_is_not_green() -> None:
    """J06: the generator of cases was used up before the tests began."""
    assert Ledger().exit_code() == EXIT_TOO_LITTLE
    unclaimed = entry("cast_copy", cast_copy, dtype="fp16")
    assert judged(unclaimed, dtypes=("bf16",), effort=QUICK).exit_code() == EXIT_TOO_LITTLE
    session = Session(selection=Selection(), effort=QUICK)
    assert session.run([]).exit_code() == EXIT_TOO_LITTLE


def test_reference_agrees_with_two_independent_oracles() -> None:
    """J07: the reference itself mixed two decay rules."""
    case = drawn(ADAMW, "fp32", sizes=(64,), regime="ordinary")
    lists = {name: list(tensors) for name, tensors in case.lists.items()}
    zeros = torch.zeros(64)
    lists |= {"exp_avgs": [zeros], "exp_avg_sqs": [zeros], "steps": [torch.tensor(0)]}
    got = evaluate(case, lists)["params"][0].double()
    lr, eps, decay = (float(case.controls[name]) for name in ("lr", "eps", "weight_decay"))
    p = lists["params"][0].double()
    g = lists["grads"][0].double() * float(case.controls["factor"])
    # From empty moments the corrections cancel: u = g / (|g| + eps).
    by_hand = p - lr * (g / (g.abs() + eps) + decay * p)
    theirs = p.clone()
    theirs.grad = g
    betas = (float(case.controls["beta1"]), float(case.controls["beta2"]))
    torch.optim.AdamW([theirs], lr=lr, betas=betas, eps=eps, weight_decay=decay).step()
    for oracle in (by_hand, theirs):
        assert (got - oracle).abs().max() <= 1e-6 * (lr + p.abs().max())


def test_no_number_of_the_user_widens_a_bound() -> None:
    """J08: a tolerance was widened until the run was green."""
    for function in (register, check, Effort, Selection):
        for name in inspect.signature(function).parameters:
            assert not any(word in name for word in ("tol", "slack", "delta", "threshold")), name


@pytest.mark.parametrize("combination", ADAMW.combinations)
def test_kernel_gets_the_dtypes_that_the_cell_names(combination: str) -> None:
    """J09: the fp32 case ran in float64."""
    seen: dict[str, set[torch.dtype]] = {}

    def looking(call: AdamCall) -> None:
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies", "steps"):
            seen.setdefault(name, set()).update(t.dtype for t in getattr(call, name))
        step(call)

    judged(entry("adamw_step", looking, combination), laws=("skipped_step",), effort=QUICK)
    named = ADAMW.combinations[combination]
    assert {name: kinds for name, kinds in seen.items() if kinds} == {
        name: set(kinds) for name, kinds in named.items()
    }


@pytest.mark.parametrize("name", WRITTEN)
def test_every_written_tensor_is_compared(name: str) -> None:
    """J10: after a resume only the parameter groups were compared, not the state."""

    def nudged(call: AdamCall) -> None:
        step(call)
        for tensor in getattr(call, name):
            if tensor.numel():
                tensor.reshape(-1)[-1:].copy_(_beside(tensor.reshape(-1)[-1:]))

    assert rejected("adamw_step", nudged)


def _beside(value: Tensor) -> Tensor:
    """A value well away from this one."""
    return (
        value + 1 if value.dtype == torch.int64 else torch.where(value == 3, 5, 3).to(value.dtype)
    )


PLAIN = [operation for operation in HOUSE if operation.name not in ("mixed_step", "lamb_step")]


@pytest.mark.parametrize("operation", PLAIN, ids=lambda operation: operation.name)
def test_reference_has_the_whole_signature(operation: Operation) -> None:
    """J11: the oracle was simpler than the contract; here no argument of it is idle."""
    combination = next(iter(operation.combinations))
    idle = {control.name for control in operation.controls if not control.output}
    dice = random.Random(0)
    for seed in range(40 if not operation.lists else 4):
        case = drawn(operation, combination, seed=seed)
        others = {row.name: dice.choice(row.values) for row in operation.controls}
        case = case.with_controls(**others)
        before = evaluate(case, case.lists)
        for control in operation.controls:
            for value in control.values if control.name in idle else ():
                after = evaluate(case.with_controls(**{control.name: value}), case.lists)
                if _differ(before, after):
                    idle.discard(control.name)
    # A step that is never skipped has no second value of found_inf to draw.
    assert idle <= {control.name for control in operation.controls if len(control.values) == 1}


def _differ(one: dict[str, list[Tensor]], two: dict[str, list[Tensor]]) -> bool:
    return any(
        not torch.equal(a, b) for name in one for a, b in zip(one[name], two[name], strict=True)
    )


def test_each_row_about_checks_names_a_test_of_this_file() -> None:
    named = {row.test.removeprefix(CHECKS) for name, row in BUGS.items() if name[0] == "J"}
    assert len(named) == len([name for name in BUGS if name[0] == "J"])
    assert named <= set(globals())
