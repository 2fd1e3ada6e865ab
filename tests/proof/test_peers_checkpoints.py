"""Our checkpoints in DeepSpeed's own classes: loaded by their code, and continued bit for bit.

Needs DeepSpeed 0.19.8 beside us, which `make peers` installs. The other direction, their files in
our classes, needs files alone: tests/contract/test_checkpoints_foreign.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import twinstep.fast.optimizers.bf16
import twinstep.fast.optimizers.fp16
import twinstep.fast.optimizers.fp16_unfused
import twinstep.fast.optimizers.fused_adam
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fp16
import twinstep.reference.optimizers.fp16_unfused
import twinstep.reference.optimizers.fused_adam
from twinstep.contract.checkpoint import save_universal_checkpoint
from twinstep.contract.compat import Compat
from twinstep.golden import record_checkpoints
from twinstep.golden.record_checkpoints import SCALING, SIZES, gradient
from twinstep.golden.record_zero import (
    ENDED,
    SAVED,
    Made,
    config_of,
    groups_of,
    loss_of,
    weights_of,
)
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.parity.proof.peers.installed import deepspeed, group_of_one
from twinstep.parity.proof.peers.zero_run import CLASSES as ZEROS
from twinstep.parity.proof.peers.zero_run import Losses
from twinstep.parity.ranks.world import Rank, World

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed; make peers installs it",
    ),
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ,
        reason="DeepSpeed takes one process group and port; make peers runs this alone",
    ),
]
HALF, BRAIN = torch.float16, torch.bfloat16
WITH_EMPTY = ((0,), SIZES[0], (2, 0), SIZES[1], (0, 3))
SHARED = Compat(shared_step_counter=True)
CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    ("fast", "flat"): twinstep.fast.optimizers.fp16.FP16Optimizer,
    ("fast", "unfused"): twinstep.fast.optimizers.fp16_unfused.FP16UnfusedOptimizer,
    ("fast", "bf16"): twinstep.fast.optimizers.bf16.BF16Optimizer,
    ("reference", "flat"): twinstep.reference.optimizers.fp16.FP16Optimizer,
    ("reference", "unfused"): twinstep.reference.optimizers.fp16_unfused.FP16UnfusedOptimizer,
    ("reference", "bf16"): twinstep.reference.optimizers.bf16.BF16Optimizer,
}
ADAMS = {
    "fast": twinstep.fast.optimizers.fused_adam.FusedAdam,
    "reference": twinstep.reference.optimizers.fused_adam.FusedAdam,
}
KINDS = pytest.mark.parametrize("kind", ["flat", "unfused", "bf16"])


@pytest.fixture(scope="module", autouse=True)
def _group_of_its_own() -> Iterator[None]:
    """One group for all tests of the file, and none left behind."""
    with group_of_one():
        yield


def parameters(
    kind: str, value: float, sizes: Sequence[tuple[int, ...]] = SIZES
) -> list[nn.Parameter]:
    dtype = BRAIN if kind == "bf16" else HALF
    return [nn.Parameter(torch.full(size, value, dtype=dtype)) for size in sizes]


def ours(
    side: str,
    kind: str,
    torchs: bool,
    sizes: Sequence[tuple[int, ...]] = SIZES,
    compat: Compat | None = None,
) -> tuple[list[nn.Parameter], Any]:
    params = parameters(kind, 1.5, sizes)
    own = ADAMS[side] if compat is None else partial(ADAMS[side], compat=compat)
    adam: Callable[..., Any] = torch.optim.AdamW if torchs else own
    inside = adam(params, lr=0.25, weight_decay=0.125)
    options: dict[str, object] = {"param_names": {p: f"p{at}" for at, p in enumerate(params)}}
    if kind != "bf16":
        args = {"dynamic_loss_args": {**SCALING, "scale_window": 3}, "verbose": False}
        options = {"dynamic_loss_scale": True, **args}
    return params, CLASSES[side, kind](inside, **options)


def theirs(kind: str, published: Sequence[Tensor]) -> tuple[list[nn.Parameter], Any]:
    """DeepSpeed's object on weights that the caller loads, as its engine does."""
    params = parameters(kind, 0.0, [tuple(weight.shape) for weight in published])
    inside = torch.optim.AdamW(params, lr=0.5, weight_decay=0.0)
    optimizer = record_checkpoints.optimizer_of(kind, inside, params)
    with torch.no_grad():
        for param, weight in zip(params, published, strict=True):
            param.copy_(weight)
    return params, optimizer


def trained(kind: str, params: Sequence[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        for place, param in enumerate(params):
            values = torch.tensor(gradient(step, place, param.numel())).view(param.shape)
            scale = 1.0 if kind == "bf16" else 16.0
            param.grad = (values * scale).to(param.dtype)
            if step == 1 and kind != "bf16":
                # A skipped step, so that counters differ from each other.
                param.grad.fill_(torch.inf)
        if kind == "bf16":
            optimizer.update_hp_grads()
        optimizer.step()
        if kind != "bf16" and step == 1:
            # The skip halved the scale; gradients stay as they are made.
            optimizer.loss_scale = 16.0
        optimizer.zero_grad()


def carried(kind: str, optimizer: Any, other: Any, file: Path) -> None:
    torch.save(optimizer.state_dict(), file)
    state = torch.load(file, weights_only=True)
    if kind == "bf16":
        other.load_state_dict([state], load_from_fp32_weights=True)
    else:
        other.load_state_dict(state)


def masters_of(kind: str, optimizer: Any) -> list[Tensor]:
    if kind == "unfused":
        return [master for group in optimizer.fp32_groups for master in group]
    return list(
        optimizer.fp32_groups_flat_partition if kind == "bf16" else optimizer.fp32_groups_flat
    )


@KINDS
@pytest.mark.parametrize("side", ["fast", "reference"])
def test_deepspeed_loads_what_we_save(kind: str, side: str, tmp_path: Path) -> None:
    params, optimizer = ours(side, kind, torchs=False)
    trained(kind, params, optimizer, range(3))
    others, other = theirs(kind, [param.detach() for param in params])
    carried(kind, optimizer, other, tmp_path / "ours.pt")
    pairs = list(zip(masters_of(kind, optimizer), masters_of(kind, other), strict=True))
    for one, two in pairs:
        assert bits(one.detach()) == bits(two.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            assert bits(optimizer.state[one][key]) == bits(other.optimizer.state[two][key])
        taken = optimizer.state[one]["step"]
        assert float(taken) == float(other.optimizer.state[two]["step"]) == (3 - (kind != "bf16"))
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    if kind != "bf16":
        config = other.loss_scale_config
        seen = (config.cur_scale, config.cur_iter, config.last_overflow_iter, config.scale_window)
        assert seen == (16.0, 3, 1, 3)
    before = [bits(param.detach()) for param in others]
    trained(kind, others, other, range(3, 4))
    assert [bits(param.detach()) for param in others] != before


@KINDS
@pytest.mark.parametrize("side", ["reference"])
def test_deepspeed_continues_a_run_of_ours_bit_for_bit(
    kind: str, side: str, tmp_path: Path
) -> None:
    """Around torch's AdamW, whose arithmetic is the same in both."""
    params, optimizer = ours(side, kind, torchs=True)
    trained(kind, params, optimizer, range(3))
    others, other = theirs(kind, [param.detach() for param in params])
    carried(kind, optimizer, other, tmp_path / "ours.pt")
    for parts, one in ((params, optimizer), (others, other)):
        trained(kind, parts, one, range(3, 5))
    assert [bits(p.detach()) for p in params] == [bits(p.detach()) for p in others]


@pytest.mark.parametrize("side", ["fast", "reference"])
def test_empty_parameters_have_no_place_in_files_of_the_unfused_class(
    side: str, tmp_path: Path
) -> None:
    """Neither theirs nor ours: each goes on from the other's file with its bits."""
    params, optimizer = ours(side, "unfused", torchs=True, sizes=WITH_EMPTY)
    others, other = theirs("unfused", [param.detach() for param in params])
    trained("unfused", params, optimizer, range(3))
    with torch.no_grad():
        for param, weight in zip(others, params, strict=True):
            param.copy_(weight)
    carried("unfused", optimizer, other, tmp_path / "ours.pt")
    assert [len(group) for group in other.fp32_groups] == [len(SIZES)]
    for parts, one in ((params, optimizer), (others, other)):
        trained("unfused", parts, one, range(3, 4))
    assert [bits(p.detach()) for p in params] == [bits(p.detach()) for p in others]
    # A step more and the scale grows, by which theirs divides in that very step (edge LS-1).
    again, ended = ours(side, "unfused", torchs=True, sizes=WITH_EMPTY)
    carried("unfused", other, ended, tmp_path / "theirs.pt")
    for parts, one in ((again, ended), (others, other)):
        trained("unfused", parts, one, range(4, 5))
    assert ended.loss_scale == other.loss_scale_config.cur_scale
    assert [bits(p.detach()) for p in again] == [bits(p.detach()) for p in others]


@pytest.mark.parametrize("side", ["fast", "reference"])
def test_a_shared_counter_is_that_of_each_parameter_for_torchs_adamw_there(
    side: str, tmp_path: Path
) -> None:
    params, optimizer = ours(side, "unfused", torchs=False, compat=SHARED)
    trained("unfused", params, optimizer, range(4))
    counted = [int(optimizer.state[master]["step"]) for master in optimizer.fp32_groups[0]]
    _, other = theirs("unfused", [param.detach() for param in params])
    carried("unfused", optimizer, other, tmp_path / "ours.pt")
    taken = [float(held["step"]) for held in other.optimizer.state.values()]
    assert (counted, taken) == ([0, 3], [3.0, 3.0])


def adam_kernel(
    _chunk: int, _flag: Tensor, lists: Sequence[Sequence[Tensor]], *numbers: float
) -> None:
    """Stands for the kernel of DeepSpeed's `FusedAdam`, which takes minutes to compile."""
    lr, beta1, beta2, eps, step, _mode, _corrects, decay = numbers
    for grad, param, first, second in zip(*lists, strict=True):
        param.mul_(1 - lr * decay)
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt() + eps
        param.sub_(lr * (first / (1 - beta1**step)) / root)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("side", ["fast", "reference"])
def test_files_of_deepspeeds_fused_adam_count_for_each_parameter(
    side: str, wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own class counts, around a kernel that computes the same."""
    module = import_module("deepspeed.ops.adam.fused_adam")
    built = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=adam_kernel))
    monkeypatch.setattr(module, "FusedAdamBuilder", lambda: built)
    others = parameters("unfused", 1.5)
    if not wrapped:
        others = [nn.Parameter(param.detach().float()) for param in others]
    inside = module.FusedAdam(others, lr=0.25, weight_decay=0.125)
    other = record_checkpoints.optimizer_of("unfused", inside, others) if wrapped else inside
    trained("unfused", others, other, range(1))
    trained("unfused", others, other, range(2, 4))
    # The wrapper takes a step at construction.
    steps = 3 + wrapped
    counted = [int(held["step"]) for held in inside.state.values()]
    assert counted == [0, steps]
    torch.save(other.state_dict(), tmp_path / "theirs.pt")
    file = torch.load(tmp_path / "theirs.pt", weights_only=True)
    for compat, wanted in ((Compat(), [steps, steps]), (SHARED, counted)):
        if wrapped:
            params, optimizer = ours(side, "unfused", torchs=False, compat=compat)
        else:
            params = [nn.Parameter(torch.full(size, 1.5)) for size in SIZES]
            optimizer = ADAMS[side](params, compat=compat)
        optimizer.load_state_dict(file)
        assert [int(held["step"]) for held in optimizer.state.values()] == wanted


@pytest.mark.parametrize("side", ["fast", "reference"])
def test_deepspeed_takes_up_a_universal_checkpoint_of_zero(side: str, tmp_path: Path) -> None:
    """Ours is written on two ranks; theirs goes on from it on one, with the bits of ours."""

    def made(group: dist.ProcessGroup | None) -> tuple[list[nn.Parameter], Any]:
        params = weights_of("bf16")
        names = {param: f"params.{at}" for at, param in enumerate(params)}
        given: dict[str, Any] = {"param_names": names, "dp_process_group": group, "verbose": False}
        return params, ZEROS[side](torch.optim.AdamW(groups_of(params)), **given)

    def save(rank: Rank) -> None:
        params, optimizer = made(rank.group("data"))
        for step in range(SAVED):
            optimizer.backward(loss_of(params, step, rank.number, 2))
            optimizer.step()
        save_universal_checkpoint(optimizer, tmp_path / "u")

    World(2).run(save)
    params = weights_of("bf16")
    model = Losses(params)
    initialize = deepspeed("deepspeed").initialize
    inner = torch.optim.AdamW(groups_of(params))
    run = Made(dtype="bf16", stage=2, elastic=False, world=1)
    engine, *_ = initialize(model=model, optimizer=inner, config=config_of(run))
    engine.optimizer.load_state_dict(None, checkpoint_folder=str(tmp_path / "u"))
    engine.optimizer.update_lp_params()
    others, other = made(None)
    other.load_state_dict([], checkpoint_folder=tmp_path / "u")
    for step in range(SAVED, ENDED):
        engine.backward(engine(partial(loss_of, params, step, 0, 1)))
        engine.step()
        other.backward(loss_of(others, step, 0, 1))
        other.step()
        assert [bits(p.detach()) for p in params] == [bits(p.detach()) for p in others]
    masters = engine.optimizer.single_partition_of_fp32_groups
    for one, two in zip(masters, other.single_partition_of_fp32_groups, strict=True):
        assert bits(one.detach()) == bits(two.detach())
