"""Small optimizers of every mixed-precision class on both sides, trained alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.sides import CLASSES
from twinstep.fast.runtime.lists import MovingTensors
from twinstep.fast.runtime.watch import Grads
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.sequences.observe import Leaf, Observation, Walk

KINDS = {
    "flat": "FP16Optimizer",
    "unfused": "FP16UnfusedOptimizer",
    "lamb": "FP16UnfusedOptimizer",
    "bf16": "BF16Optimizer",
}
SHAPES = ((2, 3), (0,), (4,))
SCALING = {"init_scale": 16.0, "scale_window": 2, "min_scale": 0.25}


@dataclass
class Run:
    """An optimizer with the parameters that it trains.

    Attributes:
        kind: of KINDS.
        params: in two groups, one of them empty.
        optimizer: of some side.
    """

    kind: str
    params: list[nn.Parameter]
    optimizer: Any

    def train(self, steps: range, at: Sequence[int] = ()) -> None:
        """Steps with numbered gradients; those named in `at` overflow."""
        for number in steps:
            for place, param in enumerate(self.params):
                grad = 8 * moderate(param.numel(), 10 * number + place, param.dtype)
                param.grad = grad.view(param.shape) * (torch.inf if number in at else 1.0)
            if self.kind == "bf16":
                self.optimizer.update_hp_grads()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def load(self, state: Any, **options: Any) -> None:
        """Load one state dict, masters included."""
        if self.kind == "bf16":
            self.optimizer.load_state_dict([state], load_from_fp32_weights=True, **options)
        else:
            self.optimizer.load_state_dict(state, **options)

    def seen(self) -> Observation:
        """Everything reachable, private attributes included; the device has been waited for."""
        len(self.optimizer.state)
        walk = _Walk(home=torch.device("cpu"))
        walk.root("params", self.params)
        walk.root("gradients", [param.grad for param in self.params])
        walk.root("groups", self.optimizer.param_groups)
        walk.root("state", self.optimizer.state)
        walk.root("optimizer", self.optimizer)
        # An observation is no copy, and this one is kept while something happens.
        return {
            path: leaf if leaf.tensor is None else leaf._replace(tensor=leaf.tensor.clone())
            for path, leaf in walk.leaves.items()
        }


class _Walk(Walk):
    """A walk that looks up no gradients: lists of them hold none, and a step drops them."""

    def _other(self, value: object, path: str) -> None:
        if isinstance(value, MovingTensors | Grads):
            self.leaves[path] = Leaf(f"{type(value).__name__} of {len(value)}")
        else:
            super()._other(value, path)


def started(side: str, kind: str, inside: Callable[..., Any] | None = None, **more: Any) -> Run:
    """A fresh one; equal every time."""
    dtype = more.get("low_precision_dtype", torch.float16)
    dtype = torch.bfloat16 if kind == "bf16" else dtype
    params = [
        nn.Parameter(moderate(torch.Size(shape).numel(), at, dtype).view(shape))
        for at, shape in enumerate(SHAPES)
    ]
    make = inside or CLASSES[side]["FusedLamb" if kind == "lamb" else "FusedAdam"]
    first: dict[str, object] = {"params": params[:2], "lr": 0.02, "weight_decay": 0.1}
    second: dict[str, object] = {"params": params[2:], "lr": 0.01, "weight_decay": 0.0}
    options: dict[str, object] = {"clip_grad": 0.5}
    if kind == "bf16":
        options["param_names"] = {param: f"p{at}" for at, param in enumerate(params)}
    else:
        options |= {"dynamic_loss_scale": True, "dynamic_loss_args": SCALING, "verbose": False}
    return Run(
        kind, params, CLASSES[side][KINDS[kind]](make([first, second]), **{**options, **more})
    )


def plain(value: object) -> object:
    """A state dict with tensors as dtype, shape and bits."""
    if isinstance(value, Tensor):
        # Counters may differ in dtype: an integer here, a float there.
        words = [value.item()] if not value.dim() else value.reshape(-1).view(torch.int32).tolist()
        return (tuple(value.shape), words)
    if isinstance(value, dict):
        return {key: plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    return value
