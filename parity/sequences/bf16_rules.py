"""Actions on an optimizer with the interface of `BF16Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from twinstep.parity.sequences.actions import action
from twinstep.parity.sequences.bf16_motifs import MOTIFS
from twinstep.parity.sequences.damage import inside_of
from twinstep.parity.sequences.fills import NAN, REGIMES, Dice, filled
from twinstep.parity.sequences.parts import (
    EXTENTS,
    GRAPHS,
    GROUPS,
    RANKS,
    SEEDS,
    Group,
    backward_twice,
    curved,
    left_out,
    like,
    optimizers_of,
    parameters,
    side_of,
    train,
)
from twinstep.parity.sequences.rules import OptimizerRules
from twinstep.parity.sequences.universal import write_universal
from twinstep.parity.sequences.world import Act, Value, World, spared

if TYPE_CHECKING:
    from twinstep.reference.optimizers.bf16 import BF16Optimizer

NUMBERS = range(12)
TURNS = ("bf16", "fp32", "fp16")
ACCUMULATION = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Arguments of `build` that are options of the constructor.
OPTIONS: dict[str, Any] = {
    "accumulation": ("fp32", "bf16", "bf16"),
    "clip": (0.0, 0.7, 0.05, 30.0, -1.0),
    "norm": (2.0, 2.0, 1.0, float("inf")),
    "immediate": (False, False, True),
    "keep": (False, False, True),
}
Entry = dict[str, object]


def optimizer_of(world: World) -> BF16Optimizer:
    """The optimizer, typed."""
    return cast("BF16Optimizer", world.optimizer)


def wrapped(
    cls: Callable[..., object],
    groups: Sequence[Mapping[str, object]],
    options: Mapping[str, object],
) -> object:
    """An optimizer around a fresh `FusedAdam` of its own side."""
    side, given = side_of(cls), dict(options)
    mode, keep = given.pop("adam_w_mode", True), bool(given.pop("keep", False))
    params = [param for group in groups for param in cast(Sequence[Tensor], group["params"])]
    names = {param: f"p{at}" for at, param in enumerate(params)}
    adam = import_module(f"{optimizers_of(side)}.fused_adam").FusedAdam
    inside = adam([dict(group) for group in groups], adam_w_mode=mode)
    if keep:
        given["compat"] = import_module("twinstep.contract.compat").Compat(
            keep_masters_on_load=True
        )
    return cls(inside, **{"param_names": names, **given})


class BF16Rules(OptimizerRules):
    """Accumulators, partitions and masters: what `FusedAdam` has, and all that is around a step.

    With dtype `mixed` every group has a dtype of its own. Copies of the optimizer are left out:
    copied parameters are no views of flat buffers, on either side.
    """

    hyper = {
        "lr": (3.7e-3, 0.25, 2.3e-5, 0.0),
        "betas": ((0.8765, 0.9987), (0.5, 0.95), (0.0, 0.99995)),
        "eps": (3e-6, 1.3e-3, 1e-10),
        "weight_decay": (0.013, 0.0, 0.31, -0.02),
        "bias_correction": (True, False),
    }
    tensor_hyper = cpu_offload = True
    passed = (
        *("init_optimizer", "param_names", "clip_grad", "norm_type", "grad_acc_dtype"),
        *("immediate_grad_update", "compat"),
    )
    exempt = {
        **OptimizerRules.exempt,
        **dict.fromkeys(("mpu", "dp_process_group", "expert_groups", "expert_data_groups"), RANKS),
        **dict.fromkeys(("allgather_bucket_size", "has_moe_layers"), RANKS),
    }
    sparse = True
    refused = {
        "norm_type": (0.0, -1.0, NAN, "largest"),
        "clip_grad": ("small", None),
        "grad_acc_dtype": (torch.float16, torch.float64),
        "param_names": ({},),
    }
    motifs = MOTIFS

    def arguments(self) -> set[str]:
        """Arguments of the reference's constructor that some action passes."""
        return {*self.passed, *self.refused}

    @action(
        seed=SEEDS,
        groups=GROUPS,
        **OPTIONS,
        alike=(False, False, True),
        omitted=(False, False, True),
        extent=EXTENTS,
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """Groups of parameters, some frozen, around a fresh optimizer."""
        seed = int(values["seed"])
        dice = Dice(seed)
        groups: list[Group] = []
        for number in range(int(values["groups"])):
            own = TURNS[number % 3] if dtype == "mixed" else dtype
            extent = str(values["extent"]) * (not number)
            row = parameters(dice, own, device, seed + number, False, extent)
            hyper = self.drawn_hyper(Dice(seed) if values["alike"] else dice)
            groups.append({"params": row, **hyper})
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        for param in params[1:]:
            param.requires_grad_(dice.pick((True, True, True, False)))
        options = self.drawn_options(dice, values)
        options = left_out(dice, options) if values["omitted"] else options
        return World(
            cls=cls,
            options=options,
            params=params,
            optimizer=wrapped(cls, groups, options),
            device=torch.device(device),
            more={
                "dtype": dtype,
                "groups": [len(cast(list[Tensor], group["params"])) for group in groups],
                "trained": [param.requires_grad for param in params],
            },
        )

    def drawn_options(self, dice: Dice, values: Mapping[str, Value]) -> dict[str, object]:
        """Options of a constructor: those that `build` has drawn, and of the optimizer inside."""
        return {
            "grad_acc_dtype": ACCUMULATION[str(values["accumulation"])],
            "clip_grad": values["clip"],
            "norm_type": values["norm"],
            "immediate_grad_update": values["immediate"],
            "adam_w_mode": dice.pick((True, False)),
            "keep": values["keep"],
        }

    def construct(self, world: World, wrong: Mapping[str, object]) -> None:
        """Construct another one over copies of the parameters."""
        wrapped(world.cls, [{"params": [like(param) for param in world.params]}], wrong)

    @action(often=3, seed=SEEDS, regime=REGIMES[:1] * 4 + REGIMES, missing=(0, 0, 0, *range(8)))
    def fill(self, world: World, seed: int, regime: str, missing: int) -> None:
        """New gradients by bit pattern; bit i of `missing`: none for every third parameter."""
        for index, param in enumerate(world.params):
            none = missing >> (index % 3) & 1 or not param.requires_grad
            here = world.regime_at(regime, index, seed)
            grad = filled(tuple(param.shape), param.dtype, here, world.seed_of(index, seed))
            param.grad = None if none else grad.to(world.device)

    @action(
        often=9,
        drives=("backward",),
        seed=SEEDS,
        regime=(*REGIMES[:1] * 2, *REGIMES, "planted"),
        missing=(0, 0, 0, *range(8)),
        update=(True, True, True, False),
        clear=(False, True),
        graph=GRAPHS,
    )
    def backward(  # type: ignore[override]
        self,
        world: World,
        seed: int,
        regime: str,
        missing: int,
        update: bool,
        clear: bool,
        graph: str,
    ) -> None:
        """Backward through the optimizer; the gradients are those of the regime."""
        loss = torch.zeros((), device=world.device)
        for index, param in enumerate(world.params):
            if missing >> (index % 3) & 1 and index:
                continue
            here = world.regime_at(regime, index, seed)
            weight = filled(tuple(param.shape), param.dtype, here, world.seed_of(index, seed))
            loss = loss + curved((param * weight.to(world.device)).float(), graph).sum()
        backward = partial(spared, world, optimizer_of(world).backward)
        keywords = {"update_hp_grads": update, "clear_lp_grads": clear}
        backward_twice(partial(backward, **keywords), loss, graph, ())

    @action(
        often=9,
        drives=("backward", "step"),
        seed=SEEDS,
        regime=(*REGIMES[:1] * 4, *REGIMES, "planted"),
        missing=(0, 0, 0, *range(8)),
    )
    def train(self, world: World, seed: int, regime: str, missing: int) -> object:
        """Backward through the optimizer, then one update."""
        self.backward(world, seed, regime, missing, True, False, "")
        return self.step(world)

    @action(often=3, drives=("update_hp_grads",), clear=(False, True))
    def update_hp_grads(self, world: World, clear: bool) -> None:
        """Accumulate what the parameters have."""
        optimizer_of(world).update_hp_grads(clear)

    def apply(self, world: World, act: Act) -> object:
        """Carry out an action, and read what the last step left behind."""
        try:
            return super().apply(world, act)
        finally:
            optimizer = optimizer_of(world)
            world.more["readings"] = (optimizer.overflow, optimizer.get_global_norm())

    @action(often=2, drives=("get_global_norm",))
    def ask(self, world: World) -> object:
        """Result of the last step."""
        return optimizer_of(world).overflow, optimizer_of(world).get_global_norm()

    @action(drives=("clear_hp_grads", "clear_lp_grads"), which=("hp", "lp", "lp to none"))
    def clear(self, world: World, which: str) -> None:
        """Forget gradients of one kind."""
        if which == "hp":
            optimizer_of(world).clear_hp_grads()
        else:
            none = which == "lp to none"
            spared(world, optimizer_of(world).clear_lp_grads, set_to_none=none)

    @action(often=2, drives=("get_grads_for_reduction",), half=(False, True))
    def reduce(self, world: World, half: bool) -> object:
        """Look at the accumulators, and average them as if over two equal ranks."""
        shared, experts = optimizer_of(world).get_grads_for_reduction()
        for flat in shared if half else []:
            flat.mul_(0.5)
        return shared, experts

    @action(drives=("get_grads_for_norm",), clipping=(False, True), half=(False, True))
    def grads_for_norm(self, world: World, clipping: bool, half: bool) -> object:
        """Look at what enters the norm, or what is clipped, and clip it by hand."""
        grads = spared(world, optimizer_of(world).get_grads_for_norm, for_clipping=clipping)
        for flat in tree_leaves(grads) if half else []:
            flat.mul_(0.5)
        return grads

    @action(drives=("set_lr", "get_lr"), lr=(0.03, 0.0300001, 1e-4, 0.0, 3e-9))
    def set_lr(self, world: World, lr: float) -> object:
        """Set and read the learning rate."""
        optimizer_of(world).set_lr(lr)
        return optimizer_of(world).get_lr()

    @action(drives=("refresh_fp32_params",), seed=SEEDS, number=NUMBERS)
    def load_weights(self, world: World, seed: int, number: int) -> None:
        """Somebody loads weights into the model."""
        param = world.params[number % len(world.params)]
        values = filled(tuple(param.shape), param.dtype, "ordinary", seed)
        # So that no version counter tells of it.
        param.data.copy_(values.to(world.device))
        optimizer_of(world).refresh_fp32_params()

    @action(
        often=2,
        drives=("get_full_hp_param", "get_full_hp_grad"),
        number=NUMBERS,
        key=("", "exp_avg", "exp_avg_sq", "step"),
    )
    def whole(self, world: World, number: int, key: str) -> object:
        """Read a parameter's gradient and its weight or a state by name; they are the caller's."""
        name, optimizer = f"p{number % len(world.params)}", optimizer_of(world)
        held = optimizer.get_full_hp_param(name, *([key] if key else []))
        read = world.more["read"] = optimizer.get_full_hp_grad(name), held
        return read

    @action(
        drives=("set_full_hp_param", "update_lp_params"),
        seed=SEEDS,
        number=NUMBERS,
        key=("", "exp_avg"),
        publish=(True, False),
    )
    def set_whole(self, world: World, seed: int, number: int, key: str, publish: bool) -> None:
        """Write a weight or a state by name."""
        at = number % len(world.params)
        value = filled(world.params[at].shape, torch.float32, "ordinary", seed).to(world.device)
        optimizer_of(world).set_full_hp_param(f"p{at}", value, *([key] if key else []))
        if publish:
            optimizer_of(world).update_lp_params()

    @action(drives=("initialize_optimizer_states",))
    def initialize_states(self, world: World) -> None:
        """Make the state of the inner optimizer."""
        optimizer_of(world).initialize_optimizer_states()

    @action(drives=("memory_report",))
    def report(self, world: World) -> object:
        """Bytes by kind."""
        return optimizer_of(world).memory_report()

    @action(drives=("destroy",))
    def destroy(self, world: World) -> None:
        """Remove the hooks of immediate updates."""
        optimizer_of(world).destroy()

    @action(often=2, drives=("load_state_dict",), states=(True, False), masters=(True, False))
    def load(self, world: World, states: bool, masters: bool) -> None:  # type: ignore[override]
        """Load what was saved into the present optimizer."""
        if world.saved is None:
            self.save(world)
        self._load(world, self._read(world), states, masters)

    @action(drives=("load_state_dict",))
    def load_kept(self, world: World) -> None:
        """Load the state dict that was kept, or the one of now through a file."""
        if world.kept is None:
            self.save(world)
            world.kept = self._read(world)
        self._load(world, world.kept, True, True)

    def enter(self, world: World, state: Entry) -> None:
        """Load an entry that nothing else holds."""
        self._load(world, state, True, True)

    @action(
        drives=("load_state_dict",),
        seed=SEEDS,
        states=(True, False),
        missing=("", "", "folder", "weight", "elements"),
    )
    def load_universal(self, world: World, seed: int, states: bool, missing: str) -> None:
        """Load a universal checkpoint, or try to where a part of it is missing."""
        rows = [(f"p{at}", param) for at, param in enumerate(world.params)]
        with TemporaryDirectory() as folder:
            write_universal(Path(folder), rows, optimizer_of(world).param_groups, seed, missing)
            load = partial(optimizer_of(world).load_state_dict, [], Path(folder))
            spared(world, load, load_optimizer_states=states)

    def _load(self, world: World, entry: Entry, states: bool, masters: bool) -> None:
        entries = self.entries(world, entry if states or masters else inside_of(entry))
        try:
            keywords = {"load_optimizer_states": states, "load_from_fp32_weights": masters}
            spared(world, optimizer_of(world).load_state_dict, entries, **keywords)
        finally:
            # The list stays the caller's; an entry that nothing else holds need not.
            world.more["given"] = [type(given).__name__ for given in entries]

    def entries(self, world: World, entry: Entry) -> Sequence[Entry]:
        """Entries of all ranks that masters are split over."""
        del world
        return [entry]

    @action(often=2, drives=("load_state_dict",), seed=SEEDS)
    def resume(self, world: World, seed: int) -> None:
        """Save now; load into a new instance over copies of the parameters, other defaults."""
        self.save(world)
        self.made_anew(world, seed)
        self._load(world, self._read(world), True, True)

    def made_anew(self, world: World, seed: int) -> None:
        """Go on with a new instance over copies of the parameters, with other defaults."""
        dice = Dice(seed)
        copies = [like(param) for param in world.params]
        groups = [{**self.drawn_hyper(dice), **row} for row in self.copied_groups(world, copies)]
        # What was frozen since keeps its place in the masters.
        train(copies, cast(list[bool], world.more["trained"]))
        world.optimizer = wrapped(world.cls, groups, world.options)
        train(copies, [param.requires_grad for param in world.params])
        world.params, world.scheduler = copies, None

    def copied_groups(self, world: World, copies: Sequence[Parameter]) -> list[Group]:
        """Groups of copies, as those of the parameters are."""
        sizes = cast(list[int], world.more["groups"])
        marked = cast(list[Group], world.more.get("marked", [{} for _ in sizes]))
        found, at = list[Group](), 0
        for size, marks in zip(sizes, marked, strict=True):
            found.append({"params": list(copies[at : at + size]), **marks})
            at += size
        return found
