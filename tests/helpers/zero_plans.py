"""Drawn trainings of ZeroOptimizer over simulated ranks, and the same on one rank with everything.

Axes are "data", "expert" and "tensor". Every step has a target for the mean gradient of each piece
of the model; ranks and micro-batches get shares of it that are small multiples of 2^-5 and of the
number of ranks, so that every sum and quotient is exact in every dtype. The target alone decides
the result, whatever the world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.sides import CLASSES
from twinstep.parity.cases.fixed_inputs import bits, moderate, words
from twinstep.parity.ranks.arithmetic import ORDERS
from twinstep.parity.ranks.world import Rank, World

AXES = ("data", "expert", "tensor")
# By name: elements, the axis that splits it, and its parameter group.
MODEL: dict[str, tuple[int, str, int]] = {
    "first": (5, "", 0),
    "empty": (0, "", 0),
    "long": (23, "", 0),
    "last": (3, "", 0),
    "split": (4, "tensor", 1),
    "one": (1, "", 1),
    "expert": (6, "expert", 2),
}
SCALER: dict[str, Any] = {"init_scale": 64.0, "scale_window": 2, "delayed_shift": 1}
MORE = {"min_scale": 1.0, "consecutive_hysteresis": False}
STATE = ("exp_avg", "exp_avg_sq")
STEPS = 3
Piece = tuple[str, int]


@dataclass(frozen=True)
class Bad:
    """A gradient of one rank that is not finite.

    Attributes:
        value: infinity or NaN.
        name: of the parameter.
        rank: that has it.
        micro: number of the micro-batch.
    """

    value: float
    name: str
    rank: int
    micro: int


@dataclass(frozen=True)
class ZeroPlan:
    """One training, as plain data.

    Attributes:
        dtype: of the model weights.
        axes: number of ranks along each of AXES.
        micro: micro-batches of a step.
        clip: largest norm, or 0.0.
        turned: parameters are given in the opposite order.
        by_hand: `reduce_gradients` is called after every second micro-batch, whatever the stage.
        by_loss: gradients come from `backward`, in another order on each rank.
        options: of the constructor.
        bads: by step; None where all gradients are finite.
        order: of reductions.
        seed: of the world.
        late: collectives complete late and out of order.
    """

    dtype: torch.dtype
    axes: tuple[int, int, int]
    micro: int = 1
    clip: float = 0.0
    turned: bool = False
    by_hand: bool = False
    by_loss: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    bads: tuple[Bad | None, ...] = (None,) * STEPS
    order: str = "ranks"
    seed: int = 0
    late: bool = False

    @property
    def world(self) -> World:
        """The ranks."""
        sizes = dict(zip(AXES, self.axes, strict=True))
        return World(sizes, self.seed, self.order, self.late, patience=30.0)

    @property
    def places(self) -> list[dict[str, int]]:
        """Of all ranks, by number."""
        return [dict(zip(AXES, at, strict=True)) for at in product(*map(range, self.axes))]

    def pieces(self, place: dict[str, int] | None) -> list[Piece]:
        """Pieces of the model at a place, or all of them."""
        counts = dict(zip(AXES, self.axes, strict=True))
        found = []
        for name, (_, axis, _) in MODEL.items():
            everywhere = range(counts[axis]) if axis else range(1)
            at = everywhere if place is None else [place[axis] if axis else 0]
            found += [(name, number) for number in at]
        return found

    def target(self, piece: Piece, step: int) -> Tensor:
        """The mean gradient of a step; None of its elements needs more than 4 bits."""
        size = MODEL[piece[0]][0]
        drawn = words(size, key(piece, step))
        return torch.tensor([float(word % 15) - 7 for word in drawn]) / 32

    def share(self, piece: Piece, step: int, micro: int, number: int, count: int) -> Tensor:
        """Gradient of one rank and micro-batch; over all of these the mean is the target.

        Args:
            piece: of the model.
            step: number of it.
            micro: number of the micro-batch.
            number: of the rank among those that have this piece.
            count: of those.
        """
        size = MODEL[piece[0]][0]

        def noise(micro: int, number: int) -> Tensor:
            drawn = words(size, key(piece, step, micro, number))
            return torch.tensor([float(word % 3) - 1 for word in drawn]) / 32

        rest = noise(micro, number)
        if micro == 0 and number == 0:
            every = [noise(*at) for at in product(range(self.micro), range(count)) if any(at)]
            rest = self.target(piece, step) - sum(every)
        mean = self.options.get("gradient_average", True)
        data = self.axes[0] * self.axes[1]
        return (rest * (data if mean else 1)).to(self.dtype)


def key(*parts: object) -> int:
    """A seed that depends on all parts."""
    return int.from_bytes(repr(parts).encode(), "big") % (2**61 - 1)


class Training:
    """A rank of a plan; without a rank, FP16Optimizer with every piece and no group.

    Args:
        plan: of the training.
        side: "fast" or "reference".
        rank: this one, or None.

    Attributes:
        params: by piece.
        optimizer: of either class.
    """

    def __init__(self, plan: ZeroPlan, side: str, rank: Rank | None) -> None:
        self.plan, self.rank = plan, rank
        home = CLASSES[side]
        pieces = plan.pieces(None if rank is None else rank.place)
        self.params = {piece: self._param(piece) for piece in pieces}
        groups: list[dict[str, Any]] = []
        for number, lr in enumerate((0.02, 0.3, 0.05)):
            own = [p for piece, p in self.params.items() if MODEL[piece[0]][2] == number]
            groups.append({"params": own[::-1] if plan.turned else own, "lr": lr})
        options: dict[str, Any] = {"clip_grad": plan.clip, "verbose": False}
        half = plan.dtype is torch.float16
        self.optimizer: Any
        if rank is None:
            inside = home["FusedAdam"](groups, betas=(0.87, 0.987), weight_decay=0.03)
            options |= {"loss_scale_config": home["DynamicLossScale"](**SCALER)} if half else {}
            options |= {"low_precision_dtype": plan.dtype}
            self.optimizer = home["FP16Optimizer"](inside, **options)
            return
        groups[2] |= {"moe": True, "name": "e"}
        inside = home["FusedAdam"](groups, betas=(0.87, 0.987), weight_decay=0.03)
        self.optimizer = home["ZeroOptimizer"](
            inside,
            param_names={param: name for (name, _), param in self.params.items()},
            dynamic_loss_scale=half,
            dynamic_loss_args={**SCALER, **MORE},
            dp_process_group=rank.group("data", "expert"),
            expert_parallel_group={"e": rank.group("expert")},
            expert_data_parallel_group={"e": rank.group("data")},
            has_moe_layers=True,
            mpu=unit(rank),
            **options,
            **plan.options,
        )

    def load(self, saved: Sequence[Any]) -> None:
        """Load what this rank needs of the state dicts of all ranks, by number."""
        assert self.rank is not None
        group = self.rank.group("data", "expert")
        entries = [saved[number] for number in dist.get_process_group_ranks(group)]
        self.optimizer.load_state_dict(entries, load_from_fp32_weights=True)

    def _param(self, piece: Piece) -> nn.Parameter:
        name, number = piece
        size, axis, _ = MODEL[name]
        param: Any = nn.Parameter(moderate(size, 10 * len(name) + number, self.plan.dtype))
        param.model_parallel = axis == "tensor"
        if axis == "expert":
            param.allreduce, param.group_name = False, "e"
        return param  # type: ignore[no-any-return]

    def step(self, number: int) -> None:
        """Gradients of all micro-batches, and a step."""
        optimizer = self.optimizer
        if self.rank is None:
            for piece, param in self.params.items():
                param.grad = self._whole(piece, number).to(param.dtype)
            optimizer.step()
            return
        for micro in range(self.plan.micro):
            by_hand = self.plan.by_hand and micro % 2 == 0
            if self.plan.by_loss:
                optimizer.backward(self._loss(number, micro, self.rank))
                if by_hand:
                    optimizer.reduce_gradients()
                continue
            for piece, param in self.params.items():
                param.grad = self._own(piece, number, micro, self.rank)
            if by_hand or optimizer.partition_gradients:
                optimizer.reduce_gradients()
            else:
                optimizer.fill_grad_accum_attribute()
        optimizer.step()

    def _loss(self, number: int, micro: int, rank: Rank) -> Tensor:
        """A loss whose gradients, multiplied by the scale, are those of the micro-batch."""
        loss = torch.zeros((), requires_grad=True) * 1.0
        pieces = list(self.params)
        turn = rank.number % len(pieces)
        for piece in (*pieces[turn:], *pieces[:turn]):
            grad, param = self._own(piece, number, micro, rank), self.params[piece]
            if grad is not None:
                # Powers of two: nothing is rounded.
                loss = loss + (param * (grad / self.optimizer.loss_scale)).float().sum()
        return loss

    def _whole(self, piece: Piece, step: int) -> Tensor:
        """The target, with what is not finite on any rank."""
        grad, bad = self.plan.target(piece, step), self.plan.bads[step]
        if bad is not None and bad.name == piece[0]:
            at = list(product(*map(range, self.plan.axes)))[bad.rank]
            axis = MODEL[bad.name][1]
            if not axis or at[AXES.index(axis)] == piece[1]:
                grad[-1] += bad.value
        return grad

    def _own(self, piece: Piece, step: int, micro: int, rank: Rank) -> Tensor | None:
        place, (_, data, expert) = rank.place, (0, *self.plan.axes[:2])
        if MODEL[piece[0]][1] == "expert":
            number, count = place["data"], data
        else:
            number, count = place["data"] * expert + place["expert"], data * expert
        grad = self.plan.share(piece, step, micro, number, count)
        bad = self.plan.bads[step]
        if bad is not None and (bad.name, bad.rank, bad.micro) == (piece[0], rank.number, micro):
            grad[-1] += bad.value
        return grad if bool(grad.any()) else None

    def agreed(self) -> dict[str, str]:
        """Facts that all ranks have alike."""
        optimizer = self.optimizer
        found = {
            "overflow": optimizer.overflow,
            "norm": optimizer.get_global_norm().hex(),
            "steps": sorted({int(row["step"]) for row in optimizer.state.values()}),
            "scale": optimizer.loss_scale,
            "clip": optimizer.clip_grad,
        }
        # A scale that is none is not saved, nor are its steps.
        found |= optimizer.loss_scaler.state_dict() if optimizer.scales else {}
        return {name: str(fact) for name, fact in found.items()}

    def weights(self) -> dict[Piece, list[int]]:
        """Of the model."""
        return {piece: bits(param.detach()) for piece, param in self.params.items()}

    def masters(self) -> dict[Piece, list[list[int]]]:
        """Masters and moments, whole; over ranks a collective."""
        optimizer = self.optimizer
        if self.rank is not None:
            keys = [None, *(STATE if optimizer.state else ())]
            return {
                piece: [bits(optimizer.get_full_hp_param(piece[0], key)) for key in keys]
                for piece in self.params
            }
        homes = {id(param): piece for piece, param in self.params.items()}
        found = {}
        for params, master in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            state = optimizer.state.get(master, {})
            rows = [master.detach(), *(state[name] for name in STATE if state)]
            cut = [row.split([param.numel() for param in params]) for row in rows]
            for place, param in enumerate(params):
                found[homes[id(param)]] = [bits(row[place]) for row in cut]
        return found


def unit(rank: Rank) -> Any:
    """The model-parallel unit of a rank."""
    return SimpleNamespace(
        get_model_parallel_group=lambda: rank.group("tensor"),
        get_data_parallel_group=lambda: rank.group("data", "expert"),
        get_tensor_model_parallel_rank=lambda: rank.place["tensor"],
    )


@st.composite
def choices(draw: st.DrawFn, data: int) -> dict[str, Any]:
    """Options of ZeroOptimizer that change no result where all sums are exact.

    Args:
        draw: of the strategy.
        data: number of data-parallel ranks.
    """
    found: dict[str, Any] = {
        "partition_grads": draw(st.booleans()),
        "round_robin_gradients": draw(st.booleans()),
        "overlap_comm": draw(st.booleans()),
        "use_multi_rank_bucket_allreduce": draw(st.booleans()),
        "reduce_bucket_size": draw(st.sampled_from([1, 7, 500_000_000])),
        "allgather_bucket_size": draw(st.sampled_from([2, 6, 5_000_000_000])),
        "gradient_average": draw(st.booleans()),
        "communication_data_type": draw(st.sampled_from([None, torch.float32])),
        "gradient_accumulation_dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "offload_optimizer_config": draw(st.sampled_from([None, SimpleNamespace(device="cpu")])),
    }
    # The mean of other numbers of ranks is not exact when it is a product.
    if data in (1, 2, 4, 8) and not found["gradient_average"]:
        found["gradient_predivide_factor"] = draw(st.sampled_from([1.0, 2.0, 8.0]))
        found["postscale_gradients"] = draw(st.booleans())
    return found


@st.composite
def zero_plans(
    draw: st.DrawFn, axes: tuple[int, int, int], dtype: torch.dtype, bad: bool
) -> ZeroPlan:
    """Plans.

    Args:
        draw: of the strategy.
        axes: number of ranks along each of AXES.
        dtype: of the model weights.
        bad: one step has a gradient that is not finite.
    """
    micro = draw(st.integers(1, 3))
    bads: list[Bad | None] = [None] * STEPS
    if bad:
        bads[draw(st.integers(0, STEPS - 1))] = Bad(
            draw(st.sampled_from([math.inf, -math.inf, math.nan])),
            draw(st.sampled_from([name for name, (size, _, _) in MODEL.items() if size])),
            draw(st.integers(0, math.prod(axes) - 1)),
            draw(st.integers(0, micro - 1)),
        )
    return ZeroPlan(
        dtype=dtype,
        axes=axes,
        micro=micro,
        clip=draw(st.sampled_from([0.0, 0.01, 1000.0])),
        turned=draw(st.booleans()),
        by_hand=draw(st.booleans()),
        by_loss=draw(st.booleans()),
        options=draw(choices(axes[0] * axes[1])),
        bads=tuple(bads),
        order=draw(st.sampled_from(sorted(ORDERS))),
        seed=draw(st.integers(0, 999)),
        late=draw(st.booleans()),
    )


def axes_of(count: int) -> list[tuple[int, int, int]]:
    """Axes of worlds with so many ranks, data first."""
    every = range(1, count + 1)
    triples = [(d, e, t) for d in every for e in every for t in every if d * e * t == count]
    return sorted(triples, reverse=True)
