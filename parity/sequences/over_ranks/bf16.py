"""Actions on a BF16 wrapper over ranks, which splits its masters over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Motif, action
from twinstep.parity.sequences.bf16_motifs import UNIVERSAL
from twinstep.parity.sequences.bf16_rules import (
    OPTIONS,
    TURNS,
    BF16Rules,
    Entry,
    optimizer_of,
    wrapped,
)
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.over_ranks.model import (
    GIVEN,
    group_arguments,
    groups_over,
    has_experts,
)
from twinstep.parity.sequences.over_ranks.place import EXPERT, REPLICAS, DrawnRank
from twinstep.parity.sequences.over_ranks.rules import DRAWN, ONE_OF, OverRanks, chosen, place_of
from twinstep.parity.sequences.parts import SEEDS, like
from twinstep.parity.sequences.universal import write_universal
from twinstep.parity.sequences.world import Value, World, spared

GROUPS = (
    *("dp_process_group", "mpu", "expert_groups", "expert_data_groups", "has_moe_layers"),
    "allgather_bucket_size",
)
OVERFLOW, CLEAN = ("train", {"regime": "planted"}), ("train", {"regime": "ordinary"})
MOTIFS: dict[str, Motif] = {
    **{
        f"overflows over {ranks}": (("build", {"ranks": ranks}), *(OVERFLOW, CLEAN) * 2)
        for ranks in ("data 2", "tensor 2", "expert 2", "data 2, expert 2", "data 8")
    },
    **{
        f"a norm over {ranks}": (("build", {"ranks": ranks, "clip": 0.05}), CLEAN, CLEAN)
        for ranks in ("tensor 2", "expert 2", "data 2, tensor 2", "data 2, expert 2")
    },
    **{
        f"a checkpoint over {ranks}": (
            *(("build", {"ranks": ranks}), CLEAN, "save", CLEAN, "load", CLEAN),
            *("load_turned", CLEAN, "resume", CLEAN, "recut", CLEAN),
            *(("set_whole", {"key": ""}),) * 2,
        )
        for ranks in ("data 2", "expert 2", "data 2, expert 2", "data 3", "data 8")
    },
    **{
        f"a universal checkpoint over {ranks}": (
            *(("build", {"ranks": ranks}), CLEAN, UNIVERSAL, "save", CLEAN, CLEAN),
        )
        for ranks in ("data 2", "data 8", "tensor 2", "expert 2")
    },
    **{
        f"a gather in pieces over {ranks}": (
            ("build", {"ranks": ranks, "bucket": 24, "groups": 3, "tiny": False}),
            *(CLEAN, *(("set_whole", {"key": ""}),) * 3),
        )
        for ranks in ("data 2", "data 3", "data 2, tensor 2")
    },
    **{
        f"padding alone over {ranks}": (
            ("build", {"ranks": ranks, "groups": 1, "tiny": True}),
            *(CLEAN, UNIVERSAL, CLEAN, UNIVERSAL),
        )
        for ranks in ("data 3", "data 4", "data 2, expert 2", "data 7", "data 8")
    },
    "experts without tokens": (
        ("build", {"ranks": "data 2, expert 2"}),
        *("fill", "forget", "update_hp_grads", "step") * 2,
    ),
    "one rank has other names": (
        ("build", {"ranks": "data 2"}),
        *(("construct_renamed", {"on": 1}),) * 2,
    ),
    "one rank is refused": ("construct_wrongly", CLEAN, "load_damaged", CLEAN, "load_damaged"),
}


class BF16OverRanks(OverRanks, BF16Rules):
    """The same actions on all ranks, whose gradients are reduced before every step."""

    motifs = MOTIFS

    @action(
        seed=SEEDS,
        groups=(1, 1, 2, 3),
        tiny=(False, False, True),
        **OPTIONS,
        given=GIVEN,
        bucket=(5_000_000_000, 24, 100),
        **DRAWN,
    )
    def build(  # type: ignore[override]
        self, cls: Callable[..., object], dtype: str, device: str, rank: DrawnRank, **values: Value
    ) -> World:
        """Groups of shared parameters or of experts, some frozen, around a fresh optimizer."""
        seed, rank.shares = int(values["seed"]), True
        dice = Dice(seed)
        given = str(values["given"])
        experts, count = has_experts(rank, given), int(values["groups"])
        turns = TURNS if dtype == "mixed" else (dtype,)
        groups = groups_over(
            dice,
            [turns[number % len(turns)] for number in range(count + experts)],
            device,
            seed,
            rank,
            experts,
            hyper=self.drawn_hyper,
            tiny=bool(values["tiny"]),
        )
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        for param in params[1:]:
            param.requires_grad_(dice.pick((True, True, True, False)))
        options = self.drawn_options(dice, values) | {
            "allgather_bucket_size": values["bucket"],
            "dp_process_group": rank.group(*REPLICAS),
            "has_moe_layers": experts,
            **group_arguments(dice, rank, given),
        }
        return World(
            cls=cls,
            options=options,
            params=params,
            optimizer=wrapped(cls, groups, options),
            device=torch.device(device),
            more={
                "dtype": dtype,
                "groups": [len(cast(list[Tensor], group["params"])) for group in groups],
                "marked": [
                    {key: row[key] for key in ("moe", "name") if key in row} for row in groups
                ],
                "trained": [param.requires_grad for param in params],
            },
            rank=rank,
        )

    def construct(self, world: World, wrong: Mapping[str, object]) -> None:
        """Construct another one over copies of the parameters, with the same groups."""
        given = {name: world.options[name] for name in GROUPS if name in world.options}
        groups = self.copied_groups(world, [like(param) for param in world.params])
        wrapped(world.cls, groups, {**given, **wrong})

    @action(on=ONE_OF)
    def construct_renamed(self, world: World, on: int) -> None:
        """Try to construct one whose parameters have other names on one rank."""
        copies = [like(param) for param in world.params]
        word = "q" if chosen(world, on) else "p"
        names = {param: f"{word}{at}" for at, param in enumerate(copies)}
        given = {name: world.options[name] for name in GROUPS if name in world.options}
        groups = self.copied_groups(world, copies)
        wrapped(world.cls, groups, {**given, "param_names": names})

    @action(often=5, drives=("step",))
    def step(self, world: World) -> object:
        """Reduce gradients over ranks, then update once."""
        self.reduced(world)
        return super().step(world)

    @action(often=2, drives=("get_grads_for_reduction",))
    def reduce(self, world: World) -> object:  # type: ignore[override]
        """Average the accumulators over ranks that hold the same."""
        return self.reduced(world)

    def reduced(self, world: World) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Average the accumulators over the ranks that hold the same."""
        shared, experts = optimizer_of(world).get_grads_for_reduction()
        place = place_of(world)
        for axes, flats in ((REPLICAS, shared), (("data",), experts.get(EXPERT, []))):
            for flat in flats:
                dist.all_reduce(flat, dist.ReduceOp.AVG, group=place.group(*axes))
        return shared, experts

    def entries(self, world: World, entry: Entry) -> Sequence[Entry]:
        """Entries of all ranks that masters are split over."""
        group = cast("dist.ProcessGroup", world.options["dp_process_group"])
        given = place_of(world).exchange(copy.deepcopy(entry))
        own = place_of(world).number
        return [
            entry if number == own else copy.deepcopy(given[number])
            for number in dist.get_process_group_ranks(group)
        ]

    @action(drives=("load_state_dict",))
    def load_turned(self, world: World) -> None:
        """Try to load the entries of all ranks in the reverse order."""
        self.save(world)
        given = self.entries(world, self._read(world))[::-1]
        optimizer_of(world).load_state_dict(given, load_from_fp32_weights=True)

    @action(drives=("load_state_dict",), seed=SEEDS)
    def recut(self, world: World, seed: int) -> None:
        """Save now; load into an instance that is split over all ranks if this one is not."""
        if world.options["has_moe_layers"]:
            return
        self.save(world)
        given = self.entries(world, self._read(world))
        alone, replicas = place_of(world).group(), place_of(world).group(*REPLICAS)
        whole = world.options["dp_process_group"] is alone
        world.options["dp_process_group"] = replicas if whole else alone
        self.made_anew(world, seed)
        optimizer_of(world).load_state_dict(given, load_from_fp32_weights=True)

    @action(
        drives=("load_state_dict",),
        seed=SEEDS,
        states=(True, False),
        missing=("", "", "folder", "weight", "elements"),
        on=ONE_OF,
    )
    def load_universal(  # type: ignore[override]
        self, world: World, seed: int, states: bool, missing: str, on: int
    ) -> None:
        """Load a universal checkpoint, or try to where a part is missing on one rank or on all."""
        place = place_of(world)
        rows = [(f"p{at}", param) for at, param in enumerate(world.params)]
        lacks = missing if chosen(world, on) else ""
        groups = optimizer_of(world).param_groups
        self.save(world)
        with TemporaryDirectory() as folder:
            seed_of = partial(place.seed_of, gradient=False)
            write_universal(Path(folder), rows, groups, seed, lacks, seed_of)
            whole = partial(optimizer_of(world).load_state_dict, [], Path(folder))
            load = partial(spared, world, whole, load_optimizer_states=states)
            self.load_on_all(world, load, stays=True)
