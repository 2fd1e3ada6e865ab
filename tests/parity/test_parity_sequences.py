"""Whole optimizers under sequences of actions: the right pass, the wrong are named, all is seen."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.profile import LONG
from twinstep.parity.proof.corpus.harmless_optimizers import HARMLESS_OPTIMIZERS
from twinstep.parity.proof.corpus.optimizers import Optimizer, judged_optimizer, twin_of
from twinstep.parity.proof.corpus.sequence_power import power_of
from twinstep.parity.proof.corpus.wrong_by_hand import WRONG_BY_HAND
from twinstep.parity.proof.corpus.wrong_classes import WRONG_CLASSES
from twinstep.parity.proof.corpus.wrong_optimizers import (
    CountsWithoutGradient,
    SharedCounter,
)
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.kernels import registrations
from twinstep.parity.sequences import OptimizerRules, World, action, register_optimizer
from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.adam_rules import AdamRules
from twinstep.parity.sequences.bf16_rules import BF16Rules
from twinstep.parity.sequences.contracts import Contract, adam_contracts
from twinstep.parity.sequences.drawing import EVERY, sequence
from twinstep.parity.sequences.drive import Side, run
from twinstep.parity.sequences.fills import REGIMES, filled
from twinstep.parity.sequences.judge import SEQUENCES, TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.observe import Walk, differences
from twinstep.parity.sequences.registry import REFERENCES, RULES, borrowed_twins, undriven
from twinstep.parity.sequences.world import read
from twinstep.reference.optimizers.fused_adam import FusedAdam

CPU = torch.device("cpu")


# Of those after ZeroOptimizer that replant no others' bug, and by hand, one in four but when LONG.
FEWER = [r for r in WRONG_CLASSES if r.reference == "ZeroOptimizer" and not r.bugs] + WRONG_BY_HAND
SOME = [row for row in WRONG_CLASSES if LONG or row not in FEWER or FEWER.index(row) % 4 == 0]


@pytest.mark.parametrize("row", SOME, ids=lambda row: row.name)
def test_wrong_optimizer_is_rejected_on_every_dtype(row: Optimizer) -> None:
    for dtype in row.dtypes:
        failure = judged_optimizer(row, dtype, SEQUENCES)
        assert "breaks `sequences`" in failure, f"{row.says} on {dtype}"
        got = next(line for line in failure.splitlines() if line.strip().startswith("got"))
        raised = "TypeError" in got or "AttributeError" in got
        assert not raised, f"rejected for the wrong reason: {failure}"


# Every sixth of the classes that there were: a new one must not exchange all others.
MEASURED = [
    "SharedCounter",
    "LoadSharesMemory",
    "FirstGroupsCorrection",
    "StateAtConstruction",
    "CopyForgetsItsMode",
    "BoundedCounterOff",
    "AcceptsAnyRate",
    "CounterOf24Bits",
    "EightForAStep",
    "SmallChangesOfTheRate",
    "TableDropsOne",
    "NormOfEachGroup",
    "SavesTheScaleOfTheLastStep",
    "MastersMove",
    "LongWindowsEndEarly",
    "ShardNorm",
    "AsksInOrderOfTheDict",
    "CutsLongParameters",
]
POWER = [row for row in WRONG_CLASSES if LONG or row.name in MEASURED]


@pytest.mark.parametrize("row", POWER, ids=lambda row: row.name)
def test_a_default_run_notices_a_wrong_optimizer_with_99_percent(row: Optimizer) -> None:
    """Four notices end the measurement: within 130 sequences they are probability enough.

    Of sequences over ranks a default run has fewer: there it takes more to know.
    """
    power = power_of(row, row.dtypes[0], enough=6 if row.over_ranks else 4, most=130)
    assert power.enough, f"{row.name}: {power.noticed} of {power.sequences}"


@pytest.mark.parametrize("row", HARMLESS_OPTIMIZERS, ids=lambda row: row.name)
def test_harmless_optimizer_passes(row: Optimizer) -> None:
    for dtype in row.dtypes:
        assert judged_optimizer(row, dtype, 60 if LONG else 10) == ""


def test_there_are_enough_of_both() -> None:
    assert len(WRONG_CLASSES) >= 70
    assert len(HARMLESS_OPTIMIZERS) >= 6
    names = [row.name for row in (*WRONG_CLASSES, *HARMLESS_OPTIMIZERS)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", REFERENCES)
def test_every_public_method_of_a_reference_has_an_action(name: str) -> None:
    reference = REFERENCES[name]
    assert undriven(reference, RULES[reference]) == []


def test_a_new_public_method_without_an_action_is_named() -> None:
    class Longer(FusedAdam):
        def refresh(self) -> None:
            """New."""

    assert undriven(Longer, AdamRules()) == ["refresh"]

    class Driven(AdamRules):
        @action(drives=("refresh",))
        def refresh(self, world: World) -> None:
            """Drive it."""

    assert undriven(Longer, Driven()) == []


def test_a_new_property_that_can_be_assigned_is_named() -> None:
    class Longer(FusedAdam):
        @property
        def scale(self) -> float:
            """New."""
            return 1.0

        @scale.setter
        def scale(self, value: float) -> None:
            """Assign it."""

    assert undriven(Longer, AdamRules()) == ["scale"]


def test_a_property_that_raises_is_seen_like_a_value() -> None:
    class Broken:
        @property
        def state(self) -> int:
            """Raise."""
            raise RuntimeError("gone")

    assert read(Broken(), "state") == "raises RuntimeError: gone"
    assert read(torch.zeros(1), "ndim") == 1


@pytest.mark.parametrize("rules", RULES.values(), ids=lambda rules: type(rules).__name__)
def test_actions_say_which_methods_they_really_call(rules: Rules) -> None:
    """`drives` is believed by the gap test, so it is held against the source of each action."""
    for function in ast.walk(ast.parse(inspect.getsource(type(rules)))):
        if isinstance(function, ast.FunctionDef) and declares_action(function):
            called = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            if isinstance(rules, BF16Rules):
                called.add("load_state_dict")
            assert set(rules.actions()[function.name].drives) <= called, function.name


def declares_action(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(line).startswith("action(") for line in function.decorator_list)


class Planted(FusedAdam):
    """Keeps one more tensor than the reference after a step."""

    def _step_group(self, group: dict[str, object], params: list[Tensor]) -> None:
        super()._step_group(group, params)
        self.extra = torch.zeros(2)


class Averaging(FusedAdam):
    """Has one more entry in the state of a parameter."""

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        return {**super()._initial_state(param), "ema": torch.zeros(1)}


class Grouped(FusedAdam):
    """Has one more entry in a group."""

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add one."""
        super().add_param_group({**param_group, "lr_scale": 1.0})


@pytest.mark.parametrize(
    ("cls", "path"),
    [
        (Planted, "optimizer.extra differs"),
        (Averaging, "dict of 4: ema, exp_avg"),
        (Grouped, "lr_scale, params"),
    ],
)
def test_a_planted_attribute_is_noticed(cls: type, path: str) -> None:
    assert path in judged_optimizer(Optimizer(cls=cls, says=""), "fp32", 5)


def test_a_private_attribute_is_nobodys_business() -> None:
    row = Optimizer(cls=Planted, says="", private=("extra",))
    assert judged_optimizer(row, "fp32", 3) == ""


def seen(*roots: tuple[str, object], overlap: bool = False) -> dict[str, str]:
    walk = Walk(home=CPU, overlap=overlap)
    for name, value in roots:
        walk.root(name, value)
    return {path: leaf.says for path, leaf in walk.leaves.items()}


def test_shared_memory_is_seen_and_may_be_narrowed_to_bytes() -> None:
    both = torch.zeros(4)
    halves = {"a": both[:2], "b": both[2:], "c": torch.zeros(2)}
    found = seen(("x", halves))
    assert found["x.b"].endswith("shares memory with x.a")
    assert "shares" not in found["x.c"]
    assert "shares" not in seen(("x", halves), overlap=True)["x.b"]
    assert "shares memory with x.a" in seen(("x", {"a": both, "b": both[3:]}), overlap=True)["x.b"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1.0, 1.0 + 2**-52),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1), torch.zeros(1).double()),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(2), torch.tensor([0.0, 1.0])),
        ({"a": None}, {}),
        (torch.zeros(1), torch.zeros(1, requires_grad=True)),
    ],
)
def test_everything_that_differs_is_seen(one: object, other: object) -> None:
    def leaves(value: object) -> Walk:
        walk = Walk(home=CPU)
        walk.root("x", value)
        return walk

    assert differences(leaves(one).leaves, leaves(other).leaves)
    assert not differences(leaves(one).leaves, leaves(one).leaves)


def test_the_payload_of_a_nan_is_not_compared() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    walks = [Walk(home=CPU), Walk(home=CPU)]
    for walk, value in zip(walks, quiet, strict=True):
        walk.root("x", value.clone())
    assert differences(walks[0].leaves, walks[1].leaves) == []


def test_sequences_are_the_same_in_every_run_and_differ_from_each_other() -> None:
    rules = AdamRules()
    drawn = [str(sequence(rules, 3, "bf16", number)) for number in range(20)]
    assert drawn == [str(sequence(rules, 3, "bf16", number)) for number in range(20)]
    assert len(set(drawn)) == 20
    assert drawn != [str(sequence(rules, 4, "bf16", number)) for number in range(20)]
    lengths = [len(sequence(rules, 0, "fp32", number)) - 1 for number in range(200)]
    assert 18 <= sum(lengths) / 200 <= 24
    assert sum(length >= 60 for length in lengths) == 4


def test_sequences_reach_every_action_and_overflow_and_are_rarely_refused() -> None:
    rules, names, raised, broken = AdamRules(), Counter[str](), Counter[str](), 0
    for number in range(2 * EVERY):
        side = Side(FusedAdam, rules, "bf16", "cpu")
        for act in sequence(rules, 0, "bf16", number):
            side.carry_out(act)
            names[act.name] += 1
            if "raised" in side.outcome:
                raised[act.name] += 1
        assert side.world is not None
        broken += any(not bool(param.isfinite().all()) for param in side.world.params)
    assert set(names) == set(rules.actions())
    wrong = {"add_group_again", "add_impossible_group", "construct_wrongly", "load_damaged"}
    wrong |= {"add_refused_group", "step_wrongly", "add_labelled_group"}
    # A sparse gradient is refused, and a dict of before a group was added; closures may fail.
    assert raised.keys() <= wrong | {"load", "load_kept", "step", "train", "step_with_closure"}
    assert 0 < raised["step_with_closure"] < names["step_with_closure"]
    assert raised["step"] < names["step"] / 4
    assert 0 < raised["load_damaged"] < names["load_damaged"]
    assert raised["construct_wrongly"] == names["construct_wrongly"]
    assert raised["add_group_again"] == names["add_group_again"]
    assert raised["load"] < names["load"] / 4
    assert 1 <= broken <= EVERY // 2


@pytest.mark.parametrize("regime", REGIMES)
def test_gradients_have_the_bits_of_their_regime(regime: str, dtype: torch.dtype) -> None:
    values = filled((64,), dtype, regime, 5)
    assert values.dtype == dtype
    smallest = torch.finfo(dtype).smallest_normal
    if regime == "subnormal":
        assert bool((values.abs() < smallest).all())
        assert bool((values != 0).any())
    if regime == "zeros":
        assert bool((values == 0).all())
        assert bool(values.signbit().any())
    assert int((~values.isfinite()).sum()) == (1 if regime == "planted" else 0)
    if regime == "extreme":
        assert bool((values.abs() > torch.finfo(dtype).max / 2).any())


def test_a_failure_is_shrunk(tmp_path: Path) -> None:
    with borrowed_twins():
        twin = twin_of(Optimizer(cls=CountsWithoutGradient, says=""))
    effort = TwinEffort(sequences=40, repros=str(tmp_path))
    cell = judge_twin(twin, "fp32", twin_engine(twin), effort)
    actions = [line for line in cell.failure.splitlines() if line.startswith("  " + " " * 9)]
    assert len(actions) <= 5, cell.failure
    assert "seed 0, sequence" in cell.failure
    assert Path(cell.repro).parent == tmp_path


class Unbuildable(FusedAdam):
    """Refuses every construction, on whichever side it is."""

    def __init__(self, *args: object, **options: object) -> None:
        raise ImportError("no such module")


def test_a_cell_in_which_nothing_is_built_is_no_success() -> None:
    row = next(row for row in HARMLESS_OPTIMIZERS if "fp32" in row.dtypes)
    twin = replace(twin_of(row), reference=Unbuildable, subject=Unbuildable)
    cell = judge_twin(twin, "fp32", twin_engine(twin), TwinEffort(sequences=3))
    assert cell.status is Status.FAILED
    assert cell.failure.endswith("no sequence builds the reference: ImportError: no such module")


def test_the_same_sequence_can_be_run_again() -> None:
    twin = twin_of(Optimizer(cls=CountsWithoutGradient, says=""))
    acts = next(
        acts
        for number in range(60)
        if run(twin, "fp32", "cpu", acts := sequence(twin.rules, 0, "fp32", number))
    )
    first, second = (run(twin, "fp32", "cpu", acts) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.at, first.difference) == (second.at, second.difference)


class NoStep(OptimizerRules):
    """Declares nothing that steps in bounds."""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reference": "FusedAdagrad"}, 'reference "FusedAdagrad" is unknown'),
        ({"arithmetic": "sloppy"}, 'arithmetic has "sloppy"'),
        ({"dtypes": ("fp8",)}, 'dtypes has "fp8"'),
        ({"dtypes": ()}, "dtypes is empty"),
        ({"engines": ("tpu",)}, 'engines has "tpu"'),
        ({"rules": NoStep()}, "no action of NoStep drives initialize_states"),
        ({"reference": torch.optim.SGD}, 'it should be "exact"'),
        ({"reference": SharedCounter, "rules": AdamRules(), "name": "taken"}, "registered already"),
    ],
)
def test_a_wrong_registration_is_refused_in_one_sentence(
    given: dict[str, object], says: str
) -> None:
    with registrations(), borrowed_twins():
        register_optimizer("taken", arithmetic="exact")(FusedAdam)
        with pytest.raises(UsageError) as caught:
            register_optimizer(**{"name": "x", **given})(SharedCounter)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ".py:" in str(caught.value)


def test_a_class_that_lacks_a_method_is_refused() -> None:
    class Short:
        """No optimizer."""

    with borrowed_twins(), pytest.raises(UsageError, match="Short lacks add_param_group"):
        register_optimizer("short")(Short)


def test_a_moment_of_a_weight_that_is_nan_lacks_the_decay_of_zero_or_is_nan() -> None:
    param = Parameter(torch.tensor([torch.nan, 1.0]))
    optimizer = FusedAdam([param], betas=(0.5, 0.5), adam_w_mode=False)
    param.grad = torch.tensor([0.5, 0.5])
    device = torch.device("cpu")
    world = World(FusedAdam, {"adam_w_mode": False}, [param], optimizer, device)
    (contract,) = adam_contracts(world)
    assert isinstance(contract, Contract)
    moment = contract.accepted["optimizer.state[params[0]].exp_avg"]
    for first, taken in ((0.25, True), (torch.nan, True), (0.26, False), (0.0, False)):
        assert moment.accepts(torch.tensor([first, 0.25])).tolist() == [taken, True]
    assert moment.accepts(torch.tensor([0.25, torch.nan])).tolist() == [True, False]
