"""Learning rates of DeepSpeed 0.19.8 that a config names, with its numbers and state dicts.

WarmupLR        lr(i) = min + (max - min) warm(i)
WarmupDecayLR   the same, then down to min on a line that ends at step T
WarmupCosineLR  lr(i) = lr warm(i), then down on half a cosine that ends at step T
LRRangeTest     lr(i) = min (1 + rate (i + 1) / size)
OneCycle        lr(i) = min + (max - min) h(i + 1), momentum the other way; after that both decay

h goes from 0 to 1 over the first part of a cycle, and back to 0 over the second.
warm(i) = log(i + 1) / log(W) or i / W for i < W, then 1. Step i is counted from 0; before the first
`step()` the rate is the smallest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

LOG = logging.getLogger(__name__)
Rates = float | Sequence[float]
Rate = Callable[[int, int], float]
"""A number of step i, for a group."""
BETA2 = 0.99
"""Second beta of Adam under OneCycle, whatever the optimizer was given."""


class Schedule:
    """Rates of the groups of an optimizer by the number of steps.

    Args:
        optimizer: whose groups are written.
        rate: learning rate.
        first: rates before the first step, by group.
        momentum: first beta, which comes with a second of 0.99; None leaves both.
        first_momentum: before the first step, by group.

    Attributes:
        last_batch_iteration: number of the last step, -1 before the first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: Rate,
        first: Sequence[float],
        momentum: Rate | None = None,
        first_momentum: Sequence[float] = (),
    ) -> None:
        self.optimizer, self._rate, self._momentum = optimizer, rate, momentum
        self.last_batch_iteration = -1
        self._enter(first, first_momentum)

    def _enter(self, rates: Sequence[float], momenta: Sequence[float]) -> None:
        self._last = list(rates)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            group["betas"] = (momentum, BETA2)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to this one."""
        self.last_batch_iteration += 1
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration
        i, groups = self.last_batch_iteration, range(len(self.optimizer.param_groups))
        momentum = self._momentum
        momenta = [] if momentum is None else [momentum(i, group) for group in groups]
        self._enter([self._rate(i, group) for group in groups], momenta)

    def get_last_lr(self) -> list[float]:
        """Rates that were entered last."""
        return list(self._last)

    def state_dict(self) -> dict[str, int]:
        """The number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Take it over; the next step sets rates."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]


def warmup_lr(
    optimizer: torch.optim.Optimizer,
    *,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    total_num_steps: int | None = None,
) -> Schedule:
    """WarmupLR, or with `total_num_steps` WarmupDecayLR; `warmup_max_lr=None` for the groups' own.

    Raises:
        ValueError: a count is not positive, or there are not as many rates as groups.
    """
    steps = _steps(warmup_num_steps)
    low = _by_group(optimizer, warmup_min_lr)
    own = [float(group["lr"]) for group in optimizer.param_groups]
    high = own if warmup_max_lr is None else _by_group(optimizer, warmup_max_lr)

    def rate(step: int, group: int) -> float:
        if step < steps or total_num_steps is None:
            part = _warm(step, steps, warmup_type)
        else:
            part = max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - steps))
        return low[group] + (high[group] - low[group]) * part

    return Schedule(optimizer, rate, low)


def warmup_cosine_lr(
    optimizer: torch.optim.Optimizer,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    """WarmupCosineLR: ratios of the groups' own rates.

    Raises:
        ValueError: `warmup_num_steps` is not positive.
    """
    steps = _steps(warmup_num_steps)
    own = [float(group["lr"]) for group in optimizer.param_groups]

    def rate(step: int, group: int) -> float:
        if step < steps:
            part = warmup_min_ratio + _warm(step, steps, warmup_type) * (1.0 - warmup_min_ratio)
        else:
            done = min(1.0, (step - steps + 1) / max(1, total_num_steps - steps))
            wave = (1 + math.cos(math.pi * done)) / 2
            part = max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * wave)
        return own[group] * part

    return Schedule(optimizer, rate, [0.0] * len(own))


def lr_range_test(
    optimizer: torch.optim.Optimizer,
    *,
    lr_range_test_min_lr: Rates = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Schedule:
    """LRRangeTest.

    Raises:
        ValueError: the size is not positive, or there are not as many rates as groups.
    """
    if lr_range_test_step_size <= 0:
        raise ValueError(
            f"lr_range_test_step_size={lr_range_test_step_size}, but should be positive"
        )
    low = _by_group(optimizer, lr_range_test_min_lr)

    def rate(step: int, group: int) -> float:
        done = float(step + 1) / lr_range_test_step_size
        done = math.floor(done) if lr_range_test_staircase else done
        return low[group] * (1 + lr_range_test_step_rate * done)

    return Schedule(optimizer, rate, low)


def one_cycle(
    optimizer: torch.optim.Optimizer,
    *,
    cycle_min_lr: Rates,
    cycle_max_lr: Rates,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: Rates = 0.8,
    cycle_max_mom: Rates = 0.9,
    decay_mom_rate: float = 0.0,
) -> Schedule:
    """OneCycle: rates up and down once, momentum down and up; rates and momenta of a group or all.

    h is a staircase where a count of stairs is given. A cycle is over after T steps, both parts of
    it together; then rates are min / (1 + rate (i - T + 1) / size), momenta max (1 + rate ...),
    where size is `decay_step_size`; of 0 nothing decays. Without betas no momentum moves, which is
    logged.

    Raises:
        ValueError: the first part is not positive, the second is negative, or there are not as many
            rates as groups.
    """
    first = float(cycle_first_step_size)
    second = first if cycle_second_step_size is None else float(cycle_second_step_size)
    if first <= 0 or second < 0:
        raise ValueError(
            f"cycle_first_step_size={first:g} and cycle_second_step_size={second:g}, but should "
            "be positive, and 0 or more"
        )
    stairs = (
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
    )
    low, high = _by_group(optimizer, cycle_min_lr), _by_group(optimizer, cycle_max_lr)

    def past(step: int) -> float:
        """Sizes of a decay that have passed since the cycle."""
        return (step - (first + second) + 1) / decay_step_size if decay_step_size else 0.0

    def rate(step: int, group: int) -> float:
        if step < first + second:
            return low[group] + (high[group] - low[group]) * _height(
                step + 1, first, second, stairs
            )
        return low[group] / (1 + decay_lr_rate * past(step))

    if cycle_momentum and not all("betas" in group for group in optimizer.param_groups):
        LOG.warning("OneCycle moves no momentum: %s has no betas", type(optimizer).__name__)
        cycle_momentum = False
    if not cycle_momentum:
        return Schedule(optimizer, rate, low)
    least, most = _by_group(optimizer, cycle_min_mom), _by_group(optimizer, cycle_max_mom)

    def momentum(step: int, group: int) -> float:
        if step < first + second:
            height = _height(step + 1, first, second, stairs)
            return most[group] - (most[group] - least[group]) * height
        return most[group] * (1 + decay_mom_rate * past(step))

    return Schedule(optimizer, rate, low, momentum, least)


def _height(at: int, first: float, second: float, stairs: tuple[int, int]) -> float:
    """Height in [0, 1] of a cycle after so many steps."""
    total = first + second
    turn, x = first / total, 1.0 + at / total - math.floor(1 + at / total)
    rises = x <= turn
    count = stairs[0] if rises else stairs[1]
    if count <= 0:
        return x / turn if rises else (x - 1) / (turn - 1)
    # From whole numbers: a height just below a stair would be a stair too low.
    at_stair = at % total
    done = at_stair * count / first if at_stair <= first else (total - at_stair) * count / second
    return math.floor(done) / count


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
}


def schedule_of(
    name: str, params: Mapping[str, object], optimizer: torch.optim.Optimizer
) -> Schedule | torch.optim.lr_scheduler.LRScheduler:
    """The schedule that a config names: one of DeepSpeed's, or one of torch's.

    Raises:
        ValueError: there is none of this name here, or `WarmupDecayLR` has no end.
    """
    if name == "WarmupDecayLR" and "total_num_steps" not in params:
        raise ValueError("scheduler.params has no total_num_steps, but should for WarmupDecayLR")
    torchs = getattr(torch.optim.lr_scheduler, name, None)
    made = SCHEDULES.get(name, None if torchs is None else partial(torchs))
    if made is None:
        raise ValueError(
            f"scheduler.type={name!r}, but should be one of {', '.join(SCHEDULES)} or of "
            "torch.optim.lr_scheduler"
        )
    return made(optimizer, **params)


def _steps(count: int) -> int:
    if count <= 0:
        raise ValueError(f"warmup_num_steps={count}, but should be positive")
    return max(2, count)


def _warm(step: int, steps: int, kind: str) -> float:
    if step >= steps:
        return 1.0
    return step / steps if kind == "linear" else (1.0 / math.log(steps)) * math.log(step + 1)


def _by_group(optimizer: torch.optim.Optimizer, rates: Rates) -> list[float]:
    groups = len(optimizer.param_groups)
    found = list(rates) if isinstance(rates, Sequence) else [rates] * groups
    if len(found) != groups:
        raise ValueError(f"{len(found)} rates are given, but there should be {groups}, by group")
    return found
