"""Accepted results of one update of a parameter and its state, when arithmetic is bounded.

Bounds over many steps cannot be derived: an error in a moment is divided by a root that it moved.
So bounded twins are judged step by step. Before every update the reference's formula says, on the
reference's own state, which interval each result may lie in; after it the subject takes over the
reference's bits. Everything between updates is compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.operations.table import operation_named
from twinstep.parity.sequences.world import World

# A class under judgement may be in another process: a place must be picklable.
Place = Callable[[World], Tensor]
# Entry of the state for each list that is written; the weights are none.
STATE = {"params": "", "exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"}


@dataclass(frozen=True)
class ParamPlace:
    """The parameter of that number."""

    index: int

    def __call__(self, world: World) -> Tensor:
        """Find it."""
        return world.params[self.index].detach()


@dataclass(frozen=True)
class StatePlace:
    """An entry of a parameter's state."""

    index: int
    name: str

    def __call__(self, world: World) -> Tensor:
        """Find it."""
        return cast(Tensor, world.torch_optimizer.state[world.params[self.index]][self.name])


@dataclass(frozen=True)
class Contract:
    """Accepted values at some places after the update.

    Attributes:
        accepted: by path.
        places: where to find the tensor of a path on either side.
        follows: the reference goes on from what the class has, not the class from the reference's.
    """

    accepted: Mapping[str, Accepted]
    places: Mapping[str, Place]
    follows: bool = False


def adam_contracts(world: World) -> Sequence[Contract]:
    """One contract for each group with a gradient; parameters are found by their number.

    There are none where a gradient is sparse, which is refused.
    """
    if any(param.grad is not None and param.grad.is_sparse for param in world.params):
        return []
    numbers = {param: at for at, param in enumerate(world.params)}
    found: list[Contract] = []
    for group in world.torch_optimizer.param_groups:
        indices = [numbers[param] for param in group["params"] if param.grad is not None]
        found += [_adam_contract(world, group, indices)] if indices else []
    return found


def _adam_contract(world: World, group: Mapping[str, object], indices: Sequence[int]) -> Contract:
    decoupled = bool(getattr(world.optimizer, "adam_w_mode", True))
    operation = operation_named("adamw_step" if decoupled else "adam_step", "twins")
    lists: dict[str, list[Tensor]] = {name: [] for name in (*STATE, "grads", "steps", "copies")}
    for param in (world.params[index] for index in indices):
        state = world.torch_optimizer.state.get(param) or {}
        zeros = torch.zeros(param.shape)
        lists["params"].append(param.detach().clone())
        lists["grads"].append(cast(Tensor, param.grad).clone())
        lists["exp_avgs"].append(state.get("exp_avg", zeros).clone())
        lists["exp_avg_sqs"].append(state.get("exp_avg_sq", zeros).clone())
        lists["steps"].append(state.get("step", torch.zeros((), dtype=torch.int64)).clone())
    case = Case(
        operation=operation,
        combination="",
        lists=lists,
        controls=_controls(group),
        options={"bias_correction": bool(group["bias_correction"])},
        skews={},
        guard=0,
        recipe=Recipe(layout="list", sizes=tuple(param.numel() for param in lists["params"])),
    )
    accepted = accepted_outputs(case, "bounded")
    chosen: dict[str, Accepted] = {}
    places: dict[str, Place] = {}
    for at, index in enumerate(indices):
        for argument, entry in STATE.items():
            path = f"optimizer.state[params[{index}]].{entry}" if entry else f"params[{index}]"
            places[path] = StatePlace(index, entry) if entry else ParamPlace(index)
            chosen[path] = accepted[argument][at]
    return Contract(chosen, places)


def _controls(group: Mapping[str, object]) -> dict[str, Tensor]:
    beta1, beta2 = cast(tuple[float, float], group["betas"])
    numbers = {
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }
    controls = {
        name: torch.tensor(float(cast(float, number)), dtype=torch.float64)
        for name, number in numbers.items()
    }
    controls["factor"] = torch.ones(())
    return {**controls, "found_inf": torch.zeros(())}
