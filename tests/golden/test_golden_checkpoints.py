"""DeepSpeed's own checkpoints: loaded, continued bit for bit, and refused where they do not fit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.universal_checkpoint import SHAPES, SPOILS, UNIVERSAL, spoiled
from twinstep.contract.checkpoint import read_checkpoint
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.moments import StateDict
from twinstep.golden import record_checkpoints
from twinstep.golden.record_checkpoints import FOLDER, SCALING, SIZES, gradient
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

HALF, BRAIN = torch.float16, torch.bfloat16
Wrapper = FP16Optimizer | FP16UnfusedOptimizer | BF16Optimizer
COMPATS = pytest.mark.parametrize("compat", [CORRECT, Compat.deepspeed()], ids=["ours", "theirs"])


def built(kind: str, compat: Compat = CORRECT) -> tuple[list[nn.Parameter], Wrapper]:
    """An object whose weights are still zero."""
    dtype = BRAIN if kind == "bf16" else HALF
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    inner = torch.optim.AdamW(params, lr=0.25, weight_decay=0.125)
    if kind == "bf16":
        names = {param: f"p{place}" for place, param in enumerate(params)}
        return params, BF16Optimizer(inner, param_names=names, compat=compat)
    make: Callable[..., Wrapper] = FP16Optimizer if kind == "flat" else FP16UnfusedOptimizer
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALING, "verbose": False}
    return params, make(inner, compat=compat, **options)


def state_of(kind: str) -> StateDict:
    key = "optimizer_state_dict" if kind == "bf16" else "optimizer"
    state = read_checkpoint(FOLDER / f"deepspeed_{kind}.pt")[key]
    assert isinstance(state, dict)
    return state


def load(optimizer: Wrapper, state: StateDict) -> None:
    if isinstance(optimizer, BF16Optimizer):
        optimizer.load_state_dict([state], load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(state)


@COMPATS
@pytest.mark.parametrize("kind", ["flat", "unfused", "bf16"])
def test_a_checkpoint_of_deepspeed_continues_bit_for_bit(kind: str, compat: Compat) -> None:
    params, optimizer = built(kind, compat)
    load(optimizer, state_of(kind))
    for step in range(2, 4):
        for place, param in enumerate(params):
            values = torch.tensor(gradient(step, place, param.numel())).view(param.shape)
            scale = 1.0 if kind == "bf16" else SCALING["init_scale"]
            param.grad = (values * scale).to(param.dtype)
        if isinstance(optimizer, BF16Optimizer):
            optimizer.update_hp_grads()
        optimizer.step()
    after = read_checkpoint(FOLDER / f"deepspeed_{kind}_after.pt")["weights"]
    assert isinstance(after, list)
    assert [bits(param.detach()) for param in params] == [bits(weight) for weight in after]


@pytest.mark.parametrize("kind", ["flat", "unfused"])
def test_scale_and_counters_of_deepspeed_are_taken_over(kind: str) -> None:
    _, optimizer = built(kind)
    load(optimizer, state_of(kind))
    saved = optimizer.state_dict()
    counters = {"cur_scale": 16.0, "cur_iter": 2, "last_overflow_iter": -1}
    assert {name: saved[name] for name in counters} == counters


@pytest.mark.parametrize("kind", ["flat", "unfused", "bf16"])
def test_a_checkpoint_of_another_class_is_refused(kind: str) -> None:
    for other in {"flat", "unfused", "bf16"} - {kind}:
        _, optimizer = built(kind)
        with pytest.raises(ValueError, match="state has no"):
            load(optimizer, state_of(other))


def universal_optimizer(
    group: dist.ProcessGroup | None = None, ours: bool = True
) -> tuple[list[nn.Parameter], BF16Optimizer]:
    params = [nn.Parameter(torch.zeros(shape, dtype=BRAIN)) for shape in SHAPES.values()]
    names = dict(zip(params, SHAPES, strict=True))
    inner = FusedAdam(params) if ours else torch.optim.AdamW(params)
    return params, BF16Optimizer(inner, param_names=names, dp_process_group=group)


def whole(name: str, key: str = "fp32") -> torch.Tensor:
    tensor = read_checkpoint(UNIVERSAL / "zero" / name / f"{key}.pt")["param"]
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


@pytest.mark.parametrize("ours", [True, False], ids=["FusedAdam", "torch"])
def test_a_universal_checkpoint_is_loaded_before_any_step(ours: bool) -> None:
    """Edges CK-7, CK-16, BF-14: no linked state, no iteration, no model-parallel unit needed."""
    params, optimizer = universal_optimizer(ours=ours)
    optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL)
    for param, name in zip(params, SHAPES, strict=True):
        assert bits(param.detach()) == bits(whole(name).to(BRAIN))
        for key in ("exp_avg", "exp_avg_sq"):
            assert bits(optimizer.get_full_hp_param(name, key)) == bits(whole(name, key))
    (state,) = optimizer.state.values()
    assert state["step"] == torch.tensor(3.0)
    assert optimizer.get_lr() == 0.25


def test_weights_and_moments_stay_apart_after_loading() -> None:
    """Edges TF-3, TF-4 and CK-15: the fp32 weight is the weight, and the next step moves it."""
    params, optimizer = universal_optimizer()
    optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.update_hp_grads()
    optimizer.step()
    for param, name in zip(params, SHAPES, strict=True):
        weight = optimizer.get_full_hp_param(name)
        assert bits(weight.to(BRAIN)) == bits(param.detach())
        assert bits(weight) != bits(whole(name))
        assert bits(weight) != bits(optimizer.get_full_hp_param(name, "exp_avg"))


def test_states_can_be_left_out() -> None:
    _, optimizer = universal_optimizer()
    optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL, load_optimizer_states=False)
    assert bits(optimizer.get_full_hp_param("0.bias")) == bits(whole("0.bias"))
    assert not optimizer.state
    assert optimizer.get_lr() == 1e-3


@pytest.mark.parametrize(("spoil", "message"), SPOILS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_spoiled_universal_checkpoint_is_refused_and_changes_nothing(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = spoiled(tmp_path)
    spoil(folder)
    params, optimizer = universal_optimizer()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict([], checkpoint_folder=folder)
    assert all(bool((param == 0).all()) for param in params)
    assert not optimizer.state


def test_stray_files_are_not_read(tmp_path: Path) -> None:
    """Edge CK-10: whatever does not end in .pt."""
    folder = spoiled(tmp_path)
    (folder / "zero" / "0.bias" / "notesxpt").write_text("no checkpoint")
    (folder / "zero" / "0.bias" / "exp_avg.pt.old").write_text("no checkpoint")
    universal_optimizer()[1].load_state_dict([], checkpoint_folder=folder)


def test_a_universal_checkpoint_of_other_groups_is_refused() -> None:
    params = [nn.Parameter(torch.zeros(shape, dtype=BRAIN)) for shape in SHAPES.values()]
    inner = FusedAdam(params[:2])
    inner.add_param_group({"params": params[2:]})
    names = dict(zip(params, SHAPES, strict=True))
    optimizer = BF16Optimizer(inner, param_names=names)
    with pytest.raises(ValueError, match="has 1 groups, but should have 2"):
        optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL)


def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed here, so that its absence cannot be shown")
    assert record_checkpoints.main([str(tmp_path)]) == 2
    assert "deepspeed should be installed to be recorded" in capsys.readouterr().err
