"""Actions on hyper-parameters: values of groups, rates in tensors, schedules."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from twinstep.parity.sequences.actions import Rules, action
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.parts import SEEDS, Group
from twinstep.parity.sequences.world import World

# Numbers that may be anything, not only what a list has.
CONTINUOUS = ("lr", "weight_decay")


class HyperRules(Rules):
    """Actions on the groups of every optimizer with torch's interface.

    Attributes:
        hyper: hyper-parameters of a group and the values they take, the ordinary one first.
        tensor_hyper: whether numbers may also be given as 0-dim float64 tensors.
    """

    hyper: Mapping[str, Sequence[object]] = {"lr": (3.7e-3, 0.25, 0.041, 2.3e-5, 0.0)}
    tensor_hyper: bool = False

    def drawn_hyper(self, dice: Dice) -> Group:
        """A value for each hyper-parameter."""
        drawn = {name: dice.pick(row) for name, row in self.hyper.items()}
        return drawn | {name: dice.smaller(drawn[name]) for name in CONTINUOUS if name in drawn}

    @action(often=3, seed=SEEDS, which=range(8), group=range(4), as_tensor=(False, False, True))
    def set_hyper(self, world: World, seed: int, which: int, group: int, as_tensor: bool) -> None:
        """Assign a hyper-parameter of one group."""
        groups = world.torch_optimizer.param_groups
        dice = Dice(seed)
        name = tuple(self.hyper)[which % len(self.hyper)]
        value = dice.pick(self.hyper[name][::-1])
        value = dice.smaller(value) if name in CONTINUOUS else value
        if as_tensor and self.tensor_hyper and isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64, device=world.device)
        groups[group % len(groups)][name] = value

    @action(often=0, number=range(9))
    def turn_hyper(self, world: World, number: int) -> None:
        """Give one hyper-parameter of every group its next value; there may be fewer of them."""
        for name in tuple(self.hyper)[number : number + 1]:
            for group in world.torch_optimizer.param_groups:
                if name in group:
                    others = [one for one in self.hyper[name] if one != group[name]]
                    group[name] = others[0]

    @action(often=2, group=range(4), bits=(4, 8, 10, 12, 14))
    def lower_rate(self, world: World, group: int, bits: int) -> None:
        """Lower the learning rate of one group by little, as a schedule does."""
        groups = world.torch_optimizer.param_groups
        if "lr" in self.hyper:
            groups[group % len(groups)]["lr"] *= 1.0 - 2.0**-bits

    @action(often=0)
    def part_rates(self, world: World) -> None:
        """Give groups rates that differ in their last bits of fp32."""
        for number, group in enumerate(world.torch_optimizer.param_groups):
            if "lr" in group:
                group["lr"] = 64.0 * (1.0 + number * 2.0**-22)

    @action(often=0)
    def hold_rates(self, world: World) -> None:
        """Give every group a rate in a 0-dim tensor, not 0, where numbers may be tensors."""
        for group in world.torch_optimizer.param_groups if self.tensor_hyper else ():
            if "lr" in group:
                group["lr"] = torch.tensor(float(group["lr"]) or 0.25, dtype=torch.float64)
        # They are their owner's.
        groups = world.torch_optimizer.param_groups
        world.more["rates"] = [group["lr"] for group in groups if "lr" in group]

    @action(often=0)
    def raise_rates(self, world: World) -> None:
        """Let weights show the last bits of a corrected update: by large rates, in every group."""
        for group in world.torch_optimizer.param_groups:
            if "lr" in group:
                group["lr"] = 64.0
            if "bias_correction" in group:
                group["bias_correction"] = True

    def has_momentum(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if a scheduler may cycle momentum or beta1."""
        return bool({"momentum", "betas"} & optimizer.defaults.keys())

    @action(kind=("lambda", "cyclic", "onecycle"))
    def start_scheduler(self, world: World, kind: str) -> None:
        """Put a learning-rate scheduler on; the last two cycle momentum or beta1 as well."""
        optimizer = world.torch_optimizer
        momentum = self.has_momentum(optimizer)
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            # torch's schedulers fill such a tensor in place, in float64: nothing of ours to see.
            return
        # Every group keeps a rate of its own.
        rates = [1.0 + at for at in range(len(optimizer.param_groups))]
        if kind == "lambda":
            world.scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        elif kind == "cyclic":
            low, high = [1e-4 * one for one in rates], [0.1 * one for one in rates]
            world.scheduler = lr_scheduler.CyclicLR(
                optimizer, low, high, step_size_up=2, cycle_momentum=momentum
            )
        else:
            world.scheduler = lr_scheduler.OneCycleLR(
                optimizer,
                [0.1 * one for one in rates],
                total_steps=40,
                cycle_momentum=momentum,
            )

    @action(often=3)
    def scheduler_step(self, world: World) -> None:
        """Let the scheduler change the learning rate."""
        if world.scheduler is None:
            return
        with warnings.catch_warnings():
            # A scheduler that steps before the optimizer does is one of the sequences.
            warnings.simplefilter("ignore", UserWarning)
            world.scheduler.step()
