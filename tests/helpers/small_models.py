"""A small model and one optimizer over it, driven as its class wants it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.battery import Subject

FP16 = ("FP16Optimizer", "FP16UnfusedOptimizer")


def model_and(subject: Subject, **options: Any) -> tuple[nn.Linear, Any]:
    """A model and its optimizer, after a step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(subject.dtype)
    if subject.name in FP16:
        options |= {"dynamic_loss_scale": True, "dynamic_loss_args": ARGUMENTS}
    optimizer = subject(list(model.parameters()), hyper={"lr": 0.1}, **options)
    train(model, optimizer)
    return model, optimizer


ARGUMENTS = {"init_scale": 64.0, "scale_window": 2, "min_scale": 1.0}


def train(model: nn.Linear, optimizer: Any) -> None:
    """One step; wrappers call their own backward."""
    optimizer.zero_grad()
    x = torch.tensor([[1.0, -2.0, 3.0]]).to(model.weight.dtype)
    getattr(optimizer, "backward", torch.autograd.backward)(model(x).float().pow(2).sum())
    optimizer.step()
