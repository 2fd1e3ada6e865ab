"""Guarded memory: placement, and seeing every byte that changed."""

from __future__ import annotations

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory, spans_of
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.laws.call import Call, Outcome
from twinstep.parity.laws.plan import Plan, Same, Unchanged, Untouched
from twinstep.parity.operations.table import operation_named
from twinstep.parity.runner.run_plan import PlanRunner

CPU = torch.device("cpu")


def case_of(sizes: tuple[int, ...], *, aligned: bool = True, guard: int = 0x5A) -> Case:
    recipe = Recipe(layout="list", sizes=sizes, seed=3, aligned=aligned, guard=guard)
    return generate(operation_named("accumulate", "test"), "bf16", recipe)


def outcome_of(memory: GuardedMemory) -> Outcome:
    return Outcome(memory, memory.before, memory.after(), accepted_outputs(memory.case, "exact"))


def test_tensors_never_touch_and_misaligned_ones_keep_their_item_alignment() -> None:
    spans, length = spans_of(case_of((3, 0, 5, 1), aligned=False))
    ends = [0, *[span.stop for span in spans]]
    for span, end in zip(spans, ends, strict=False):
        assert span.start - end >= 64
        assert span.start % span.value.element_size() == 0
    assert length - ends[-1] >= 64


def test_guarded_memory_hands_out_the_values_of_the_case() -> None:
    case = case_of((3, 0, 5))
    memory = GuardedMemory.of(case, CPU)
    seen: list[list[Tensor]] = []
    memory.call(lambda accumulators, grads: seen.extend([accumulators, grads]))
    for got, want in zip(seen, (case.lists["accumulators"], case.lists["grads"]), strict=True):
        assert [t.tolist() for t in got] == [t.tolist() for t in want]


def test_untouched_names_a_write_behind_the_end() -> None:
    memory = GuardedMemory.of(case_of((3,)), CPU)
    memory.block[memory.spans[0].stop] ^= 1
    found = Untouched().violation([outcome_of(memory)])
    assert found is not None
    assert "0 bytes past the end of accumulators[0]" in found.says


def test_untouched_names_a_written_input() -> None:
    memory = GuardedMemory.of(case_of((3,)), CPU)
    grads = next(span for span in memory.spans if span.name == "grads")
    grads.of(memory.block)[2] = 7.0
    found = Untouched().violation([outcome_of(memory)])
    assert found is not None
    assert (found.name, found.index, found.place) == ("grads", 0, 2)


def test_untouched_accepts_what_the_operation_writes() -> None:
    memory = GuardedMemory.of(case_of((3,)), CPU)
    memory.spans[0].of(memory.block)[1] = 7.0
    assert Untouched().violation([outcome_of(memory)]) is None


def test_unchanged_sees_one_bit_of_a_nan_payload() -> None:
    memory = GuardedMemory.of(case_of((3,)), CPU)
    memory.block[memory.spans[0].start] ^= 1
    found = Unchanged(names=("accumulators",)).violation([outcome_of(memory)])
    assert found is not None
    assert found.place == 0


def test_same_says_no_when_one_call_differs() -> None:
    memories = [GuardedMemory.of(case_of((3,)), CPU) for _ in range(2)]
    assert Same(says="x").violation([outcome_of(memory) for memory in memories]) is None
    memories[1].spans[0].of(memories[1].block)[2] = 7.0
    found = Same(says="x").violation([outcome_of(memory) for memory in memories])
    assert found is not None
    assert found.place == 2


def test_a_call_may_reuse_the_memory_of_an_earlier_one() -> None:
    from twinstep.parity.registry.engines import engine_named
    from twinstep.parity.registry.kernels import Kernel

    addresses: list[int] = []

    def kernel(accumulators: list[Tensor], grads: list[Tensor]) -> None:
        addresses.append(accumulators[0].data_ptr())
        accumulators[0].add_(1.0)

    operation = operation_named("accumulate", "test")
    row = Kernel(
        name="k", operation=operation, function=kernel, arithmetic="exact", dtypes=("bf16",),
        layouts=("list",), engines=("cpu",), place="here:1",
    )  # fmt: skip
    case = case_of((3,))
    plan = Plan(calls=(Call(case=case), Call(case=case, reuse=0)), checks=(Same(says="x"),))
    assert PlanRunner(row, engine_named("cpu")).violation(plan) is None
    assert addresses[0] == addresses[1]


def test_weights_that_require_gradients_are_leaves_and_nothing_is_recorded() -> None:
    recipe = Recipe(layout="list", sizes=(3, 1), seed=3, requires_grad=True, dims=0)
    memory = GuardedMemory.of(generate(operation_named("adamw_step", "test"), "bf16", recipe), CPU)

    def kernel(params: list[Tensor], grads: list[Tensor], *rest: object, **more: object) -> None:
        assert all(p.requires_grad and p.is_leaf for p in params)
        assert not any(g.requires_grad for g in grads)
        assert params[1].shape == ()
        params[0].add_(1.0)

    memory.call(kernel)
    assert list(memory.changed) == []
    assert torch.is_grad_enabled()
    assert not torch.equal(memory.after(), memory.before)

    def thawing(params: list[Tensor], *rest: object, **more: object) -> None:
        params[0].requires_grad_(False)

    memory.call(thawing)
    assert list(memory.changed) == ["changes shape, memory or requires_grad of a tensor of params"]
