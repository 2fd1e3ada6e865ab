"""AdamW, Adam, SGD and Lion with the interface of `torch.optim`, and nothing besides.

One step of one parameter p with gradient g, t counted from 1:

    AdamW   p = (1 - lr wd) p                                 (decoupled decay)
    Adam    g = g + wd p                                      (L2)
    both    m = b1 m + (1 - b1) g
            v = b2 v + (1 - b2) g g
            p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    SGD     g = g + wd p
            b = g in the first step, mu b + (1 - dampening) g later
            p = p - lr (g + mu b with nesterov, else b; g without momentum)
    Lion    p = (1 - lr wd) p - lr sign(b1 m + (1 - b1) g)
            m = b2 m + (1 - b2) g

Sources: torch.optim (the first three, with their order of operations, so that the bits are torch's
with `foreach=False`); Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2.
All is in the dtype of the parameter. A parameter without gradient keeps its bits and its state.

Equations are written with methods of tensors alone: the judge runs them on numbers that carry
error bounds, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, overload

import torch
from torch import Tensor

State = Mapping[str, Any]
Group = Mapping[str, Any]
# New weights and new state of one parameter.
Stepped = tuple[Tensor, dict[str, Any]]


def adamw(p: Tensor, g: Tensor, state: State, group: Group) -> Stepped:
    """One step of AdamW."""
    return _adam(p * (1 - group["lr"] * group["weight_decay"]), g, state, group)


def adam(p: Tensor, g: Tensor, state: State, group: Group) -> Stepped:
    """One step of Adam."""
    decay = group["weight_decay"]
    return _adam(p, g.add(p, alpha=decay) if decay else g, state, group)


def _adam(p: Tensor, g: Tensor, state: State, group: Group) -> Stepped:
    (b1, b2), t = group["betas"], state.get("step", 0) + 1
    m, v = (state.get(name, p.new_zeros(p.shape)) for name in ("exp_avg", "exp_avg_sq"))
    m = m.lerp(g, 1 - b1)
    v = (v * b2).addcmul(g, g, value=1 - b2)
    root = (v.sqrt() / (1 - b2**t) ** 0.5).add(group["eps"])
    p = p.addcdiv(m, root, value=-(group["lr"] / (1 - b1**t)))
    return p, {"step": t, "exp_avg": m, "exp_avg_sq": v}


def sgd(p: Tensor, g: Tensor, state: State, group: Group) -> Stepped:
    """One step of SGD."""
    decay, mu, b = group["weight_decay"], group["momentum"], state.get("momentum_buffer")
    g = g.add(p, alpha=decay) if decay else g
    if not mu:
        return p.add(g, alpha=-group["lr"]), dict(state)
    b = g * 1.0 if b is None else (b * mu).add(g, alpha=1 - group["dampening"])
    d = g.add(b, alpha=mu) if group["nesterov"] else b
    return p.add(d, alpha=-group["lr"]), {"momentum_buffer": b}


def lion(p: Tensor, g: Tensor, state: State, group: Group) -> Stepped:
    """One step of Lion."""
    b1, b2 = group["betas"]
    m = state.get("exp_avg", p.new_zeros(p.shape))
    c = (m * b1).add(g, alpha=1 - b1)
    p = (p * (1 - group["lr"] * group["weight_decay"])).add(c.sign(), alpha=-group["lr"])
    return p, {"exp_avg": (m * b2).add(g, alpha=1 - b2)}


class Ordinary(torch.optim.Optimizer):
    """Base of the four: `step` carries out the equation of its class.

    Attributes:
        equation: takes a parameter, its gradient, its state and its group; new weights and state.
    """

    equation: Callable[[Tensor, Tensor, State, Group], Stepped]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; writes the weights of parameters that have a gradient, in place.

        Args:
            closure: evaluates the loss again, with gradients enabled.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        equation = type(self).equation
        for group in self.param_groups:
            for p in cast("list[Tensor]", group["params"]):
                if p.grad is not None:
                    new, state = equation(p, p.grad, self.state[p], group)
                    p.copy_(new)
                    self.state[p].update(state)
        return loss


class AdamW(Ordinary):
    """AdamW as `torch.optim.AdamW` has it."""

    equation = staticmethod(adamw)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        decay = {"weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **decay})


class Adam(Ordinary):
    """Adam as `torch.optim.Adam` has it."""

    equation = staticmethod(adam)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        decay = {"weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **decay})


class SGD(Ordinary):
    """SGD as `torch.optim.SGD` has it."""

    equation = staticmethod(sgd)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        inertia = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **inertia})


class Lion(Ordinary):
    """Lion as published."""

    equation = staticmethod(lion)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
