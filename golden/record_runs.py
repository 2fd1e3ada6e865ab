"""Record whole runs in one process: DeepSpeed's wrappers, and torch's Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING

from twinstep.golden.drive import Driven, Groups, drive, unwrapped
from twinstep.golden.record_deepspeed import (
    BF16,
    FLAT,
    UNFUSED,
    bf16_optimizer,
    class_of,
    deepspeed_version,
    header_of,
)
from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Header, Trace, Value

if TYPE_CHECKING:
    import torch
    from torch import nn

SUBJECTS = {"flat": FLAT, "unfused": UNFUSED, "bf16": BF16}
OPTIM_COMMAND = "python -m twinstep.golden.record torch"


def record(situation: Situation) -> Trace:
    """Run DeepSpeed's own class through a situation."""
    import torch

    subject = SUBJECTS[situation.rule]
    start = {"scale": situation.scale}
    header = header_of(situation, deepspeed_version(), subject, start)
    bf16 = situation.rule == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float16
    make = partial(_bf16 if bf16 else _scaled, situation)
    rows = drive(situation.steps, situation.constants, dtype, make)
    return Trace(header=header, steps=rows)


def record_optim(situation: Situation) -> Trace:
    """Run torch's Adam or AdamW, on fp32 weights."""
    import torch

    kind = "AdamW" if situation.constants["adamw"] else "Adam"
    rows = drive(situation.steps, situation.constants, torch.float32, partial(_plain, situation))
    header = Header(
        name=f"torch_{situation.rule}_{situation.name}",
        package="torch",
        version=torch.__version__,
        subject=f"torch.optim.{kind}",
        command=OPTIM_COMMAND,
        rule=situation.rule,
        constants=situation.constants,
        start={"scale": situation.scale},
        steps=situation.steps,
        differs=situation.differs,
    )
    return Trace(header=header, steps=rows)


def inner_of(situation: Situation, groups: Groups) -> torch.optim.Optimizer:
    """The optimizer that is wrapped: torch's own."""
    import torch

    if situation.constants["adamw"]:
        return torch.optim.AdamW(groups, foreach=False)
    return torch.optim.SGD(groups, lr=1.0, foreach=False)


def _scaled(
    situation: Situation, params: list[nn.Parameter], groups: Groups, saved: object
) -> Driven:
    del params
    given = situation.constants
    optimizer = class_of(SUBJECTS[situation.rule])(
        inner_of(situation, groups),
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": situation.scale,
            "scale_window": given["scale_window"],
            "min_scale": given["min_scale"],
        },
        clip_grad=given["clip_grad"],
        verbose=False,
    )
    if saved is not None:
        optimizer.load_state_dict(saved)
    config = optimizer.loss_scale_config

    def masters() -> Sequence[torch.Tensor]:
        held: list[torch.Tensor] = (
            optimizer.fp32_groups_flat
            if situation.rule == "flat"
            else list(chain(*optimizer.fp32_groups))
        )
        return held

    return Driven(
        backward=optimizer.backward,
        step=_stepped(optimizer),
        observe=lambda: {
            "scale": float(config.cur_scale),
            "cur_iter": int(config.cur_iter),
            "last_overflow_iter": int(config.last_overflow_iter),
            **_outcome(optimizer),
        },
        masters=masters,
        groups=lambda: optimizer.param_groups,
        saved=lambda: deepcopy(optimizer.state_dict()),
        override=optimizer.override_loss_scale,
    )


def _bf16(
    situation: Situation, params: list[nn.Parameter], groups: Groups, saved: object
) -> Driven:
    names = {param: f"p{place}" for place, param in enumerate(params)}
    grouped = [params] if len(groups) == 1 else [[param] for param in params]
    sizes = [sum(param.numel() for param in group) for group in grouped]
    clip = situation.constants["clip_grad"]
    optimizer = bf16_optimizer(inner_of(situation, groups), names, clip_grad=clip)
    if saved is not None:
        optimizer.load_state_dict([saved])

    def backward(loss: torch.Tensor) -> None:
        # Its own backward() raises TypeError in 0.19.8 (edge BF-9); engines do these two calls.
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.update_hp_grads(clear_lp_grads=True)

    return Driven(
        backward=backward,
        step=_stepped(optimizer),
        observe=lambda: _outcome(optimizer),
        masters=lambda: [
            flat[:size]
            for flat, size in zip(optimizer.fp32_groups_flat_partition, sizes, strict=True)
        ],
        groups=lambda: optimizer.param_groups,
        saved=lambda: deepcopy(optimizer.state_dict()),
    )


def _stepped(optimizer: SimpleNamespace) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _outcome(optimizer: SimpleNamespace) -> dict[str, Value]:
    """A skipped step leaves the norm of the step before it; there is none to record."""
    skipped = bool(optimizer.overflow)
    return {"norm": 0.0 if skipped else float(optimizer._global_grad_norm), "skipped": skipped}


def _plain(
    situation: Situation, params: list[nn.Parameter], groups: Groups, saved: object
) -> Driven:
    import torch

    given = situation.constants
    kind = torch.optim.AdamW if given["adamw"] else torch.optim.Adam
    betas = (float(given["beta1"]), float(given["beta2"]))
    optimizer = kind(groups, betas=betas, eps=float(given["eps"]), foreach=False)
    return unwrapped(optimizer, params, saved)
