"""The recorded universal checkpoint of DeepSpeed, and copies of it that are spoiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from twinstep.golden.record_checkpoints import FOLDER

UNIVERSAL = FOLDER / "deepspeed_universal"
SHAPES = {"0.weight": (2, 3), "0.bias": (2,), "1.weight": (1, 2)}


def spoiled(tmp_path: Path) -> Path:
    target = tmp_path / "universal"
    shutil.copytree(UNIVERSAL, target)
    return target


def remove_common(folder: Path) -> None:
    (folder / "zero" / "optimizer_state.pt").unlink()


def remove_weight(folder: Path) -> None:
    (folder / "zero" / "0.bias" / "fp32.pt").unlink()


def cut_moment(folder: Path) -> None:
    file = folder / "zero" / "0.bias" / "exp_avg.pt"
    file.write_bytes(file.read_bytes()[:300])


def other_size(folder: Path) -> None:
    torch.save({"param": torch.zeros(7)}, folder / "zero" / "0.bias" / "exp_avg.pt")


def other_step(folder: Path) -> None:
    torch.save(torch.tensor(4.0), folder / "zero" / "0.bias" / "step.pt")


SPOILS = [
    (remove_common, "optimizer_state.pt does not exist, but should"),
    (remove_weight, "fp32.pt does not exist, but should"),
    (cut_moment, "exp_avg.pt should be a whole checkpoint"),
    (other_size, "exp_avg.pt of 0.bias has 7 elements, but should have 2"),
    (other_step, "parameters of one group have steps 3, 4, but should agree"),
]
