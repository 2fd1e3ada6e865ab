"""Actions by hand: on the state of an optimizer, its groups, its parameters' memory.

Code around an optimizer does not only call methods. It prunes parameters, replaces entries of the
state, moves weights, loads files of other classes, and reads what is promised beside the methods.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Motif, Step, action
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.motifs import CLEAR, FROZEN, PLAIN, THAWED
from twinstep.parity.sequences.parts import SEEDS, move
from twinstep.parity.sequences.rules import OptimizerRules
from twinstep.parity.sequences.world import World

NUMBERS = range(8)
DEFAULTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Names of numbers that may be held in tensors.
HELD = ("lr", "eps", "weight_decay")
# What a group may not ask for, each with the value that asks.
ASKED: Mapping[str, object] = {"maximize": True, "amsgrad": True, "differentiable": True}
WRONG_GROUPS = (*ASKED, "fp64", "text", "set")
OLD_STEP = "arguments of an old step"
SCALE = 256.0
LEGACY = ("scale", "grads", "output_params", "grad_norms", "stranger")

ZEROS: Step = ("train", {"regime": "zeros", "missing": 0})
LOWER: Step = ("lower_rate", {"bits": 10})
NUDGED: Motif = ("nudge_betas", PLAIN)
MADE: Motif = ("initialize_states", "save")

BY_HAND: Mapping[str, Motif] = {
    "other forms of parameters": (
        *(("start_again", {"how": "generator"}), PLAIN),
        *(("start_again", {"how": "names"}), PLAIN, "save"),
        *(("start_again", {"how": "tensor"}), PLAIN),
    ),
    "a rate by position": (("start_again", {"how": "rate"}), PLAIN),
    "state in other hands": (
        *(PLAIN, ("replace_state", {"how": "copies"}), PLAIN),
        *(("replace_state", {"how": "zeros"}), PLAIN),
        *(("replace_state", {"how": "delete"}), PLAIN),
    ),
    "weights in other memory": (PLAIN, "move_weights", PLAIN, LOWER, PLAIN, *NUDGED),
    "groups in other hands": (
        ("build", {"groups": 3}),
        *(PLAIN, CLEAR, ("edit_groups", {"how": "take out"}), PLAIN, CLEAR),
        *(("edit_groups", {"how": "put back"}), PLAIN, ("edit_groups", {"how": "exchange"}), PLAIN),
        *(("edit_groups", {"how": "replace"}), PLAIN),
        *(("edit_groups", {"how": "drop"}), PLAIN, "resume", PLAIN),
    ),
    "files of other classes": (
        *(PLAIN, ("load_elsewhere", {"whose": "apex"}), PLAIN),
        *(("load_elsewhere", {"whose": "torch"}), PLAIN),
    ),
    "betas nearby": ("raise_rates", PLAIN, *NUDGED, *NUDGED),
    "numbers in other forms": (
        *(PLAIN, LOWER, PLAIN, "write_numbers", PLAIN, *NUDGED),
        # A rate that is a whole number would stay one.
        *("hold_rates", "hold_numbers", PLAIN, "change_held", PLAIN),
    ),
    "numbers in tensors that are kept": (
        *(PLAIN, "hold_numbers", "keep", "load_kept", "change_held", PLAIN, "change_held", PLAIN),
    ),
    "states made while frozen": (*FROZEN, *MADE, *THAWED, PLAIN),
    **{
        f"states of a new instance made while frozen, {how}": (
            *(*FROZEN, ("start_again", {"how": how}), *MADE, *THAWED, PLAIN),
        )
        for how in ("names", "tensor")
    },
    "groups that ask for too much": tuple(
        ("add_refused_group", {"what": what}) for what in WRONG_GROUPS
    ),
    OLD_STEP: ("fill", *(("step_wrongly", {"name": name}) for name in LEGACY)),
    "a scaler of torch": (
        *(("train_by_grad_scaler", {"regime": "ordinary"}), PLAIN),
        *(("train_by_grad_scaler", {"regime": "planted"}), PLAIN),
        ("train_by_grad_scaler", {"regime": "ordinary"}),
    ),
    "another default dtype": (("train_by_default", {"dtype": "bf16"}), PLAIN),
    "nothing to divide": (("start_again", {"how": "generator"}), "forget_eps", ZEROS),
    "closures that give something else": (
        *(
            ("step_with_closure", {"gives": gives, "fails": False})
            for gives in ("tensor", "tensor", "nothing", "pair", "nan")
        ),
        "step_with_warm_up",
    ),
    "gradients that are freed": (PLAIN, "free", LOWER, PLAIN),
    "groups with words of their own": (
        *(("start_again", {"how": "words"}), "add_labelled_group", PLAIN, "save", "resume"),
        *("watch", ("copy", {"how": "deepcopy"}), PLAIN, ("copy", {"how": "pickle"}), "save"),
    ),
    "a copy that is changed": (
        *(PLAIN, ("change_copy", {"how": "deepcopy"}), PLAIN, ("add_group", {"seed": 1}), PLAIN),
        ("change_copy", {"how": "pickle"}),
    ),
}


@contextlib.contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Another default dtype of torch; of the whole process."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(DEFAULTS[name])
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


class ByHand(OptimizerRules):
    """Actions on Adam and both LAMBs that go around their methods."""

    motifs = {**OptimizerRules.motifs, **BY_HAND}

    @action(seed=SEEDS, how=("generator", "names", "rate", "tensor", "words"))
    def start_again(self, world: World, seed: int, how: str) -> None:
        """A new instance over all parameters in one group, or two, given in another form."""
        hyper, params = self.drawn_hyper(Dice(seed)), world.params
        forms: dict[str, object] = {
            "generator": (param for param in params),
            "names": [(f"p{at}", param) for at, param in enumerate(params)],
            "tensor": [{"params": params[0]}, *([{"params": params[1:]}] * (len(params) > 1))],
            "words": [{"params": params, "label": "all", "depth": 2}],
        }
        rate = [hyper.pop("lr")] if how == "rate" else []
        world.optimizer = world.cls(forms.get(how, params), *rate, **hyper, **world.options)
        world.scheduler = world.saved = world.kept = None

    @action(number=NUMBERS, how=("copies", "zeros", "delete"))
    def replace_state(self, world: World, number: int, how: str) -> None:
        """Put other tensors in the place of a parameter's state, or delete it."""
        state = world.torch_optimizer.state
        param = world.params[number % len(world.params)]
        if how == "delete":
            state.pop(param, None)
        elif how == "copies" and param in state:
            state[param] = {name: _copied(value) for name, value in state[param].items()}
        elif "exp_avg" in state.get(param, {}):
            state[param]["exp_avg"] = torch.zeros_like(state[param]["exp_avg"])

    @action(every=(True, False))
    def move_weights(self, world: World, every: bool) -> None:
        """Give parameters other memory, as `module.to` and offloading do."""
        move(world.params, every)

    @action(number=NUMBERS, how=("take out", "put back", "exchange", "drop", "replace"))
    def edit_groups(self, world: World, number: int, how: str) -> None:
        """Edit the lists of parameters, as pruning does."""
        optimizer = world.torch_optimizer
        groups = optimizer.param_groups
        first, last = groups[0]["params"], groups[-1]["params"]
        held = {param for group in groups for param in group["params"]}
        if how == "put back":
            last += [param for param in world.params if param not in held]
        elif how == "exchange" and len(groups) > 1 and first and last:
            first[0], last[0] = last[0], first[0]
        elif how == "take out" and len(held) > 1 and last:
            optimizer.state.pop(last.pop(number % len(last)), None)
        elif how == "replace":
            groups[0] = {**groups[0], "lr": 0.125}
        elif how == "drop" and len(groups) > 1:
            for param in groups.pop()["params"]:
                optimizer.state.pop(param, None)
        world.scheduler = world.saved = world.kept = None

    @action(drives=("load_state_dict",), whose=("torch", "apex"))
    def load_elsewhere(self, world: World, whose: str) -> None:
        """Load the state of now as torch's Adam would have saved it, or apex's and DeepSpeed's.

        torch's has no `bias_correction`: that of now stays, which is off then.
        """
        self.save(world)
        state = cast(dict[str, Any], self._read(world))
        counters = [row for row in state["state"].values() if "step" in row]
        if whose == "torch":
            for row in counters:
                row["step"] = torch.tensor(float(row["step"]), dtype=torch.float32)
            for now, saved in zip(
                world.torch_optimizer.param_groups, state["param_groups"], strict=True
            ):
                if saved.pop("bias_correction", None) is not None:
                    now["bias_correction"] = False
        else:
            count = max((int(row.pop("step")) for row in counters), default=0)
            for group in state["param_groups"]:
                group.setdefault("step", count)
        self.enter(world, state)

    @action(often=0)
    def write_numbers(self, world: World) -> None:
        """Write rates as whole numbers and betas as lists, where numbers need not be floats."""
        for group in world.torch_optimizer.param_groups if self.tensor_hyper else ():
            given: dict[str, object] = {"lr": 1, "betas": [0.75, 0.5]}
            group.update({name: value for name, value in given.items() if name in group})

    @action(often=0, drives=("step",), seed=SEEDS)
    def step_with_warm_up(self, world: World, seed: int) -> object:
        """Update once with a closure that makes the gradients and sets every rate."""

        def closure() -> float:
            self.fill(world, seed, "ordinary", 0)
            for group in world.torch_optimizer.param_groups:
                group["lr"] = 0.125
            world.updating()
            return 0.5

        return world.torch_optimizer.step(closure)

    @action(often=0)
    def hold_numbers(self, world: World) -> None:
        """Put the numbers of every group into 0-dim tensors, where they may be tensors."""
        for group in world.torch_optimizer.param_groups if self.tensor_hyper else ():
            held = {name: group[name] for name in HELD if name in group}
            group.update({name: _number(value) for name, value in held.items()})
            if "betas" in group:
                group["betas"] = tuple(_number(beta) for beta in group["betas"])

    @action()
    def change_held(self, world: World) -> None:
        """Change every number that a tensor holds, in place, and past its version counter."""
        for group in world.torch_optimizer.param_groups:
            for name in HELD:
                if isinstance(held := group.get(name), Tensor):
                    held.data.copy_(held * 0.75 if held else torch.full_like(held, 0.125))
            for beta in group.get("betas", ()):
                if isinstance(beta, Tensor) and beta > 0:
                    beta.data.copy_(1 - (1 - beta) * 0.75)

    @action(drives=("add_param_group",), what=WRONG_GROUPS)
    def add_refused_group(self, world: World, what: str) -> None:
        """Try to add a group that asks for what there is not, or whose parameters cannot be."""
        dtype = torch.float64 if what == "fp64" else torch.float32
        extra = Parameter(torch.ones(2, device=world.device, dtype=dtype))
        asked = {what: ASKED[what]} if what in ASKED else {"lr": "fast"} if what == "text" else {}
        group: dict[str, Any] = {"params": {extra} if what == "set" else [extra], **asked}
        # A dict that is refused stays as its owner made it.
        with world.lent(group):
            world.torch_optimizer.add_param_group(group)

    @action(drives=("add_param_group",))
    def add_labelled_group(self, world: World) -> None:
        """Add a group with an entry that means nothing to the optimizer."""
        extra = Parameter(torch.ones_like(world.params[0]))
        group: dict[str, Any] = {"params": [extra], "label": "late"}
        world.torch_optimizer.add_param_group(group)
        # Whoever added it may write there.
        world.more["group"] = group
        world.params.append(extra)
        world.scheduler = None

    @action(how=("deepcopy", "pickle"))
    def change_copy(self, world: World, how: str) -> None:
        """Make a copy, and change all that it has; the original should keep what it has."""
        pair = (world.optimizer, world.params)
        copied: Any = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        optimizer, params = copied
        for numbers in (optimizer.defaults, *optimizer.param_groups):
            numbers["lr"] = 0.75
        for tensor in (*params, *_tensors(optimizer.state)):
            tensor.data.fill_(1)

    @action(drives=("step",), name=LEGACY)
    def step_wrongly(self, world: World, name: str) -> object:
        """Try to step with an argument that apex's old step had, or with one that none had.

        A `step` without keywords refuses by TypeError, ours by name.
        """
        given: dict[str, Any] = {name: 128.0 if name in ("scale", "stranger") else [[None]]}
        try:
            return world.torch_optimizer.step(**given)
        except (TypeError, RuntimeError):
            return "refused"

    @action(often=0)
    def nudge_betas(self, world: World) -> None:
        """Move the betas of every group by so little that most stay the same in fp32."""
        for group in world.torch_optimizer.param_groups:
            if "betas" in group:
                group["betas"] = tuple(beta * (1.0 + 2.0**-27) for beta in group["betas"])

    @action(drives=("step",), seed=SEEDS, regime=("ordinary", "ordinary", "planted"))
    def train_by_grad_scaler(self, world: World, seed: int, regime: str) -> float:
        """New gradients times a scale, then an update by torch's GradScaler; it refuses fp16."""
        self.fill(world, seed, regime, 0)
        scaler = torch.amp.GradScaler(world.params[0].device.type, init_scale=SCALE)
        scaler.scale(torch.ones((), device=world.device))
        for param in world.params:
            param.grad = None if param.grad is None else param.grad * SCALE
        optimizer = world.torch_optimizer
        # What is left to do is known once the gradients are unscaled.
        handle = optimizer.register_step_pre_hook(lambda *_: world.updating())
        try:
            scaler.step(optimizer)
        finally:
            handle.remove()
        scaler.update()
        return scaler.get_scale()

    @action(seed=SEEDS, dtype=tuple(DEFAULTS))
    def train_by_default(self, world: World, seed: int, dtype: str) -> object:
        """New gradients, then one update while torch's default dtype is another."""
        self.fill(world, seed, "ordinary", 0)
        world.updating()
        with default_dtype(dtype):
            return world.torch_optimizer.step()  # type: ignore[call-overload, unused-ignore]

    @action(often=0)
    def forget_eps(self, world: World) -> None:
        """Let nothing keep a division from 0 / 0, in any group: neither eps nor decay."""
        for group in world.torch_optimizer.param_groups:
            group.update(eps=0.0, weight_decay=0.0)

    @action(drives=("zero_grad",))
    def free(self, world: World) -> object:
        """Drop gradients that nobody else holds; whether their memory is given back."""
        grads = [param.grad for param in world.params if param.grad is not None]
        ref: Any = StorageWeakRef
        kept = [ref(grad.untyped_storage()) for grad in grads if not grad.is_sparse]
        grads.clear()
        # The last observation holds storages.
        world.places = {}
        world.torch_optimizer.zero_grad(set_to_none=True)
        return [one.expired() for one in kept]


def _tensors(state: Mapping[Any, Mapping[str, object]]) -> list[Tensor]:
    return [value for row in state.values() for value in row.values() if isinstance(value, Tensor)]


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _number(value: object) -> object:
    whole = value.item() if isinstance(value, Tensor) else value
    return torch.tensor(whole, dtype=torch.float64) if isinstance(whole, float) else value
