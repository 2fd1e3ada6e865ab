"""Edges of DeepSpeed's engine on one rank: EN-1, TF-3, Z-7."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor, nn

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.edge_scene import Numbers, Play
from twinstep.parity.proof.peers.installed import deepspeed
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.zero import ZeroOptimizer

Config = Mapping[str, object]
BASE: Config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "steps_per_print": 1000,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}


class Engine(Protocol):
    """Interface of DeepSpeed's engine that a scene needs."""

    def __call__(self, factor: float, used: int) -> Tensor:
        """The loss."""

    def backward(self, loss: Tensor) -> object:
        """Run backward."""

    def step(self) -> object:
        """One step."""

    def save_checkpoint(self, folder: str, *, tag: str, client_state: object) -> object:
        """Write a checkpoint."""

    def load_checkpoint(self, folder: str, *, tag: str) -> object:
        """Read one."""


def engine(model: nn.Module, inside: torch.optim.Optimizer, config: Config) -> Engine:
    """DeepSpeed's engine around a model."""
    made: Engine
    made, *_ = deepspeed("deepspeed").initialize(
        model=model,
        optimizer=inside,
        config={**BASE, **config},
        model_parameters=list(model.parameters()),
    )
    return made


class Sums(nn.Module):
    """Weights, each filled with its number, whose sum times a factor is the loss."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((size,), place + 1.0, dtype=dtype))
            for place, size in enumerate(sizes)
        )

    def forward(self, factor: float, used: int) -> Tensor:
        """The factor times the sum of the first `used` weights."""
        rows = [weight.float().sum() for weight in list(self.weights)[:used]]
        return torch.stack(rows).sum() * factor


def their_scaled_step() -> Numbers:
    """Movement of the weight by a gradient of 1 under a static scale of 128."""
    model = Sums([1])
    config = {"fp16": {"enabled": True, "loss_scale": 128}}
    whole = engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    whole.backward(whole(1.0, 1))
    whole.step()
    return [1.0 - model.weights[0].item()]


def our_scaled_step(compat: Compat) -> Numbers:
    """The same through the wrapper that the engine chose, which is its own engine."""
    model = Sums([1])
    inside = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapper = FP16UnfusedOptimizer(inside, static_loss_scale=128.0, compat=compat)
    wrapper.backward(model(1.0, 1))
    wrapper.step()
    return [1.0 - model.weights[0].item()]


BF16 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
}
RATE = 0.1


@contextmanager
def universal() -> Iterator[tuple[Path, list[Tensor]]]:
    """A universal checkpoint after three steps, and the masters that are in it."""
    model = Sums([4, 3], torch.bfloat16)
    whole = engine(model, torch.optim.AdamW(model.parameters(), lr=RATE), BF16)
    for _ in range(3):
        whole.backward(whole(1.0, 2))
        whole.step()
    view = deepspeed("deepspeed.utils").safe_get_full_fp32_param
    with tempfile.TemporaryDirectory() as scratch:
        whole.save_checkpoint(scratch, tag="t", client_state=UNIVERSAL_INFO)
        convert(Path(scratch, "t"), Path(scratch, "u"))
        yield Path(scratch), [view(weight).clone() for weight in model.weights]


def convert(source: Path, target: Path) -> None:
    """Run DeepSpeed's converter to universal checkpoints."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    places = ["--input_folder", str(source), "--output_folder", str(target)]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([*command, *places, *workers], check=True, capture_output=True)


def apart(views: Sequence[Tensor], wanted: Sequence[Tensor]) -> Numbers:
    """Largest distance of each fp32 weight from what the checkpoint holds."""
    return [
        float((view.flatten() - want.flatten()).abs().max())
        for view, want in zip(views, wanted, strict=True)
    ]


def their_universal_load() -> Numbers:
    """The fp32 weights as the engine shows them after loading."""
    utils = deepspeed("deepspeed.utils")
    with universal() as (folder, wanted):
        model = Sums([4, 3], torch.bfloat16)
        inside = torch.optim.AdamW(model.parameters(), lr=RATE)
        whole = engine(model, inside, {**BF16, "checkpoint": {"load_universal": True}})
        whole.load_checkpoint(str(folder), tag="u")
        return apart([utils.safe_get_full_fp32_param(weight) for weight in model.weights], wanted)


def our_universal_load(compat: Compat) -> Numbers:
    """The same folder, loaded by the reference."""
    with universal() as (folder, wanted):
        model = Sums([4, 3], torch.bfloat16)
        names = {weight: f"weights.{place}" for place, weight in enumerate(model.weights)}
        inside = torch.optim.AdamW(model.parameters(), lr=RATE)
        optimizer = BF16Optimizer(inside, param_names=names, compat=compat)
        optimizer.load_state_dict([], checkpoint_folder=folder / "u")
        return apart([optimizer.get_full_hp_param(name) for name in names.values()], wanted)


def their_offload() -> Numbers:
    """Movement in each of three steps of a weight with a gradient in the first alone."""
    model = Sums([2, 2])
    config = {
        "fp16": {"enabled": True, "loss_scale": 4},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    whole = engine(model, torch.optim.SGD(model.parameters(), lr=0.25), config)
    places = [2.0]
    for used in (2, 1, 1):
        whole.backward(whole(2.0, used))
        whole.step()
        places.append(model.weights[1][0].item())
    return [before - after for before, after in zip(places, places[1:], strict=False)]


def our_offload(compat: Compat) -> Numbers:
    """The same of the reference, which takes the option and offloads nothing."""
    model = Sums([2, 2])
    inside = torch.optim.SGD(model.parameters(), lr=0.25)
    names = {weight: name for name, weight in model.named_parameters()}
    optimizer = ZeroOptimizer(
        inside,
        param_names=names,
        static_loss_scale=4.0,
        offload_optimizer_config=SimpleNamespace(device="cpu"),
        compat=compat,
    )
    places = [2.0]
    for used in (2, 1, 1):
        optimizer.backward(model(2.0, used))
        optimizer.step()
        places.append(model.weights[1][0].item())
    return [before - after for before, after in zip(places, places[1:], strict=False)]


def raised(run: Callable[[Tensor], object]) -> Numbers:
    """1 if a backward pass raises TypeError, else 0."""
    try:
        run(torch.ones((), requires_grad=True) * 1)
    except TypeError:
        return [1.0]
    return [0.0]


def their_backward() -> Numbers:
    """Backward of the BF16_Optimizer in an engine."""
    model = Sums([2], torch.bfloat16)
    return raised(wrapped(engine(model, torch.optim.SGD(model.parameters(), lr=1.0), BF16)))


def wrapped(whole: Engine) -> Callable[[Tensor], object]:
    """Backward of the optimizer in an engine."""
    method: Callable[[Tensor], object] = vars(whole)["optimizer"].backward
    return method


def our_backward(compat: Compat) -> Numbers:
    """Backward of the reference's."""
    model = Sums([2], torch.bfloat16)
    names = {weight: "weight" for weight in model.weights}
    inside = torch.optim.SGD(model.parameters(), lr=1.0)
    return raised(BF16Optimizer(inside, param_names=names, compat=compat).backward)


PLAYS: dict[str, Play] = {
    "EN-1": (their_scaled_step, our_scaled_step),
    "TF-3": (their_universal_load, our_universal_load),
    "BF-9": (their_backward, our_backward),
    "Z-7": (their_offload, our_offload),
}
