"""The whole step: its parts in their order, skipped steps, and which scale unscales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.parity.cases.fixed_inputs import anything, bits, moderate
from twinstep.parity.operations.scales import update_scale_dynamic
from twinstep.parity.operations.steps import mixed_step
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.clip import clip_factor
from twinstep.reference.norm import l2_norm
from twinstep.reference.parameters import Lists

NAMES = (
    *("params", "exp_avgs", "exp_avg_sqs", "copies", "steps"),
    *("scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "growth_tracker", "exhausted"),
    *("norm", "found_inf"),
)
FLOATS = {
    "lr": 0.0123,
    "beta1": 0.87,
    "beta2": 0.993,
    "eps": 3e-7,
    "weight_decay": 0.07,
    "max_norm": 0.5,
    "scale": 16.0,
    "scale_factor": 2.0,
    "min_scale": 0.25,
    "backoff_factor": 0.5,
}
INTEGERS = {
    "cur_iter": 5,
    "last_overflow_iter": 2,
    "cur_hysteresis": 2,
    "growth_tracker": 1,
    "exhausted": 0,
    "scale_window": 2,
    "delayed_shift": 2,
}


def state(dtype: torch.dtype = torch.float16) -> Lists:
    sizes = (40, 0, 7)
    p = [moderate(n, 10 + n, torch.float32) for n in sizes]
    g = [moderate(n, 20 + n, dtype, high=4) for n in sizes]
    m = [moderate(n, 30 + n, torch.float32) for n in sizes]
    v = [moderate(n, 40 + n, torch.float32, high=0).abs() for n in sizes]
    return p, g, m, v, [t.to(dtype) for t in p], [torch.tensor(n) for n in (0, 3, 7)]


def call(
    lists: Lists,
    *,
    rule: str = "dynamic",
    adam_w_mode: bool = True,
    compat: Compat = CORRECT,
    **changed: float,
) -> dict[str, object]:
    floats = {name: float64(changed.get(name, value)) for name, value in FLOATS.items()}
    integers = {
        name: torch.tensor(int(changed.get(name, value))) for name, value in INTEGERS.items()
    }
    whole: Callable[..., tuple[object, ...]] = mixed_step
    result = whole(
        *lists,
        **floats,
        **integers,
        norm=torch.tensor(7.0),
        found_inf=torch.tensor(1.0),
        adam_w_mode=adam_w_mode,
        bias_correction=True,
        rule=rule,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        compat=compat,
    )
    return dict(zip(NAMES, result, strict=True))


def value(result: dict[str, object], name: str) -> float:
    entry = result[name]
    assert isinstance(entry, Tensor)
    return entry.item()


def tensors(result: dict[str, object], name: str) -> list[Tensor]:
    entry = result[name]
    assert isinstance(entry, list)
    return entry


@pytest.mark.parametrize("adam_w_mode", [False, True])
def test_mixed_step_is_its_parts_in_order(adam_w_mode: bool) -> None:
    lists = state()
    norm = l2_norm(lists[1])
    controls = {name: float64(FLOATS[name]) for name in ("scale", "max_norm")}
    factor = clip_factor(norm=norm, **controls)
    assert factor < 1 / 16.0
    hyper = {n: float64(FLOATS[n]) for n in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    step: Callable[..., Lists] = adamw_step if adam_w_mode else adam_step
    parts = step(*lists, **hyper, factor=factor, found_inf=torch.tensor(0.0), bias_correction=True)
    result = call(lists, adam_w_mode=adam_w_mode)
    for name, wanted in zip(NAMES, parts, strict=False):
        assert [bits(t) for t in tensors(result, name)] == [bits(t) for t in wanted]
    update: Callable[..., tuple[Tensor, ...]] = update_scale_dynamic
    scale, cur_iter, last, hysteresis, exhausted = update(
        scale=float64(16.0),
        found_inf=torch.tensor(0.0),
        scale_factor=float64(2.0),
        min_scale=float64(0.25),
        **{n: torch.tensor(INTEGERS[n]) for n in INTEGERS if n != "growth_tracker"},
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
    )
    state_after = [scale, cur_iter, last, hysteresis, exhausted]
    names = ["scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "exhausted"]
    assert [value(result, name) for name in names] == [t.item() for t in state_after]
    assert value(result, "norm") == (norm.double() / 16.0).float().item()
    assert value(result, "found_inf") == 0.0


@pytest.mark.parametrize("rule", ["static", "dynamic", "wrapper", "torch"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_overflow_skips_the_step_bit_for_bit(rule: str, bad: float) -> None:
    p, g, m, v, c, s = state()
    p[0], m[0] = anything(40, 1, torch.float32), anything(40, 2, torch.float32)
    g[2][6] = bad
    result = call((p, g, m, v, c, s), rule=rule)
    written = {"params": p, "exp_avgs": m, "exp_avg_sqs": v, "copies": c, "steps": s}
    for name, old in written.items():
        assert [bits(t) for t in tensors(result, name)] == [bits(t) for t in old]
    assert value(result, "found_inf") == 1.0


TOUCHED: dict[str, set[str]] = {
    "static": set(),
    "dynamic": {"cur_iter", "last_overflow_iter", "cur_hysteresis"},
    "wrapper": {"scale", "cur_iter", "last_overflow_iter"},
    "torch": {"scale", "growth_tracker"},
}


@pytest.mark.parametrize("rule", list(TOUCHED))
def test_a_rule_touches_only_its_own_state(rule: str) -> None:
    p, g, m, v, c, s = state()
    g[0][0] = torch.inf
    result = call((p, g, m, v, c, s), rule=rule)
    before = {"scale": 16.0, **{name: INTEGERS[name] for name in INTEGERS if name in NAMES}}
    moved = {name for name, old in before.items() if value(result, name) != old}
    assert moved == TOUCHED[rule]


def test_exhausted_is_raised_at_the_floor_and_nothing_else_moves() -> None:
    p, g, m, v, c, s = state()
    g[0][0] = torch.nan
    result = call((p, g, m, v, c, s), scale=0.25, cur_hysteresis=1)
    assert (value(result, "exhausted"), value(result, "cur_iter")) == (1, 5)
    assert value(result, "scale") == 0.25


def unit_steps(compat: Compat, rule: str = "wrapper") -> list[tuple[float, float]]:
    """Largest part of the applied gradient and reported norm, six steps of gradient 1, window 2.

    With beta1 = beta2 = 0, eps far above the gradient and no bias correction, Adam's update is the
    gradient times lr / eps.
    """
    p, scale, cur_iter, last = torch.zeros(4), 4.0, 0, -1
    applied = []
    for _ in range(6):
        zero = torch.zeros(4)
        result = call(
            ([p], [torch.full((4,), scale)], [zero], [zero], [], [torch.tensor(0)]),
            rule=rule,
            compat=compat,
            lr=2.0**30,
            beta1=0.0,
            beta2=0.0,
            eps=2.0**30,
            weight_decay=0.0,
            max_norm=0.0,
            scale=scale,
            cur_iter=cur_iter,
            last_overflow_iter=last,
        )
        new_p = tensors(result, "params")[0]
        applied.append(((p - new_p)[0].item(), value(result, "norm")))
        p, scale = new_p, value(result, "scale")
        cur_iter, last = int(value(result, "cur_iter")), int(value(result, "last_overflow_iter"))
    assert scale == 16.0
    return applied


def test_a_growth_step_applies_the_whole_gradient() -> None:
    assert unit_steps(CORRECT) == [(1.0, 2.0)] * 6


def test_compat_halves_the_gradient_of_a_growth_step() -> None:
    compat = Compat(unscale_with_updated_scale=True)
    half, whole = (0.5, 1.0), (1.0, 2.0)
    assert unit_steps(compat) == [whole, whole, half, whole, half, whole]


def test_compat_grows_with_the_window_and_not_after_it() -> None:
    lists = state()
    for compat, cur_iter, wanted in (
        (CORRECT, 1, 16.0),
        (CORRECT, 2, 32.0),
        (Compat(growth_counts_this_step=True), 1, 32.0),
        (Compat(growth_counts_this_step=True), 2, 16.0),
    ):
        result = call(lists, compat=compat, cur_iter=cur_iter, last_overflow_iter=-1)
        assert value(result, "scale") == wanted


def test_inputs_are_never_written() -> None:
    lists = state()
    before = [[bits(t) for t in ts] for ts in lists]
    call(lists)
    assert [[bits(t) for t in ts] for ts in lists] == before


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="rule='apex', but should be one of static, dynamic"):
        call(state(), rule="apex")
