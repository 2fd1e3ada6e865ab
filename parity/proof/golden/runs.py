"""Whole runs replayed by our classes, driven as the recorders of `golden` drive others'.

Inside a wrapper is torch's own optimizer, as where it was recorded, or a side's `FusedAdam`, whose
kernels take the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.contract.compat import Compat
from twinstep.golden.drive import Driven, Groups, drive, unwrapped
from twinstep.golden.trace import Header, Step, Value
from twinstep.parity.proof.golden.sides import CLASSES, descent
from twinstep.parity.ranks.world import Rank, World

RULES = ("flat", "unfused", "bf16", "zero", "adam", "lamb", "flat_lamb")
KINDS = {"flat_lamb": "flat"}
COUNTERS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


def run(side: str, header: Header, compat: Compat, *, fused: bool) -> list[Step]:
    """Run a side's class through the steps of a trace.

    Args:
        side: "fast" or "reference".
        header: of the trace.
        compat: of the class.
        fused: `FusedAdam` inside, not torch's optimizer.
    """
    given = header.constants
    if header.rule in ("adam", "lamb"):
        return drive(header.steps, given, torch.float32, partial(_alone, side, header))
    if header.rule != "zero":
        build = partial(_wrapper, side, header, compat, fused)
        low = torch.bfloat16 if header.rule == "bf16" else torch.float16
        return drive(header.steps, given, low, build)
    dtype = torch.bfloat16 if given["bf16"] else torch.float16
    count = int(given["ranks"])

    def on_rank(rank: Rank | None) -> list[Step]:
        make = partial(_zero, side, header, compat, fused, rank)
        number = 0 if rank is None else rank.number
        return drive(header.steps, given, dtype, make, rank=number, ranks=count)

    if count == 1:
        return on_rank(None)
    seen = World(count, seed=count, order="ring").run(on_rank)
    if any(rows != seen[0] for rows in seen):
        raise RuntimeError(f"{header.name}: ranks of the {side} side saw different runs")
    return seen[0]


def _inside(side: str, header: Header, groups: Groups, fused: bool) -> torch.optim.Optimizer:
    if header.rule == "flat_lamb":
        return _lamb(side, header, groups)
    adamw = bool(header.constants["adamw"])
    if not fused:
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if adamw else torch.optim.SGD
        return kind(groups, lr=1.0, foreach=False)
    if not adamw:
        return descent(side, groups)
    made: torch.optim.Optimizer = CLASSES[side]["FusedAdam"](groups, adam_w_mode=True)
    return made


def _outcome(optimizer: Any) -> dict[str, Value]:
    skipped = bool(optimizer.overflow)
    return {"norm": 0.0 if skipped else optimizer.get_global_norm(), "skipped": skipped}


def _counted(scaler: Any) -> dict[str, Value]:
    state = scaler.state_dict()
    return {"scale": state["cur_scale"], **{n: state[n] for n in COUNTERS if n in state}}


def _wrapper(
    side: str,
    header: Header,
    compat: Compat,
    fused: bool,
    params: list[Parameter],
    groups: Groups,
    saved: Any,
) -> Driven:
    given, bf16 = header.constants, header.rule == "bf16"
    sizes = _sizes(params, groups)
    inside = _inside(side, header, groups, fused)
    options: dict[str, Any] = {"clip_grad": float(given["clip_grad"]), "compat": compat}
    if bf16:
        options["param_names"] = {param: f"p{place}" for place, param in enumerate(params)}
    else:
        options |= {"dynamic_loss_scale": True, "verbose": False}
        options["dynamic_loss_args"] = {
            "init_scale": float(header.start["scale"]),
            "scale_window": float(given["scale_window"]),
            "min_scale": float(given["min_scale"]),
        }
    optimizer = CLASSES[side][KINDS.get(header.rule, header.rule)](inside, **options)
    if saved is not None:
        optimizer.load_state_dict([saved] if bf16 else saved)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def observe() -> dict[str, Value]:
        return (
            _outcome(optimizer)
            if bf16
            else {**_counted(optimizer.loss_scaler), **_outcome(optimizer)}
        )

    def masters() -> list[Tensor]:
        held = [master for group in inside.param_groups for master in group["params"]]
        return (
            [master.detach()[:size] for master, size in zip(held, sizes, strict=True)]
            if bf16
            else held
        )

    return Driven(
        backward=partial(optimizer.backward, clear_lp_grads=True) if bf16 else optimizer.backward,
        step=step,
        observe=observe,
        masters=masters,
        groups=lambda: optimizer.param_groups,
        saved=lambda: deepcopy(optimizer.state_dict()),
        override=optimizer.override_loss_scale if not bf16 else lambda scale: None,
    )


def _sizes(params: list[Parameter], groups: Groups) -> list[int]:
    sizes = [param.numel() for param in params]
    return [sum(sizes)] if len(groups) == 1 else sizes


def _zero(
    side: str,
    header: Header,
    compat: Compat,
    fused: bool,
    rank: Rank | None,
    params: list[Parameter],
    groups: Groups,
    saved: Any,
) -> Driven:
    del saved
    given = header.constants
    scales = not given["bf16"]
    scaling = {
        "init_scale": float(header.start["scale"]),
        "scale_window": int(given["scale_window"]),
        "min_scale": float(given["min_scale"]),
        "delayed_shift": int(given["delayed_shift"]),
    }
    optimizer = CLASSES[side]["zero"](
        _inside(side, header, groups, fused),
        param_names={param: f"p{place}" for place, param in enumerate(params)},
        dp_process_group=None if rank is None else rank.group("data"),
        dynamic_loss_scale=scales,
        dynamic_loss_args=scaling if scales else None,
        verbose=False,
        clip_grad=float(given["clip_grad"]),
        partition_grads=given["stage"] == 2,
        compat=compat,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def observe() -> dict[str, Value]:
        counted = _counted(optimizer.loss_scaler) if scales else {"scale": optimizer.loss_scale}
        return {**counted, **_outcome(optimizer)}

    return Driven(
        backward=optimizer.backward,
        step=step,
        observe=observe,
        masters=lambda: [optimizer.get_full_hp_param(f"p{at}") for at in range(len(params))],
        groups=lambda: optimizer.param_groups,
    )


def _lamb(side: str, header: Header, groups: Groups) -> torch.optim.Optimizer:
    given = header.constants
    bounds = {name: float(given[name]) for name in ("max_coeff", "min_coeff")}
    made: torch.optim.Optimizer = CLASSES[side]["FusedLamb"](groups, **bounds)
    return made


def _adam(side: str, header: Header, groups: Groups) -> torch.optim.Optimizer:
    given = header.constants
    made: torch.optim.Optimizer = CLASSES[side]["FusedAdam"](
        groups,
        betas=(float(given["beta1"]), float(given["beta2"])),
        eps=float(given["eps"]),
        adam_w_mode=bool(given["adamw"]),
    )
    return made


def _alone(
    side: str, header: Header, params: list[Parameter], groups: Groups, saved: Any
) -> Driven:
    optimizer = (_adam if header.rule == "adam" else _lamb)(side, header, groups)
    return unwrapped(optimizer, params, saved)
