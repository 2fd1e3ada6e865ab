"""Training plans over simulated ranks, and the same training on one rank that holds everything.

Axes are "data", "expert" and "tensor". The parameter "shared" is on all ranks, "split" has a piece
for each place along "tensor", expert "e" one along "expert", and expert "f" one on every rank.
Gradients are small multiples of 2^-5: their sums are exact in any order and in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.sides import CLASSES, WRAPPERS
from twinstep.parity.cases.fixed_inputs import bits, moderate, words
from twinstep.parity.ranks.arithmetic import ORDERS
from twinstep.parity.ranks.world import Rank, World

AXES = ("data", "expert", "tensor")
SIZES = {"shared": 5, "split": 3, "e": 2, "f": 1}
SPLIT_OVER = {"shared": (), "split": ("tensor",), "e": ("expert",), "f": AXES}
REDUCED_OVER = {"shared": ("data", "expert"), "split": ("data", "expert"), "e": ("data",), "f": ()}
EXPERTS = ("e", "f")
STATE = ("exp_avg", "exp_avg_sq")
COUNTS = (2, 4, 3, 8, 7, 1)  # what is drawn first should have copies
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEPS = 3
Place = dict[str, int]


class Piece(NamedTuple):
    """A piece of the model: the parameter's name, and a place along the axes that split it."""

    name: str
    at: tuple[int, ...]


class Bad(NamedTuple):
    """A gradient that is not finite.

    Attributes:
        value: infinity or NaN.
        name: of the parameter.
        rank: that has it.
        when: "before" its ranks add their gradients up, "after" that, on this rank alone, or
            on "all" ranks.
    """

    value: float
    name: str
    rank: int
    when: str


@dataclass(frozen=True)
class Plan:
    """One training, as plain data.

    Attributes:
        kind: the wrapper's class.
        inside: the class of the optimizer inside.
        dtype: of the model weights.
        axes: number of ranks along each of AXES.
        order: of reductions.
        seed: of the world.
        late: collectives complete late and out of order.
        micro: gradients that are accumulated before a step.
        clip: largest norm, or 0.0.
        norm_type: of it.
        experts: there are some.
        unit: there is a model-parallel unit.
        reduces: the engine's answer, or None without an engine.
        turned: ranks that list experts, and parameters where they may, in the opposite order.
        bads: by step; None where all gradients are finite.
        idle: by step: the parameter that has no gradient, or "".
        bucket: largest number of elements in a message that gathers.
    """

    kind: str
    inside: str
    dtype: torch.dtype
    axes: tuple[int, int, int]
    order: str
    seed: int
    late: bool
    micro: int
    clip: float
    norm_type: float
    experts: bool
    unit: bool
    reduces: bool | None
    turned: frozenset[int]
    bads: tuple[Bad | None, ...]
    idle: tuple[str, ...]
    bucket: int

    @property
    def world(self) -> World:
        """The ranks."""
        sizes = dict(zip(AXES, self.axes, strict=True))
        return World(sizes, self.seed, self.order, self.late, patience=30.0)

    @property
    def places(self) -> list[Place]:
        """Of all ranks, by number."""
        return [dict(zip(AXES, at, strict=True)) for at in product(*map(range, self.axes))]

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return names_of(self.experts, self.axes)

    @property
    def coupled(self) -> bool:
        """True if groups that the optimizer was given connect all ranks."""
        grouped = self.experts or self.unit or self.reduces is False
        return grouped or self.kind == "BF16Optimizer"

    def gradient(self, piece: Piece, share: int, step: int) -> list[Tensor]:
        """One rank's gradients of a step, by micro-batch.

        Args:
            piece: of the model.
            share: number of the rank among those that add up.
            step: number of it.
        """
        size = SIZES[piece.name]
        key = repr((*piece, share, step)).encode()
        drawn = words(size * self.micro, int.from_bytes(key, "big") % (2**61 - 1))
        whole = torch.tensor([float(word % 15) - 7 for word in drawn], dtype=self.dtype) / 32
        return list(whole.split(size))


def names_of(experts: bool, axes: tuple[int, int, int]) -> list[str]:
    """Parameters; without an expert axis there are experts that have copies alone."""
    more = {"e": experts, "f": experts and axes[1] > 1}
    return [name for name in SIZES if more.get(name, True)]


def piece_of(name: str, place: Place) -> Piece:
    """The piece that a rank holds."""
    return Piece(name, tuple(place[axis] for axis in SPLIT_OVER[name]))


class Training:
    """One rank of a plan; without a rank, one that holds every piece and has no group.

    Attributes:
        params: by piece.
        optimizer: of the plan's kind.
    """

    def __init__(self, plan: Plan, side: str, rank: Rank | None, *, wrong: str = "") -> None:
        """Construct.

        Args:
            plan: of the training.
            side: "fast" or "reference".
            rank: this one, or None.
            wrong: "norm" for a norm type that is refused, "layout" for parameters in an order
                that BF16Optimizer refuses where other ranks have another.
        """
        self.plan, self.rank = plan, rank
        places = plan.places if rank is None else [rank.place]
        turned = rank is not None and rank.number in plan.turned
        self.params = {
            piece: self._param(piece)
            for name in plan.names
            for piece in sorted({piece_of(name, place) for place in places})
        }
        names = [["shared", "split"], *([name] for name in plan.names if name in EXPERTS)]
        groups: list[dict[str, Any]] = [
            {"params": [p for piece, p in self.params.items() if piece.name in each]}
            for each in names
        ]
        for name, group in zip(names[1:], groups[1:], strict=True):
            group |= {"moe": True, "name": name[0], "lr": 0.3}
        bf16 = plan.kind == "BF16Optimizer"
        if wrong == "layout" or (turned and not bf16):
            groups[0]["params"].reverse()
        home = CLASSES[side]
        inside = home[plan.inside](groups, lr=0.02, betas=(0.87, 0.987), weight_decay=0.03)
        options: dict[str, Any] = {"clip_grad": plan.clip, "norm_type": plan.norm_type}
        if wrong == "norm":
            options["norm_type"] = -1.0
        if rank is not None:
            options |= self._groups(rank, turned)
        if bf16:
            options["param_names"] = {param: str(piece) for piece, param in self.params.items()}
            options |= {"has_moe_layers": plan.experts, "allgather_bucket_size": plan.bucket}
        else:
            scaler = home["DynamicLossScale"](init_scale=64.0, scale_window=2, delayed_shift=1)
            options |= {"loss_scale_config": scaler, "verbose": False}
        self.optimizer: Any = home[plan.kind](inside, **options)

    def _param(self, piece: Piece) -> nn.Parameter:
        seed = sum(7 * at + 1 for at in piece.at) + 100 * len(piece.name)
        param: Any = nn.Parameter(moderate(SIZES[piece.name], seed, self.plan.dtype))
        param.model_parallel = "tensor" in SPLIT_OVER[piece.name]
        if piece.name in EXPERTS:
            param.allreduce, param.group_name = False, piece.name
        return param  # type: ignore[no-any-return]

    def _groups(self, rank: Rank, turned: bool) -> dict[str, Any]:
        """Process groups as arguments of the wrapper's constructor."""
        plan, replicas = self.plan, rank.group("data", "expert")
        found: dict[str, Any] = {}
        if plan.experts:
            split = {"e": rank.group("expert"), "f": replicas} if plan.axes[1] > 1 else {}
            copies = {"e": rank.group("data")}
            found["expert_groups"] = dict(reversed(split.items())) if turned else split
            found["expert_data_groups"] = copies
        if plan.unit:
            found["mpu"] = SimpleNamespace(
                get_model_parallel_group=lambda: rank.group("tensor"),
                get_data_parallel_group=lambda: replicas,
                get_tensor_model_parallel_rank=lambda: rank.place["tensor"],
            )
        if plan.kind == "BF16Optimizer":
            return {**found, "dp_process_group": replicas}
        if plan.reduces is not None:
            found["deepspeed"] = SimpleNamespace(enable_backward_allreduce=plan.reduces)
        return found

    def accumulate(self, step: int) -> None:
        """Gradients of all micro-batches, added up over ranks."""
        self.optimizer.zero_grad()
        bf16 = self.plan.kind == "BF16Optimizer"
        rows = {piece: self._gradients(piece, step) for piece in self.params}
        for micro in range(self.plan.micro if self.rank is not None else 1):
            for piece, param in self.params.items():
                if rows[piece]:
                    old = param.grad
                    param.grad = rows[piece][micro] + (0.0 if old is None else old)
            if bf16:
                self.optimizer.update_hp_grads(clear_lp_grads=True)
        if self.rank is not None:
            self._reduce(self.rank)
        bad = self.plan.bads[step]
        if self.rank is not None and bad is not None and bad.when != "before":
            grad = self.params[piece_of(bad.name, self.rank.place)].grad
            if grad is not None and (bad.when == "all" or bad.rank == self.rank.number):
                grad[-1] = bad.value

    def _gradients(self, piece: Piece, step: int) -> list[Tensor]:
        """Of each micro-batch; of one rank with everything, their sum over ranks. May be empty."""
        plan, bad = self.plan, self.plan.bads[step]
        if plan.idle[step] == piece.name:
            return []
        over = REDUCED_OVER[piece.name]
        shares = {tuple(place[axis] for axis in over) for place in plan.places}
        numbers = {at: number for number, at in enumerate(sorted(shares))}
        if self.rank is None:
            rows = [plan.gradient(piece, share, step) for share in numbers.values()]
            total = torch.stack([grad for row in rows for grad in row]).sum(0)
            if bad is not None:
                places = plan.places if bad.when == "all" else [plan.places[bad.rank]]
                total[-1] += bad.value if piece in {piece_of(bad.name, at) for at in places} else 0
            return [total]
        here = tuple(self.rank.place[axis] for axis in over)
        found = plan.gradient(piece, numbers[here], step)
        if bad is not None and bad.when == "before" and bad.name == piece.name:
            place = plan.places[bad.rank]
            # Ranks that hold copies along the tensor axis have equal gradients.
            if piece_of(bad.name, place) == piece and tuple(place[axis] for axis in over) == here:
                found[0][-1] = bad.value
        return found

    def _reduce(self, rank: Rank) -> None:
        if self.plan.kind == "BF16Optimizer":
            shared, experts = self.optimizer.get_grads_for_reduction()
            rows = {"shared": shared, **experts}
        else:
            rows = {name: [] for name in self.plan.names}
            for piece, param in self.params.items():
                rows[piece.name] += [] if param.grad is None else [param.grad]
        for name, tensors in rows.items():
            for tensor in tensors:
                dist.all_reduce(tensor, group=rank.group(*REDUCED_OVER[name]))

    def step(self, step: int) -> None:
        """Accumulate, and take a step or skip it."""
        self.accumulate(step)
        self.optimizer.step()

    def agreed(self) -> dict[str, str]:
        """Facts that all ranks have alike."""
        optimizer = self.optimizer
        found = {
            "overflow": optimizer.overflow,
            "norm": optimizer.get_global_norm().hex(),
            "steps": sorted({int(row["step"]) for row in optimizer.state.values()}),
            "clip": optimizer.clip_grad,
        }
        if self.plan.kind != "BF16Optimizer":
            found |= {"scale": optimizer.loss_scale, **optimizer.loss_scaler.state_dict()}
        return {name: str(fact) for name, fact in found.items()}

    def weights(self) -> dict[Piece, list[int]]:
        """Of the model."""
        return {piece: bits(param.detach()) for piece, param in self.params.items()}

    def masters(self) -> dict[Piece, list[list[int]]]:
        """Masters and moments, whole; over ranks a collective."""
        optimizer, pieces = self.optimizer, list(self.params)
        if self.plan.kind == "BF16Optimizer":
            keys = [None, *(STATE if optimizer.state else ())]
            return {
                piece: [bits(optimizer.get_full_hp_param(str(piece), key)) for key in keys]
                for piece in pieces
            }
        homes = {id(param): piece for piece, param in self.params.items()}
        found = {}
        for params, group in zip(optimizer.fp16_groups, optimizer.param_groups, strict=True):
            rows = []
            for master in group["params"]:
                state = optimizer.state.get(master, {})
                rows.append([master.detach(), *(state[key] for key in STATE if state)])
            if self.plan.kind == "FP16Optimizer":
                sizes = [param.numel() for param in params]
                rows = [list(row) for row in zip(*(r.split(sizes) for r in rows[0]), strict=True)]
            for param, row in zip(params, rows, strict=True):
                found[homes[id(param)]] = [bits(tensor) for tensor in row]
        return found

    def load(self, saved: Sequence[Any]) -> None:
        """Load this rank's own of the state dicts of all ranks."""
        assert self.rank is not None
        if self.plan.kind == "BF16Optimizer":
            group = self.rank.group("data", "expert")
            entries = [saved[number] for number in dist.get_process_group_ranks(group)]
            self.optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        else:
            self.optimizer.load_state_dict(saved[self.rank.number])


@st.composite
def plans(draw: st.DrawFn, kind: str | None = None, when: str | None = None) -> Plan:
    """Plans.

    Args:
        draw: of the strategy.
        kind: the wrapper's class, or None for any.
        when: as in `Bad`, "none" for gradients that are all finite, or None for any.
    """
    kind = kind or draw(st.sampled_from(WRAPPERS))
    bf16 = kind == "BF16Optimizer"
    when = when or draw(st.sampled_from(["none", "before", *([] if bf16 else ["after", "all"])]))
    count = draw(st.sampled_from(COUNTS))
    triples = [(d, e, t) for d, e, t in product(COUNTS, repeat=3) if d * e * t == count]
    axes = draw(st.sampled_from(sorted(triples, reverse=True)))
    experts = axes[1] > 1 or draw(st.booleans())
    unit = axes[2] > 1 or draw(st.booleans())
    # What one rank alone finds, the others hear over groups that they were given.
    told = when != "after" or experts
    reduces = None if bf16 else draw(st.sampled_from([None, True, False] if told else [False]))
    names = names_of(experts, axes)
    numbers = st.integers(0, count - 1)
    bad = st.builds(
        Bad,
        st.sampled_from([math.inf, -math.inf, math.nan]),
        st.sampled_from(names),
        numbers,
        st.just(when),
    )
    at = STEPS if when == "none" else draw(st.integers(0, STEPS - 1))
    bads = [draw(bad) if step == at else None for step in range(STEPS)]
    idle = [
        draw(st.sampled_from(["", *(n for n in names if each is None or n != each.name)]))
        for each in bads
    ]
    insides = ["FusedAdam", "FusedLamb"] if kind == "FP16UnfusedOptimizer" else ["FusedAdam"]
    return Plan(
        kind=kind,
        inside=draw(st.sampled_from(insides)),
        dtype=draw(st.sampled_from(DTYPES)),
        axes=axes,
        order=draw(st.sampled_from(sorted(ORDERS))),
        seed=draw(st.integers(0, 999)),
        late=draw(st.booleans()),
        micro=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([0.0, 0.01, 1000.0])),
        norm_type=draw(st.sampled_from([1.0, 2.0, math.inf])),
        experts=experts,
        unit=unit,
        reduces=reduces,
        turned=draw(st.frozensets(numbers)),
        bads=tuple(bads),
        idle=tuple(idle),
        bucket=draw(st.sampled_from([4, 5_000_000_000])),
    )
