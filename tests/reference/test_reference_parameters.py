"""The protocol of every step: what is read, skipped, rounded and refused, for each optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.oracles.rational import BF16, FP16, rounded
from twinstep.parity.cases.fixed_inputs import anything, bits, moderate
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.apex_lamb import apex_lamb_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.lamb import lamb_step
from twinstep.reference.parameters import Lists
from twinstep.reference.sgd import sgd_step

FORMATS = {torch.float16: FP16, torch.bfloat16: BF16}


@dataclass(frozen=True)
class Step:
    """A step, the names of its lists of state and of its controls, its options, other controls."""

    run: Callable[..., Lists]
    state: tuple[str, ...]
    controls: str
    options: dict[str, bool]
    more: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, lists: Lists, found_inf: float = 0.0) -> Lists:
        """Take it with controls between 0 and 1."""
        numbers = {name: float64(0.1 + 0.07 * at) for at, name in enumerate(self.controls.split())}
        factor, skip = torch.tensor(0.37), torch.tensor(found_inf)
        controls = {**numbers, **self.more, "factor": factor, "found_inf": skip}
        return self.run(*lists, **controls, **self.options)

    def lists(self, make: Callable[[int, int, torch.dtype], Tensor], dtype: torch.dtype) -> Lists:
        """One tensor of 64 in each list; gradient and copy have the dtype."""
        one, *state = (make(64, at, torch.float32).abs() for at in range(1 + len(self.state)))
        grad, copy = make(64, 8, dtype), make(64, 9, dtype)
        return ([one], [grad], *[[x] for x in state], [copy], [torch.tensor(5)])


MOMENTS, ADAM = ("exp_avgs", "exp_avg_sqs"), "lr beta1 beta2 eps weight_decay"
STEPS = {
    "sgd": Step(
        sgd_step, ("momentums",), "lr momentum dampening weight_decay", {"nesterov": False}
    ),
    "adam": Step(adam_step, MOMENTS, ADAM, {"bias_correction": True}),
    "adamw": Step(adamw_step, MOMENTS, ADAM, {"bias_correction": True}),
    "apex lamb": Step(
        apex_lamb_step,
        MOMENTS,
        f"{ADAM} max_norm",
        {
            **dict.fromkeys(("bias_correction", "adam_w_mode", "grad_averaging"), True),
            "use_nvlamb": False,
        },
        {"norm": torch.tensor(0.9)},
    ),
    "lamb": Step(
        lamb_step,
        MOMENTS,
        f"{ADAM} min_coeff max_coeff",
        {"bias_correction": True, "eps_inside_sqrt": False},
    ),
}
EACH = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
NARROW = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)


def all_bits(lists: Lists) -> list[list[list[int]]]:
    return [[bits(t) for t in tensors] for tensors in lists]


@EACH
@NARROW
def test_a_skipped_step_returns_copies_of_every_bit(step: Step, dtype: torch.dtype) -> None:
    lists = step.lists(anything, dtype)
    result, written = step(lists, found_inf=1.0), (lists[0], *lists[2:])
    assert all_bits(result) == all_bits(written)
    assert all(new[0] is not old[0] for new, old in zip(result, written, strict=True))


@EACH
def test_inputs_are_never_written_and_the_step_counts(step: Step) -> None:
    lists = step.lists(moderate, torch.float16)
    before = all_bits(lists)
    assert step(lists)[-1] == [torch.tensor(6)]
    assert all_bits(lists) == before


@EACH
@NARROW
def test_parameters_and_copies_are_rounded_once_from_fp32(step: Step, dtype: torch.dtype) -> None:
    lists = step.lists(moderate, dtype)
    result = step(lists)
    ((master,), *_), (copy,) = result, result[-2]
    assert copy.tolist() == [rounded(Fraction(x), FORMATS[dtype]) for x in master.tolist()]
    narrow = lists[0][0].to(dtype)
    (pure,), *_, (copy_of_pure,), _ = step(([narrow], *lists[1:-2], [torch.zeros(64)], lists[-1]))
    (wide,), *_ = step(([narrow.float()], *lists[1:]))
    assert pure.dtype == dtype
    assert bits(pure) == bits(wide.to(dtype))
    assert bits(copy_of_pure) == bits(wide)


@EACH
@NARROW
def test_narrow_state_is_read_to_fp32_and_rounded_once(step: Step, dtype: torch.dtype) -> None:
    params, grads, *state, copies, steps = step.lists(moderate, dtype)
    narrow = [[tensors[0].to(dtype)] for tensors in state]
    got = step((params, grads, *narrow, copies, steps))
    wide = step((params, grads, *[[t[0].float()] for t in narrow], copies, steps))
    assert bits(got[0][0]) == bits(wide[0][0])
    for at in range(1, 1 + len(state)):
        assert got[at][0].dtype == dtype
        assert bits(got[at][0]) == bits(wide[at][0].to(dtype))


@EACH
def test_empty_lists_and_empty_tensors_are_fine(step: Step) -> None:
    empty = [list[Tensor]() for _ in range(4 + len(step.state))]
    assert step(tuple(empty)) == tuple(empty[1:])
    nothing = [[torch.zeros(0)] for _ in range(2 + len(step.state))]
    result = step((*nothing, [], [torch.tensor(0)]))
    assert result[0][0].numel() == 0
    assert result[-1] == [torch.tensor(1)]


@EACH
def test_lists_that_do_not_match_are_named(step: Step) -> None:
    params, grads, *state, copies, steps = step.lists(moderate, torch.float16)
    first = step.state[0]
    for lists, message in (
        ((params, [], *state, copies, steps), "grads has 0 tensors, but should have 1 like params"),
        ((params, grads, state[0] * 2, *state[1:], copies, steps), f"{first} has 2 tensors, but"),
        (
            (params, grads, [torch.zeros(3)], *state[1:], copies, steps),
            rf"{first}\[0\] has shape \(3,\), but should have \(64,\)",
        ),
        ((params, grads, *state, copies * 2, steps), "copies has 2 tensors, but should have 1"),
        ((params, grads, *state, copies, []), "steps has 0 tensors, but should have 1"),
    ):
        with pytest.raises(ValueError, match=message):
            step(lists)
