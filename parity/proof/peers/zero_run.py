"""One configuration of ZeRO on this rank: DeepSpeed's engine, or either of our sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import twinstep.fast.optimizers.zero
import twinstep.reference.optimizers.zero
from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.installed import deepspeed
from twinstep.parity.proof.peers.live_run import Groups, Seen, flat
from twinstep.parity.proof.peers.zero_config import ZeroConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CLASSES: dict[str, Callable[..., Any]] = {
    "fast": twinstep.fast.optimizers.zero.ZeroOptimizer,
    "reference": twinstep.reference.optimizers.zero.ZeroOptimizer,
}
TINY = 2.0**-24  # the least number of fp16


@dataclass(frozen=True)
class Trained:
    """A training with the ways to look into it.

    Attributes:
        micro_batch: runs backward from the loss that a function makes.
        step: takes a step.
        optimizer: with `overflow` and `single_partition_of_fp32_groups`.
        norm: of the last step's gradients.
    """

    micro_batch: Callable[[Callable[[], Tensor]], None]
    step: Callable[[], object]
    optimizer: Any
    norm: Callable[[], float]


Make = Callable[[ZeroConfig, list[list[Parameter]]], Trained]


class Losses(nn.Module):
    """A module whose forward pass is a function that is given."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        """The loss."""
        return loss()


def theirs(config: ZeroConfig, params: list[list[Parameter]]) -> Trained:
    """DeepSpeed's engine with ZeRO."""
    model = Losses([param for group in params for param in group])
    initialize = deepspeed("deepspeed").initialize
    engine, *_ = initialize(model=model, optimizer=_inside(config, params), config=_theirs(config))

    def micro_batch(loss: Callable[[], Tensor]) -> None:
        engine.backward(engine(loss))
        if not engine.is_gradient_accumulation_boundary():
            # It counts micro-batches there.
            engine.step()

    zero = engine.optimizer
    return Trained(micro_batch, engine.step, zero, lambda: float(zero._global_grad_norm))


def _theirs(config: ZeroConfig) -> dict[str, object]:
    zero = {
        "stage": config.stage,
        "contiguous_gradients": config.contiguous,
        "overlap_comm": config.overlaps,
        "reduce_scatter": config.scatters,
        "reduce_bucket_size": config.bucket,
        "allgather_bucket_size": config.gathered,
        "round_robin_gradients": config.dealt,
        "use_multi_rank_bucket_allreduce": config.multi_rank,
    }
    fp16 = {
        "enabled": True,
        "loss_scale": config.static_scale,
        "initial_scale_power": config.power,
        "loss_scale_window": config.scale_window,
        "hysteresis": config.hysteresis,
        "consecutive_hysteresis": config.refills,
        "min_loss_scale": 1,
    }
    bf16 = {"enabled": True, "check_grad_overflow": config.checks}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.micro_batches,
        "gradient_clipping": config.clip_grad,
        "prescale_gradients": not config.postscales,
        "gradient_predivide_factor": config.predivides,
        "communication_data_type": config.wire,
        "data_types": {"grad_accum_dtype": config.sums},
        "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        config.dtype: fp16 if config.dtype == "fp16" else bf16,
    }


def ours(
    config: ZeroConfig, params: list[list[Parameter]], *, side: str, compat: Compat
) -> Trained:
    """`ZeroOptimizer` of a side."""
    every = [param for group in params for param in group]
    scaling = {
        "init_scale": 2.0**config.power,
        "scale_window": config.scale_window,
        "min_scale": 1.0,
        "delayed_shift": config.hysteresis,
        "consecutive_hysteresis": config.refills,
    }
    optimizer = CLASSES[side](
        _inside(config, params),
        param_names={param: f"p{place}" for place, param in enumerate(every)},
        dp_process_group=dist.group.WORLD,
        static_loss_scale=config.static_scale or 1.0,
        dynamic_loss_scale=config.dynamic,
        dynamic_loss_args=scaling if config.dynamic else None,
        verbose=False,
        clip_grad=config.clip_grad,
        partition_grads=config.stage == 2,
        gradient_accumulation_dtype=DTYPES[config.sums],
        communication_data_type=DTYPES[config.wire],
        contiguous_gradients=config.contiguous,
        overlap_comm=config.overlaps,
        reduce_scatter=config.scatters,
        reduce_bucket_size=config.bucket,
        allgather_bucket_size=config.gathered,
        round_robin_gradients=config.dealt,
        postscale_gradients=config.postscales,
        gradient_predivide_factor=config.predivides,
        check_grad_overflow=config.checks or config.dtype == "fp16",
        compat=compat,
    )
    return Trained(
        # The engine divides, too.
        lambda loss: optimizer.backward(loss() / config.micro_batches),
        optimizer.step,
        optimizer,
        optimizer.get_global_norm,
    )


def _inside(config: ZeroConfig, params: list[list[Parameter]]) -> torch.optim.Optimizer:
    """The optimizer that is wrapped: torch's own, on all sides."""
    groups: Groups = [
        {"params": group, "lr": lr, "weight_decay": decay}
        for group, lr, decay in zip(params, config.rates, config.decays, strict=True)
    ]
    if config.clips:
        return torch.optim.SGD(groups, lr=0.1)
    return torch.optim.AdamW(groups, foreach=False)


def run(config: ZeroConfig, make: Make) -> list[Seen]:
    """The whole run, as this rank sees it; masters are its own partition."""
    generator = torch.Generator().manual_seed(config.seed)
    params = [
        [
            Parameter(torch.randn(shape, generator=generator).to(DTYPES[config.dtype]))
            for shape in group
        ]
        for group in config.shapes
    ]
    every = [param for group in params for param in group]
    side = make(config, params)
    before = flat(side.optimizer.single_partition_of_fp32_groups)
    seen: list[Seen] = []
    for step in range(len(config.events)):
        for micro in range(config.micro_batches):
            side.micro_batch(lambda: loss_of(config, every, step, micro))  # noqa: B023 - called at once
        side.step()
        skipped = bool(side.optimizer.overflow)
        masters = flat(side.optimizer.single_partition_of_fp32_groups)
        seen.append(
            Seen(
                scale=float(side.optimizer.loss_scale),
                skipped=skipped,
                norm=None if skipped else side.norm(),
                weights=torch.cat([param.detach().reshape(-1).float() for param in every]),
                masters=masters,
                moved=float((masters - before).abs().max()),
            )
        )
        before = masters
    side.optimizer.destroy()
    return seen


def loss_of(config: ZeroConfig, params: list[Parameter], step: int, micro: int) -> Tensor:
    """A loss whose gradients are given numbers, others on each rank."""
    rank, event = dist.get_rank(), config.events[step]
    seed = ((config.seed * 1000 + step) * 10 + micro) * 10 + rank
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for place, param in enumerate(params):
        wanted = torch.randn(param.shape, generator=generator)
        if event == "t":
            wanted = (wanted * 8).round() * TINY
        if place != config.idle or step % 3 or len(params) == 1:
            total = total + (param.float() * wanted).sum()
    overflows = event == "o" and rank == config.seed % config.world
    return total * (torch.inf if overflows else 0.0 if event == "z" else 1.0)
