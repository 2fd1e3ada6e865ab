"""Universal checkpoints over ranks: split, padded, and taken by all ranks or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.mesh import Mesh, on_mesh
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.universal_checkpoint import SHAPES, SPOILS, UNIVERSAL, spoiled
from twinstep.contract.checkpoint import load_universal_checkpoint, read_checkpoint
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = pytest.mark.usefixtures("replay")
BOTH = pytest.mark.parametrize("side", SIDES)
BRAIN, HALF = torch.bfloat16, torch.float16
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 3  # of the file
CLIP = 0.375


def built(side: str, kind: str, **options: Any) -> tuple[list[nn.Parameter], Any]:
    """Parameters of zero, with the names of the file, and an optimizer of this class."""
    dtype = BRAIN if kind == "BF16Optimizer" else HALF
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES.values()]
    if kind == "BF16Optimizer":
        options["param_names"] = dict(zip(params, SHAPES, strict=True))
    else:
        options |= {"verbose": False, "dynamic_loss_scale": True}
    home = CLASSES[side]
    return params, home[kind](home["FusedAdam"](params), clip_grad=CLIP, **options)


def whole(name: str, key: str = "fp32") -> Tensor:
    """A tensor of the file."""
    tensor = read_checkpoint(UNIVERSAL / "zero" / name / f"{key}.pt")["param"]
    assert isinstance(tensor, Tensor)
    return tensor.detach()


@BOTH
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_has_its_part_of_a_universal_checkpoint(side: str, world: int) -> None:
    """Edge CK-8: ten elements over eight ranks leave three with nothing but padding."""

    def run(mesh: Mesh) -> list[object]:
        params, optimizer = built(side, "BF16Optimizer", dp_process_group=mesh.column)
        optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL)
        assert optimizer.clip_grad == CLIP
        assert optimizer.get_lr() == 0.25
        (state,) = optimizer.state.values()
        assert int(state["step"]) == STEPS
        for param, name in zip(params, SHAPES, strict=True):
            assert bits(param.detach()) == bits(whole(name).to(BRAIN))
            assert bits(optimizer.get_full_hp_param(name)) == bits(whole(name))
            for key in MOMENTS:
                assert bits(optimizer.get_full_hp_param(name, key)) == bits(whole(name, key))
        for place, param in enumerate(params):
            param.grad = moderate(param.numel(), place, BRAIN).view(param.shape)
        optimizer.update_hp_grads()
        optimizer.step()
        (state,) = optimizer.state.values()
        after = [optimizer.get_full_hp_param(name, key) for name in SHAPES for key in MOMENTS]
        return [int(state["step"]), *map(bits, [*after, *(param.detach() for param in params)])]

    (alone,) = on_mesh(1, 1, run)
    assert alone[0] == STEPS + 1
    assert on_mesh(world, 1, run) == [alone] * world


def seen(params: list[nn.Parameter], optimizer: Any) -> list[object]:
    """Weights, masters, state, clip norm and scale."""
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    state = [value for master in masters for value in optimizer.state.get(master, {}).values()]
    tensors = [bits(torch.as_tensor(t).detach()) for t in (*params, *masters, *state)]
    options = [{**group, "params": None} for group in optimizer.param_groups]
    return [tensors, str(options), optimizer.clip_grad, getattr(optimizer, "loss_scale", None)]


def load(optimizer: Any, params: list[nn.Parameter], folder: Path) -> None:
    if hasattr(optimizer, "bf16_groups"):
        optimizer.load_state_dict([], checkpoint_folder=folder)
    else:
        load_universal_checkpoint(optimizer, folder, dict(zip(params, SHAPES, strict=True)))


@BOTH
@pytest.mark.parametrize("kind", ["FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 2)])
def test_what_one_rank_cannot_read_is_loaded_by_none(
    side: str, kind: str, rows: int, columns: int, tmp_path: Path
) -> None:
    """Whatever is wrong with one rank's files; afterwards all load good ones."""
    folders = []
    for number, (spoil, _) in enumerate(SPOILS):
        folders.append(spoiled(tmp_path / str(number)))
        spoil(folders[-1])

    def run(mesh: Mesh) -> tuple[list[str], bool]:
        given: dict[str, Any] = {"mpu": mesh}
        if kind == "BF16Optimizer":
            given["dp_process_group"] = mesh.column
        params, optimizer = built(side, kind, **given)
        before, said = seen(params, optimizer), []
        first = mesh.place == (0, 0)
        for folder in folders:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
                load(optimizer, params, folder if first else UNIVERSAL)
            said.append(str(caught.value))
        kept = seen(params, optimizer) == before
        load(optimizer, params, UNIVERSAL)
        assert optimizer.clip_grad == CLIP
        return said, kept and seen(params, optimizer) != before

    (own, kept), *others = on_mesh(rows, columns, run)
    assert kept
    for sentence, (_, message) in zip(own, SPOILS, strict=True):
        assert message in sentence
    for said, kept in others:
        assert kept
        for sentence in said:
            assert sentence.startswith("another rank")
            assert sentence.endswith(" cannot, and names the reason: all ranks should, or none")


@BOTH
def test_groups_of_unlike_ranks_are_cut_each_over_its_own(side: str, tmp_path: Path) -> None:
    """Shared weights over a column of three, experts over a row of two, steps of their own."""
    sizes, steps = {"shared": 7, "expert": 5}, {"shared": 3, "expert": 6}
    kinds = ("fp32", *MOMENTS)
    for place, (name, size) in enumerate(sizes.items()):
        (tmp_path / "zero" / name).mkdir(parents=True)
        for kind in kinds:
            values = moderate(size, 10 * place + kinds.index(kind), torch.float32).abs()
            torch.save({"param": values}, tmp_path / "zero" / name / f"{kind}.pt")
        torch.save(steps[name], tmp_path / "zero" / name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.5}, {"lr": 0.25}]}, tmp_path / "zero/optimizer_state.pt")
    home = CLASSES[side]

    def run(mesh: Mesh) -> bool:
        params = {name: nn.Parameter(torch.zeros(n, dtype=BRAIN)) for name, n in sizes.items()}
        expert = params["expert"]
        expert.allreduce, expert.group_name = False, "e"  # type: ignore[attr-defined]
        inside = home["FusedAdam"](
            [{"params": [params["shared"]]}, {"params": [expert], "moe": True, "name": "e"}]
        )
        optimizer = home["BF16Optimizer"](
            inside,
            param_names={param: name for name, param in params.items()},
            dp_process_group=mesh.column,
            has_moe_layers=True,
            expert_data_groups={"e": mesh.row},
        )
        optimizer.load_state_dict([], checkpoint_folder=tmp_path)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
        for master, name in zip(optimizer.fp32_groups_flat_partition, sizes, strict=True):
            assert int(optimizer.state[master]["step"]) == steps[name]
            for kind in kinds:
                wanted = torch.load(tmp_path / "zero" / name / f"{kind}.pt")["param"]
                key = None if kind == "fp32" else kind
                assert bits(optimizer.get_full_hp_param(name, key)) == bits(wanted)
            assert bits(params[name].detach()) == bits(optimizer.get_full_hp_param(name).to(BRAIN))
        return True

    assert on_mesh(3, 2, run) == [True] * 6
