"""DeepSpeed's own files in the FP16 classes of both sides: loaded, continued alike, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.golden.test_golden_checkpoints import SHAPES, SPOILS, UNIVERSAL
from tests.helpers.checkpoint_runs import CLASSES, SIDES, Run, plain
from twinstep.contract.checkpoint import load_universal_checkpoint, read_checkpoint
from twinstep.contract.compat import Compat
from twinstep.golden.record_checkpoints import FOLDER, SIZES, gradient
from twinstep.golden.record_checkpoints import SCALING as THEIRS
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.parity.sequences.observe import differences

pytestmark = pytest.mark.usefixtures("replay")
KINDS = pytest.mark.parametrize("kind", ["flat", "unfused"])


def started(
    side: str, kind: str, shapes: Any = SIZES, inside: Callable[..., Any] | None = None, **more: Any
) -> Run:
    """A run whose weights are still zero; counters are those of no step."""
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float16)) for shape in shapes]
    adam = (inside or CLASSES[side]["Adam"])(params, lr=0.125, weight_decay=0.5)
    scaling: dict[str, Any] = {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": THEIRS,
        "verbose": False,
    }
    return Run(kind, params, CLASSES[side][kind](adam, **{**scaling, **more}))


def continued(run: Run, steps: range) -> None:
    """The steps that DeepSpeed's object took after it was saved."""
    for step in steps:
        for place, param in enumerate(run.params):
            values = torch.tensor(gradient(step, place, param.numel())).view(param.shape)
            param.grad = (values * THEIRS["init_scale"]).to(param.dtype)
        run.optimizer.step()
        run.optimizer.zero_grad()


def theirs(kind: str) -> Any:
    return read_checkpoint(FOLDER / f"deepspeed_{kind}.pt")["optimizer"]


@KINDS
@pytest.mark.parametrize("compat", [False, True], ids=["ours", "theirs"])
def test_both_sides_go_on_alike_from_deepspeeds_file(kind: str, compat: bool) -> None:
    runs = []
    for side in SIDES:
        chosen = Compat.deepspeed() if compat else Compat()
        run = started(side, kind, compat=chosen)
        run.load(theirs(kind))
        assert run.optimizer.loss_scale == 16.0
        assert run.optimizer.param_groups[0]["lr"] == 0.25
        continued(run, range(2, 4))
        runs.append(run)
    fast_run, reference_run = runs
    wanted = plain(reference_run.optimizer.state_dict())
    assert plain(fast_run.optimizer.state_dict()) == wanted
    for one, other in zip(fast_run.params, reference_run.params, strict=True):
        assert bits(one.detach()) == bits(other.detach())
        assert one.abs().max() > 0.0


@KINDS
def test_the_fast_side_goes_on_as_deepspeed_did(kind: str) -> None:
    """Around torch's AdamW, whose arithmetic DeepSpeed recorded."""
    run = started("fast", kind, inside=torch.optim.AdamW)
    run.load(theirs(kind))
    continued(run, range(2, 4))
    after: Any = read_checkpoint(FOLDER / f"deepspeed_{kind}_after.pt")["weights"]
    assert [bits(param.detach()) for param in run.params] == [bits(weight) for weight in after]


@KINDS
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


def universal(side: str, kind: str, folder: Path = UNIVERSAL, **options: Any) -> Run:
    run = started(side, kind, SHAPES.values(), clip_grad=0.5)
    names = dict(zip(run.params, SHAPES, strict=True))
    load_universal_checkpoint(run.optimizer, folder, names, **options)
    return run


@KINDS
@pytest.mark.parametrize("states", [True, False])
def test_a_universal_checkpoint_is_loaded_and_continued_alike(kind: str, states: bool) -> None:
    runs = [universal(side, kind, load_optimizer_states=states) for side in SIDES]
    for run in runs:
        assert run.optimizer.clip_grad == 0.5
        assert run.optimizer.get_lr() == (0.25 if states else 0.125)
        assert bool(run.optimizer.state) == states
        for param, name in zip(run.params, SHAPES, strict=True):
            weight = torch.load(UNIVERSAL / "zero" / name / "fp32.pt", weights_only=True)["param"]
            assert bits(param.detach()) == bits(weight.detach().view(param.shape).half())
        for number in range(2):
            for place, param in enumerate(run.params):
                grad = 8 * moderate(param.numel(), 10 * number + place, param.dtype)
                param.grad = grad.view(param.shape)
            run.optimizer.step()
            run.optimizer.zero_grad()
    ours, wanted = (plain(run.optimizer.state_dict()) for run in runs)
    assert ours == wanted
    steps = {int(held["step"]) for held in runs[0].optimizer.state.values()}
    assert steps == {5 if states else 2}


@KINDS
@pytest.mark.parametrize("side", SIDES)
def test_a_spoiled_universal_checkpoint_changes_nothing(
    side: str, kind: str, tmp_path: Path
) -> None:
    run = universal(side, kind)
    before = run.seen()
    names = dict(zip(run.params, SHAPES, strict=True))
    load = load_universal_checkpoint
    for at, spoil in enumerate([*(spoil for spoil, _ in SPOILS), *MORE]):
        folder = tmp_path / str(at)
        shutil.copytree(UNIVERSAL, folder)
        spoil(folder)
        with pytest.raises(ValueError, match="should") as caught:
            load(run.optimizer, folder, names)
        assert "\n" not in str(caught.value)
        assert differences(run.seen(), before) == [], str(caught.value)
    with pytest.raises(ValueError, match="param_names has no name"):
        load(run.optimizer, UNIVERSAL, dict(list(names.items())[1:]))
    with pytest.raises(ValueError, match="does not exist"):
        load(run.optimizer, UNIVERSAL, dict(zip(run.params, "abc", strict=True)))
    assert differences(run.seen(), before) == []


@KINDS
def test_a_universal_checkpoint_of_zero_on_fp16_brings_its_scale(kind: str) -> None:
    """Written by an engine with ZeRO; its scaler is an object of DeepSpeed's, read as values."""
    folder = FOLDER / "deepspeed_universal_fp16"
    for side in SIDES:
        run = started(side, kind, SHAPES.values(), inside=torch.optim.AdamW)
        run.optimizer.loss_scale = 2.0
        names = dict(zip(run.params, SHAPES, strict=True))
        load_universal_checkpoint(run.optimizer, folder, names)
        saved = run.optimizer.state_dict()
        assert (saved["cur_scale"], saved["cur_iter"], saved["last_overflow_iter"]) == (16.0, 3, -1)
        static = started(side, kind, SHAPES.values(), dynamic_loss_scale=False)
        names = dict(zip(static.params, SHAPES, strict=True))
        load_universal_checkpoint(static.optimizer, folder, names)
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
    *(half_moment, one_moment_less, no_moments, turned, no_number, no_step),
    *(two_groups, no_rate, strange_groups, code),
]
