"""DeepSpeed's own files in the FP16 classes of both sides: loaded, continued alike, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.checkpoint_runs import KINDS, Run, plain
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.universal_checkpoint import SHAPES, SPOILS, UNIVERSAL
from twinstep.contract.checkpoint import load_universal_checkpoint, read_checkpoint
from twinstep.contract.compat import Compat
from twinstep.golden.record_checkpoints import FOLDER, SIZES, gradient
from twinstep.golden.record_checkpoints import SCALING as THEIRS
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.parity.sequences.observe import differences

pytestmark = pytest.mark.usefixtures("replay")
SCALED = pytest.mark.parametrize("kind", ["flat", "unfused"])
ALL = pytest.mark.parametrize("kind", ["flat", "unfused", "bf16"])


def started(
    side: str, kind: str, shapes: Any = SIZES, inside: Callable[..., Any] | None = None, **more: Any
) -> Run:
    """A run whose weights are still zero; counters are those of no step."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    adam = (inside or CLASSES[side]["FusedAdam"])(params, lr=0.125, weight_decay=0.5)
    options: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": THEIRS}
    options |= {"verbose": False}
    if kind == "bf16":
        options = {"param_names": named(params)}
    return Run(kind, params, CLASSES[side][KINDS[kind]](adam, **{**options, **more}))


def named(params: list[nn.Parameter]) -> dict[nn.Parameter, str]:
    """The names of the recorded universal checkpoint."""
    return dict(zip(params, SHAPES, strict=False))


def continued(run: Run, steps: range) -> None:
    """The steps that DeepSpeed's object took after it was saved."""
    for step in steps:
        for place, param in enumerate(run.params):
            values = torch.tensor(gradient(step, place, param.numel())).view(param.shape)
            param.grad = (values * THEIRS["init_scale"]).to(param.dtype)
        if run.kind == "bf16":
            run.optimizer.update_hp_grads()
        run.optimizer.step()
        run.optimizer.zero_grad()


def theirs(kind: str) -> Any:
    key = "optimizer_state_dict" if kind == "bf16" else "optimizer"
    return read_checkpoint(FOLDER / f"deepspeed_{kind}.pt")[key]


@ALL
@pytest.mark.parametrize("compat", [False, True], ids=["ours", "theirs"])
def test_both_sides_go_on_alike_from_deepspeeds_file(kind: str, compat: bool) -> None:
    runs = []
    for side in SIDES:
        chosen = Compat.deepspeed() if compat else Compat()
        run = started(side, kind, compat=chosen)
        run.load(theirs(kind))
        assert kind == "bf16" or run.optimizer.loss_scale == 16.0
        assert run.optimizer.param_groups[0]["lr"] == 0.25
        continued(run, range(2, 4))
        runs.append(run)
    fast_run, reference_run = runs
    wanted = plain(reference_run.optimizer.state_dict())
    assert plain(fast_run.optimizer.state_dict()) == wanted
    for one, other in zip(fast_run.params, reference_run.params, strict=True):
        assert bits(one.detach()) == bits(other.detach())
        assert one.abs().max() > 0.0


@SCALED
def test_the_fast_side_goes_on_as_deepspeed_did(kind: str) -> None:
    """Around torch's AdamW, whose arithmetic DeepSpeed recorded."""
    run = started("fast", kind, inside=torch.optim.AdamW)
    run.load(theirs(kind))
    continued(run, range(2, 4))
    after: Any = read_checkpoint(FOLDER / f"deepspeed_{kind}_after.pt")["weights"]
    assert [bits(param.detach()) for param in run.params] == [bits(weight) for weight in after]


@ALL
@pytest.mark.parametrize("side", SIDES)
def test_whole_files_of_others_are_refused_and_change_nothing(side: str, kind: str) -> None:
    run = started(side, kind)
    before = run.seen()
    files = [*FOLDER.glob("*.pt"), UNIVERSAL / "zero" / "optimizer_state.pt"]
    assert len(files) == 7
    for file in files:
        held = read_checkpoint(file)
        own = f"deepspeed_{kind}.pt" == file.name
        for state in (
            held,
            None if own else held.get("optimizer", held.get("optimizer_state_dict")),
        ):
            with pytest.raises(ValueError, match="but should be|lacks|has no") as caught:
                run.load(state)
            assert "\n" not in str(caught.value)
    assert differences(run.seen(), before) == []


def load_universal(run: Run, folder: Path, **options: Any) -> None:
    if run.kind == "bf16":
        run.optimizer.load_state_dict([], checkpoint_folder=folder, **options)
    else:
        load_universal_checkpoint(run.optimizer, folder, named(run.params), **options)


def universal(side: str, kind: str, **options: Any) -> Run:
    run = started(side, kind, SHAPES.values(), clip_grad=0.5)
    load_universal(run, UNIVERSAL, **options)
    return run


@ALL
@pytest.mark.parametrize("states", [True, False])
def test_a_universal_checkpoint_is_loaded_and_continued_alike(kind: str, states: bool) -> None:
    runs = [universal(side, kind, load_optimizer_states=states) for side in SIDES]
    for run in runs:
        assert run.optimizer.clip_grad == 0.5
        assert run.optimizer.get_lr() == (0.25 if states else 0.125)
        assert bool(run.optimizer.state) == states
        for param, name in zip(run.params, SHAPES, strict=True):
            weight = torch.load(UNIVERSAL / "zero" / name / "fp32.pt", weights_only=True)["param"]
            assert bits(param.detach()) == bits(weight.detach().view(param.shape).to(param.dtype))
        run.train(range(2))
    ours, wanted = (plain(run.optimizer.state_dict()) for run in runs)
    assert ours == wanted
    steps = {int(held["step"]) for held in runs[0].optimizer.state.values()}
    assert steps == {5 if states else 2}


@ALL
@pytest.mark.parametrize("side", SIDES)
def test_a_spoiled_universal_checkpoint_changes_nothing(
    side: str, kind: str, tmp_path: Path
) -> None:
    run = universal(side, kind)
    before = run.seen()
    for at, (spoil, message) in enumerate([*SPOILS, *MORE]):
        folder = tmp_path / str(at)
        shutil.copytree(UNIVERSAL, folder)
        spoil(folder)
        with pytest.raises(ValueError, match=message) as caught:
            load_universal(run, folder)
        assert "\n" not in str(caught.value)
        assert differences(run.seen(), before) == [], str(caught.value)


@SCALED
@pytest.mark.parametrize("side", SIDES)
def test_names_that_are_missing_are_refused(side: str, kind: str) -> None:
    run = universal(side, kind)
    before = run.seen()
    names = dict(list(named(run.params).items())[1:])
    with pytest.raises(ValueError, match="param_names has no name for 1 parameters"):
        load_universal_checkpoint(run.optimizer, UNIVERSAL, names)
    with pytest.raises(ValueError, match="does not exist"):
        load_universal_checkpoint(
            run.optimizer, UNIVERSAL, dict(zip(run.params, "abc", strict=True))
        )
    assert differences(run.seen(), before) == []


@SCALED
def test_a_universal_checkpoint_of_zero_on_fp16_brings_its_scale(kind: str) -> None:
    """Written by an engine with ZeRO; its scaler is an object of DeepSpeed's, read as values."""
    folder = FOLDER / "deepspeed_universal_fp16"
    for side in SIDES:
        run = started(side, kind, SHAPES.values(), inside=torch.optim.AdamW)
        run.optimizer.loss_scale = 2.0
        load_universal(run, folder)
        saved = run.optimizer.state_dict()
        assert (saved["cur_scale"], saved["cur_iter"], saved["last_overflow_iter"]) == (16.0, 3, -1)
        scaler = CLASSES[side]["DynamicLossScale"](delayed_shift=5)
        patient = started(side, kind, SHAPES.values(), loss_scale_config=scaler)
        load_universal(patient, folder)
        assert patient.optimizer.state_dict()["cur_hysteresis"] == 2
        static = started(side, kind, SHAPES.values(), dynamic_loss_scale=False)
        load_universal(static, folder)
        assert static.optimizer.loss_scale == 1.0
        for one, other in zip(run.params, static.params, strict=True):
            assert bits(one.detach()) == bits(other.detach())
            assert one.abs().max() > 0.0


def half_moment(folder: Path) -> None:
    torch.save({"param": torch.zeros(2).half()}, folder / "zero" / "0.bias" / "exp_avg.pt")


def one_moment_less(folder: Path) -> None:
    (folder / "zero" / "1.weight" / "exp_avg_sq.pt").unlink()


def no_moments(folder: Path) -> None:
    for file in folder.glob("zero/*/exp_avg_sq.pt"):
        file.unlink()


def turned(folder: Path) -> None:
    torch.save({"param": torch.zeros(3, 2)}, folder / "zero" / "0.weight" / "fp32.pt")


def no_number(folder: Path) -> None:
    torch.save({"step": 3}, folder / "zero" / "0.weight" / "step.pt")


def no_step(folder: Path) -> None:
    torch.save(torch.tensor(torch.nan), folder / "zero" / "0.weight" / "step.pt")


def two_groups(folder: Path) -> None:
    torch.save({"param_groups": [{}, {}]}, folder / "zero" / "optimizer_state.pt")


def no_rate(folder: Path) -> None:
    torch.save({"param_groups": [{"lr": torch.nan}]}, folder / "zero" / "optimizer_state.pt")


def strange_groups(folder: Path) -> None:
    torch.save({"param_groups": {"lr": 1}}, folder / "zero" / "optimizer_state.pt")


def code(folder: Path) -> None:
    torch.save({"param": folder}, folder / "zero" / "0.bias" / "exp_avg.pt")


MORE = [
    (half_moment, "exp_avg.pt of 0.bias is torch.float16, but should be torch.float32"),
    (one_moment_less, "1.weight has exp_avg, fp32, but should have exp_avg, exp_avg_sq, fp32"),
    (no_moments, "has step, exp_avg, but should have step, exp_avg, exp_avg_sq"),
    (turned, r"fp32.pt of 0.weight has shape \(3, 2\), but should have \(2, 3\)"),
    (no_number, "step.pt holds a dict, but should hold a number"),
    (no_step, "step=nan, but should be a whole number of steps"),
    (two_groups, "optimizer_state.pt has 2 groups, but should have 1"),
    (no_rate, "lr=nan, but should be finite"),
    (strange_groups, "param_groups of optimizer_state.pt should be a list of dicts"),
    (code, "exp_avg.pt should be a whole checkpoint .* but it names code"),
]


@pytest.mark.parametrize("side", SIDES)
def test_unfused_files_have_no_place_for_empty_parameters(side: str) -> None:
    """As DeepSpeed numbers them, so that its file fits a model that has some."""
    run = started(side, "unfused", shapes=((0,), SIZES[0], (2, 0), SIZES[1]))
    run.load(theirs("unfused"))
    plainer = started(side, "unfused")
    plainer.load(theirs("unfused"))
    kept = [param for param in run.params if param.numel()]
    assert [bits(p.detach()) for p in kept] == [bits(p.detach()) for p in plainer.params]
    wanted = plain(plainer.optimizer.state_dict())
    assert plain(run.optimizer.state_dict()) == wanted


def shared(file: Any) -> Any:
    """A file of an FP16 class, counted as DeepSpeed's `FusedAdam` counts."""
    inner = file["optimizer_state_dict"]
    for group in inner["param_groups"]:
        group["step"] = 0
        for number in group["params"][:-1]:
            inner["state"][number]["step"] = 0
    return file


@pytest.mark.parametrize("side", SIDES)
def test_a_counter_that_a_group_shared_is_that_of_each_parameter(side: str) -> None:
    counted = []
    for compat in (Compat(), Compat(shared_step_counter=True)):
        adam = partial(CLASSES[side]["FusedAdam"], compat=compat)
        run = started(side, "unfused", inside=adam)
        run.load(shared(theirs("unfused")))
        counted.append([int(held["step"]) for held in run.optimizer.state.values()])
        saved = run.optimizer.state_dict()["optimizer_state_dict"]["state"]
        assert [int(held["step"]) for held in saved.values()] == [3, 3]
        own = shared(theirs("unfused"))["optimizer_state_dict"]
        plain_adam = adam([nn.Parameter(torch.zeros(shape)) for shape in SIZES])
        plain_adam.load_state_dict(own)
        counted.append([int(held["step"]) for held in plain_adam.state.values()])
        # What it saves is known by the same mark.
        again = CLASSES[side]["FusedAdam"]([nn.Parameter(torch.zeros(size)) for size in SIZES])
        again.load_state_dict(plain_adam.state_dict())
        assert [int(held["step"]) for held in again.state.values()] == [3, 3]
    assert counted == [[3, 3], [3, 3], [0, 3], [0, 3]]
