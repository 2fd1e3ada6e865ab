"""One configuration through one side: DeepSpeed's class or the reference's, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.installed import EXPERTS, deepspeed, make_expert_group
from twinstep.parity.proof.peers.live_config import Config
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer

Groups = list[dict[str, object]]


class Wrapper(Protocol):
    """Interface of an optimizer that a run needs, on either side."""

    overflow: bool

    def step(self) -> object:
        """One step."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Observation after one step.

    Attributes:
        scale: the loss scale from now on.
        skipped: whether the step was skipped.
        norm: of the gradients, as the optimizer reports it; None after a skipped step.
        weights: model weights.
        masters: fp32 masters, flattened in order.
        moved: how far the step moved the one that it moved most.
    """

    scale: float
    skipped: bool
    norm: float | None
    weights: Tensor
    masters: Tensor
    moved: float


@dataclass(frozen=True)
class Side:
    """An optimizer with the ways to look into it."""

    wrapper: Wrapper
    backward: Callable[[Tensor], None]
    scale: Callable[[], float]
    norm: Callable[[], float]
    masters: Callable[[], list[Tensor]]
    override: Callable[[float], None]
    reload: Callable[[], None]


def nothing(*given: object) -> None:
    """An action that a side has no way to do."""
    del given


def parameters(config: Config) -> list[list[Parameter]]:
    """The parameters of a run, by group."""
    generator = torch.Generator().manual_seed(config.seed)
    dtype = torch.bfloat16 if config.kind == "bf16" else torch.float16
    made = [
        [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in group]
        for group in config.shapes
    ]
    if config.expert >= 0:
        vars(made[0][config.expert]).update(allreduce=False, group_name=EXPERTS)
    return made


def inside(config: Config, params: list[list[Parameter]]) -> torch.optim.Optimizer:
    """The optimizer that is wrapped: torch's own, on both sides."""
    groups: Groups = [
        {"params": group, "lr": lr, "weight_decay": decay}
        for group, lr, decay in zip(params, config.rates, config.decays, strict=True)
    ]
    if config.clips:
        return torch.optim.SGD(groups, lr=0.1)
    return torch.optim.AdamW(groups, foreach=False)


def theirs(config: Config, params: list[list[Parameter]]) -> Side:
    """DeepSpeed's optimizer."""
    if config.kind == "bf16":
        return _their_bf16(config, params)
    flat = config.kind == "flat"
    module, name = (
        ("fused_optimizer", "FP16_Optimizer")
        if flat
        else ("unfused_optimizer", "FP16_UnfusedOptimizer")
    )
    kind = getattr(deepspeed(f"deepspeed.runtime.fp16.{module}"), name)
    if config.expert >= 0:
        make_expert_group()
    wrapper = kind(inside(config, params), **_scaling(config), verbose=False)
    return Side(
        wrapper,
        wrapper.backward,
        lambda: float(wrapper.loss_scale_config.cur_scale),
        lambda: float(wrapper._global_grad_norm),
        lambda: wrapper.fp32_groups_flat if flat else sum(wrapper.fp32_groups, []),
        wrapper.override_loss_scale,
        nothing,
    )


def ours(config: Config, params: list[list[Parameter]], compat: Compat) -> Side:
    """The reference's optimizer."""
    optimizer = inside(config, params)
    if config.kind == "bf16":
        return _our_bf16(config, params, optimizer, compat)
    kind = FP16Optimizer if config.kind == "flat" else FP16UnfusedOptimizer
    wrapper = kind(optimizer, **_scaling(config), verbose=False, compat=compat)  # type: ignore[arg-type]
    return Side(
        cast(Wrapper, wrapper),
        wrapper.backward,
        lambda: wrapper.loss_scaler.loss_scale,
        wrapper.get_global_norm,
        lambda: [p for group in optimizer.param_groups for p in group["params"]],
        wrapper.override_loss_scale,
        nothing,
    )


def _scaling(config: Config) -> dict[str, object]:
    dynamic = {
        "init_scale": config.init_scale,
        "scale_window": config.scale_window,
        "min_scale": config.min_scale,
    }
    return {
        "static_loss_scale": config.static_scale or 1.0,
        "dynamic_loss_scale": config.dynamic,
        "dynamic_loss_args": dynamic if config.dynamic else None,
        "clip_grad": config.clip_grad,
    }


def _their_bf16(config: Config, params: list[list[Parameter]]) -> Side:
    kind = deepspeed("deepspeed.runtime.bf16_optimizer").BF16_Optimizer
    wrapper = kind(
        inside(config, params),
        _names(params),
        SimpleNamespace(enabled=True, immediate_grad_update=False),
        clip_grad=config.clip_grad,
        dp_process_group=torch.distributed.group.WORLD,
        grad_acc_dtype=torch.float32,
    )

    def backward(loss: Tensor) -> None:
        # Its own backward() raises TypeError in 0.19.8 (edge BF-9); engines do these two calls.
        loss.backward()  # type: ignore[no-untyped-call]
        wrapper.update_hp_grads(clear_lp_grads=True)

    return Side(
        wrapper,
        backward,
        lambda: 1.0,
        lambda: float(wrapper._global_grad_norm),
        lambda: wrapper.fp32_groups_flat_partition,
        nothing,
        lambda: wrapper.load_state_dict([wrapper.state_dict()]),
    )


def _our_bf16(
    config: Config,
    params: list[list[Parameter]],
    optimizer: torch.optim.Optimizer,
    compat: Compat,
) -> Side:
    wrapper = BF16Optimizer(
        optimizer, param_names=_names(params), clip_grad=config.clip_grad, compat=compat
    )
    masters = [group["params"][0] for group in optimizer.param_groups]
    scale, norm = (lambda: 1.0), wrapper.get_global_norm
    backward = partial(wrapper.backward, clear_lp_grads=True)

    def reload() -> None:
        wrapper.load_state_dict([wrapper.state_dict()])

    return Side(cast(Wrapper, wrapper), backward, scale, norm, lambda: masters, nothing, reload)


def _names(params: list[list[Parameter]]) -> dict[Parameter, str]:
    every = [param for group in params for param in group]
    return {param: f"p{place}" for place, param in enumerate(every)}


def run(config: Config, make: Callable[[Config, list[list[Parameter]]], Side]) -> list[Seen]:
    """The whole run."""
    params = parameters(config)
    every = [param for group in params for param in group]
    side = make(config, params)
    generator = torch.Generator().manual_seed(config.seed + 1)
    if config.external_scale:
        side.override(config.external_scale)
    seen: list[Seen] = []
    before = flat(side.masters())
    for step, event in enumerate(config.events):
        side.wrapper.zero_grad()
        for _ in range(config.micro_batches):
            side.backward(_loss(config, every, step, event, generator))
        side.wrapper.step()
        skipped = bool(side.wrapper.overflow)
        masters = flat(side.masters())
        seen.append(
            Seen(
                scale=side.scale(),
                skipped=skipped,
                norm=None if skipped else side.norm(),
                weights=torch.cat([param.detach().reshape(-1).float() for param in every]),
                masters=masters,
                moved=float((masters - before).abs().max()),
            )
        )
        before = masters
        if step == config.reload:
            with torch.no_grad():
                for param in every:
                    param.mul_(0.5)
            side.reload()
            before = flat(side.masters())
    return seen


def flat(masters: list[Tensor]) -> Tensor:
    """A copy of the masters in one tensor."""
    return torch.cat([master.detach().reshape(-1) for master in masters])


def _loss(
    config: Config, params: list[Parameter], step: int, event: str, generator: torch.Generator
) -> Tensor:
    """A loss whose gradients are given numbers, times infinity or zero if the event asks so."""
    total = torch.zeros(())
    for place, param in enumerate(params):
        wanted = torch.randn(param.shape, generator=generator)
        if place != config.idle or step % 3 or len(params) == 1:
            total = total + (param.float() * wanted).sum()
    return total * {"g": 1.0, "o": torch.inf, "z": 0.0}[event]
