"""Actions on an optimizer with the interface of `ZeroOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Action, Rules, action
from twinstep.parity.sequences.bf16_rules import NUMBERS, TURNS, BF16Rules
from twinstep.parity.sequences.fills import REGIMES, Dice, filled
from twinstep.parity.sequences.fp16_parts import Timers
from twinstep.parity.sequences.fp16_rules import ADAM, FP16Rules
from twinstep.parity.sequences.parts import (
    GRAPHS,
    RANKS,
    SEEDS,
    Group,
    add_to,
    backward_twice,
    curved,
    left_out,
    like,
    parameters,
    side_of,
)
from twinstep.parity.sequences.shards import shards
from twinstep.parity.sequences.world import Act, OnRank, Value, World
from twinstep.parity.sequences.zero_parts import (
    MEANS,
    OPTIONS,
    PASSED,
    REFUSED,
    at_the_floor,
    drawn_options,
    inner,
)

if TYPE_CHECKING:
    from twinstep.reference.optimizers.zero import ZeroOptimizer

# Options that a run may go on with as others.
MOVABLE = ("partition_grads", "round_robin_gradients", "reduce_bucket_size", "clip_grad")
PLAIN_TRAIN: dict[str, Value] = {"regime": "ordinary", "missing": 0}
KINDS = ("model_weights", "master_weights", "gradients", "optimizer_state")


def zero_of(world: World) -> ZeroOptimizer:
    """The optimizer, typed."""
    return cast("ZeroOptimizer", world.optimizer)


class ZeroRules(BF16Rules):
    """Gradients taken in every way, reduced, and partitions of masters with all around a step.

    Gradients that come after a reduction are reduced before a step: ours refuse it otherwise.
    """

    least = 4
    # A backward of ours meets one after it has taken others, where the reference takes none.
    sparse = False
    hyper = dict[str, Sequence[object]](ADAM)
    passed = PASSED  # type: ignore[assignment]
    exempt = {
        **{name: why for name, why in BF16Rules.exempt.items() if why != RANKS},
        **dict.fromkeys(("mpu", "dp_process_group", "has_moe_layers"), RANKS),
        **dict.fromkeys(("expert_parallel_group", "expert_data_parallel_group"), RANKS),
        "destroy": "called, and does nothing in the reference, which has no hooks",
    }
    refused = REFUSED
    motifs = {
        # Accumulators are each side's own here, so nothing clips them by hand.
        **{n: m for n, m in BF16Rules.motifs.items() if n != "gradients clipped by hand"},
        "micro-batches": (("train", {**PLAIN_TRAIN, "micros": 3}),) * 2,
        "sums that are zeroed": (("build", {"stage": 1}), "backward", "zero_grad", "train"),
        "gradients taken by hand": (
            *(("by_hand", {"then": "take"}), ("by_hand", {"then": "reduce"})),
            *(("by_hand", {"then": "take"}), "backward", "step"),
        ),
        "steps without a gradient": (("zero_grad", {"how": "drop"}), "step", "fill", "step"),
        "refused steps": ("train", "refuse", "refuse", "train"),
        "a scale from outside": (("override", {"scale": 64.0}), "train", "train"),
        "files of DeepSpeed": ("train", "load_shards", "train", "load_shards", "train"),
        "hooks that are gone": ("train", "set_lr", "destroy", "train"),
    }

    def actions(self) -> dict[str, Action]:
        """Every action but those on accumulators, which here are each side's own."""
        gone = ("update_hp_grads", "clear", "grads_for_norm")
        return {name: row for name, row in super().actions().items() if name not in gone}

    @action(
        seed=SEEDS,
        groups=(1, 1, 2, 3),
        **OPTIONS,
        alike=(False, False, True),
        omitted=(False, False, True),
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """Groups of parameters, some frozen, around a fresh optimizer."""
        seed = int(values["seed"])
        dice = Dice(seed)
        groups: list[Group] = []
        for number in range(int(values["groups"])):
            own = TURNS[number % 3] if dtype == "mixed" else dtype
            row = parameters(dice, own, device, seed + number, False)
            hyper = self.drawn_hyper(Dice(seed) if values["alike"] else dice)
            groups.append({"params": row, **hyper})
        options = drawn_options(dice, {**values, "dtype": dtype})
        if values["omitted"]:
            options = left_out(dice, options)
            # What remains may depend on it.
            options |= {} if "reduce_scatter" in options else dict(MEANS["scatter"])
        return self.world_of(cls, dtype, device, dice, groups, options)

    def world_of(
        self,
        cls: Callable[..., object],
        dtype: str,
        device: str,
        dice: Dice,
        groups: Sequence[Group],
        options: dict[str, object],
        rank: OnRank | None = None,
    ) -> World:
        """A world around groups of parameters, of which some get frozen."""
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        for param in params[1:]:
            param.requires_grad_(dice.pick((True, True, True, False)))
        world = World(
            cls=cls,
            options=options,
            params=params,
            optimizer=None,
            device=torch.device(device),
            rank=rank,
            more={
                "dtype": dtype,
                "groups": [len(cast(list[Tensor], group["params"])) for group in groups],
                "marked": [
                    {key: row[key] for key in ("moe", "name") if key in row} for row in groups
                ],
                "trained": [param.requires_grad for param in params],
                "reduced": False,
                "refused": False,
            },
        )
        world.optimizer = self.made(world, groups, options)
        return world

    def made(
        self,
        world: World,
        groups: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
    ) -> object:
        """An optimizer around a fresh one, of the side that the world's class is on."""
        given = dict(options)
        inside = inner(side_of(world.cls), str(given.pop("inside", "adamw")), groups)
        params = [param for group in groups for param in cast(Sequence[Tensor], group["params"])]
        if given.pop("timers", False):
            given["timers"] = Timers(world.events)
        if "compat" in given:
            fields = dict.fromkeys(cast(Sequence[str], given["compat"]), True)
            given["compat"] = import_module("twinstep.contract.compat").Compat(**fields)
        names = {param: f"p{at}" for at, param in enumerate(params)}
        return world.cls(inside, **{"param_names": names, **given})

    def construct(self, world: World, wrong: Mapping[str, object]) -> None:
        """Construct another one over copies of the parameters."""
        more = {"dynamic_loss_scale": True} if "dynamic_loss_args" in wrong else {}
        groups = self.copied_groups(world, [like(param) for param in world.params])
        self.made(world, groups, {**self.kept_options(world), **more, **wrong})

    def kept_options(self, world: World) -> dict[str, object]:
        """Options that another one over the same parameters needs."""
        del world
        return {}

    def made_anew(self, world: World, seed: int) -> None:
        """Go on with a new instance over copies of the parameters, with some other options."""
        dice = Dice(seed)
        copies = [like(param) for param in world.params]
        groups = [{**self.drawn_hyper(dice), **row} for row in self.copied_groups(world, copies)]
        values = {name: dice.pick(row) for name, row in OPTIONS.items()}
        drawn = drawn_options(dice, {**values, "dtype": str(world.more["dtype"])})
        world.options |= {name: drawn[name] for name in MOVABLE if seed}
        # What was frozen since keeps its place in the masters.
        for copied, trained in zip(copies, cast(list[bool], world.more["trained"]), strict=True):
            copied.requires_grad_(trained)
        world.optimizer = self.made(world, groups, world.options)
        for copied, param in zip(copies, world.params, strict=True):
            copied.requires_grad_(param.requires_grad)
        world.params, world.scheduler = copies, None
        world.more["reduced"] = False

    def apply(self, world: World, act: Act) -> object:
        """Carry out an action, and read what the last step left behind."""
        try:
            return Rules.apply(self, world, act)
        finally:
            world.more["readings"] = self.readings(world)

    def readings(self, world: World) -> dict[str, object]:
        """Facts of the last step; after one that was refused, each side has its own."""
        optimizer = zero_of(world)
        found: dict[str, object] = {"scale": optimizer.loss_scale}
        if optimizer.scales:
            found["scaler"] = optimizer.loss_scaler.state_dict()
        if not world.more["refused"]:
            found |= {"overflow": optimizer.overflow, "norm": optimizer.get_global_norm()}
        return found

    def turn_of(self, world: World) -> int:
        """Number of this rank among those with gradients of their own."""
        del world
        return 0

    def anyone(self, world: World, flag: bool) -> bool:
        """True if a flag is set, on any rank."""
        del world
        return flag

    def loss_of(self, world: World, seed: int, regime: str, missing: int, graph: str) -> Tensor:
        """A loss whose gradients are those of the regime; ranks differ in what is missing.

        They differ in the order, too, in which their gradients arrive.
        """
        add_to(world.params)
        turn, count = self.turn_of(world), len(world.params)
        loss = torch.zeros((), device=world.device, requires_grad=True) * 1.0
        for at in range(count):
            index = (at + turn) % count
            if missing >> ((index + turn) % 3) & 1:
                continue
            param, here = world.params[index], world.regime_at(regime, index, seed)
            weight = filled(tuple(param.shape), param.dtype, here, world.seed_of(index, seed))
            product = param.float() * weight.to(world.device).float()
            loss = loss + curved(product, graph).sum()
        return loss

    @action(
        often=6,
        drives=("backward",),
        seed=SEEDS,
        regime=(*REGIMES[:1] * 2, *REGIMES, "planted"),
        missing=(0, 0, 0, *range(8)),
        graph=GRAPHS,
    )
    def backward(  # type: ignore[override]
        self, world: World, seed: int, regime: str, missing: int, graph: str
    ) -> None:
        """Backward through the optimizer, on top of gradients that are there."""
        loss = self.loss_of(world, seed, regime, missing, graph)
        world.more["reduced"] = zero_of(world).partition_gradients
        self.run_backward(zero_of(world).backward, loss, graph)

    def run_backward(self, backward: Callable[..., None], loss: Tensor, graph: str) -> None:
        """Run backward; a second time if the graph is retained."""
        backward_twice(backward, loss, graph, ("retain_graph", "create_graph"))

    @action(
        often=9,
        drives=("backward", "step"),
        seed=SEEDS,
        regime=(*REGIMES[:1] * 4, *REGIMES, "planted"),
        missing=(0, 0, 0, *range(8)),
        micros=(1, 1, 2, 3),
    )
    def train(  # type: ignore[override]
        self, world: World, seed: int, regime: str, missing: int, micros: int
    ) -> object:
        """Backward through the optimizer for some micro-batches, then one update."""
        for micro in range(micros):
            own = seed + 101 * micro if seed else 0
            self.backward(world, own, regime, missing, "")
        return self.step(world)

    @action(
        often=4,
        seed=SEEDS,
        missing=(0, 0, 0, *range(8)),
        then=("reduce", "take", "nothing"),
    )
    def by_hand(self, world: World, seed: int, missing: int, then: str) -> None:
        """Backward past the optimizer, of a loss that is scaled by hand."""
        loss = self.loss_of(world, seed, "ordinary", missing, "")
        backward_twice(torch.autograd.backward, loss * zero_of(world).loss_scale, "")
        if then == "reduce":
            self.reduce(world)
        elif then == "take":
            self.take(world)

    @action(often=2, drives=("fill_grad_accum_attribute",))
    def take(self, world: World) -> None:
        """Take the gradients into the sums of this rank."""
        zero_of(world).fill_grad_accum_attribute()
        world.more["reduced"] = False

    @action(often=2, drives=("reduce_gradients",))
    def reduce(self, world: World) -> None:  # type: ignore[override]
        """Take the gradients, and reduce all sums."""
        zero_of(world).reduce_gradients()
        world.more["reduced"] = True

    @action(often=5, drives=("step",))
    def step(self, world: World) -> object:
        """Update once."""
        return self.stepped(world, zero_of(world).step)

    def stepped(self, world: World, step: Callable[[], object]) -> object:
        """Update once, after gradients that came late have been reduced."""
        late = any(param.grad is not None for param in world.params)
        if world.more["reduced"] and self.anyone(world, late):
            self.reduce(world)
        world.updating()
        with at_the_floor(world):
            result = step()
        world.more["reduced"] = world.more["refused"] = False
        return result

    @action(kind=("closure", "rate", "sparse"), number=NUMBERS)
    def refuse(self, world: World, kind: str, number: int) -> object:
        """Try a step that should be refused."""
        return self.stepped(world, lambda: self.wrong_step(world, kind, number))

    def wrong_step(self, world: World, kind: str, number: int) -> object:
        """Take a step with a closure, a rate that is no number, or a sparse gradient."""
        optimizer, param = zero_of(world), world.params[number % len(world.params)]
        group = optimizer.param_groups[0]
        rate, grad = group["lr"], param.grad
        sparse = kind == "sparse" and param.requires_grad and param.dim() > 0
        if kind == "rate":
            group["lr"] = "fast"
        if sparse:
            param.grad = torch.ones_like(param).to_sparse()
        try:
            return optimizer.step(lambda: 0.0) if kind == "closure" else optimizer.step()
        finally:
            group["lr"] = rate
            if sparse:
                param.grad = grad

    @action(often=2, drives=("zero_grad",), how=("as it is", "drop", "zero"))
    def zero_grad(self, world: World, how: str) -> object:
        """Drop or zero the gradients, which the caller holds, and forget all sums."""
        held = super().zero_grad(world, how)
        world.more["reduced"] = False
        return held

    @action(often=2, drives=("get_global_norm",))
    def ask(self, world: World) -> object:
        """Ask for the norm of the last step; after one that was refused, each side has its own."""
        return None if world.more["refused"] else zero_of(world).get_global_norm()

    override = FP16Rules.override
    assign_scale = FP16Rules.assign_scale
    set_clip = FP16Rules.set_clip

    @action(
        drives=("load_state_dict",),
        seed=SEEDS,
        saved=(1, 2, 3),
        dealt=(False, True),
        gaps=(False, False, True),
    )
    def load_shards(self, world: World, seed: int, saved: int, dealt: bool, gaps: bool) -> None:
        """Load files of DeepSpeed; `gaps`: those of as many ranks, of which each has its own."""
        own, parts = self.part_of(world)
        found = shards(
            world,
            zero_of(world).loss_scaler.state_dict(),
            seed,
            parts if gaps else saved,
            dealt=bool(world.options.get("round_robin_gradients")) if gaps else dealt,
            padded=not gaps,
            seed_of=self.seed_in(world),
        )
        given = [row if at == own or not gaps else None for at, row in enumerate(found)]
        zero_of(world).load_state_dict(given, load_from_fp32_weights=True)

    def part_of(self, world: World) -> tuple[int, int]:
        """Place of this rank among those that masters are split over, and their number."""
        del world
        return 0, 1

    def seed_in(self, world: World) -> Callable[[Tensor, int], int]:
        """Seed of what a rank holds of a parameter, from that of its place."""
        del world
        return lambda param, own: own

    @action(drives=("memory_report",))
    def report(self, world: World) -> object:
        """Bytes by kind; sums and buckets are each side's own."""
        found = zero_of(world).memory_report()
        return {kind: found[kind] for kind in KINDS}
