"""Record DeepSpeed's `DynamicLossScaler` and the scale rule inside its FP16_Optimizer.

DeepSpeed is no dependency of the project. It installs without a GPU, in an environment that has
torch, by `pip install deepspeed==0.19.8`, and runs here in one process.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Header, Step, Trace

SCALERS = "deepspeed.runtime.fp16.loss_scaler"
WRAPPER = "deepspeed.runtime.fp16.fused_optimizer"
COMMAND = "python -m twinstep.golden.record deepspeed"


def record(situation: Situation) -> Trace:
    """Run DeepSpeed's own code through a situation."""
    run = {"dynamic": _dynamic, "wrapper": _wrapper, "wrapper_step": _wrapper_step}
    return run[situation.rule](situation)


def deepspeed_version() -> str:
    """Import DeepSpeed once, in a process group of one: its scaler asks for its rank to log."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29599")
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return str(deepspeed.__version__)


def _dynamic(situation: Situation) -> Trace:
    version = deepspeed_version()
    scaler = import_module(SCALERS).DynamicLossScaler(
        init_scale=situation.scale, **situation.constants
    )
    start = _state(scaler)
    steps: list[Step] = []
    for letter in situation.steps:
        raised = False
        try:
            scaler.update_scale(letter == "o")
        except Exception as error:
            # The error at the floor is a bare Exception; its subclasses are accidents.
            if type(error) is not Exception:
                raise
            raised = True
        steps.append({**_state(scaler), "raised": raised})
    subject = f"{SCALERS}.DynamicLossScaler"
    return Trace(header=header_of(situation, version, subject, start), steps=steps)


def _wrapper(situation: Situation) -> Trace:
    version = deepspeed_version()
    import torch

    update_scale = import_module(WRAPPER).FP16_Optimizer._update_scale
    arguments = {
        "init_scale": situation.scale,
        "scale_window": situation.constants["scale_window"],
        "min_scale": situation.constants["min_scale"],
    }
    config = import_module(SCALERS).LossScaleConfig(torch.float16, True, 1.0, arguments)
    optimizer = SimpleNamespace(loss_scale_config=config, verbose=False)
    names = ("cur_iter", "last_overflow_iter")

    def state() -> dict[str, float | int]:
        return {"scale": float(config.cur_scale), **{name: getattr(config, name) for name in names}}

    start = state()
    steps: list[Step] = []
    for letter in situation.steps:
        update_scale(optimizer, letter == "o")
        steps.append(state())
    subject = f"{WRAPPER}.FP16_Optimizer._update_scale"
    return Trace(header=header_of(situation, version, subject, start), steps=steps)


def _wrapper_step(situation: Situation) -> Trace:
    """Whole steps of the real FP16_Optimizer around torch's SGD."""
    version = deepspeed_version()
    import torch

    weights = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = import_module(WRAPPER).FP16_Optimizer(
        torch.optim.SGD([weights], lr=1.0),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": situation.scale, **situation.constants},
        verbose=False,
    )
    (master,) = optimizer.fp32_groups_flat
    steps: list[Step] = []
    for letter in situation.steps:
        before = master.detach().clone()
        loss = weights.float().sum()
        optimizer.backward(loss * torch.inf if letter == "o" else loss)
        skipped = bool(optimizer.step())
        moved = float((before - master.detach())[0])
        # A skipped step leaves the norm of the step before it; there is none to record.
        norm = 0.0 if skipped else float(optimizer._global_grad_norm)
        scale = float(optimizer.loss_scale_config.cur_scale)
        steps.append({"scale": scale, "applied": moved, "norm": norm, "skipped": skipped})
    start = {"scale": situation.scale}
    header = header_of(situation, version, f"{WRAPPER}.FP16_Optimizer", start)
    edge = "edge LS-1: by default the gradient of a growth step is applied whole"
    return Trace(header=replace(header, differs=edge), steps=steps)


def _state(scaler: object) -> dict[str, float | int]:
    names = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
    scale = float(getattr(scaler, "cur_scale"))  # noqa: B009 - untyped class of another package
    return {"scale": scale, **{name: int(getattr(scaler, name)) for name in names}}


def header_of(situation: Situation, version: str, subject: str, start: Step) -> Header:
    """Where a trace of DeepSpeed comes from."""
    return Header(
        name=f"deepspeed_{situation.rule}_{situation.name}",
        package="deepspeed",
        version=version,
        subject=subject,
        command=COMMAND,
        rule=situation.rule,
        constants=situation.constants,
        start=start,
        steps=situation.steps,
    )
