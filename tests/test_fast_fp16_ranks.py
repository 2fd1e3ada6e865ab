"""The fast FP16 optimizers over ranks do what the reference does, bit for bit, and alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import fast.compat
import fast.fp16_optimizer
import fast.fp16_unfused_optimizer
import fast.fused_adam
import fast.fused_lamb
import fast.scalers
import reference.compat
import reference.fp16_optimizer
import reference.fp16_unfused_optimizer
import reference.fused_adam
import reference.fused_lamb
import reference.scalers
from parity.host import watched
from parity.words import bits, moderate
from tests.test_fast_bf16_ranks import Polite, in_turns
from tests.test_reference_bf16_ranks import Group, Meeting, simulated

pytestmark = pytest.mark.usefixtures("replay", "simulated")

__all__ = ["simulated"]  # a fixture
HALF = torch.float16
T = TypeVar("T")
SIDES: dict[str, Any] = {"fast": fast, "reference": reference}
SIZES = (20, 5, 70, 33)
BADS = (None, math.inf, None, math.nan)


@dataclass
class Mesh:
    """A rank's place among rows, which hold one model, and columns, which hold the same part.

    Attributes:
        row: handle of this rank's row.
        column: of its column.
        world: all ranks.
        calls: collectives so far, as (elements, dtype).
    """

    row: Polite
    column: Polite
    world: int
    calls: list[tuple[int, torch.dtype]]

    def get_model_parallel_group(self) -> Polite:
        """The row."""
        return self.row

    def get_data_parallel_group(self) -> Polite:
        """The column."""
        return self.column

    def get_tensor_model_parallel_rank(self) -> int:
        """Place in the row."""
        return self.row.rank


class Counting(Polite):
    """A handle that notes what is sent."""

    calls: list[tuple[int, torch.dtype]]

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Note it."""
        self.calls.append((tensor.numel(), tensor.dtype))
        return super().exchange(tensor)


def on_mesh(rows: int, columns: int, run: Callable[[Mesh], T]) -> list[T]:
    """Run a function on every rank of a mesh, one at a time."""
    meetings = {name: Meeting(columns) for name in range(rows)}
    crossing = {name: Meeting(rows) for name in range(columns)}

    def one(group: Group | None) -> T:
        rank = 0 if group is None else group.rank
        row, column = divmod(rank, columns)
        mesh = Mesh(
            row=Counting(meetings[row], column, columns),
            column=Counting(crossing[column], row, rows),
            world=rows * columns,
            calls=[],
        )
        for handle in (mesh.row, mesh.column):
            handle.calls = mesh.calls  # type: ignore[attr-defined]
        return run(mesh)

    return in_turns(rows * columns, one)


class Training:
    """One rank of one side: what is shared, what is split, a replica, and two experts."""

    def __init__(
        self,
        side: str,
        mesh: Mesh,
        *,
        kind: str = "fp16_optimizer",
        inside: str = "adam",
        dtype: torch.dtype = HALF,
        given: Callable[[Mesh], dict[str, Any]] = lambda mesh: {"mpu": mesh},
        compat: dict[str, bool] | None = None,
        **options: Any,
    ) -> None:
        self.mesh = mesh
        self.params = [nn.Parameter(moderate(n, slot, dtype)) for slot, n in enumerate(SIZES)]
        self.mark()
        groups = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.3}]
        home = SIDES[side]
        hyper = {"lr": 0.02, "betas": (0.87, 0.987), "weight_decay": 0.03}
        inner = home.fused_lamb.FusedLamb if inside == "lamb" else home.fused_adam.FusedAdam
        wrapper = {
            "fp16_optimizer": home.fp16_optimizer.__dict__.get("FP16Optimizer"),
            "fp16_unfused_optimizer": home.fp16_unfused_optimizer.__dict__.get(
                "FP16UnfusedOptimizer"
            ),
        }[kind]
        assert wrapper is not None
        made: Any = (
            torch.optim.SGD(self.params, lr=0.02) if inside == "sgd" else inner(groups, **hyper)
        )
        scaler = home.scalers.DynamicLossScale(init_scale=64.0, scale_window=2, delayed_shift=1)
        self.optimizer = wrapper(
            made,
            verbose=False,
            compat=home.compat.Compat(**(compat or {})),
            **{"loss_scale_config": scaler, "clip_grad": 0.7, **given(mesh), **options},
        )

    def mark(self) -> None:
        """The second parameter is the same on a row, the third is split over it."""
        self.params[2].model_parallel = True  # type: ignore[attr-defined]

    def fill(self, seed: int, bad: float | None = None, slot: int = 2) -> None:
        """Gradients of a step; one rank's may hold a number that is not finite."""
        for place, param in enumerate(self.params):
            split = 7000 * self.mesh.row.rank if place == 2 else 0
            param.grad = moderate(param.numel(), 100 * seed + place + split, param.dtype)
        if bad is not None and self.mesh.row.rank == self.mesh.row.world - 1:
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
        grad = moderate(SIZES[3], 100 * seed + 9 * self.mesh.row.rank, self.params[3].dtype)
        self.params[3].grad = grad


def trained(training: Training, slot: int = 2) -> list[object]:
    """What was seen after each of some steps, with an infinity and a NaN on some ranks."""
    found = []
    for seed, bad in enumerate(BADS):
        training.fill(seed, bad, slot)
        training.optimizer.step()
        found.append(training.seen())
    return [*found, training.agreed()]


def compared(rows: int, columns: int, cls: type[Training] = Training, **options: Any) -> list[Any]:
    """What the ranks of the fast side agreed on, once both sides have seen the same."""
    slot = options.pop("slot", 2)

    def run(side: str) -> list[list[object]]:
        return on_mesh(rows, columns, lambda mesh: trained(cls(side, mesh, **options), slot))

    ours = run("fast")
    assert ours == run("reference")
    said = [[step[-1] for step in rank[:-1]] for rank in ours]  # type: ignore[index]
    assert said == said[:1] * len(said)
    return said[0]


class Unreduced(Training):
    """Nobody has reduced the gradients over columns: one rank alone may overflow."""

    def fill(self, seed: int, bad: float | None = None, slot: int = 2) -> None:
        """Bad on the last rank of all."""
        last = self.mesh.column.rank == self.mesh.column.world - 1
        super().fill(seed, bad if last else None, slot)


KINDS = pytest.mark.parametrize("kind", ["fp16_optimizer", "fp16_unfused_optimizer"])


@KINDS
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_a_model_over_ranks_steps_like_the_reference_and_alike(
    rows: int, columns: int, kind: str
) -> None:
    """One rank's infinity or NaN skips the step of all; norm, scale and counters are the same."""
    said = compared(rows, columns, kind=kind)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]
    assert len({step[2] for step in said}) > 2


@KINDS
@pytest.mark.parametrize("norm_type", [1.0, math.inf, 3.0])
def test_every_norm_of_a_model_over_ranks_equals_the_reference(kind: str, norm_type: float) -> None:
    compared(1, 2, kind=kind, norm_type=norm_type)


@KINDS
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 3.0])
def test_experts_on_different_ranks_step_like_the_reference(kind: str, norm_type: float) -> None:
    """Their norms enter one sum before the root; whose copies are equal, average to themselves."""
    world = (2, 2) if norm_type == 2.0 else (1, 2)
    said = compared(*world, cls=Experts, kind=kind, given=experts, norm_type=norm_type)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]


@pytest.mark.parametrize("inside", ["lamb", "sgd"])
def test_other_optimizers_inside_step_over_ranks_like_the_reference(inside: str) -> None:
    for cls, given in ((Training, None), (Experts, experts)):
        more = {} if given is None else {"given": given}
        compared(1, 2, cls=cls, kind="fp16_unfused_optimizer", inside=inside, **more)


@KINDS
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_that_does_not_count_still_skips_the_step(kind: str, norm_type: float) -> None:
    """A copy on the second rank of the first parameter, which is not split."""
    said = compared(1, 2, kind=kind, norm_type=norm_type, slot=0)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]
    assert not math.isfinite(float.fromhex(said[1][1]))


def test_ranks_whose_gradients_nobody_reduced_agree_on_an_overflow() -> None:
    engine = SimpleNamespace(enable_backward_allreduce=False)
    said = compared(2, 1, cls=Unreduced, given=lambda mesh: {"mpu": mesh, "deepspeed": engine})
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]


def test_upstreams_norm_leaves_out_the_experts_of_all_ranks() -> None:
    """Edge ME-3: they skip a step, and clip nothing."""
    options: dict[str, Any] = {"cls": Experts, "kind": "fp16_unfused_optimizer", "given": experts}
    ours = compared(1, 2, **options, compat={"clip_without_experts": True})
    theirs = compared(1, 2, **options)
    assert ours[0][1] != theirs[0][1]
    assert [step[0] for step in ours] == [step[0] for step in theirs]


def norms_of_experts(side: str, values: list[float], given: Any, norm_type: float) -> list[float]:
    """What each rank of a column reports, whose expert has this gradient."""

    def run(mesh: Mesh) -> float:
        training = Experts(side, mesh, given=given, norm_type=norm_type)
        for param in training.params:
            param.grad = torch.zeros_like(param)
        training.params[3].grad = torch.full_like(training.params[3], values[mesh.column.rank])
        training.optimizer.step()
        norm: float = training.optimizer.get_global_norm()
        return norm * 64.0

    return on_mesh(len(values), 1, run)


@pytest.mark.parametrize(
    ("norm_type", "wanted"),
    [(1.0, 33 * 3.0), (2.0, math.sqrt(33 * (1 + 4 + 36) / 3)), (math.inf, 6.0)],
)
def test_the_norm_of_experts_that_differ_is_averaged_over_their_copies(
    norm_type: float, wanted: float
) -> None:
    """Sums of powers are: 33 elements of 1, 2 and 6 on three ranks. All ranks clip alike."""
    found = norms_of_experts("fast", [1.0, 2.0, 6.0], experts, norm_type)
    assert found == norms_of_experts("reference", [1.0, 2.0, 6.0], experts, norm_type)
    assert found == [pytest.approx(wanted, rel=1e-6)] * 3
    alone = norms_of_experts("fast", [1.7] * 3, lambda mesh: {}, norm_type)
    assert norms_of_experts("fast", [1.7] * 3, experts, norm_type) == alone


@KINDS
def test_a_step_over_ranks_waits_for_nothing_and_sends_one_sum(kind: str) -> None:
    """A collective for each group, of 32 integers: experts, copies of them, the model."""

    def run(cls: type[Training], given: Callable[[Mesh], dict[str, Any]]) -> list[object]:
        def one(mesh: Mesh) -> tuple[list[str], object]:
            training = cls("fast", mesh, kind=kind, given=given)
            training.fill(0)
            training.optimizer.step()
            mesh.calls.clear()
            training.fill(1)
            control = training.optimizer._step.control
            with ExitStack() as stack:
                device = [p.grad for p in training.params] + [control["norm"], control["scale"]]
                reads = [
                    stack.enter_context(watched(tensor)) for tensor in device if tensor.numel()
                ]
                training.optimizer.step()
            return [read for each in reads for read in each], list(mesh.calls)

        return list(on_mesh(1, 2, one))

    message = (32, torch.int64)
    assert run(Training, lambda mesh: {"mpu": mesh}) == [([], [message])] * 2
    both = lambda mesh: {"mpu": mesh, **experts(mesh)}  # noqa: E731
    assert run(Experts, both) == [([], [message] * 3)] * 2


@pytest.mark.parametrize("side", list(SIDES))
def test_the_error_at_the_floor_comes_on_all_ranks_at_once(side: str) -> None:
    """Edge LS-9: one rank overflows, every rank raises and has changed nothing."""

    def run(mesh: Mesh) -> tuple[str, bool]:
        floor = {"init_scale": 1.0, "min_scale": 1.0, "delayed_shift": 1}
        scaler = SIDES[side].scalers.DynamicLossScale(**floor, raise_error_at_min_scale=True)
        training = Training(side, mesh, loss_scale_config=scaler)
        before = [param.detach().clone() for param in training.params]
        training.fill(0, math.inf)
        try:
            training.optimizer.step()
            training.optimizer.get_global_norm()
        except RuntimeError as error:
            same = all(map(torch.equal, training.params, before))
            return type(error).__name__, same
        return "nothing", False

    assert on_mesh(1, 2, run) == [("MinimumLossScale", True)] * 2


def test_the_comparison_over_ranks_can_say_no() -> None:
    """Without the model-parallel unit every rank goes its own way."""
    with pytest.raises(AssertionError):
        compared(1, 2, given=lambda mesh: {})
