"""A training loop in which a scenario happens, and in which every step is looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.scenarios import trace
from twinstep.scenarios.calls import Value
from twinstep.scenarios.named.scenario import LAST, Scenario, Seen
from twinstep.scenarios.optimizers import SHARDED, observed
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.trainers import ClassTrainer, Windows

FP32_SLACK = 2.0**-22  # of a master: the step's own roundings


class ScenarioTrainer(ClassTrainer):
    """A run in which the events of a scenario happen.

    Attributes:
        seen: facts of every step that this object has taken.
    """

    def __init__(
        self, scenario: Scenario, plan: Plan, side: str, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(plan, side, device, ranks)
        self.scenario, self.seen = scenario, list[Seen]()
        self._micro = 0
        self._sums: dict[str, Tensor] = {}
        self._kept: dict[str, Value] = {}
        self._last: list[Tensor] | None = None
        for name, weight in zip(self.names, self._weights, strict=True):
            weight.register_hook(partial(self._arrives, name))  # type: ignore[no-untyped-call]

    def header(self, side: str) -> trace.Header:
        """The origin of a trace of this run."""
        return replace(super().header(side), scenario=self.scenario.name)

    def micro_batches(self) -> Iterator[Windows]:
        """Those of this rank, counted over all ranks."""
        first = self.ranks.share(self.plan.accumulate).start
        for number, windows in enumerate(super().micro_batches(), first):
            self._micro = number
            yield windows
        if self.ranks.count > 1 and not isinstance(self.optimizer, SHARDED):
            # Ranks add up gradients, also where one has none.
            for weight in self._weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)

    def _arrives(self, name: str, grad: Tensor) -> Tensor:
        """A gradient of one micro-batch, with what the scenario does to it."""
        last = self.plan.accumulate - 1
        for fault in self.scenario.faults:
            micro = last if fault.micro == LAST else fault.micro
            if self.step in fault.steps and micro in (None, self._micro) and fault.only in name:
                grad = grad.clone()
                if math.isfinite(fault.factor):
                    grad *= fault.factor
                else:
                    grad.view(-1)[0] = fault.factor
        self._sums[name] = self._sums.get(name, torch.zeros(())) + grad.double().cpu()
        return grad

    def advance(self) -> trace.StepRecord:
        """Take one step in which the scenario happens, and look at it."""
        self._begin(self.step + 1)
        before = self._masters() if self._last is None else self._last
        self._sums = {}
        group = self.optimizer.param_groups[0]
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        record = super().advance()
        self.seen.append(self._look(before, lr, decay, record.scale))
        return record

    def _begin(self, step: int) -> None:
        for change in self.scenario.changes:
            if change.name == "lr" and step >= change.step:
                for group in self.optimizer.param_groups:
                    group["lr"] *= change.value  # the schedule sets it anew in every step
            elif step == change.step:
                if change.name == "weight_decay":
                    for group in self.optimizer.param_groups:
                        group["weight_decay"] = change.value
                elif change.name != "lr":
                    setattr(self.wrapper, change.name, change.value)
        for frozen in self.scenario.frozen:
            for name, weight in zip(self.names, self._weights, strict=True):
                if frozen.only in name:
                    weight.requires_grad_(step >= frozen.until)

    def _written(self) -> dict[str, Value]:
        """Everything that a step writes, which is looked at as well."""
        written = super()._written()
        self._kept = {k: v for k, v in written.items() if k not in ("weights", "scale", "norm")}
        return written

    def _masters(self) -> list[Tensor]:
        """A copy of the master of each weight, flat, on the CPU; on all ranks."""
        if isinstance(self.optimizer, SHARDED):
            return [
                self.optimizer.get_full_hp_param(name).detach().reshape(-1).cpu().clone()
                for name in self.names
            ]
        kept = [t for name, t in observed(self.optimizer, self.names) if name.startswith("master")]
        flat = torch.cat([tensor.detach().reshape(-1).float().cpu() for tensor in kept])
        return list(torch.split(flat, [weight.numel() for weight in self._weights]))

    def _look(self, before: list[Tensor], lr: float, decay: float, scale: float) -> Seen:
        after, moved, reach = self._masters(), set[str](), 0.0
        self._last = after
        for name, old, new in zip(self.names, before, after, strict=True):
            if torch.equal(old, new):
                continue
            moved.add(name)
            beyond = (new.double() - old.double() * (1.0 - lr * decay)).abs()
            reach = max(reach, float((beyond - FP32_SLACK * old.abs()).max()) / lr)
        sums = [
            self._sums.get(name, torch.zeros(weight.shape, dtype=torch.float64))
            for name, weight in zip(self.names, self._weights, strict=True)
        ]
        rows = self.ranks.gather(sums)
        total = [sum(parts[1:], parts[0]) for parts in zip(*rows, strict=True)]
        named = zip(self.names, zip(*rows, strict=True), strict=True)
        return Seen(
            moved=frozenset(moved),
            touched=frozenset(name for name, parts in named if any(p.any() for p in parts)),
            overflowed=not all(bool(part.isfinite().all()) for row in rows for part in row),
            reach=reach,
            rounded=all(
                torch.equal(weight.detach().cpu().reshape(-1), master.to(weight.dtype))
                for weight, master in zip(self._weights, after, strict=True)
            ),
            finite=all(bool(master.isfinite().all()) for master in after),
            kept=trace.digest(self._kept),
            norm64=float(torch.cat([part.reshape(-1) for part in total]).norm()) / scale,
        )
