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
    """

    accepted: Mapping[str, Accepted]
    places: Mapping[str, Place]


def adam_contracts(world: World) -> Sequence[Contract]:
    """Contracts of all parameters with a gradient; parameters are found by their number.

    There are none where a gradient is sparse, which is refused. Elements are independent of one
    another: parameters with the same hyper-parameters, step and dtypes are evaluated as one.
    """
    found: list[Contract] = []
    if any(param.grad is not None and param.grad.is_sparse for param in world.params):
        return found
    numbers = {param: at for at, param in enumerate(world.params)}
    for group in world.torch_optimizer.param_groups:
        alike: dict[object, list[int]] = {}
        for param in group["params"]:
            if param.grad is not None:
                tensors = _tensors(world, numbers[param])
                step = int(tensors.pop("steps"))
                key = (step, *(tensor.dtype for tensor in tensors.values()))
                alike.setdefault(key, []).append(numbers[param])
        found += [_adam_contract(world, group, indices) for indices in alike.values()]
    return found


def _tensors(world: World, index: int) -> dict[str, Tensor]:
    """A parameter and its state, by the names of the operation's lists."""
    param = world.params[index]
    state = world.torch_optimizer.state.get(param) or {}
    zeros = torch.zeros(param.shape)
    return {
        "params": param.detach(),
        "grads": cast(Tensor, param.grad),
        "exp_avgs": state.get("exp_avg", zeros),
        "exp_avg_sqs": state.get("exp_avg_sq", zeros),
        "steps": state.get("step", torch.zeros((), dtype=torch.int64)),
    }


def _adam_contract(world: World, group: Mapping[str, object], indices: Sequence[int]) -> Contract:
    decoupled = bool(world.options.get("adam_w_mode", True))
    operation = operation_named("adamw_step" if decoupled else "adam_step", "twins")
    rows = [_tensors(world, index) for index in indices]
    steps = rows[0]["steps"].clone()
    flat = {name: torch.cat([row[name].reshape(-1) for row in rows]) for name in rows[0]}
    case = Case(
        operation=operation,
        combination="",
        lists={**{name: [value] for name, value in flat.items()}, "steps": [steps], "copies": []},
        controls=_controls(group),
        options={"bias_correction": bool(group["bias_correction"])},
        skews={},
        guard=0,
        recipe=Recipe(layout="list", sizes=(flat["params"].numel(),)),
    )
    accepted = accepted_outputs(case, "bounded")
    places: dict[str, Place] = {}
    chosen: dict[str, Accepted] = {}
    start = 0
    for index in indices:
        shape = world.params[index].shape
        part = slice(start, start + shape.numel())
        start = part.stop

        def cut(x: Tensor, part: slice = part, shape: torch.Size = shape) -> Tensor:
            return x[part].reshape(shape)

        state = f"optimizer.state[params[{index}]]"
        for argument, path, place in (
            ("params", f"params[{index}]", ParamPlace(index)),
            ("exp_avgs", f"{state}.exp_avg", StatePlace(index, "exp_avg")),
            ("exp_avg_sqs", f"{state}.exp_avg_sq", StatePlace(index, "exp_avg_sq")),
        ):
            places[path], chosen[path] = place, accepted[argument][0].moved(cut)
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
