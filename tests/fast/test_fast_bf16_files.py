"""The fast BF16Optimizer loads DeepSpeed's files like the reference, and goes on with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twinstep.fast.bf16_optimizer
import twinstep.fast.fused_adam
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fused_adam
from tests.golden.test_golden_checkpoints import SHAPES, UNIVERSAL
from twinstep.contract.checkpoint import read_checkpoint
from twinstep.golden.record_checkpoints import FOLDER, SIZES
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = pytest.mark.usefixtures("replay")

SIDES: list[tuple[Any, Any]] = [
    (twinstep.fast.bf16_optimizer.BF16Optimizer, twinstep.fast.fused_adam.FusedAdam),
    (
        twinstep.reference.optimizers.bf16.BF16Optimizer,
        twinstep.reference.optimizers.fused_adam.FusedAdam,
    ),
]


def built(side: int, shapes: dict[str, tuple[int, ...]]) -> tuple[list[nn.Parameter], Any]:
    cls, adam = SIDES[side]
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes.values()]
    names = dict(zip(params, shapes, strict=True))
    return params, cls(adam(params, lr=0.25, weight_decay=0.125), param_names=names)


def seen(params: list[nn.Parameter], optimizer: Any) -> list[object]:
    masters = optimizer.fp32_groups_flat_partition
    state = [value for held in optimizer.state.values() for _, value in sorted(held.items())]
    words = [bits(tensor.detach()) for tensor in (*params, *masters) if tensor.numel()]
    return [*words, *(tensor.tolist() for tensor in state), optimizer.get_lr()]


def continued(sides: list[tuple[list[nn.Parameter], Any]]) -> None:
    """Compare as loaded, and after three more steps."""
    assert seen(*sides[0]) == seen(*sides[1])
    for number in range(3):
        for params, optimizer in sides:
            for place, param in enumerate(params):
                grad = moderate(param.numel(), 10 * number + place, torch.bfloat16)
                param.grad = grad.reshape(param.shape)
            optimizer.update_hp_grads()
            optimizer.step()
        assert seen(*sides[0]) == seen(*sides[1])


def test_deepspeeds_own_file_is_loaded_and_continued() -> None:
    state = read_checkpoint(FOLDER / "deepspeed_bf16.pt")["optimizer_state_dict"]
    shapes = {f"p{place}": size for place, size in enumerate(SIZES)}
    sides = [built(side, shapes) for side in range(2)]
    for _, optimizer in sides:
        optimizer.load_state_dict([state], load_from_fp32_weights=True)
    assert sides[0][1].fp32_groups_flat_partition[0].abs().max().item() > 0.0
    continued(sides)


@pytest.mark.parametrize("states", [True, False])
def test_a_universal_checkpoint_is_loaded_and_continued(states: bool) -> None:
    sides = [built(side, SHAPES) for side in range(2)]
    for _, optimizer in sides:
        optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL, load_optimizer_states=states)
    assert bool(sides[0][1].state) == states
    continued(sides)


def spoil(folder: Path, what: str) -> None:
    """Make a copied checkpoint unfit."""
    zero = folder / "zero"
    moment = zero / "0.bias" / "exp_avg.pt"
    if what == "common":
        (zero / "optimizer_state.pt").unlink()
    elif what == "weight":
        (zero / "0.bias" / "fp32.pt").unlink()
    elif what == "cut":
        moment.write_bytes(moment.read_bytes()[:300])
    elif what == "size":
        torch.save({"param": torch.zeros(9)}, moment)
    elif what == "steps":
        torch.save(torch.tensor(7.0), zero / "0.bias" / "step.pt")
    elif what == "no number":
        torch.save({"a": 1}, zero / "0.bias" / "step.pt")
    elif what == "moment":
        for file in zero.glob("*/exp_avg_sq.pt"):
            file.unlink()
    else:
        torch.save({"param_groups": [{}, {}]}, zero / "optimizer_state.pt")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("common", "optimizer_state.pt does not exist"),
        ("weight", "fp32.pt does not exist"),
        ("cut", "exp_avg.pt should be a whole checkpoint"),
        ("size", "exp_avg.pt of 0.bias has 9 elements, but should have 2"),
        ("steps", "have steps 3, 7, but should agree"),
        ("no number", "step.pt holds a dict, but should hold a number"),
        ("moment", "parameter 0 has step, exp_avg, but should have step, exp_avg, exp_avg_sq"),
        ("groups", "has 2 groups, but should have 1"),
    ],
)
def test_what_does_not_fit_is_said_and_changes_nothing(
    what: str, says: str, tmp_path: Path
) -> None:
    shutil.copytree(UNIVERSAL, tmp_path / "universal")
    spoil(tmp_path / "universal", what)
    params, optimizer = built(0, SHAPES)
    before = seen(params, optimizer)
    with pytest.raises(ValueError, match=says) as caught:
        optimizer.load_state_dict([], checkpoint_folder=tmp_path / "universal")
    assert "\n" not in str(caught.value)
    assert seen(params, optimizer) == before
