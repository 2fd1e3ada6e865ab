"""Optimizers as people write them, with torch's interface alone, and each with faults put in.

A class is right as it stands here. A fault is a piece of its text in the place of another.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.optimizers import Optimizer

Closure = Callable[[], float]
ORDINARY: list[Optimizer] = []
WRONG_ORDINARY: list[Optimizer] = []


class LoopAdamW(torch.optim.Optimizer):
    """AdamW, parameter by parameter; the decay is added to the update."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, rates)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                if not state:
                    state["t"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p)
                mean, square = state["mean"], state["square"]
                state["t"] += 1
                mean.mul_(beta1).add_(g, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                m = mean / (1 - beta1 ** state["t"])
                v = square / (1 - beta2 ** state["t"])
                p.sub_(lr * (m / (v.sqrt() + eps) + decay * p))
        return loss


class ForeachAdam(torch.optim.Optimizer):
    """Adam with L2 on lists of tensors; both corrections are in the rate."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "amsgrad": amsgrad})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_count: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                by_count.setdefault(state["step"], []).append(p)
            for count, params in by_count.items():
                self._update(params, count, group)
        return loss

    def _update(self, params: list[Tensor], t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grads: list[Tensor] | tuple[Tensor, ...]
        grads = [p.grad for p in params if p.grad is not None]
        if group["weight_decay"]:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        root = math.sqrt(1 - beta2**t)
        rate = group["lr"] * root / (1 - beta1**t)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"] * root)
        torch._foreach_addcdiv_(params, means, roots, value=-rate)


class LoopSGD(torch.optim.Optimizer):
    """SGD with all its arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        inertia = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **inertia})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            mu = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                d = p.grad + group["weight_decay"] * p
                if mu != 0:
                    if "buffer" not in self.state[p]:
                        self.state[p]["buffer"] = d.clone()
                    else:
                        self.state[p]["buffer"].mul_(mu).add_(d, alpha=1 - group["dampening"])
                    buffer = self.state[p]["buffer"]
                    d = d + mu * buffer if group["nesterov"] else buffer
                p.add_(d, alpha=-group["lr"])
        return loss


class HeavyBall(torch.optim.Optimizer):
    """SGD with a rate and momentum, which begins with a buffer of zeros."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    v = self.state[p].setdefault("v", torch.zeros_like(p))
                    v.mul_(group["momentum"]).add_(p.grad)
                    p.sub_(group["lr"] * v)
        return loss


class LoopLion(torch.optim.Optimizer):
    """Lion that decays before it steps."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, m = p.grad, self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(torch.sign(m * beta1 + g * (1 - beta1)), alpha=-lr)
                m.lerp_(g, 1 - beta2)
        return loss


# Class, name of the faulty one, what is wrong with it, a piece of its text, and what stands there.
FAULTS: Sequence[tuple[type, str, str, str, str]] = (
    (LoopAdamW, "EpsUnderTheRoot", "Adds eps under the root.",
     "(v.sqrt() + eps)", "(v + eps).sqrt()"),
    (LoopAdamW, "EpsBeforeTheCorrection", "Adds eps to the root of the moment not yet corrected.",
     "m / (v.sqrt() + eps)", 'm * (1 - beta2 ** state["t"]) ** 0.5 / (square.sqrt() + eps)'),
    (LoopAdamW, "DecaysTheNewWeight", "Decays the weight that has been updated.",
     "p.sub_(lr * (m / (v.sqrt() + eps) + decay * p))",
     "p.sub_(lr * m / (v.sqrt() + eps)).mul_(1 - lr * decay)"),
    (LoopAdamW, "DecaysTheGradient", "Decays as Adam does.",
     "g, state = p.grad, self.state[p]",
     "g, state, decay = p.grad + decay * p, self.state[p], 0.0"),
    (LoopAdamW, "DecayWithoutRate", "Decays by the coefficient alone, not times the rate.",
     "p.sub_(lr * (m / (v.sqrt() + eps) + decay * p))",
     "p.mul_(1 - decay).sub_(lr * m / (v.sqrt() + eps))"),
    (LoopAdamW, "NoCorrectionOfTheMean", "Corrects the second moment alone.",
     'mean / (1 - beta1 ** state["t"])', "mean * 1.0"),
    (LoopAdamW, "CountsFromZero", "Corrects by the count before the step, from the second on.",
     'v = square / (1 - beta2 ** state["t"])',
     'v = square / (1 - beta2 ** max(1, state["t"] - 1))'),
    (LoopAdamW, "StepsWithoutGradient", "Takes zero for a gradient that is missing.",
     "if p.grad is None:\n                    continue\n                g, state = p.grad,",
     "g, state = torch.zeros_like(p) if p.grad is None else p.grad,"),
    (LoopAdamW, "RateOfTheConstructor", "Reads the rate of the constructor in every step.",
     'lr, eps, decay = group["lr"]', 'lr, eps, decay = self.defaults["lr"]'),
    (LoopAdamW, "BetasOfTheFirstGroup", "Reads the betas of the first group.",
     'beta1, beta2 = group["betas"]', 'beta1, beta2 = self.param_groups[0]["betas"]'),
    (LoopAdamW, "LosesItsCount", "Counts from 1 again after a load.",
     "@torch.no_grad()\n    def step",
     "def load_state_dict(self, state_dict):\n        super().load_state_dict(state_dict)\n"
     "        for row in self.state.values():\n            row['t'] = 0\n\n"
     "    @torch.no_grad()\n    def step"),
    (LoopAdamW, "KeepsItsState", "Loads hyper-parameters and keeps its own state.",
     "@torch.no_grad()\n    def step",
     "def load_state_dict(self, state_dict):\n        state = self.state\n"
     "        super().load_state_dict(state_dict)\n        self.state = state\n\n"
     "    @torch.no_grad()\n    def step"),
    (LoopAdamW, "StateBeside", "Keeps moments where `state_dict` does not look.",
     "g, state = p.grad, self.state[p]",
     "g, state = p.grad, self.__dict__.setdefault('kept', {}).setdefault(p, {})"),
    (LoopAdamW, "OneCountForAll", "Counts the steps of a group, not of each parameter.",
     'state["t"] += 1',
     "state['t'] = group['t'] = group.get('t', 0) + (p is group['params'][0])"),
    (LoopAdamW, "WritesTheGradient", "Scales the caller's gradient in place.",
     "square.mul_(beta2).addcmul_(g, g, value=1 - beta2)",
     "square.mul_(beta2).addcmul_(g, g.mul_(1 - beta2))"),
    (LoopAdamW, "NoGradInTheClosure", "Evaluates the closure with autograd off.",
     "with torch.enable_grad():", "with torch.no_grad():"),
    (LoopAdamW, "NoLoss", "Forgets what the closure gave.", "return loss", "return None"),
    (ForeachAdam, "EpsNotScaled", "Adds eps to a root that is not corrected.",
     'group["eps"] * root', 'group["eps"]'),
    (ForeachAdam, "GroupsOfOneDecay", "Decays every group as the first one.",
     'alpha=group["weight_decay"])', 'alpha=self.param_groups[0]["weight_decay"])'),
    (ForeachAdam, "BetasExchanged", "Uses beta2 for the first moment too.",
     "grads, 1 - beta1)", "grads, 1 - beta2)"),
    (ForeachAdam, "DecaysNothing", "Leaves the decay out.",
     'if group["weight_decay"]:', "if False:"),
    (LoopSGD, "DampensTheFirst", "Dampens the first gradient, too.",
     "= d.clone()", '= d * (1 - group["dampening"])'),
    (LoopSGD, "NesterovIgnored", "Steps along the buffer with nesterov, too.",
     'd + mu * buffer if group["nesterov"] else buffer', "buffer"),
    (LoopSGD, "DampensNothing", "Ignores dampening.", '1 - group["dampening"]', "1"),
    (LoopSGD, "DecaysAfterMomentum", "Adds the decay behind the momentum.",
     'd = p.grad + group["weight_decay"] * p', "d = p.grad.clone()"),
    (HeavyBall, "RateInTheBuffer", "Puts the rate into the buffer, where an older one stays.",
     'add_(p.grad)\n                    p.sub_(group["lr"] * v)',
     "add_(p.grad, alpha=group['lr'])\n                    p.sub_(v)"),
    (LoopLion, "MomentFirst", "Moves the moment before it takes the sign.",
     "torch.sign(m * beta1 + g * (1 - beta1))",
     "torch.sign(m.lerp_(g, 1 - beta2))"),
    (LoopLion, "OneBeta", "Moves the moment by beta1.", "m.lerp_(g, 1 - beta2)",
     "m.lerp_(g, 1 - beta1)"),
    (LoopLion, "SignOfTheGradient", "Takes the sign of the gradient.",
     "torch.sign(m * beta1 + g * (1 - beta1))", "torch.sign(g)"),
    (LoopLion, "SignOfZeroIsMinusOne", "Has no third sign.",
     "torch.sign(m * beta1 + g * (1 - beta1))",
     "torch.where(m * beta1 + g * (1 - beta1) > 0, 1.0, -1.0)"),
    (LoopLion, "LionDecaysTheGradient", "Adds the decay to the gradient, not to the update.",
     'p.mul_(1 - lr * group["weight_decay"])', 'g = g + group["weight_decay"] * p'),
    (LoopLion, "LionDecaysWithoutRate", "Decays by the coefficient alone.",
     '1 - lr * group["weight_decay"]', '1 - group["weight_decay"]'),
)  # fmt: skip
# Rows of docs/reference/bugs.md that some replant.
REPLANTED = {"SignOfZeroIsMinusOne": ("B08",), "LionDecaysTheGradient": ("B10",)}
REFERENCES = {LoopAdamW: "AdamW", ForeachAdam: "Adam", LoopLion: "Lion"}


def source_of(base: type, name: str = "", piece: str = "", other: str = "") -> str:
    """A class's text under another name, with a piece of it replaced."""
    text = inspect.getsource(base)
    assert piece in text, f"{base.__name__} has no {piece!r}"
    text = text.replace(piece, other, 1) if piece else text
    return text.replace(f"class {base.__name__}(", f"class {name or base.__name__}(", 1)


def _faulty(base: type, name: str, piece: str, other: str) -> type:
    scope = dict(globals())
    exec(source_of(base, name, piece, other), scope)
    return scope[name]  # type: ignore[no-any-return]


for _cls in (LoopAdamW, ForeachAdam, LoopSGD, HeavyBall, LoopLion):
    ORDINARY.append(
        Optimizer(
            cls=_cls,
            says=str(_cls.__doc__),
            reference=REFERENCES.get(_cls, "SGD"),
            dtypes=("fp32", "bf16"),
            arithmetic="bounded",
        )
    )
for _base, _name, _says, _piece, _other in FAULTS:
    WRONG_ORDINARY.append(
        Optimizer(
            cls=_faulty(_base, _name, _piece, _other),
            says=_says,
            reference=REFERENCES.get(_base, "SGD"),
            arithmetic="bounded",
            bugs=REPLANTED.get(_name, ()),
        )
    )
