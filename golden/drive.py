"""One way to drive every optimizer through a whole run: weights, gradients, and rows of a trace.

Recorders hand in another project's object, the replay one of ours; what happens to it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinstep.golden.trace import Constant, Step, Value

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

GRADIENT = ((1.0, 2.0, 2.0), (4.0,))
START = ((1.0, 0.5, -0.25), (2.0,))
RATES = (0.0625, 0.125)
FACTORS = {"b": 0.5, "z": 0.0, "h": 2.0**66}
INF = float("inf")
# Place of a value that is no number, by letter: parameter, element, value.
PLANTED: Mapping[str, Sequence[tuple[int, int, float]]] = {
    "o": ((1, 0, INF),),
    "i": ((0, 1, -INF),),
    "n": ((0, 0, float("nan")),),
    "q": ((0, 1, -INF), (1, 0, INF)),
    "m": ((1, 0, INF),),
    "p": ((1, 0, INF),),
}


@dataclass(frozen=True, kw_only=True)
class Driven:
    """An optimizer with the ways to drive it and to look into it.

    Attributes:
        backward: runs backward from a loss and accumulates.
        step: takes a step and forgets the gradients.
        observe: scale, counters, norm and whether the step was skipped.
        masters: flat fp32 weights in the order of the parameters.
        groups: parameter groups that hold the learning rates.
        saved: everything that a new object has to load.
        override: the scale that losses are multiplied with from now on.
    """

    backward: Callable[[Tensor], None]
    step: Callable[[], None]
    observe: Callable[[], dict[str, Value]]
    masters: Callable[[], Sequence[Tensor]]
    groups: Callable[[], Sequence[dict[str, object]]]
    saved: Callable[[], object] = dict
    override: Callable[[float], None] = lambda scale: None


def unwrapped(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], saved: object
) -> Driven:
    """An optimizer without a wrapper: what is saved is its state and the parameters."""
    import torch

    if saved is not None:
        assert isinstance(saved, tuple)
        state, values = saved
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Driven(
        backward=torch.autograd.backward,
        step=step,
        observe=dict,
        masters=lambda: params,
        groups=lambda: optimizer.param_groups,
        saved=lambda: deepcopy((optimizer.state_dict(), [param.detach() for param in params])),
    )


Groups = list[dict[str, object]]
Make = Callable[["list[nn.Parameter]", Groups, object], Driven]
"""From parameters, their groups, and what was saved (None at first) to an object."""


def drive(
    steps: str,
    constants: Mapping[str, Constant],
    dtype: torch.dtype,
    make: Make,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> list[Step]:
    """A row for each step of a run.

    Args:
        steps: one letter each, as in `golden.runs`.
        constants: of the run.
        dtype: of the model's weights.
        make: builds the object, at first and after it was saved.
        rank: of this process.
        ranks: number of processes.
    """
    params = weights(dtype)
    driven = make(params, groups_of(params, constants), None)
    rows: list[Step] = []
    for letter in steps:
        if letter == "R":
            saved = driven.saved()
            params = weights(dtype)
            driven = make(params, groups_of(params, constants), saved)
        elif letter == "X":
            driven.override(float(constants["override"]))
        elif letter == "L":
            for group in driven.groups():
                group["lr"] = group["lr"] / 2  # type: ignore[operator]
        micro_batches = int(constants.get("micro_batches", 1))
        for micro in range(micro_batches):
            driven.backward(_loss(params, letter, micro, rank, ranks) / micro_batches)
        driven.step()
        held = [value for master in driven.masters() for value in master.detach().tolist()]
        rows.append({**driven.observe(), "weights": tuple(map(float, held))})
    return rows


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """The parameters before the first step."""
    import torch

    return [torch.nn.Parameter(torch.tensor(values, dtype=dtype)) for values in START]


def groups_of(params: Sequence[nn.Parameter], constants: Mapping[str, Constant]) -> Groups:
    """One group, or one for each parameter, the last of which does not decay."""
    decay = float(constants["weight_decay"])
    if constants["groups"] == 1:
        return [{"params": list(params), "lr": RATES[0], "weight_decay": decay}]
    return [
        {"params": [param], "lr": lr, "weight_decay": decay if place == 0 else 0.0}
        for place, (param, lr) in enumerate(zip(params, RATES, strict=True))
    ]


def gradients(letter: str, micro: int, rank: int, ranks: int) -> list[list[float]]:
    """The true gradients of a micro-batch on a rank; their mean over ranks is that of the letter.

    Of two ranks the first has half of it and the second one and a half times.
    """
    share = 1.0 if ranks == 1 else (0.5, 1.5)[rank]
    factor = FACTORS.get(letter, 1.0) * share
    made = [[value * factor for value in values] for values in GRADIENT]
    spared = (letter == "m" and micro) or (letter == "p" and rank < ranks - 1)
    for param, element, value in () if spared else PLANTED.get(letter, ()):
        made[param][element] = value
    return made


def _loss(params: Sequence[nn.Parameter], letter: str, micro: int, rank: int, ranks: int) -> Tensor:
    import torch

    made = gradients(letter, micro, rank, ranks)
    pairs = zip(params, made, strict=True)
    return torch.stack(
        [(param.float() * torch.tensor(values)).sum() for param, values in pairs]
    ).sum()
