"""Mistakes in the formulas of Adam and LAMB, as references that make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.expected.deviations import DEVIATIONS
from twinstep.parity.operations.operation import Operation
from twinstep.parity.runner.causes.evidence import Cause, Evidence, Masks, Reference
from twinstep.reference.adam import AdamScalars, adam_scalars
from twinstep.reference.arithmetic import bias_correction_of, fp32, power, sqrt_rn
from twinstep.reference.lamb import lamb_scalars, lamb_update
from twinstep.reference.parameters import Lists, for_each_parameter

Numbers = tuple[int, Tensor, Tensor]
Scalars = Callable[[AdamScalars, Numbers], AdamScalars]
Denominator = Callable[[Tensor, AdamScalars], Tensor]
DECAYS = ("L2", "decoupled", "without lr", "by lr twice", "of the new weights")


def _acceptable(says: str, *names: str) -> str:
    """Deviations that may be accepted: what is done, how serious it is, and how to accept it."""
    weights = "; ".join(DEVIATIONS[name].weight for name in names)
    accept = ", ".join(f'"{name}": "why"' for name in names)
    return f"{says} ({weights}). To allow for it: @register(..., accept={{{accept}}})"


LOST, LOST_POWER = (_acceptable(row.says, name) for name, row in DEVIATIONS.items())
LOST_BOTH = _acceptable("1 - beta and beta^t are formed in fp32", *DEVIATIONS)


def formula_causes(operation: Operation) -> list[Cause]:
    """Mistakes in the formula of an operation; none where its formula is not known here."""
    if operation.name in ("adam_step", "adamw_step"):
        return _adam_causes("decoupled" if operation.name == "adamw_step" else "L2")
    if operation.name == "lamb_step":
        return [_cause(LOST, _lamb)]
    return []


def _adam_causes(decay: str) -> list[Cause]:
    scalars: dict[str, Scalars] = {
        LOST: _lost,
        LOST_POWER: _lost_power,
        LOST_BOTH: lambda s, n: _lost(_lost_power(s, n), n),
        "no bias correction of the first moment": lambda s, n: replace(s, k1=torch.ones_like(s.k1)),
        "no bias correction of the second moment": lambda s, n: replace(
            s, k2=torch.ones_like(s.k2)
        ),
        "the bias correction is applied twice": lambda s, n: replace(s, k1=s.k1**2, k2=s.k2**2),
        "the bias correction takes the step before this one": _step_by(-1),
        "the bias correction takes the step after this one": _step_by(1),
    }
    roots: dict[str, Denominator] = {
        "eps is added under the root: sqrt(v + eps), not sqrt(v) + eps": lambda v, s: sqrt_rn(
            v / s.k2 + s.eps
        ),
        "eps is added before the bias correction: (sqrt(v) + eps) / sqrt(k2)": lambda v, s: (
            (sqrt_rn(v) + s.eps) / sqrt_rn(s.k2)
        ),
    }
    return [
        *(_cause(says, _adam(decay, scalars=change)) for says, change in scalars.items()),
        *(_cause(says, _adam(decay, root=root)) for says, root in roots.items()),
        *(
            _cause(f"weight decay is {_name(other)}, but should be {_name(decay)}", _adam(other))
            for other in DECAYS
            if other != decay
        ),
    ]


def _name(decay: str) -> str:
    return {
        "L2": "added to the gradient (L2)",
        "decoupled": "decoupled and times lr",
        "without lr": "not multiplied by lr",
        "by lr twice": "multiplied by lr twice",
        "of the new weights": "taken of the weights after the step",
    }[decay]


def _cause(says: str, reference: Reference) -> Cause:
    def fits(evidence: Evidence) -> Masks:
        return evidence.with_reference(reference)

    return Cause(says=says, fits=fits)


def _lost(s: AdamScalars, numbers: Numbers) -> AdamScalars:
    return replace(s, c1=1.0 - s.b1, c2=1.0 - s.b2)


def _lost_power(s: AdamScalars, numbers: Numbers) -> AdamScalars:
    t, beta1, beta2 = numbers
    k1, k2 = (1.0 - fp32(power(fp32(beta), t)) for beta in (beta1, beta2))
    corrected = bool(s.k1 != 1) or bool(s.k2 != 1)
    return replace(s, k1=k1, k2=k2) if corrected else s


def _step_by(offset: int) -> Scalars:
    def change(s: AdamScalars, numbers: Numbers) -> AdamScalars:
        t, beta1, beta2 = numbers
        if not (bool(s.k1 != 1) or bool(s.k2 != 1)):
            return s
        k1, k2 = (bias_correction_of(beta, t + offset) for beta in (beta1, beta2))
        return replace(s, k1=k1, k2=k2)

    return change


def _adam(
    decay: str,
    *,
    scalars: Scalars = lambda s, numbers: s,
    root: Denominator = lambda v, s: sqrt_rn(v / s.k2) + s.eps,
) -> Reference:
    """Adam with another decay, other scalars, or another denominator."""

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamScalars) -> tuple[Tensor, ...]:
        g = g * s.factor
        g = g + s.wd * p if decay == "L2" else g
        m = s.b1 * m + s.c1 * g
        v = s.b2 * v + (s.c2 * g) * g
        u = (m / s.k1) / root(v, s)
        if decay == "decoupled":
            return p - s.lr * (u + s.wd * p), m, v
        if decay == "by lr twice":
            return p - s.lr * (u + (s.lr * s.wd) * p), m, v
        stepped = p - s.lr * u
        if decay == "without lr":
            return stepped - s.wd * p, m, v
        if decay == "of the new weights":
            return stepped - (s.lr * s.wd) * stepped, m, v
        return stepped, m, v

    def reference(
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        copies: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        found_inf: Tensor,
        **controls: Tensor,
    ) -> Lists:
        def of_one(t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            s = adam_scalars(t, **controls)  # type: ignore[arg-type]
            return update(p, g, m, v, scalars(s, (t, controls["beta1"], controls["beta2"])))

        moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
        return for_each_parameter("adam", of_one, params, grads, moments, copies, steps, found_inf)

    return reference


def _lamb(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    found_inf: Tensor,
    eps_inside_sqrt: bool,
    **controls: Tensor,
) -> Lists:
    """LAMB with 1 - beta formed in fp32."""

    def of_one(t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s = lamb_scalars(t, **controls)  # type: ignore[arg-type]
        s = replace(s, c1=1.0 - s.b1, c2=1.0 - s.b2)
        return lamb_update(p, g, m, v, s, eps_inside_sqrt=eps_inside_sqrt)[:3]

    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    return for_each_parameter("lamb", of_one, params, grads, moments, copies, steps, found_inf)
