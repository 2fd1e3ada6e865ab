"""Actions on Adam in particular."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

import torch
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Action, action
from twinstep.parity.sequences.by_hand import ByHand
from twinstep.parity.sequences.fills import INF, NAN, Dice
from twinstep.parity.sequences.motifs import PLAIN
from twinstep.parity.sequences.parts import SEEDS
from twinstep.parity.sequences.world import World

REFUSED: Mapping[str, Sequence[object]] = {
    "lr": (-1.0, NAN, INF, "fast", None),
    "betas": ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), (0.9,), 0.9),
    "eps": (-1e-8, NAN, "small"),
    "weight_decay": (NAN, INF, None),
    "bias_correction": (None, 1),
    "amsgrad": (True,),
}


class _Initializing(Protocol):
    def initialize_states(self) -> None:
        """Make all state."""


class AdamRules(ByHand):
    """Adam and AdamW with the interface of `FusedAdam`; also judged within bounds."""

    hyper = {
        "lr": (3.7e-3, 0.25, 0.041, 2.3e-5, 8.0, 0.0, 1e-3, 3e-8),
        "betas": ((0.8765, 0.9987), (0.5, 0.95), (0.9991, 0.7), (0.0, 0.99995), (0.9, 0.999)),
        "eps": (3e-6, 1.3e-3, 1e-10, 1e-8),
        "weight_decay": (0.013, 0.0, 0.31, -0.02, 0.01),
        "bias_correction": (True, False),
    }
    options = {"adam_w_mode": (True, False), "set_grad_none": (True, False)}
    sparse = True
    tensor_hyper = True
    refused = REFUSED
    motifs = {
        **ByHand.motifs,
        **{
            f"another mode behind {before}": (
                *(PLAIN, before, ("turn", {"name": "adam_w_mode"}), PLAIN),
                *(("turn", {"name": "set_grad_none"}), ("zero_grad", {"how": "as it is"})),
            )
            for before in ("set_hyper", "save", "resume", "zero_grad", "watch")
        },
    }
    exempt = {
        **ByHand.exempt,
        "compat": "upstream behaviour of our own classes; others are judged by the default",
    }

    @action(drives=("add_param_group",))
    def add_impossible_group(self, world: World) -> None:
        """Try to add a group with a learning rate below zero."""
        extra = Parameter(torch.ones(2, device=world.device))
        world.torch_optimizer.add_param_group({"params": [extra], "lr": -1.0})

    @action(drives=("initialize_states",))
    def initialize_states(self, world: World) -> None:
        """Make the state of parameters that have not been stepped yet."""
        cast(_Initializing, world.optimizer).initialize_states()

    @action(name=("adam_w_mode", "set_grad_none"))
    def turn(self, world: World, name: str) -> None:
        """Assign the other value to an attribute that the constructor has set."""
        setattr(world.optimizer, name, not getattr(world.optimizer, name))

    def contracts(self, world: World) -> Sequence[object]:
        """One `adamw_step` or `adam_step` for each parameter with a gradient."""
        from twinstep.parity.sequences.contracts import adam_contracts

        return adam_contracts(world)


class CompatAdamRules(AdamRules):
    """Adam with our `compat`, two fields of which change a step; to be judged as exact."""

    exempt = {**ByHand.exempt}
    motifs = {
        **AdamRules.motifs,
        **{
            f"the steps of DeepSpeed's, {field}": (
                # Parameters that share a counter: one group may have but one.
                *(("build", {"groups": 3}), ("start_as_upstream", {"field": field})),
                *(PLAIN, ("train", {"missing": 1}), PLAIN, "save"),
            )
            for field in ("shared_step_counter", "moments_in_param_dtype")
        },
    }

    @action(often=0, seed=SEEDS, field=("shared_step_counter", "moments_in_param_dtype"))
    def start_as_upstream(self, world: World, seed: int, field: str) -> None:
        """A new instance of one group over all parameters, with a behaviour of DeepSpeed's."""
        compat = import_module("twinstep.contract.compat").Compat(**{field: True})
        world.options = {**world.options, "compat": compat}
        world.optimizer = world.cls(world.params, **self.drawn_hyper(Dice(seed)), **world.options)
        world.scheduler = world.saved = world.kept = None

    def arguments(self) -> set[str]:
        """Arguments of the reference's constructor that some action passes."""
        return super().arguments() | {"compat"}


class LenientAdamRules(AdamRules):
    """Adam that need not refuse anything: sound arguments and states, dense gradients, floats.

    Nor need it read the files of other classes, or take a rate by position.
    """

    sparse = False
    tensor_hyper = False

    def actions(self) -> dict[str, Action]:
        """Every action but those that should be refused."""
        left = {"construct_wrongly", "construct_in_every_wrong_way", "load_damaged"}
        left |= {"load_elsewhere", "add_refused_group", "step_wrongly", "turn"}
        found = {name: row for name, row in super().actions().items() if name not in left}
        again = found["start_again"]
        choices = {**again.choices, "how": ("generator", "names", "tensor", "words")}
        return {**found, "start_again": replace(again, choices=choices)}
