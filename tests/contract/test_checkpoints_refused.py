"""A state that does not fit gets one sentence, and changes nothing that can be reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_faults import INNER, MASTERS, faults
from tests.helpers.checkpoint_runs import KINDS, Run, started
from tests.helpers.sides import SIDES
from twinstep.parity.sequences.observe import differences

pytestmark = pytest.mark.usefixtures("replay")


def good(kind: str) -> dict[str, Any]:
    """A state that fits, unlike that of any run below."""
    source = started("reference", kind)
    source.train(range(10, 13))
    state: dict[str, Any] = source.optimizer.state_dict()
    return state


def refused(run: Run, state: object) -> str:
    """Load what cannot be loaded; return what differs or was said badly, or nothing."""
    before = run.seen()
    try:
        run.load(state)
    except ValueError as error:
        said = str(error)
    else:
        return "was loaded"
    if "\n" in said or len(said) > 400 or "[" not in said:
        return f"said {said}"
    changed = differences(run.seen(), before)
    return "; ".join(f"{one.path}: {one.got}, was {one.want}" for one in changed[:3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_what_does_not_fit_is_said_and_changes_nothing(side: str, kind: str) -> None:
    """Before the first step, and after a step that nobody has asked about."""
    state = good(kind)
    run = started(side, kind)
    wrong = {f"fresh, {name}": refused(run, make(state)) for name, make in faults(kind).items()}
    run.train(range(2), at=(1,))
    wrong |= {f"trained, {name}": refused(run, make(state)) for name, make in faults(kind).items()}
    assert {name: what for name, what in wrong.items() if what} == {}
    assert len(wrong) > 100
    run.load(state)


SENTENCES = {
    "list": "state is a list, but should be a dict",
    "foreign": "state has no {inner}, {masters}, but should",
    "clip text": "clip_grad='much', but should be a number",
    "masters none": "{masters} (should be a list of tensors|is a NoneType, but should be a list)",
    "masters fewer": "{masters} has 1 (tensors|groups), but should have 2",
    "masters longer": r"{masters}\[0\](\[0\])? has .* elements, but should have",
    "masters half": r"{masters}\[0\](\[0\])? is torch.float16, but should be torch.float32",
    "inner number": "{inner} should be the state dict of an optimizer, but is not",
    "inner groups": r"state has groups of \[.*\] parameters, but should have \[.*\]",
    "inner lacking": "has step, exp_avg, but should have step, exp_avg, exp_avg_sq",
    "moment short": r"exp_avg_sq of parameter \d has shape \(.*\), but should have \(.*\)",
    "options of sgd": "state has no betas, but .* should",
    "lr text": "lr='fast', but should be a number",
    "step 1.5": "step=1.5, but should be a whole number of steps",
}
SCALE = {
    "no cur_scale": "state has no cur_scale, but should",
    "static": "dynamic_loss_scale=False, but should be True: the rule comes from the constructor",
    "scale -1.0": "loss scale is -1.0, but should be positive and finite",
    "cur_iter 1.5": "cur_iter=1.5, but should be a whole number",
    "cur_iter -3": "cur_iter=-3, but should be at least 0 and fit int64",
}
SPLIT = {
    "empty version": "ds_version is empty, but should name a version",
    "other ranks": r"partition_count=\[2, 2\], but should be \[1, 1\]",
    "places": "p0 lies at {{'numel': 6, 'start': 1}}, but should lie at",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_a_fault_is_named_with_what_should_be(side: str, kind: str) -> None:
    state, made = good(kind), faults(kind)
    run = started(side, kind)
    named = {"masters": MASTERS[kind], "inner": INNER.get(kind, "optimizer_state_dict")}
    for fault, sentence in (SENTENCES | (SPLIT if kind == "bf16" else SCALE)).items():
        if kind == "bf16" and fault == "foreign":
            sentence = "state has no ds_version, {inner}, {masters}, but should"
        with pytest.raises(ValueError, match=sentence.format(**named)):
            run.load(made[fault](state))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_a_change_would_be_seen(side: str, kind: str) -> None:
    """The digest of the test above says no to every tensor and counter."""
    run = started(side, kind)
    assert refused(run, good(kind)) == "was loaded"
    before = run.seen()
    assert differences(run.seen(), before) == []
    masters = next(iter(run.optimizer.param_groups))["params"]
    for tensor in (run.params[0].data, masters[0].data, *run.optimizer.state[masters[0]].values()):
        kept = tensor.clone()
        tensor.add_(1)
        assert differences(run.seen(), before) != []
        tensor.copy_(kept)
    run.optimizer.clip_grad += 1.0
    assert differences(run.seen(), before) != []


@pytest.mark.parametrize("kind", ["flat", "unfused"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_state_of_another_class_inside_is_refused_by_torchs_own(
    side: str, kind: str, name: str
) -> None:
    """Torch itself would take it, and fail or go wrong in the next step."""

    def inside(groups: Any) -> torch.optim.Optimizer:
        if name == "SGD":
            return torch.optim.SGD(groups, momentum=0.9)
        return torch.optim.Adam(groups)

    run = started(side, kind, inside)
    for step in range(2):
        state = good(kind)
        if name == "Adam":
            # Adam's own keys and options, and one fault.
            held = state["optimizer_state_dict"]["state"]
            held[max(held)]["exp_avg_sq"] = held[max(held)]["exp_avg_sq"].half()
            other = good(kind)
            held = other["optimizer_state_dict"]["state"]
            held[max(held)]["step"] = torch.tensor(1.5)
            assert refused(run, other) == ""
        assert refused(run, state) == ""
        run.train(range(step, step + 1))


@pytest.mark.parametrize("side", SIDES)
def test_adam_and_lamb_do_not_take_each_others_state(side: str) -> None:
    adam, lamb = started(side, "unfused"), started(side, "lamb")
    assert refused(adam, good("lamb")) == ""
    assert refused(lamb, good("unfused")) == ""


@pytest.mark.parametrize("side", SIDES)
def test_the_sentence_names_whose_file_it_is(side: str) -> None:
    run = started(side, "flat")
    theirs: dict[str, object] = {key: [] for key in ("optimizer_state_dict", MASTERS["unfused"])}
    with pytest.raises(ValueError, match=r"that of FP16UnfusedOptimizer"):
        run.load(theirs)
    with pytest.raises(ValueError, match=r"that of a ZeRO optimizer"):
        run.load({"zero_stage": 1, "base_optimizer_state": {}})
    with pytest.raises(ValueError, match=r"whole checkpoint of DeepSpeed.* optimizer \["):
        run.load({"module": {}, "optimizer": run.optimizer.state_dict(), "ds_version": "0.19.8"})
