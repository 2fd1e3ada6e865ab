"""Actions on an optimizer with the interface of `FusedLamb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Action, action
from twinstep.parity.sequences.adam_rules import REFUSED, AdamRules
from twinstep.parity.sequences.by_hand import OLD_STEP, ByHand
from twinstep.parity.sequences.fills import INF, NAN, Dice, filled
from twinstep.parity.sequences.motifs import PLAIN
from twinstep.parity.sequences.parts import SEEDS
from twinstep.parity.sequences.world import World


class _Lamb(Protocol):
    step: Callable[..., object]

    def initialize_states(self) -> None:
        """Make all state."""

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios."""


class LambRules(ByHand):
    """LAMB: trust ratios, clipping of each gradient, and gradients handed to `step`."""

    tensor_hyper = True
    hyper = {
        "lr": (3.7e-3, 0.25, 2.3e-5, 0.0, 1e-3),
        "betas": ((0.8765, 0.9987), (0.5, 0.95), (0.9991, 0.7), (0.0, 0.99995), (0.9, 0.999)),
        "eps": (3e-6, 1.3e-3, 1e-10, 1e-8),
        "weight_decay": (0.013, 0.0, 0.31, -0.02, 0.01),
        "bias_correction": (True, False),
        "max_grad_norm": (0.0, 0.0, 0.7, -1.0, 1e-3),
        "max_coeff": (7.3, 0.9, 100.0),
        "min_coeff": (0.013, 0.0, 0.5),
    }
    options = {"eps_inside_sqrt": (False, True)}
    sparse = True
    refused = {
        **REFUSED,
        "max_grad_norm": (NAN, INF, None),
        "max_coeff": (NAN, 0.001, None),
        "min_coeff": (-0.1, NAN, 100.0),
    }
    exempt = AdamRules.exempt
    motifs = {
        **{name: row for name, row in ByHand.motifs.items() if name != OLD_STEP},
        "ratios of two steps": ("train", "coefficients", PLAIN, PLAIN),
        "ratios of a step with clipping": ("train", "coefficients", "step_with_gradients"),
        "ratios of a step without gradients": (
            *(("train", {"missing": 0}), "coefficients"),
            *(("train", {"missing": 7}), "coefficients"),
        ),
    }

    def actions(self) -> dict[str, Action]:
        """Every action; here `step` takes gradients and a scale."""
        return {name: row for name, row in super().actions().items() if name != "step_wrongly"}

    @action(drives=("add_param_group",))
    def add_impossible_group(self, world: World) -> None:
        """Try to add a group whose trust ratio could not be bounded."""
        extra = Parameter(torch.ones(2, device=world.device))
        group = {"params": [extra], "max_coeff": 0.1, "min_coeff": 0.2}
        world.torch_optimizer.add_param_group(group)

    @action(drives=("initialize_states",))
    def initialize_states(self, world: World) -> None:
        """Make the state of parameters that have not been stepped yet."""
        cast(_Lamb, world.optimizer).initialize_states()

    @action(often=3, drives=("get_lamb_coeffs",))
    def coefficients(self, world: World) -> object:
        """Read the trust ratios of the last step."""
        # What was returned is looked at again after every later action.
        world.more["coefficients"] = cast(_Lamb, world.optimizer).get_lamb_coeffs()
        return world.more["coefficients"]

    @action(
        often=4,
        drives=("step",),
        seed=SEEDS,
        scale=(1.0, 512.7, 0.37),
        as_tensor=(False, True),
        norms=(False, True),
        copies=(False, True),
    )
    def step_with_gradients(
        self, world: World, seed: int, scale: float, as_tensor: bool, norms: bool, copies: bool
    ) -> object:
        """Update once with gradients, a scale, norms and copies from outside."""
        groups = world.torch_optimizer.param_groups
        dice = Dice(seed)
        grads: list[list[Tensor | None]] = []
        place = 0
        for group in groups:
            row: list[Tensor | None] = []
            for param in group["params"]:
                place += 1
                low = dice.pick((param.dtype, torch.float16, torch.float32))
                grad = filled(tuple(param.shape), low, "ordinary", seed + place if seed else 0)
                row.append(dice.pick((grad.to(world.device), None, grad.to(world.device))))
            grads.append(row)
        outputs = [[torch.zeros_like(p, dtype=torch.float16) for p in g["params"]] for g in groups]
        known = [[0.3 + 2.7 * at for at in range(len(group["params"]))] for group in groups]
        world.more["outputs"] = outputs
        divisor = torch.tensor(scale, dtype=torch.float64, device=world.device)
        return cast(_Lamb, world.optimizer).step(
            grads=grads if len(groups) > 1 else grads[0],
            output_params=outputs if copies else None,
            scale=divisor if as_tensor else scale,
            grad_norms=known if norms else None,
        )
