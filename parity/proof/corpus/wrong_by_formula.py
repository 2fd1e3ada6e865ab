"""Wrong formulas that are smaller than the roundings around them.

All of them update bf16 weights without masters, whose own rounding is a thousand times larger. A
scalar that is one fp32 ULP off is wrong where every bit is claimed; for a bounded kernel that is an
honest rounding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from twinstep.parity.proof.corpus.adam import Scalars
from twinstep.parity.proof.corpus.adamw_kernel import triton_arranged
from twinstep.parity.proof.corpus.arithmetic import fp32, power, scalar
from twinstep.parity.proof.corpus.calls import AdamCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import named, wrong
from twinstep.parity.proof.corpus.triton_kernels import AdamwLaunch, adamw

SHELF: list[Entry] = []
PURE = ("bf16-pure",)
small = partial(
    wrong, SHELF, "adamw_step", component="Adam", law="formula", engines=("cuda", "replay")
)


def _next(x: torch.Tensor) -> torch.Tensor:
    """The next larger fp32 number; 0 stays 0."""
    return torch.where(x > 0, torch.nextafter(x, torch.tensor(torch.inf)), x)


@small(dtypes=PURE, arithmetic="exact", alone=True)
def eps_one_ulp_too_large(call: AdamCall) -> None:
    """Eps is the next larger fp32 number."""
    adamw(call, AdamwLaunch(change=lambda s, c, t: replace(s, eps=_next(s.eps))))


@small(dtypes=PURE)
def eps_a_hundred_thousandth_too_large(call: AdamCall) -> None:
    """Eps is 1.00001 times what it should be, under bf16 weights."""
    adamw(call, AdamwLaunch(change=lambda s, c, t: replace(s, eps=s.eps * 1.00001)))


@small(dtypes=("bf16", *PURE), arithmetic="exact")
def learning_rate_one_ulp_too_large(call: AdamCall) -> None:
    """Lr is the next larger fp32 number."""
    adamw(call, AdamwLaunch(change=lambda s, c, t: replace(s, lr=_next(s.lr))))


@small(dtypes=PURE)
def one_minus_beta2_formed_in_fp32(call: AdamCall) -> None:
    """1 - beta2 is formed in fp32, from the rounded beta2."""
    adamw(call, AdamwLaunch(change=lambda s, c, t: replace(s, c2=1.0 - s.b2)))


def _fp32_powers(s: Scalars, call: AdamCall, t: int) -> Scalars:
    if not call.bias_correction:
        return s
    k1, k2 = (1.0 - fp32(beta) ** t for beta in (call.beta1, call.beta2))
    return replace(s, k1=k1, k2=k2)


@small(dtypes=PURE)
def powers_of_beta_formed_in_fp32(call: AdamCall) -> None:
    """Bias corrections come from powers formed in fp32, under bf16 weights."""
    adamw(call, AdamwLaunch(change=_fp32_powers))


def _trifle(s: Scalars, call: AdamCall, t: int) -> Scalars:
    if not call.bias_correction:
        return s
    return replace(s, k1=scalar(1.0 - power(float(call.beta1), t) * (1.0 + 2.0**-26)))


@small(dtypes=PURE)
def power_of_beta_a_trifle_too_large(call: AdamCall) -> None:
    """The first bias correction uses beta1^t times 1 + 2^-26."""
    adamw(call, AdamwLaunch(change=_trifle))


# The twins of harmless_adamw.py: as easily written, and another formula or fewer digits.
ARRANGED = {
    "complement": "1 - beta is formed in the kernel, in fp32, and nothing says so.",
    "difference": "Moments (m - g) * b1 + g, where g cancels all but 1 - b1 of it.",
    "weighted": "Moments m + c1 * (g - m), where m cancels if beta is 0.",
    "no_rate": "P shrinks by 1 - wd, formed in the kernel.",
    "grown": "P grows by 1 + lr * wd, formed in the kernel.",
    "new": "P times 1 - lr * wd behind the step: the new weights decay.",
}
for how, says in ARRANGED.items():
    wrong(
        SHELF, "adamw_step", component="Adam", engines=("cuda", "replay"), dtypes=("bf16", "fp32")
    )(named(f"triton_adamw_{how}_rejected", says, partial(triton_arranged, how=how)))
