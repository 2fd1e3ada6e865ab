"""AdamW as public optimizers write it, in torch and Triton: arrangements of one formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adamw_kernel import triton_arranged
from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import AdamCall, skipped
from twinstep.parity.proof.corpus.entry import Variant
from twinstep.parity.proof.corpus.shelf import harmless, named

SHELF: list[Variant] = []
DTYPES = ("bf16", "fp32", "bf16-pure")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Hyper-parameters of one tensor's step as Python numbers, the bias corrections formed."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    k1: float
    k2: float


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Numbers], None]
Form = Callable[[AdamCall, Tensor], Numbers]


def stepped(call: AdamCall, step: Step, form: Form | None = None) -> None:
    """A style that changes weights and moments in place, tensor by tensor, all of it in fp32."""
    if skipped(call):
        return
    for i, p in enumerate(call.params):
        call.steps[i] += 1
        w, g = fp32(p.detach()), fp32(call.grads[i]) * call.factor
        formed = (form or numbers)(call, call.steps[i])
        step(w, g, call.exp_avgs[i], call.exp_avg_sqs[i], formed)
        p.copy_(w)
        if call.copies:
            call.copies[i].copy_(w)


def numbers(call: AdamCall, count: Tensor) -> Numbers:
    """Hyper-parameters that a launcher reads from its group, for the step after `count - 1`."""
    beta1, beta2, t = float(call.beta1), float(call.beta2), int(count)
    return Numbers(
        lr=float(call.lr),
        beta1=beta1,
        beta2=beta2,
        eps=float(call.eps),
        decay=float(call.weight_decay),
        k1=1 - beta1**t if call.bias_correction else 1.0,
        k2=1 - beta2**t if call.bias_correction else 1.0,
    )


def by_powers_in_fp32(call: AdamCall, count: Tensor) -> Numbers:
    """The same, each power of beta rounded to fp32."""
    formed = numbers(call, count)
    if not call.bias_correction:
        return formed
    k1, k2 = (float(1 - torch.pow(b, fp32(count))) for b in (formed.beta1, formed.beta2))
    return replace(formed, k1=k1, k2=k2)


def moments(g: Tensor, m: Tensor, v: Tensor, h: Numbers) -> None:
    """Both moments by `mul_`, `add_` and `addcmul_`."""
    m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)


def as_torch(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Numbers) -> None:
    """Decay first, lerp, sqrt(v) / sqrt(k2), addcdiv by lr / k1."""
    w.mul_(1 - h.lr * h.decay)
    m.lerp_(g, 1 - h.beta1)
    v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
    w.addcdiv_(m, (v.sqrt() / h.k2**0.5).add_(h.eps), value=-(h.lr / h.k1))


def decay_last(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Numbers) -> None:
    """The decay of the old weights is taken behind the step."""
    moments(g, m, v, h)
    old = w.clone()
    w.addcdiv_(m, (v / h.k2).sqrt_().add_(h.eps), value=-h.lr / h.k1)
    w.add_(old, alpha=-h.lr * h.decay)


def as_the_paper(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Numbers) -> None:
    """Lr sqrt(k2) / k1 as step size, eps times sqrt(k2), the decay written out."""
    moments(g, m, v, h)
    root = h.k2**0.5
    w.sub_(h.lr * h.decay * w)
    w.addcdiv_(m, v.sqrt().add_(h.eps * root), value=-h.lr * root / h.k1)


def lerped(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Numbers) -> None:
    """Both moments by lerp."""
    m.lerp_(g, 1 - h.beta1)
    v.lerp_(g.square(), 1 - h.beta2)
    w.mul_(1 - h.lr * h.decay)
    w.add_(m / (v.sqrt().div_(h.k2**0.5).add_(h.eps)), alpha=-h.lr / h.k1)


STYLES: tuple[Step, ...] = (as_torch, decay_last, as_the_paper, lerped)
for style in STYLES:
    harmless(SHELF, "adamw_step", dtypes=DTYPES)(
        named(f"adamw_{style.__name__}", style.__doc__ or "", partial(stepped, step=style))
    )

ARRANGED = {
    "decay": "P times 1 - lr * wd, formed in the kernel.",
    "host": "The host forms 1 - lr * wd, lr / k1 and sqrt(k2).",
    "paper": "Lr * wd * p written out; the step size and eps take sqrt(k2).",
    "reciprocal": "Products with reciprocals that the kernel forms.",
    "last": "The decay of the old weights is taken behind the step.",
    "lerp": "Moments m + c1 * (g - m), from the nearer end.",
}
for how, says in ARRANGED.items():
    harmless(SHELF, "adamw_step", dtypes=DTYPES, engines=("cuda", "replay"))(
        named(f"triton_adamw_{how}", says, partial(triton_arranged, how=how))
    )


@harmless(
    SHELF,
    "adamw_step",
    dtypes=DTYPES,
    engines=("cuda", "replay"),
    accept={"one_minus_beta": "two arguments less"},
)
def triton_adamw_complement(call: AdamCall) -> None:
    """1 - beta formed in the kernel, in fp32."""
    triton_arranged(call, "complement")


@harmless(SHELF, "adamw_step", dtypes=DTYPES, accept={"power_of_beta": "the count is a tensor"})
def adamw_capturable(call: AdamCall) -> None:
    """The corrections by torch.pow of a step count in fp32, as where a step is captured."""
    stepped(call, as_torch, by_powers_in_fp32)


@harmless(SHELF, "adamw_step", dtypes=DTYPES, engines=("cuda", "replay"))
def triton_adamw_tuned(call: AdamCall) -> None:
    """Autotuned block, state restored between trials."""
    triton_arranged(call, "host", tuned=True)
