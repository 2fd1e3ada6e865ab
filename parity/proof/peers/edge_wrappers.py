"""Edges of the FP16 wrappers and of FusedAdam: LS-1, FP-1, NM-1, NM-10, FA-1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.edge_scene import Numbers, Play
from twinstep.parity.proof.peers.installed import EXPERTS, deepspeed, make_expert_group
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

HALF, BRAIN = torch.float16, torch.bfloat16
Groups = list[dict[str, object]]


class Flat(Protocol):
    """Interface of a flat wrapper that a scene needs, on either side."""

    fp32_groups_flat: list[Tensor]
    overflow: bool

    def backward(self, loss: Tensor) -> None:
        """Scale the loss and run backward."""

    def step(self) -> object:
        """One step."""

    def state_dict(self) -> dict[str, object]:
        """The saved state."""

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Load it."""


Make = Callable[..., Flat]
MakePlain = Callable[[list[Parameter]], torch.optim.Optimizer]


def theirs(inside: torch.optim.Optimizer, **options: object) -> Flat:
    """DeepSpeed's flat wrapper."""
    made: Flat = deepspeed("deepspeed.runtime.fp16.fused_optimizer").FP16_Optimizer(
        inside, verbose=False, **options
    )
    return made


def ours(compat: Compat) -> Make:
    """The reference's."""

    def make(inside: torch.optim.Optimizer, **options: object) -> Flat:
        wrapper = FP16Optimizer(inside, verbose=False, compat=compat, **options)  # type: ignore[arg-type]
        return cast(Flat, wrapper)

    return make


def norm_of(wrapper: Flat) -> float:
    """The norm that a wrapper of either side reports."""
    if isinstance(wrapper, FP16Optimizer):
        return wrapper.get_global_norm()
    return float(vars(wrapper)["_global_grad_norm"])


def growing(make: Make) -> Numbers:
    """Movement of the weight in each of six steps, by gradients of one, at rate one."""
    weight = Parameter(torch.zeros(1, dtype=HALF))
    scale: Mapping[str, float] = {"init_scale": 4, "scale_window": 2, "min_scale": 1}
    wrapper = make(
        torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=scale
    )
    places = [0.0]
    for _ in range(6):
        wrapper.backward(weight.sum())
        wrapper.step()
        places.append(weight.item())
    return [before - after for before, after in zip(places, places[1:], strict=False)]


def built(make: Make) -> Numbers:
    """Master and step counter after construction, and how far the first step moves the master."""
    weight = Parameter(torch.ones(1, dtype=HALF))
    inside = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    wrapper = make(inside, static_loss_scale=1.0)
    (master,) = wrapper.fp32_groups_flat
    start = master.item()
    counter = float(inside.state[master]["step"]) if master in inside.state else 0.0
    wrapper.backward(weight.sum())
    wrapper.step()
    return [start, counter, start - master.item()]


def not_a_number(make: Make) -> Numbers:
    """After a bf16 step with a NaN: was it skipped, is its norm finite, and the weight."""
    weight = Parameter(torch.ones(4, dtype=BRAIN))
    wrapper = make(torch.optim.SGD([weight], lr=1.0), low_precision_dtype=BRAIN)
    weight.grad = torch.full_like(weight, torch.nan)
    wrapper.step()
    norm = torch.tensor(norm_of(wrapper))
    return [float(wrapper.overflow), float(norm.isfinite()), weight[0].item()]


def with_experts() -> Make:
    """DeepSpeed's flat wrapper, once there is an expert-parallel group of one rank."""
    make_expert_group()
    return theirs


def experts(make: Make) -> Numbers:
    """The norm of eight gradients of one, four of them those of experts whose weights are 100."""
    shared, expert = (
        Parameter(torch.full((4,), value, dtype=HALF, requires_grad=True)) for value in (1.0, 100.0)
    )
    vars(expert).update(allreduce=False, group_name=EXPERTS)
    groups: Groups = [
        {"params": [shared]},
        {"params": [expert], "moe": True, "name": EXPERTS},
    ]
    wrapper = make(torch.optim.SGD(groups, lr=1.0), has_moe_layers=True)
    shared.grad, expert.grad = torch.ones_like(shared), torch.ones_like(expert)
    wrapper.step()
    return [norm_of(wrapper)]


def three(make: MakePlain) -> Numbers:
    """Three weights after three steps, the third without a gradient of the last; counters."""
    weights = [Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = make(weights)
    for step in range(3):
        for place, weight in enumerate(weights):
            weight.grad = None if step == place == 2 else torch.ones(1)
        optimizer.step()
    counters = [float(optimizer.state[weight]["step"]) for weight in weights]
    return [*(weight.item() for weight in weights), *counters]


def small(make: MakePlain) -> Numbers:
    """An fp16 weight after each of three steps by a gradient whose square is no fp16 number."""
    weight = Parameter(torch.ones(1, dtype=HALF))
    optimizer, places = make([weight]), []
    for _ in range(3):
        weight.grad = torch.full_like(weight, 1e-4)
        optimizer.step()
        places.append(weight.item())
    return places


def their_adam(weights: list[Parameter], lr: float) -> torch.optim.Optimizer:
    """DeepSpeed's FusedAdam, whose CPU build is C++."""
    made: torch.optim.Optimizer = deepspeed("deepspeed.ops.adam").FusedAdam(weights, lr=lr)
    return made


def loaded(make: Make) -> Numbers:
    """Master and model weight after a state was loaded whose master is 2."""
    weight = Parameter(torch.ones(1, dtype=HALF))
    wrapper = make(torch.optim.SGD([weight], lr=1.0))
    state = wrapper.state_dict()
    masters = [torch.full_like(master, 2.0) for master in wrapper.fp32_groups_flat]
    wrapper.load_state_dict({**state, "fp32_groups_flat": masters})
    return [wrapper.fp32_groups_flat[0].item(), weight.item()]


def flat(play: Callable[[Make], Numbers]) -> Play:
    """Both sides of a scene of flat wrappers."""
    return (lambda: play(theirs)), (lambda compat: play(ours(compat)))


def adam(play: Callable[[MakePlain], Numbers], lr: float) -> Play:
    """Both sides of a scene of FusedAdam."""
    return (
        lambda: play(lambda weights: their_adam(weights, lr)),
        lambda compat: play(lambda weights: FusedAdam(weights, lr=lr, compat=compat)),
    )


PLAYS: dict[str, Play] = {
    "LS-1": flat(growing),
    "FP-1": flat(built),
    "FA-1": adam(three, 0.1),
    "FA-6": adam(small, 0.0625),
    "LOAD": flat(loaded),
    "NM-1": flat(not_a_number),
    "NM-10": ((lambda: experts(with_experts())), (lambda compat: experts(ours(compat)))),
}
