"""Actions on an optimizer with the interface of `FusedLAMB`."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from twinstep.parity.sequences.actions import action
from twinstep.parity.sequences.adam_rules import REFUSED, AdamRules
from twinstep.parity.sequences.by_hand import ByHand
from twinstep.parity.sequences.fills import INF, NAN
from twinstep.parity.sequences.parts import SEEDS
from twinstep.parity.sequences.world import World


class ApexLambRules(ByHand):
    """apex's LAMB: one norm over all groups, a counter for each group, NVLAMB."""

    tensor_hyper = True
    hyper = {
        **AdamRules.hyper,
        # No trust ratio is taken without decay, unless the instance is NVLAMB.
        "weight_decay": (0.013, 0.0, 0.31, -0.02, 0.0, 0.01),
        "grad_averaging": (True, False),
        "max_grad_norm": (1.0, 0.0, 0.07, -1.0, 1e-3, 1e30),
    }
    options = {
        "adam_w_mode": (True, False),
        "set_grad_none": (True, False),
        "use_nvlamb": (False, True),
    }
    sparse = True
    refused = {**REFUSED, "max_grad_norm": (NAN, INF, None), "grad_averaging": (None, 1)}

    @action(drives=("add_param_group",))
    def add_impossible_group(self, world: World) -> None:
        """Try to add a group whose counter counts no steps."""
        extra = Parameter(torch.ones(2, device=world.device))
        world.torch_optimizer.add_param_group({"params": [extra], "step": 1.5})

    @action(often=3, drives=("step",), seed=SEEDS, kept=range(4))
    def step_of_one_group(self, world: World, seed: int, kept: int) -> object:
        """Update once where one group alone has gradients: the others count the step too."""
        self.fill(world, seed, "ordinary", 0)
        groups = world.torch_optimizer.param_groups
        for number, group in enumerate(groups):
            for param in group["params"] if number != kept % len(groups) else ():
                param.grad = None
        return self.step(world)
