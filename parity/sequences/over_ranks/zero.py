"""Actions on `ZeroOptimizer` over ranks, which also goes on over fewer or more of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch.distributed as dist
from torch import Tensor

from twinstep.parity.sequences.actions import Motif, Step, action
from twinstep.parity.sequences.bf16_rules import NUMBERS, TURNS
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.over_ranks.bf16 import BF16OverRanks
from twinstep.parity.sequences.over_ranks.model import (
    group_arguments,
    groups_over,
    has_experts,
)
from twinstep.parity.sequences.over_ranks.place import (
    EXPERT,
    OWN_EXPERT,
    REPLICAS,
    DrawnRank,
)
from twinstep.parity.sequences.over_ranks.rules import ONE_OF, chosen, place_of
from twinstep.parity.sequences.parts import SEEDS, like
from twinstep.parity.sequences.world import Value, World
from twinstep.parity.sequences.zero_parts import OPTIONS, drawn_options
from twinstep.parity.sequences.zero_rules import PLAIN_TRAIN, ZeroRules, zero_of

# Three axes at once are those of the other wrappers; here every rank takes part in every action.
ZERO_WORLDS = (
    *("data 1", "data 2", "data 2", "data 3", "expert 2", "tensor 2"),
    *("data 2, expert 2", "data 2, tensor 2", "data 4", "data 7"),
)
# Orders in which all elements of a message are added up alike, however buckets are cut.
ALIKE = ("ranks", "tree", "halving")
# Parameters of a group; a round robin needs some.
MANY = (2, 1, 3, 5)
# What ranks should have alike: a value that another rank has not.
OTHERS: Mapping[str, object] = {
    "partition_grads": None,
    "round_robin_gradients": None,
    "reduce_bucket_size": 11,
    "clip_grad": 0.123,
    "gradient_average": None,
    "elastic_checkpoint": None,
}
CLEAN: Step = ("train", PLAIN_TRAIN)
OVERFLOW: Step = ("train", {"regime": "planted", "missing": 0})
MICROS: Step = ("train", {**PLAIN_TRAIN, "micros": 3})
FREEZE: Step = ("freeze", {"trained": False})
LOAD: Step = ("load", {"states": True, "masters": True})
UNIVERSAL: Step = ("load_universal", {"states": True, "missing": ""})


SOME: Step = ("train", {"regime": "ordinary", "missing": 3})
# Gradients that are there before a backward, some of frozen parameters.
EARLY: Motif = (("by_hand", {"then": "nothing"}), "forget", FREEZE, FREEZE, "backward", "step")
# Sums that are forgotten, and weights that somebody loads.
LATE: Motif = (
    *(("by_hand", {"then": "take"}), "zero_grad", "load_weights", CLEAN),
    *("fill", "forget", "step"),
)


def built(ranks: str, stage: int, **fixed: Value) -> Step:
    """A construction with a scale that moves; in stage 1 with sums that the wire rounds."""
    rounds: dict[str, Value] = {"sums": "fp32", "wire": ""} if stage == 1 else {}
    drawn: dict[str, Value] = {"ranks": ranks, "stage": stage, "scale": "dynamic"}
    return ("build", {**drawn, **rounds, **fixed})


MOTIFS: dict[str, Motif] = {
    **{
        f"overflows over {ranks}, stage {stage}": (
            *(built(ranks, stage, mean=mean), OVERFLOW, MICROS, SOME, OVERFLOW),
            *LATE,
        )
        for ranks, stage, mean in (
            *(("data 2", 2, "after"), ("data 3", 1, "scatter")),
            *(("data 2, expert 2", 2, "scatter"), ("data 2, tensor 2", 1, "after")),
        )
    },
    **{
        f"small buckets over {ranks}, stage {stage}": (
            built(ranks, stage, bucket=bucket, mean=mean, groups=2, tiny=False),
            *(MICROS, *EARLY, CLEAN),
        )
        for ranks, stage, bucket, mean in (
            *(("data 2", 2, 9, "scatter"), ("data 3", 1, 40, "after"), ("data 4", 2, 1, "before")),
            *(("expert 2", 1, 40, "scatter"), ("data 2, expert 2", 2, 40, "scatter")),
            *(("data 2, tensor 2", 2, 40, "after"), ("data 7", 2, 9, "reduce")),
        )
    },
    **{
        f"a norm over {ranks}": (built(ranks, stage, clip=0.05, groups=2), CLEAN, MICROS, *LATE)
        for ranks, stage in (("tensor 2", 2), ("data 2, tensor 2", 1), ("data 2, expert 2", 1))
    },
    **{
        f"a checkpoint over {ranks}, stage {stage}": (
            built(ranks, stage, mean=mean, given="", inside="adamw", groups=2),
            *(MICROS, "save", CLEAN, "load", ("recut", {"size": 1}), CLEAN),
            *(("recut", {"size": 8}), CLEAN, "resume", CLEAN, ("load_shards", {"gaps": True})),
        )
        for ranks, stage, mean in (
            *(("data 2", 2, "scatter"), ("data 3", 1, "scatter"), ("data 4", 1, "after")),
            *(("data 2, tensor 2", 2, "reduce"), ("data 2", 1, "after")),
        )
    },
    "a round robin, and files of DeepSpeed": (
        *(built("data 3", 2, robin=True, given="", inside="adamw", tiny=False, groups=3), CLEAN),
        *("save", CLEAN, LOAD, CLEAN, "resume", CLEAN, ("load_shards", {"gaps": True}), CLEAN),
        *(("load_shards", {"gaps": False}), CLEAN),
    ),
    "a universal checkpoint": (
        *(built("data 3", 1), CLEAN, UNIVERSAL, CLEAN, ("set_whole", {"publish": True})),
        *("whole", "save", CLEAN),
    ),
    "padding alone": (built("data 4", 2, tiny=True, groups=1), MICROS, SOME, "resume", CLEAN),
    "one rank is refused": (
        *("construct_otherwise", "construct_wrongly", CLEAN, "refuse"),
        *(CLEAN, "load_damaged", "construct_renamed", CLEAN),
    ),
}


class ZeroOverRanks(BF16OverRanks, ZeroRules):
    """The same actions on all ranks; gradients, what is missing and the order differ on each."""

    motifs = MOTIFS

    @action(
        seed=SEEDS,
        groups=(1, 1, 2, 3),
        tiny=(False, False, True),
        **OPTIONS,
        given=("", "experts"),
        ranks=ZERO_WORLDS,
        order=ALIKE,
    )
    def build(  # type: ignore[override]
        self, cls: Callable[..., object], dtype: str, device: str, rank: DrawnRank, **values: Value
    ) -> World:
        """Groups of shared parameters or of experts, some frozen, around a fresh optimizer."""
        seed, rank.shares = int(values["seed"]), True
        dice, given = Dice(seed), str(values["given"])
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
            counts=MANY,
        )
        drawn = {**values, "dtype": dtype}
        if experts:
            drawn["mean"] = "scatter" if drawn["mean"] != "sum" else "sum"
        if rank.sizes["tensor"] > 1 and drawn["inside"] == "lamb":
            # Its trust ratio would be that of what a rank holds, and copies would drift apart.
            drawn["inside"] = "adam"
        options = drawn_options(dice, drawn)
        options |= self.groups_of(rank, group_arguments(dice, rank, given))
        options |= {"has_moe_layers": experts, "dp_process_group": rank.group(*REPLICAS)}
        if experts:
            options["contiguous_gradients"] = True
        # What is not finite stays, where all steps are taken: copies would differ.
        rank.alone = bool(options["check_grad_overflow"])
        world = self.world_of(cls, dtype, device, dice, groups, options, rank)
        world.more["parts"] = rank.sizes["data"]
        return world

    def groups_of(self, rank: DrawnRank, given: Mapping[str, object]) -> dict[str, object]:
        """Arguments with process groups under the names that this constructor has for them."""
        found = dict(given)
        split = cast("Mapping[str, object]", found.pop("expert_groups", {}))
        copies = cast("Mapping[str, object]", found.pop("expert_data_groups", {}))
        if split:
            alone = {OWN_EXPERT: rank.group()} if OWN_EXPERT in split else {}
            found["expert_parallel_group"] = split
            found["expert_data_parallel_group"] = {**copies, **alone}
        return found

    def kept_options(self, world: World) -> dict[str, object]:
        """Groups of ranks, and what experts need."""
        names = ("dp_process_group", "mpu", "expert_parallel_group", "expert_data_parallel_group")
        return {
            name: world.options[name]
            for name in (*names, "has_moe_layers")
            if name in world.options
        }

    construct = ZeroRules.construct

    @action(on=ONE_OF)
    def construct_renamed(self, world: World, on: int) -> None:
        """Try to construct one whose parameters have other names on one rank."""
        copies = [like(param) for param in world.params]
        word = "q" if chosen(world, on) else "p"
        names = {param: f"{word}{at}" for at, param in enumerate(copies)}
        given = {**self.kept_options(world), "param_names": names}
        self.made(world, self.copied_groups(world, copies), given)

    def turn_of(self, world: World) -> int:
        """Number of this rank among those with gradients of their own."""
        place = place_of(world)
        return place.at["data"] * place.sizes["expert"] + place.at["expert"]

    def anyone(self, world: World, flag: bool) -> bool:
        """True if a flag is set, on any rank."""
        return any(place_of(world).exchange(flag))

    def part_of(self, world: World) -> tuple[int, int]:
        """Place of this rank among those that masters are split over, and their number."""
        group = cast("dist.ProcessGroup", world.options["dp_process_group"])
        numbers = dist.get_process_group_ranks(group)
        return numbers.index(place_of(world).number), len(numbers)

    def seed_in(self, world: World) -> Callable[[Tensor, int], int]:
        """Seed of what a rank holds of a parameter, from that of its place."""
        return partial(place_of(world).seed_of, gradient=False)

    @action(often=5, drives=("step",))
    def step(self, world: World) -> object:
        """Update once."""
        return ZeroRules.step(self, world)

    def run_backward(self, backward: Callable[..., None], loss: Tensor, graph: str) -> None:
        """Run backward, which waits for other ranks: filters of warnings would not be put back."""
        twice = graph == "retain"
        for retained in (True, False) if twice else (False,):
            backward(loss, retain_graph=retained)

    def stepped(self, world: World, step: Callable[[], object]) -> object:
        """Update once; where that is refused, all ranks go on without these gradients."""
        world.more["refused"], reports = True, len(world.events)
        try:
            super().stepped(world, step)
            # Ours learn what other ranks refuse when something is read.
            found = zero_of(world).overflow
        except Exception:
            self.zero_grad(world, "as it is")
            # Ours have reported their times by then.
            del world.events[reports:]
            raise
        world.more["refused"] = False
        return found

    @action(often=2, drives=("reduce_gradients",))
    def reduce(self, world: World) -> None:  # type: ignore[override]
        """Take the gradients, and reduce all sums."""
        ZeroRules.reduce(self, world)

    @action(
        drives=("step",), kind=("closure", "rate", "sparse", "scale"), number=NUMBERS, on=ONE_OF
    )
    def refuse(  # type: ignore[override]
        self, world: World, kind: str, number: int, on: int
    ) -> object:
        """Try a step that should be refused, on one rank or on all."""
        mine = kind if chosen(world, on) else ""
        return self.stepped(world, lambda: self.wrong_step(world, mine, number))

    def wrong_step(self, world: World, kind: str, number: int) -> object:
        """Take a wrong step, which may be one with a scale of its own."""
        optimizer = zero_of(world)
        if kind != "scale" or not optimizer.scales:
            return super().wrong_step(world, kind, number)
        before = optimizer.external_loss_scale
        optimizer.override_loss_scale(2.0**-7)
        try:
            result = optimizer.step()
            # Ranks with the scale of the others learn of it here.
            _ = optimizer.overflow
            return result
        finally:
            optimizer.override_loss_scale(before)

    @action(seed=SEEDS, on=ONE_OF)
    def construct_otherwise(self, world: World, seed: int, on: int) -> None:
        """Try to construct one with an option that is another on one rank, or on all."""
        name = Dice(seed).pick(tuple(OTHERS))
        other = OTHERS[name]
        other = not world.options.get(name, True) if other is None else other
        before = {name: world.options[name]} if name in world.options else {}
        self.construct(world, {name: other} if chosen(world, on) else before)

    @action(often=2, drives=("load_state_dict",), seed=SEEDS, size=(1, 2, 3, 8))
    def recut(  # type: ignore[override]
        self, world: World, seed: int, size: int
    ) -> None:
        """Save now; go on with so many data-parallel ranks together, all with one state."""
        place = place_of(world)
        size = min(size, place.sizes["data"])
        self.save(world)
        entries = place.exchange(copy.deepcopy(self._read(world)))
        at = cast(int, world.more["parts"])
        own = [
            copy.deepcopy(entry)
            for entry, there in zip(entries, place.places, strict=True)
            if there["data"] < at and there["tensor"] == place.at["tensor"]
        ]
        replicas = place.cut(size, *REPLICAS)
        world.options["dp_process_group"] = replicas
        if "mpu" in world.options:
            unit = {**vars(world.options["mpu"]), "get_data_parallel_group": lambda: replicas}
            world.options["mpu"] = SimpleNamespace(**unit)
        named = cast("Mapping[str, object]", world.options.get("expert_data_parallel_group", {}))
        if EXPERT in named:
            copies = {**named, EXPERT: place.cut(size, "data")}
            world.options["expert_data_parallel_group"] = copies
        # What is refused here would leave weights of some ranks behind.
        world.options["elastic_checkpoint"] = True
        world.more["parts"], place.apart = size, place.at["data"] // size
        self.made_anew(world, seed)
        zero_of(world).load_state_dict(own, load_from_fp32_weights=True)
