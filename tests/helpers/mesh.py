"""FP16 optimizers of both sides on a mesh of simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from tests.helpers.sides import CLASSES
from twinstep.contract.compat import Compat
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.parity.ranks.group import Sent
from twinstep.parity.ranks.world import Rank, World

HALF = torch.float16
T = TypeVar("T")
SIZES = (20, 5, 70, 33)
BADS = (None, math.inf, None, math.nan)


@dataclass
class Mesh:
    """A rank's place among rows, which hold one model, and columns, which hold the same part.

    Attributes:
        row: process group of this rank's row.
        column: of its column.
        place: number of the column and of the row that cross here.
        shape: number of rows and of columns.
        calls: collectives so far.
    """

    row: Any
    column: Any
    place: tuple[int, int]
    shape: tuple[int, int]
    calls: list[Sent]

    def get_model_parallel_group(self) -> Any:
        """The row."""
        return self.row

    def get_data_parallel_group(self) -> Any:
        """The column."""
        return self.column

    def get_tensor_model_parallel_rank(self) -> int:
        """Place in the row."""
        return self.place[0]


def on_mesh(rows: int, columns: int, run: Callable[[Mesh], T]) -> list[T]:
    """Run a function on every rank of a mesh."""

    def one(rank: Rank) -> T:
        row, column = rank.group("column"), rank.group("row")
        place = (rank.place["column"], rank.place["row"])
        return run(Mesh(row, column, place, (rows, columns), rank.sent))

    return World({"row": rows, "column": columns}, seed=rows, order="tree").run(one)


class Training:
    """One rank of one side: what is shared, what is split, a replica, and two experts."""

    def __init__(
        self,
        side: str,
        mesh: Mesh,
        *,
        kind: str = "FP16Optimizer",
        inside: str = "FusedAdam",
        dtype: torch.dtype = HALF,
        given: Callable[[Mesh], dict[str, Any]] = lambda mesh: {"mpu": mesh},
        compat: dict[str, bool] | None = None,
        **options: Any,
    ) -> None:
        self.mesh = mesh
        self.params = [nn.Parameter(moderate(n, slot, dtype)) for slot, n in enumerate(SIZES)]
        self.mark()
        groups = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.3}]
        home = CLASSES[side]
        hyper = {"lr": 0.02, "betas": (0.87, 0.987), "weight_decay": 0.03}
        made: Any = (
            torch.optim.SGD(self.params, lr=0.02)
            if inside == "SGD"
            else home[inside](groups, **hyper)
        )
        scaler = home["DynamicLossScale"](init_scale=64.0, scale_window=2, delayed_shift=1)
        self.optimizer = home[kind](
            made,
            verbose=False,
            compat=Compat(**(compat or {})),
            **{"loss_scale_config": scaler, "clip_grad": 0.7, **given(mesh), **options},
        )

    def mark(self) -> None:
        """The second parameter is the same on a row, the third is split over it."""
        self.params[2].model_parallel = True  # type: ignore[attr-defined]

    def fill(self, seed: int, bad: float | None = None, slot: int = 2) -> None:
        """Gradients of a step; one rank's may hold a number that is not finite."""
        for place, param in enumerate(self.params):
            split = 7000 * self.mesh.place[0] if place == 2 else 0
            param.grad = moderate(param.numel(), 100 * seed + place + split, param.dtype)
        if bad is not None and self.mesh.place[0] == self.mesh.shape[1] - 1:
            grad = self.params[slot].grad
            assert grad is not None
            grad[-1] = bad

    def seen(self) -> list[object]:
        """Weights, masters and their state, and what all ranks have to agree on, at the end."""
        optimizer = self.optimizer
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        state = [optimizer.state.get(master, {}) for master in masters]
        tensors = [*self.params, *masters, *(torch.as_tensor(v) for s in state for v in s.values())]
        return [*(bits(tensor.detach()) for tensor in tensors), self.agreed()]

    def agreed(self) -> tuple[str, ...]:
        """Overflow, norm, scale and the counters of its rule."""
        optimizer = self.optimizer
        state = optimizer.loss_scaler.state_dict()
        told = (optimizer.overflow, optimizer.get_global_norm().hex(), optimizer.loss_scale)
        return (*map(str, told), *(f"{name}={value}" for name, value in state.items()))


def experts(mesh: Mesh) -> dict[str, Any]:
    """Experts over rows, copies of them over columns."""
    return {"expert_groups": {"e": mesh.row}, "expert_data_groups": {"e": mesh.column}}


class Experts(Training):
    """The third and the last parameter are experts."""

    def mark(self) -> None:
        """They say so."""
        for param in self.params[2:]:
            param.allreduce, param.group_name = False, "e"  # type: ignore[attr-defined]

    def fill(self, seed: int, bad: float | None = None, slot: int = 2) -> None:
        """Every rank of a row has other experts."""
        super().fill(seed, bad, slot)
        grad = moderate(SIZES[3], 100 * seed + 9 * self.mesh.place[0], self.params[3].dtype)
        self.params[3].grad = grad


def trained(training: Training, slot: int = 2) -> list[object]:
    """Observations after each of some steps, with an infinity and a NaN on some ranks."""
    found = []
    for seed, bad in enumerate(BADS):
        training.fill(seed, bad, slot)
        training.optimizer.step()
        found.append(training.seen())
    return [*found, training.agreed()]


def compared(
    rows: int,
    columns: int,
    cls: type[Training] = Training,
    *,
    slot: int = 2,
    **options: Any,
) -> list[Any]:
    """Values that the ranks of the fast side agreed on, once both sides have seen the same.

    Args:
        rows: of the mesh.
        columns: of it.
        cls: of the training.
        slot: the parameter whose gradient is bad at times.
        options: of the training.
    """

    def run(side: str) -> list[list[object]]:
        def one(mesh: Mesh) -> list[object]:
            return trained(cls(side, mesh, **options), slot)

        return on_mesh(rows, columns, one)

    ours = run("fast")
    assert ours == run("reference")
    said = [[step[-1] for step in rank[:-1]] for rank in ours]  # type: ignore[index]
    assert said == said[:1] * len(said)
    return said[0]


class Unreduced(Training):
    """Nobody has reduced the gradients over columns: one rank alone may overflow."""

    def fill(self, seed: int, bad: float | None = None, slot: int = 2) -> None:
        """Bad on the last rank of all."""
        last = self.mesh.place[1] == self.mesh.shape[0] - 1
        super().fill(seed, bad if last else None, slot)


class Idle(Training):
    """The first rank of a row has no gradients at all."""

    def fill(self, seed: int, bad: float | None = None, slot: int = 2) -> None:
        """Only on the others."""
        super().fill(seed, bad, slot)
        for param in self.params if self.mesh.place[0] == 0 else []:
            param.grad = None


def engine(mesh: Mesh, reduces: bool) -> dict[str, Any]:
    """An engine that reduces gradients over columns, or does not."""
    return {"deepspeed": SimpleNamespace(enable_backward_allreduce=reduces)}


def norms_of_experts(side: str, values: list[float], given: Any, norm_type: float) -> list[float]:
    """Reports of the ranks of a column, whose expert has this gradient."""

    def run(mesh: Mesh) -> float:
        training = Experts(side, mesh, given=given, norm_type=norm_type)
        for param in training.params:
            param.grad = torch.zeros_like(param)
        training.params[3].grad = torch.full_like(training.params[3], values[mesh.place[1]])
        training.optimizer.step()
        norm: float = training.optimizer.get_global_norm()
        return norm * 64.0

    return on_mesh(len(values), 1, run)
