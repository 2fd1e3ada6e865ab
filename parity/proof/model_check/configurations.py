"""Configurations of the scalers, all of them up to symmetry: small windows, small hysteresis.

Multiplying scale and floor by a power of two changes nothing but the range of floats, so that the
floor is 1 everywhere, and the range's two ends have configurations of their own. With a hysteresis
of 0 or 1 nothing can be refilled, so that refilling by every clean step is left out there.
"""

from __future__ import annotations

from itertools import product

from twinstep.parity.proof.model_check.explore import Configuration
from twinstep.reference.loss_scale import DynamicRule, StaticRule, TorchRule, WrapperRule

WINDOWS = (1, 2, 3, 4)
SHIFTS = (0, 1, 2, 3)
STARTS = (4.0, 6.0, 1.0, 0.5)  # above, above and no power of two, at, and below the floor
TOP = 2.0**1021
FACTORS = ((2.0, 0.5), (1.1, 0.3), (3.0, 0.5))
FP32_ENDS = (1.0, 2.0**-147, 3e38)


def configurations() -> list[Configuration]:
    """All of them."""
    return [*_dynamic(), *_wrapper(), *_torch(), _static()]


def _dynamic() -> list[Configuration]:
    found = []
    either = (False, True)
    for window, shift, refills, raises, early in product(WINDOWS, SHIFTS, either, either, either):
        if refills and shift < 2:
            continue
        rule = DynamicRule(
            scale_window=window,
            delayed_shift=shift,
            consecutive_hysteresis=refills,
            raise_error_at_min_scale=raises,
            growth_counts_this_step=early,
        )
        words = [f"window {window}", f"hysteresis {shift}"]
        words += ["refilled by clean steps"] * refills + ["raises at the floor"] * raises
        words += ["growth as in 0.14"] * early
        starts = (*STARTS, TOP) if not refills else STARTS
        found.append(
            Configuration(
                name=f"dynamic, {', '.join(words)}",
                kind="dynamic",
                rule=rule,
                starts=starts,
                hysteresis=shift,
            )
        )
    return found


def _wrapper() -> list[Configuration]:
    return [
        Configuration(
            name=f"wrapper, window {window}",
            kind="wrapper",
            rule=WrapperRule(scale_window=window),
            starts=(*STARTS, TOP),
        )
        for window in WINDOWS
    ]


def _torch() -> list[Configuration]:
    return [
        Configuration(
            name=f"torch, interval {window}, factors {grows} and {backs}",
            kind="torch",
            rule=TorchRule(growth_factor=grows, backoff_factor=backs, growth_interval=window),
            starts=tuple(map(_fp32, FP32_ENDS)),
        )
        for window, (grows, backs) in product(WINDOWS, FACTORS)
    ]


def _fp32(value: float) -> float:
    import torch

    return float(torch.tensor(value, dtype=torch.float32))


def _static() -> Configuration:
    return Configuration(name="static", kind="static", rule=StaticRule(), starts=(3.5,))
