"""DeepSpeed's own runs of the curves' model, in a process of their own.

    python -m twinstep.scenarios.curves_deepspeed STEPS DTYPE...

prints the losses of all ZeRO stages on one process as a line of JSON. The engine, its wrappers and
its ZeRO are DeepSpeed's; the optimizer inside is our reference's AdamW, since torch's multiplies in
another order, and a difference of a rounding in each step would hide every other one.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module

import torch
from torch import Tensor, nn

from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.scenarios.curves import DEEPSPEED, MICRO_BATCHES, STAGES, Curve, plan_of
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import StepRecord
from twinstep.scenarios.train import one_thread
from twinstep.scenarios.trainers import BATCH, Trainer, Windows


class Losses(nn.Module):
    """The language model as DeepSpeed wants it: its forward pass gives the loss."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.weights = nn.ParameterList(map(nn.Parameter, trainer.initial_weights()))

    def forward(self, windows: Windows) -> Tensor:
        """Mean loss of a micro-batch, fp32, shape ()."""
        return self.trainer.loss(list(self.weights), windows)


class EngineTrainer(Trainer):
    """A run whose steps are those of DeepSpeed's engine."""

    def __init__(self, plan: Plan, stage: int) -> None:
        super().__init__(plan)
        self.model = Losses(self)
        inner = FusedAdam(
            self.model.parameters(),
            lr=plan.lr,
            betas=(plan.beta1, plan.beta2),
            eps=plan.eps,
            weight_decay=plan.weight_decay,
        )
        initialize = import_module("deepspeed").initialize
        self.engine, *_ = initialize(
            model=self.model, optimizer=inner, config=config_of(plan, stage)
        )

    @property
    def weights(self) -> Sequence[Tensor]:
        """The model's weights, which the engine writes."""
        return list(self.model.weights)

    @property
    def scale(self) -> float:
        """The factor missing from a loss: without ZeRO the engine of 0.19.8 does not scale it.

        Its step divides by it all the same.
        """
        optimizer = self.engine.optimizer
        wrapped = hasattr(optimizer, "loss_scale_config") and not hasattr(optimizer, "loss_scaler")
        return float(optimizer.loss_scale_config.cur_scale) if wrapped else 1.0

    def advance(self) -> StepRecord:
        """Take one step: forward and backward of each micro-batch, and the engine's step.

        The engine is asked for neither norm nor state: NaN and "".
        """
        self.step += 1
        lr = self.plan.lr * self.plan.share(self.step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        losses, before, scale = [], self.engine.skipped_steps, self.scale
        for windows in self.micro_batches():
            loss = self.engine(windows)
            self.engine.backward(loss * self.scale)
            self.engine.step()
            losses.append(float(loss.detach()))
        return StepRecord(
            step=self.step,
            loss=sum(losses) / len(losses),
            lr=lr,
            scale=scale,
            norm=math.nan,
            skipped=self.engine.skipped_steps > before,
            state="",
        )


def config_of(plan: Plan, stage: int) -> dict[str, object]:
    """The configuration of a run; sums of micro-batches as ours, where DeepSpeed has the choice."""
    fp32_sums = {"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}
    kinds: dict[str, dict[str, object]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}, **fp32_sums},
        "fp16": {
            "fp16": {
                "enabled": True,
                "initial_scale_power": int(plan.first_scale).bit_length() - 1,
                "loss_scale_window": plan.scale_window,
                "hysteresis": plan.delayed_shift,
                "min_loss_scale": plan.min_scale,
            },
            **fp32_sums,
        },
    }
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
        **kinds[plan.dtype],
    }


def curve(dtype: str, stage: int, steps: int) -> Curve:
    """One run."""
    trainer = EngineTrainer(plan_of(dtype, stage, steps), stage)
    records = [trainer.advance() for _ in range(steps)]
    return Curve(
        side=DEEPSPEED,
        dtype=dtype,
        stage=stage,
        ranks=1,
        losses=[record.loss for record in records],
        skipped=[record.step for record in records if record.skipped],
        held_out=trainer.held_out_loss(),
    )


def main(steps: int, dtypes: Sequence[str]) -> None:
    """All runs; nothing but the last line of standard output is for the caller."""
    deepspeed = import_module("deepspeed")
    # Its collective over shared memory would be compiled first; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It refuses fp16 on a CPU, where it computes all the same.
    vars(deepspeed.accelerator.get_accelerator())["is_fp16_supported"] = lambda: True
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1"}
    os.environ.update({**where, "RANK": "0", "LOCAL_RANK": "0"})
    with one_thread():
        curves = [asdict(curve(dtype, stage, steps)) for dtype in dtypes for stage in STAGES]
    version = f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}"
    print(json.dumps({"version": version, "curves": curves}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
