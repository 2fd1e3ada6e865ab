"""Record DeepSpeed's `DynamicLossScaler` and the scale rule of its FP16_Optimizer.

DeepSpeed is no dependency of the project. It installs without a GPU, in an environment that has
torch, by `pip install deepspeed==0.19.8`, and runs here in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace

from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Constant, Header, Step, Trace

SCALERS = "deepspeed.runtime.fp16.loss_scaler"
FLAT = "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer"
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
COMMAND = "python -m twinstep.golden.record deepspeed"


def record(situation: Situation) -> Trace:
    """Run DeepSpeed's own code through a situation."""
    if situation.rule == "static":
        return _static(situation)
    return _dynamic(situation) if situation.rule == "dynamic" else _wrapper(situation)


def deepspeed_version() -> str:
    """Import DeepSpeed once, in a process group of one: its scaler asks for its rank to log."""
    deepspeed = import_module("deepspeed")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29599")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return str(deepspeed.__version__)


def class_of(path: str) -> Callable[..., SimpleNamespace]:
    """A class of DeepSpeed's; typed as anything, since its package has no types."""
    module, name = path.rsplit(".", 1)
    found: Callable[..., SimpleNamespace] = getattr(import_module(module), name)
    return found


def bf16_optimizer(inner: object, names: object, **options: object) -> SimpleNamespace:
    """BF16_Optimizer over a process group of one, its gradients summed in fp32."""
    import torch

    config = SimpleNamespace(enabled=True, immediate_grad_update=False)
    group = torch.distributed.group.WORLD
    options |= {"dp_process_group": group, "grad_acc_dtype": torch.float32}
    return class_of(BF16)(inner, names, config, **options)


def _static(situation: Situation) -> Trace:
    version = deepspeed_version()
    scaler = import_module(SCALERS).LossScaler(scale=situation.scale)
    start = {"scale": float(scaler.cur_scale)}
    steps: list[Step] = []
    for letter in situation.steps:
        scaler.update_scale(letter == "o")
        steps.append({"scale": float(scaler.cur_scale)})
    subject = f"{SCALERS}.LossScaler"
    return Trace(header=header_of(situation, version, subject, start), steps=steps)


def _dynamic(situation: Situation) -> Trace:
    version = deepspeed_version()

    def made() -> SimpleNamespace:
        given = {k: v for k, v in situation.constants.items() if k != "override"}
        found: SimpleNamespace = import_module(SCALERS).DynamicLossScaler(
            init_scale=situation.scale, **given
        )
        return found

    scaler = made()
    start = _state(scaler)
    steps: list[Step] = []
    for letter in situation.steps:
        raised = False
        if letter == "R":
            # Checkpoints hold the object itself; what it remembers is in its attributes.
            remembered = _state(scaler)
            scaler = made()
            scaler.cur_scale = remembered.pop("scale")
            vars(scaler).update(remembered)
        elif letter == "X":
            scaler.cur_scale = float(situation.constants["override"])
        else:
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

    # Both wrappers have a rule of their own, of the same words.
    owner = UNFUSED if "unfused" in situation.name else FLAT
    update_scale = vars(class_of(owner))["_update_scale"]
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
    subject = f"{owner}._update_scale"
    return Trace(header=header_of(situation, version, subject, start), steps=steps)


def _state(scaler: object) -> dict[str, float | int]:
    names = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
    scale = float(getattr(scaler, "cur_scale"))  # noqa: B009 - untyped class of another package
    return {"scale": scale, **{name: int(getattr(scaler, name)) for name in names}}


def header_of(
    situation: Situation, version: str, subject: str, start: Mapping[str, Constant]
) -> Header:
    """The header of a trace of DeepSpeed."""
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
        differs=situation.differs,
    )
