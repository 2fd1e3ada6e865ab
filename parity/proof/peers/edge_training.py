"""Three edges in a training run: a small network, 100 fp16 steps on every side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.edge_engine import engine
from twinstep.parity.proof.peers.edge_wrappers import Make, ours, theirs

STEPS = 100
EARLY = 20
SCALE = {"init_scale": 64.0, "scale_window": 1, "min_scale": 1.0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Course of a run: mean loss of its first steps, loss at its end, weights at its end."""

    early: float
    last: float
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One edge in a training run; two losses for each side, early and last.

    Attributes:
        edge: its id.
        upstream: DeepSpeed.
        default: ours.
        compat: ours with `Compat.deepspeed()`.
        same: whether the weights with `Compat.deepspeed()` are DeepSpeed's, bit for bit.
        visible: whether our default ends elsewhere.
    """

    edge: str
    upstream: list[float]
    default: list[float]
    compat: list[float]
    same: bool
    visible: bool


def network() -> nn.Sequential:
    """The network, the same every time."""
    source = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=source) / 3)
    return model.half()


class Steps(Protocol):
    """A wrapper of either side, or DeepSpeed's engine."""

    def backward(self, loss: Tensor) -> object:
        """Run backward."""

    def step(self) -> object:
        """One step."""


def followed(model: nn.Module, optimizer: Steps) -> Run:
    """Train and look on."""
    losses = []
    for number in range(STEPS):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(number))
        loss = mse_loss(model(x.half()).float(), torch.tanh(x[:, :1] - x[:, 1:2]))
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    weights = torch.cat([param.detach().flatten().float() for param in model.parameters()])
    early = sum(losses[:EARLY]) / EARLY
    return Run(early=early, last=sum(losses[-EARLY:]) / EARLY, weights=weights)


def with_growing_scale(make: Make) -> Run:
    """Plain gradient descent whose loss scale tries to grow after every clean step."""
    model = network()
    inside = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapper = make(inside, dynamic_loss_scale=True, dynamic_loss_args=SCALE)
    return followed(model, wrapper)


def with_decay(make: Make) -> Run:
    """AdamW with decay, whose first steps depend on the counter that it starts with."""
    model = network()
    inside = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5, foreach=False)
    wrapper = make(inside, static_loss_scale=128.0)
    return followed(model, wrapper)


def in_their_engine() -> Run:
    """Plain gradient descent in DeepSpeed's engine under a static scale."""
    model = network()
    config = {"fp16": {"enabled": True, "loss_scale": 128}}
    whole = engine(model, torch.optim.SGD(model.parameters(), lr=0.2), config)
    return followed(model, whole)


def with_static_scale(compat: Compat) -> Run:
    """The same in ours."""
    model = network()
    wrapper = ours(compat)(torch.optim.SGD(model.parameters(), lr=0.2), static_loss_scale=128.0)
    return followed(model, wrapper)


def of(edge: str, upstream: Run, default: Run, compat: Run) -> Trained:
    """Three runs side by side."""
    return Trained(
        edge=edge,
        upstream=[upstream.early, upstream.last],
        default=[default.early, default.last],
        compat=[compat.early, compat.last],
        same=torch.equal(upstream.weights, compat.weights),
        visible=not torch.equal(upstream.weights, default.weights),
    )


def trained() -> list[Trained]:
    """All runs."""
    correct, upstream = ours(Compat()), ours(Compat.deepspeed())
    rows = [
        of(edge, run(theirs), run(correct), run(upstream))
        for edge, run in (("LS-1", with_growing_scale), ("FP-1", with_decay))
    ]
    sides = with_static_scale(Compat()), with_static_scale(Compat.deepspeed())
    return [*rows, of("EN-1", in_their_engine(), *sides)]
