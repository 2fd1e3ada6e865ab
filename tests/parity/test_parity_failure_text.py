"""Failure texts show what decides: the call that is wrong, its inputs, its layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.call import Outcome
from twinstep.parity.laws.finding import KINDS, Finding
from twinstep.parity.laws.plan import Same, Values
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.runner.failure import Failure
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.observe import Observation, Walk, differences, furthest

UNSCALE = """
import torch
from twinstep.parity import register

calls = 0

@register("unscale", name="mine", dtypes=("fp16",), engines=("cpu",), claims=("strided",))
def mine(grads, *, inv_scale, found_inf):
    global calls
    calls += 1
    bad = any(not bool(g.isfinite().all()) for g in grads)
    for g in grads:
        {body}
    {flag}
"""
RIGHT, FLAG = "g.copy_(g.float() * inv_scale)", "bad and found_inf.fill_(1.0)"


def judged(folder: Path, law: str, body: str = RIGHT, flag: str = FLAG) -> Cell:
    file = folder / "kernel.py"
    file.write_text(UNSCALE.format(body=body, flag=flag))
    (kernel,) = load_file(str(file)).kernels
    effort = Effort(examples=48, repros=None, shrink_seconds=60.0)
    cell = judge_cell(kernel, "fp16", LAWS[law], engine_named("cpu"), effort)
    assert cell.status is Status.FAILED
    return cell


def test_a_wrong_flag_is_shown_with_the_gradients_that_decide(tmp_path: Path) -> None:
    text = judged(tmp_path, "non_finite", flag="bad").failure
    assert "`non_finite`: found_inf differs" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  grads"))
    assert line.split(None, 1)[1] in {"[inf]", "[nan]", "[-inf]"}


def test_the_call_that_is_wrong_is_shown_and_not_another_of_the_law(tmp_path: Path) -> None:
    """The law repeats calls with other values: the fault is in those of the first."""
    text = judged(tmp_path, "repeat", body=f"{RIGHT} if inv_scale < 2 else g.fill_(3)").failure
    assert "inv_scale=128" in text


def test_strides_are_shown_where_they_decide(tmp_path: Path) -> None:
    body = f"{RIGHT} if g.is_contiguous() else g.fill_(3)"
    text = judged(tmp_path, "strided", body=body).failure
    assert "  layout   grads (" in text
    assert "by columns, strides (1, " in text
    assert "number 2 of the law" in text


def test_room_between_columns_and_rows_is_not_written(tmp_path: Path) -> None:
    behind = "torch.as_strided(g, (3,), (1,), g.storage_offset() + g.shape[{0}])"
    room = "g.stride({0}) == 1 and g.stride(1 - {0}) == g.shape[{0}] + 3"
    for axis, order in ((0, "columns"), (1, "rows")):
        wrong = f"({room}) and {behind}.fill_(3)"
        body = f"{RIGHT}; {wrong.format(axis)}"
        text = judged(tmp_path, "strided", body=body).failure
        assert "memory outside every tensor was written: between the elements of gr" in text
        assert f"by {order}, strides (" in text


def test_no_line_is_wider_than_it_must_be(tmp_path: Path) -> None:
    text = judged(tmp_path, "value", body="g.zero_()").failure
    assert max(map(len, text.splitlines())) <= 100


def test_a_bound_of_zero_is_no_divisor() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    tight = Finding(says="", call=0, got=two, want=one, low=one, high=one, ratio=4.49e307)
    assert tight.distance() == "8388608 ULP, and the bound is 0"
    wide = Finding(says="", call=0, got=two, want=one, low=one, high=two, ratio=3.0)
    assert wide.distance() == "8388608 ULP = 3 x bound"


def outcome_of(arithmetic: str, wrong: dict[str, float]) -> Outcome:
    """A call of AdamW on two tensors that leaves one element of some results times a number."""
    operation = operation_named("adamw_step", "test")
    options = {row.name: row.choices[0] for row in operation.options}
    recipe = Recipe(layout="list", sizes=(3, 5), options=options, regime="ordinary")
    case = generate(operation, "fp32", recipe)
    memory, accepted = (
        GuardedMemory.of(case, torch.device("cpu")),
        accepted_outputs(case, arithmetic),
    )
    for span, one in Outcome(memory, memory.before, memory.before, accepted).written():
        if span.value.numel():
            right = one.value.clone()
            if span.index == 1 and span.name in wrong:
                right.view(-1)[2] *= wrong[span.name]
            span.of(memory.block).copy_(right)
    return Outcome(memory, memory.before, memory.after(), accepted, evaluated=True)


@pytest.mark.parametrize("arithmetic", ["exact", "bounded"])
@pytest.mark.parametrize("other", [1000.0, float("nan")])
def test_the_largest_difference_is_reported_with_how_many_there_are(
    arithmetic: str, other: float
) -> None:
    nearly = 1 + 2.0**-18
    outcome = outcome_of(arithmetic, {"params": nearly, "exp_avg_sqs": other, "exp_avgs": nearly})
    found = Values().violation([outcome])
    assert found is not None
    assert found.where() == "exp_avg_sqs[1][2]"
    assert found.differing() == "1 of 8 in params, 1 of 8 in exp_avgs, 1 of 8 in exp_avg_sqs"
    kept = Values().violation([outcome_of(arithmetic, {})])
    assert kept is None


def test_a_dependence_is_reported_where_it_is_largest() -> None:
    one = outcome_of("exact", {})
    two = outcome_of("exact", {"params": 1 + 2.0**-20, "exp_avgs": 4.0})
    found = Same(says="depends").violation([one, two])
    assert found is not None
    assert (found.name, found.differing()) == ("exp_avgs", "1 of 8 in params, 1 of 8 in exp_avgs")


@pytest.mark.parametrize(
    ("got", "want", "place", "says"),
    [
        (0.0, 1.0, -1, "0, should be 1"),
        (1.0, 0.0, -1, "1, should be 0"),
        (2.0, 1.0, -1, "8388608 ULP"),
        (0.0, 1.0, 0, "1065353216 ULP"),
    ],
)
def test_a_flag_has_no_ulp(got: float, want: float, place: int, says: str) -> None:
    one, other = torch.tensor(got), torch.tensor(want)
    assert Finding(says="", call=0, place=place, got=one, want=other).distance() == says


def test_a_mixed_list_names_its_dtypes_after_shrinking_too(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(UNSCALE.format(body=RIGHT, flag=FLAG))
    (kernel,) = load_file(str(file)).kernels
    recipe = Recipe(layout="list", sizes=(2, 2, 2))
    mixed, plain = (generate(kernel.operation, name, recipe) for name in ("mixed", "fp16"))
    small = mixed.taken([1])

    def text(case: Case, original: Case) -> str:
        finding = Finding(says="differs", call=0, case=case)
        return Failure(
            kernel=kernel, engine="cpu", law="value", case=case, original=original, finding=finding
        ).text()

    assert "  dtypes   grads float16 bfloat16 float32\n" in text(mixed, mixed)
    assert "  dtypes   grads bfloat16\n" in text(small, mixed)
    assert "  dtypes" not in text(plain, plain)


def test_what_is_too_large_for_a_file_says_from_which_size_on_it_fails(tmp_path: Path) -> None:
    body = f"{RIGHT}; g.numel() > 140000 and g.view(-1)[140000:].zero_()"
    file = tmp_path / "kernel.py"
    file.write_text(UNSCALE.format(body=body, flag=FLAG))
    (kernel,) = load_file(str(file)).kernels
    effort = Effort(examples=4, repros=str(tmp_path), shrink_seconds=60.0)
    cell = judge_cell(kernel, "fp16", LAWS["boundary_sizes"], engine_named("cpu"), effort)
    assert "  again    fails from 140001 elements on, too many for a repro file" in cell.failure
    assert not cell.repro


def test_every_end_of_a_call_has_a_kind() -> None:
    for failure, kind in {
        "raises OutOfBounds: read": "out of bounds",
        "raises Race: two": "race",
        "raises ValueError: x": "raises",
        "returns int": "returns",
    }.items():
        assert Finding(says="", call=0, failure=failure).sort == kind
        assert kind in KINDS
    assert Finding(says="", call=0, failure="hangs: no return", fatal="hang").sort == "hang"


CLASSES = """
from twinstep.parity import register_optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

@register_optimizer("counter", dtypes=("bf16",))
class Counter(FusedAdam):
    def step(self, *given, **named):
        result = super().step(*given, **named)
        for state in self.state.values():
            state["step"] += 1
        return result

@register_optimizer("attribute missing", dtypes=("bf16",))
class Bare(FusedAdam):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        del self.defaults

@register_optimizer("dtype", dtypes=("bf16",))
class Wide(FusedAdam):
    def step(self, *given, **named):
        result = super().step(*given, **named)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].double()
        return result

@register_optimizer("refusal missing", dtypes=("bf16",))
class Lenient(FusedAdam):
    def add_param_group(self, group):
        if group.get("lr", 0) >= 0:
            super().add_param_group(group)

@register_optimizer("return value", reference="FP16Optimizer", arithmetic="exact", dtypes=("bf16",))
class Passing(FP16Optimizer):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)

    def set_lr(self, lr):
        pass
"""


def test_a_failing_class_is_told_by_its_kind_of_fault_and_by_what_was_built(tmp_path: Path) -> None:
    file = tmp_path / "classes.py"
    file.write_text(CLASSES)
    for twin in load_file(str(file)).twins:
        effort = TwinEffort(sequences=40, shrunk_by=750, repros=None)
        cell = judge_twin(twin, "bf16", twin_engine(twin), effort)
        assert cell.kind == twin.name, cell.failure
        assert f"breaks `sequences` ({twin.name}): " in cell.failure
        assert "  built    params bfloat16 " in cell.failure
        assert " lr=" in cell.failure


BOTH = """
from twinstep.parity import register_optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

@register_optimizer(dtypes=("fp32",), arithmetic="{arithmetic}")
class Scaled(FusedAdam):
    def step(self, *given, **named):
        result = super().step(*given, **named)
        for param, state in self.state.items():
            param.data.mul_(1 + 2.0**-18)
            state["exp_avg"].mul_(1 + 2.0**-18)
            state["exp_avg_sq"].mul_(1000.0)
        return result
"""


@pytest.mark.parametrize("arithmetic", ["exact", "bounded"])
def test_of_a_class_the_largest_difference_is_told_too(tmp_path: Path, arithmetic: str) -> None:
    file = tmp_path / "classes.py"
    file.write_text(BOTH.format(arithmetic=arithmetic))
    (twin,) = load_file(str(file)).twins
    effort = TwinEffort(sequences=4, shrunk_by=0, repros=None)
    cell = judge_twin(twin, "fp32", twin_engine(twin), effort)
    assert cell.status is Status.FAILED
    assert cell.wrong[0].endswith("].exp_avg_sq[]"), cell.failure
    (line,) = (line for line in cell.failure.splitlines() if line.startswith("  differ   "))
    assert "].exp_avg_sq" in line
    assert "other tensors" in line


def test_of_elements_the_one_that_is_furthest_off_is_told_with_how_many_differ() -> None:
    one = {"m": torch.tensor([1.0, 2.0, 3.0]), "v": torch.tensor([1.0, 2.0, 9.0]), "n": 1}
    other = {"m": torch.tensor([1.0, 2.0, 3.0000002]), "v": torch.tensor([1.1, 4.0, 9.0]), "n": 1}
    found = furthest(differences(leaves_of(one), leaves_of(other)), lambda row: ())
    assert found.path == "x.v[1]"
    assert found.differ == "2 of 3 in x.v, and elements of 1 other tensor"


def test_dicts_that_differ_by_a_key_name_it() -> None:
    one, other = {"lr": 1, "eps": 2, 3: {"q": 1}}, {"lr": 1, "decay": 2}
    found = differences(leaves_of(one), leaves_of(other))[0]
    assert (found.path, found.want) == ("x", "dict of 2: decay, lr")
    assert found.got == "dict of 3: eps, lr; lacks decay; eps, [3] too much"


def leaves_of(value: object) -> Observation:
    walk = Walk(home=torch.device("cpu"))
    walk.root("x", value)
    return walk.leaves


def test_a_file_saved_again_in_the_same_second_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, names = tmp_path / "kernel.py", []
    for name in ("this", "that"):
        file.write_text(UNSCALE.replace("mine", name).format(body=RIGHT, flag=FLAG))
        os.utime(file, (1e9, 1e9))
        (kernel,) = load_file(str(file)).kernels
        names.append(kernel.name)
    assert names == ["this", "that"]
