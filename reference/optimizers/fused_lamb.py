"""FusedLamb: LAMB as an ordinary `torch.optim.Optimizer`.

The arithmetic is `reference.lamb`, parameter by parameter. The class adds state: fp32
moments, one integer counter per parameter, the trust ratios of the last step, and gradients, copies
and a scale that a wrapper can hand to `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast, overload

import torch
from torch import Tensor

from twinstep.contract.checkpoint.plain import loading_as_stored
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import Number, check_lamb
from twinstep.contract.keywords import check_keywords, refuse_asked
from twinstep.contract.moments import StateDict, adding_group, new_state
from twinstep.contract.shards import waited
from twinstep.contract.tensors import check_dense_gradient
from twinstep.contract.uncompiled import uncompiled
from twinstep.reference.arithmetic import control, fp32
from twinstep.reference.clip import clip_factor
from twinstep.reference.lamb import LambScalars, lamb_scalars, lamb_update
from twinstep.reference.norm import l2_norm
from twinstep.reference.optimizers.fused_adam import ParamGroup

PerParam = Sequence[Tensor | None]
TensorLists = PerParam | Sequence[PerParam]
OPTIONS = ("eps_inside_sqrt", "compat")


class FusedLamb(torch.optim.Optimizer):
    """LAMB with a bounded trust ratio for every parameter.

    Args:
        params: parameters or groups of parameters; fp16, bf16 and fp32 may be mixed.
        lr: learning rate; like betas, eps, weight_decay and both coefficients a float or a 0-dim
            tensor, read at every step.
        bias_correction: multiply the step size by sqrt(1 - beta2^t) / (1 - beta1^t).
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment, or under it.
        eps_inside_sqrt: True adds eps under the root.
        weight_decay: added to the direction, applied whatever its sign.
        max_grad_norm: clip each gradient to this norm; 0 or below does not clip.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        amsgrad: refused unless False.
        compat: upstream behaviour to reproduce; LAMB has none of its own.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State per parameter: `step` (int64, shape ()), `exp_avg` and `exp_avg_sq` (fp32, shaped like
    the parameter). Parameters without a gradient are left alone, counter included.

    Source: You et al. (2020), algorithm 2, as DeepSpeed's `FusedLamb` has it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: Number = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: Number = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: Number = 10.0,
        min_coeff: Number = 0.01,
        amsgrad: bool = False,
        compat: Compat = CORRECT,
        **torchs: object,
    ) -> None:
        check_keywords("FusedLamb", torchs, amsgrad)
        self.eps_inside_sqrt = bool(eps_inside_sqrt)
        self.compat = compat
        self._ratios: list[Tensor] = []
        defaults: ParamGroup = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; options that it lacks come from the constructor.

        Raises:
            TypeError: a hyper-parameter is no number.
            RuntimeError: the group asks for what a keyword of the constructor may not.
            ValueError: a hyper-parameter is out of range, a dtype is not fp16, bf16 or fp32, or
                elements of a parameter share memory. The optimizer is unchanged.
        """
        check_lamb({**self.defaults, **param_group}, "FusedLamb")
        refuse_asked(param_group, "FusedLamb")
        with adding_group(self, param_group):
            super().add_param_group(param_group)

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, one for each parameter that was stepped, in order."""
        return [ratio.item() for ratio in self._ratios]

    @overload
    def step(
        self,
        closure: None = None,
        *,
        grads: TensorLists | None = None,
        output_params: TensorLists | None = None,
        scale: Number = 1.0,
        grad_norms: Sequence[Sequence[Number]] | None = None,
    ) -> None: ...

    @overload
    def step(
        self,
        closure: Callable[[], float],
        *,
        grads: TensorLists | None = None,
        output_params: TensorLists | None = None,
        scale: Number = 1.0,
        grad_norms: Sequence[Sequence[Number]] | None = None,
    ) -> float: ...

    @uncompiled
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grads: TensorLists | None = None,
        output_params: TensorLists | None = None,
        scale: Number = 1.0,
        grad_norms: Sequence[Sequence[Number]] | None = None,
    ) -> float | None:
        """Take one step; writes parameters, moments, counters and the given copies in place.

        Args:
            closure: evaluates the loss again, with gradients enabled.
            grads: gradients to use instead of `param.grad`, one per parameter: a list for the only
                group, or a list per group. None entries fall back to `param.grad`.
            output_params: low-precision copies to write, laid out like `grads`.
            scale: what the gradients are divided by, with one multiplication by its inverse.
            grad_norms: norm of each gradient, still scaled, a list per group; read when
                max_grad_norm is above 0. Without it the norm is computed.

        Returns:
            The result of the closure, or None.

        Raises:
            ValueError: a list is not as long as its group.
            RuntimeError: a gradient is sparse. Nothing has been written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rows = self._rows(grads, output_params, grad_norms)
        for row in rows:
            check_dense_gradient(row.grad, "FusedLamb.step")
        self._ratios = [self._step_param(row, scale) for row in rows]
        return loss

    def _rows(
        self,
        grads: TensorLists | None,
        outputs: TensorLists | None,
        norms: Sequence[Sequence[Number]] | None,
    ) -> list[_Row]:
        """Everything that belongs to one parameter side by side; without a gradient no row."""
        lengths = [len(group["params"]) for group in self.param_groups]
        given = _per_group("grads", grads, lengths)
        copies = _per_group("output_params", outputs, lengths)
        known: Sequence[Sequence[Number | None]] = norms or [[None] * n for n in lengths]
        rows = []
        for group, *columns in zip(self.param_groups, given, copies, known, strict=True):
            for param, grad, copy, norm in zip(group["params"], *columns, strict=True):
                chosen = param.grad if grad is None else grad
                if chosen is not None:
                    rows.append(_Row(param, waited(chosen), copy, norm, group))
        return rows

    def _step_param(self, row: _Row, scale: Number) -> Tensor:
        """One step of one parameter; returns its trust ratio."""
        param = row.param
        if not self.state[param]:
            self.state[param] = self._initial_state(param)
        state = self.state[param]
        s = _scalars(row, int(state["step"].item()) + 1, scale)
        p, m, v, ratio = lamb_update(
            fp32(param),
            fp32(row.grad),
            state["exp_avg"],
            state["exp_avg_sq"],
            s,
            eps_inside_sqrt=self.eps_inside_sqrt,
        )
        param.copy_(p)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        state["step"].add_(1)
        if row.copy is not None:
            row.copy.copy_(p)
        return ratio

    def initialize_states(self) -> None:
        """Allocate the state of every parameter that has none; no value changes."""
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if not self.state[param]:
                self.state[param] = self._initial_state(param)

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        return new_state(param)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, moments in fp32 and counters as integers; the dict is copied.

        Raises:
            ValueError: a counter counts no steps, a moment is missing or has another shape, or
                groups do not match. The optimizer is unchanged.
        """
        with loading_as_stored(self, self._initial_state):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> StateDict:
        own: StateDict = {name: getattr(self, name) for name in OPTIONS}
        return {**super().__getstate__(), **own, "_ratios": self._ratios}


@dataclass(frozen=True)
class _Row:
    """One parameter and everything that belongs to it."""

    param: Tensor
    grad: Tensor
    copy: Tensor | None
    norm: Number | None
    group: ParamGroup


def _scalars(row: _Row, t: int, scale: Number) -> LambScalars:
    group, device = row.group, row.param.device
    beta1, beta2 = cast(tuple[Number, Number], group["betas"])

    def named(name: str) -> Tensor:
        return control(cast(Number, group[name]), device)

    return lamb_scalars(
        t,
        lr=named("lr"),
        beta1=control(beta1, device),
        beta2=control(beta2, device),
        eps=named("eps"),
        weight_decay=named("weight_decay"),
        max_coeff=named("max_coeff"),
        min_coeff=named("min_coeff"),
        factor=_factor(row, control(scale, device)),
        bias_correction=bool(group["bias_correction"]),
    )


def _factor(row: _Row, scale: Tensor) -> Tensor:
    """Factor of the gradient: 1/scale, or less where max_grad_norm clips it."""
    max_norm = control(cast(Number, row.group["max_grad_norm"]), row.param.device)
    norm = torch.zeros(())
    if max_norm.item() > 0:
        given = row.norm
        norm = l2_norm([row.grad]) if given is None else fp32(control(given, row.param.device))
    return clip_factor(norm=norm, scale=scale, max_norm=max_norm)


def _per_group(name: str, given: TensorLists | None, lengths: list[int]) -> list[PerParam]:
    """One list per group, each as long as its group; None entries where nothing was given.

    Raises:
        ValueError: there are not as many entries as parameters.
    """
    if given is None:
        return [[None] * length for length in lengths]
    entries = list(given)
    if all(entry is None or isinstance(entry, Tensor) for entry in entries):
        lists = [cast(PerParam, entries)]
    else:
        lists = [list(cast(PerParam, entry)) for entry in entries]
    if [len(entry) for entry in lists] != lengths:
        got = [len(entry) for entry in lists]
        raise ValueError(
            f"{name} has {got} tensors per group, but should have {lengths} [FusedLamb.step]"
        )
    return lists
