"""Parts of `ZeroRules`: options, refused arguments, inner optimizers, a step at the floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch

from twinstep.contract.errors import MinimumLossScale
from twinstep.parity.sequences.fills import DTYPES, INF, NAN, Dice
from twinstep.parity.sequences.parts import optimizers_of
from twinstep.parity.sequences.world import Value, World

# Where the mean over ranks divides.
MEANS: Mapping[str, Mapping[str, object]] = {
    "scatter": {},
    "reduce": {"reduce_scatter": False},
    "before": {"reduce_scatter": False, "postscale_gradients": False},
    "after": {"reduce_scatter": False, "gradient_predivide_factor": 3.0},
    "sum": {"gradient_average": False},
}
# Arguments of `build` that are options of the constructor.
OPTIONS: dict[str, Any] = {
    "stage": (2, 1),
    "sums": ("fp32", "fp32", "bf16", "fp16"),
    "wire": ("", "", "fp32", "bf16", "fp16"),
    "mean": ("scatter", *MEANS),
    "bucket": (500_000_000, 40, 9, 1),
    "gather": (5_000_000_000, 24, 6),
    "robin": (False, True),
    "scale": ("dynamic", "static", "default"),
    "clip": (0.0, 0.7, 0.05, 30.0, -1.0),
    "inside": (*("adamw",) * 5, "adam", "lamb", "sgd"),
}
# Masters and state in memory of the CPU.
OFFLOAD = SimpleNamespace(device="cpu")
# Options that neither side has.
OFF = (
    *("fp16_master_weights_and_gradients", "bf16_master_weights_and_gradients"),
    "bf16_optimizer_states",
)
# Arguments of the constructor that `build` passes.
PASSED = (
    *("init_optimizer", "param_names", "timers", "optimizer_params", "static_loss_scale"),
    *("dynamic_loss_scale", "dynamic_loss_args", "verbose", "contiguous_gradients"),
    *("reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_bucket_size"),
    *("reduce_scatter", "overlap_comm", "offload_optimizer_config", "clip_grad"),
    *("gradient_accumulation_dtype", "communication_data_type", "postscale_gradients"),
    *("gradient_predivide_factor", "gradient_average", "gradient_accumulation_steps"),
    *("partition_grads", "round_robin_gradients", "elastic_checkpoint"),
    *("check_grad_overflow", "compat"),
)

REFUSED: dict[str, Sequence[object]] = {
    "clip_grad": ("small", None),
    "gradient_accumulation_dtype": (torch.float64, torch.int32),
    "communication_data_type": (torch.int32,),
    "gradient_predivide_factor": (0.0, -1.0, NAN, INF, 2.0),
    "postscale_gradients": (False,),
    "reduce_bucket_size": (0, -1),
    "allgather_bucket_size": (3, 0),
    "static_loss_scale": (0.0, -1.0, NAN, INF),
    "dynamic_loss_args": ({"init": 8.0},),
    "param_names": ({},),
    "has_moe_layers": (True,),
    "ignore_unused_parameters": (False,),
    "fp16_master_weights_and_gradients": (True,),
    "bf16_master_weights_and_gradients": (True,),
    "bf16_optimizer_states": (True,),
    "zenflow_config": ({},),
}


def inner(side: str, inside: str, groups: Sequence[Mapping[str, object]]) -> object:
    """A fresh inner optimizer of a side."""
    rows = [dict(group) for group in groups]
    if inside == "sgd":
        return torch.optim.SGD(rows, momentum=0.9, foreach=False)
    home = import_module(f"{optimizers_of(side)}.fused_{'lamb' if inside == 'lamb' else 'adam'}")
    if inside == "lamb":
        return home.FusedLamb(rows)
    return home.FusedAdam(rows, adam_w_mode=inside == "adamw")


def drawn_options(dice: Dice, values: Mapping[str, Value]) -> dict[str, object]:
    """Options of a constructor: those that `build` has drawn, and some more."""
    half = values["dtype"] in ("fp16", "mixed")
    wire, mean = str(values["wire"]), str(values["mean"])
    return {
        "partition_grads": values["stage"] == 2,
        "gradient_accumulation_dtype": DTYPES[str(values["sums"])],
        "communication_data_type": DTYPES[wire] if wire else None,
        "reduce_bucket_size": values["bucket"],
        "allgather_bucket_size": values["gather"],
        "round_robin_gradients": values["robin"],
        "clip_grad": values["clip"],
        "inside": values["inside"],
        "contiguous_gradients": dice.pick((True, True, False)),
        "overlap_comm": dice.pick((False, True)),
        "use_multi_rank_bucket_allreduce": dice.pick((True, False)),
        # The fast side has no kernel of LAMB on the CPU.
        "offload_optimizer_config": dice.pick((None, None, None, OFFLOAD))
        if values["inside"] != "lamb"
        else None,
        "check_grad_overflow": half or dice.pick((True, True, False)),
        "verbose": dice.pick((False, True)),
        "timers": dice.pick((False, False, True)),
        "optimizer_params": dice.pick((None, {})),
        "gradient_accumulation_steps": dice.pick((1, 3)),
        "elastic_checkpoint": dice.pick((True, True, False)),
        "compat": dice.pick(
            ((), (), ("unscale_with_updated_scale",), ("growth_counts_this_step",))
        ),
        **dict.fromkeys(OFF, False),
        "ignore_unused_parameters": True,
        "zenflow_config": None,
        **MEANS[mean],
        **drawn_scale(dice, str(values["scale"])),
    }


def drawn_scale(dice: Dice, kind: str) -> dict[str, object]:
    """Arguments that decide on the scale; windows are short, so that it moves."""
    first = dice.pick((8.0, 64.0, 3.7, 2.0**16))
    if kind != "dynamic":
        return {} if kind == "default" else {"static_loss_scale": first}
    given = {
        "init_scale": first,
        "scale_window": dice.pick((1, 2, 3, 1000)),
        "min_scale": dice.pick((1.0, 3.0)),
        "delayed_shift": dice.pick((1, 2)),
        "consecutive_hysteresis": dice.pick((False, True)),
    }
    return {"dynamic_loss_scale": True, "dynamic_loss_args": given}


@contextmanager
def at_the_floor(world: World) -> Iterator[None]:
    """A step; where it overflows at the floor of the scale, both sides go on without gradients.

    Ours learn of it when something is read, and have reported their times by then.
    """
    optimizer, reports = cast(Any, world.optimizer), len(world.events)
    try:
        yield
        _ = optimizer.overflow
    except MinimumLossScale:
        optimizer.zero_grad()
        del world.events[reports:]
        world.more |= {"reduced": False, "refused": True}
        raise
