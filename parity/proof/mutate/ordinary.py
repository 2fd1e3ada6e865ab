"""Inputs as most projects draw them: normal(0, 1), one size, customary constants, a few steps."""

from __future__ import annotations

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe, evaluate
from twinstep.parity.operations.operation import Operation, Role
from twinstep.parity.proof.mutate.rules_elsewhere import Pair
from twinstep.parity.registry.engines import engine_for, running
from twinstep.parity.registry.kernels import Kernel

NUMEL = 1024
STEPS = 10
CURVE = 32
CUSTOMARY = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "momentum": 0.9,
    "dampening": 0.0,
    "factor": 1.0,
    "found_inf": 0.0,
    "inv_scale": 2.0**-16,
    "scale": 65536.0,
    "max_norm": 1.0,
    "norm": 32.0,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "cur_hysteresis": 2,
    "delayed_shift": 2,
    "growth_tracker": 0,
    "exhausted": 0,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": 1.0,
}

Lists = dict[str, list[Tensor]]
Controls = dict[str, Tensor]


class KernelRaised(Exception):
    """The kernel raises, not what surrounds it."""


class Run:
    """One side of a comparison: arguments that steps are taken on.

    Attributes:
        operation: whose arguments these are.
        lists: tensors by argument.
        controls: 0-dim tensors by argument.
    """

    def __init__(self, operation: Operation, combination: str) -> None:
        self.operation = operation
        self.combination = combination
        self.dice = torch.Generator().manual_seed(0)
        dtypes = operation.combinations[combination]
        self.lists: Lists = {}
        for argument in operation.lists:
            if argument.role is Role.STEPS:
                self.lists[argument.name] = [torch.tensor(0)]
                continue
            kinds = dtypes.get(argument.name, ())[:1]
            self.lists[argument.name] = [self._drawn(argument.role, kind) for kind in kinds]
        self.controls: Controls = {
            row.name: torch.tensor(CUSTOMARY[row.name], dtype=row.dtype)
            for row in operation.controls
        }
        self.options = {row.name: row.choices[0] for row in operation.options}

    def _drawn(self, role: Role, dtype: torch.dtype) -> Tensor:
        if role in (Role.MOMENT, Role.SQUARE, Role.OUTPUT):
            return torch.zeros(NUMEL, dtype=dtype)
        return torch.randn(NUMEL, generator=self.dice).to(dtype)

    def new_gradients(self, from_weights: bool) -> None:
        """Gradients of the next step: drawn, or the weights themselves, whose loss is a bowl."""
        for name in self.operation.lists_of(Role.GRAD):
            for index, old in enumerate(self.lists[name]):
                weights = self.lists["params"][index] if from_weights else None
                new = torch.randn(old.shape, generator=self.dice) if weights is None else weights
                scaled = "max_norm" in self.controls and "scale" in self.controls
                old.copy_(new * (float(self.controls["scale"]) if scaled else 1.0))

    def by(self, kernel: Kernel) -> None:
        """One step by a kernel."""
        lists = [self.lists[argument.name] for argument in self.operation.lists]
        try:
            kernel(*lists, **self.controls, **self.options)
        except Exception as error:
            raise KernelRaised(f"{kernel.name} raises {error}") from error

    def by_reference(self) -> None:
        """One step by the reference."""
        recipe = Recipe(layout="flat", sizes=(NUMEL,))
        case = Case(
            operation=self.operation,
            combination=self.combination,
            lists=self.lists,
            controls=self.controls,
            options=self.options,
            skews={},
            guard=0,
            recipe=recipe,
        )
        for name, tensors in evaluate(case, self.lists).items():
            if name in self.controls:
                self.controls[name] = tensors[0]
            else:
                self.lists[name] = tensors

    def written(self, name: str) -> list[Tensor]:
        """The tensors of one argument; a control as a list of one."""
        return [self.controls[name]] if name in self.controls else self.lists[name]

    def loss(self) -> Tensor:
        """Half the squared length of the weights."""
        return self.lists["params"][0].double().square().sum() / 2


def after(
    kernel: Kernel, combination: str, steps: int, train: bool
) -> tuple[list[Run], list[list[Tensor]]]:
    """Some steps by the kernel and by the reference; the two sides and their losses."""
    sides = [Run(kernel.operation, combination) for _ in range(2)]
    losses: list[list[Tensor]] = [[], []]
    with running(engine_for(kernel)):
        for _ in range(steps):
            for side, kept in zip(sides, losses, strict=True):
                side.new_gradients(from_weights=train)
                kept += [side.loss()] if train else []
            sides[0].by(kernel)
            sides[1].by_reference()
    return sides, losses


def pairs(kernel: Kernel, combination: str) -> list[Pair]:
    """Everything that is written in some steps with new gradients each."""
    (ours, theirs), _ = after(kernel, combination, STEPS, train=False)
    found = []
    for name in kernel.operation.writes:
        got, want = ours.written(name), theirs.written(name)
        found += [
            Pair(name, w.dtype, g.double(), w.double()) for g, w in zip(got, want, strict=True)
        ]
    return found


def curves(kernel: Kernel, combination: str) -> list[Pair]:
    """The losses of a short training; nothing where there is nothing to train."""
    if not kernel.operation.lists_of(Role.GRAD) or "params" not in kernel.operation.writes:
        return []
    _, (got, want) = after(kernel, combination, CURVE, train=True)
    return [Pair("loss", torch.float64, torch.stack(got), torch.stack(want))]
