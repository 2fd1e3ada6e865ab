"""The fast BF16Optimizer over ranks does what the reference does, bit for bit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import twinstep.fast.bf16_optimizer
import twinstep.fast.fused_adam
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fused_adam
from tests.reference.test_reference_bf16_ranks import Group, on_ranks, simulated
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = pytest.mark.usefixtures("replay", "simulated")

__all__ = ["simulated"]  # a fixture
BRAIN = torch.bfloat16
SIDES: dict[str, tuple[Any, Any]] = {
    "fast": (twinstep.fast.bf16_optimizer.BF16Optimizer, twinstep.fast.fused_adam.FusedAdam),
    "reference": (
        twinstep.reference.optimizers.bf16.BF16Optimizer,
        twinstep.reference.optimizers.fused_adam.FusedAdam,
    ),
}
T = TypeVar("T")
TURN = threading.Lock()


class Polite(Group):
    """A rank that runs alone, but for when it waits for others: replay is not for threads."""

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Let others run until they have come as far."""
        TURN.release()
        try:
            return super().exchange(tensor)
        finally:
            TURN.acquire()


@contextmanager
def turn() -> Iterator[None]:
    """Hold the turn."""
    TURN.acquire()
    try:
        yield
    finally:
        TURN.release()


def in_turns(world: int, run: Callable[[Polite | None], T]) -> list[T]:
    """Run a function on every rank, one at a time."""

    def polite(group: Group | None) -> T:
        with turn():
            if group is None:
                return run(None)
            return run(Polite(group.meeting, group.rank, group.world))

    return on_ranks(world, polite)


def built(
    side: str, sizes: tuple[int, ...] = (4, 0, 3, 5), **options: Any
) -> tuple[list[nn.Parameter], Any]:
    """Parameters of the same values on all ranks."""
    cls, adam = SIDES[side]
    params = [nn.Parameter(moderate(size, size + 1, BRAIN)) for size in sizes]
    marks = options.pop("marks", lambda params: None)
    marks(params)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]
    groups[1] |= options.pop("second", {})
    names = {p: f"p{place}" for place, p in enumerate(params)}
    return params, cls(adam(groups, lr=0.02, weight_decay=0.1), param_names=names, **options)


def trained(params: list[nn.Parameter], optimizer: Any, steps: range, seed: int = 0) -> None:
    """Steps with numbered gradients."""
    for number in steps:
        for place, param in enumerate(params):
            param.grad = moderate(param.numel(), seed + 10 * number + place, BRAIN)
        optimizer.update_hp_grads(clear_lp_grads=True)
        optimizer.step()


def seen(params: list[nn.Parameter], optimizer: Any) -> list[object]:
    """Weights, whole masters and states, and what the last step says."""
    whole = [
        optimizer.get_full_hp_param(f"p{place}", key)
        for place in range(len(params))
        for key in (None, "exp_avg", "exp_avg_sq")
    ]
    found: list[object] = [bits(tensor.detach()) for tensor in (*params, *whole)]
    return [*found, optimizer.overflow, str(optimizer.get_global_norm())]


@pytest.mark.parametrize("accumulation", [torch.float32, BRAIN])
@pytest.mark.parametrize("bucket", [5_000_000_000, 4])
def test_masters_split_over_ranks_step_like_the_reference_alone(
    bucket: int, accumulation: torch.dtype
) -> None:
    def run(side: str, group: Polite | None) -> list[object]:
        options: dict[str, Any] = {"clip_grad": 0.5, "grad_acc_dtype": accumulation}
        params, optimizer = built(
            side, dp_process_group=group, allgather_bucket_size=bucket, **options
        )
        trained(params, optimizer, range(3))
        return seen(params, optimizer)

    (alone,) = in_turns(1, lambda group: run("reference", group))
    for world in (2, 3):
        assert in_turns(world, lambda group: run("fast", group)) == [alone] * world


class Unit:
    """A model-parallel unit of one group."""

    def __init__(self, group: Polite) -> None:
        self.group = group

    def get_model_parallel_group(self) -> Polite:
        """All ranks."""
        return self.group

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place."""
        return self.group.rank


@pytest.mark.parametrize("kind", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("experts", [False, True])
def test_norms_over_a_model_and_its_experts_equal_the_reference(kind: float, experts: bool) -> None:
    """Every rank has other gradients; a replica counts once; one rank's overflow skips all."""

    def marks(params: list[nn.Parameter]) -> None:
        params[0].model_parallel = True  # type: ignore[attr-defined]
        for param in params[2:] if experts else []:
            param.allreduce, param.group_name = False, "ep"  # type: ignore[attr-defined]

    def run(side: str, group: Polite | None) -> list[object]:
        assert group is not None
        more: dict[str, Any] = {"mpu": Unit(group)}
        if experts:
            more |= {"expert_groups": {"ep": group}, "has_moe_layers": True}
            more |= {"second": {"moe": True, "name": "ep"}}
        params, optimizer = built(side, clip_grad=0.5, norm_type=kind, marks=marks, **more)
        trained(params, optimizer, range(2), seed=1000 * group.rank)
        first = seen(params, optimizer)
        shared, named = optimizer.get_grads_for_reduction()
        sizes = [len(shared), {name: len(flats) for name, flats in named.items()}]
        params[0].grad = torch.full_like(params[0], math.nan if group.rank else 1.0)
        optimizer.update_hp_grads()
        optimizer.step()
        return [*first, sizes, *seen(params, optimizer)]

    ours = in_turns(2, lambda group: run("fast", group))
    assert ours == in_turns(2, lambda group: run("reference", group))
    assert all(row[-2] is True for row in ours)


@pytest.mark.parametrize(("source", "target"), [("fast", "reference"), ("reference", "fast")])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1), (1, 2)])
def test_a_run_resumes_on_the_other_side_with_another_number_of_ranks(
    source: str, target: str, before: int, after: int
) -> None:
    def saved(group: Polite | None) -> Any:
        params, optimizer = built(source, dp_process_group=group)
        trained(params, optimizer, range(2))
        return optimizer.state_dict()

    entries = in_turns(before, saved)

    def resumed(group: Polite | None) -> list[object]:
        params, optimizer = built(target, dp_process_group=group)
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        trained(params, optimizer, range(2, 4))
        return seen(params, optimizer)

    def uninterrupted(group: Polite | None) -> list[object]:
        params, optimizer = built("reference", dp_process_group=group)
        trained(params, optimizer, range(4))
        return seen(params, optimizer)

    (wanted,) = in_turns(1, uninterrupted)
    assert in_turns(after, resumed) == [wanted] * after


def test_the_comparison_over_ranks_can_say_no() -> None:
    def run(side: str, group: Polite | None) -> list[object]:
        params, optimizer = built(side, dp_process_group=group)
        trained(params, optimizer, range(1), seed=group.rank if group else 0)
        return seen(params, optimizer)

    (alone,) = in_turns(1, lambda group: run("reference", group))
    assert in_turns(2, lambda group: run("fast", group)) != [alone] * 2
