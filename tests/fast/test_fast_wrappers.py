"""FP16 optimizers of the fast side where they differ from the reference: who steps, and when."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.battery import Subject, Twins, fill, observed
from twinstep.contract.errors import MinimumLossScale
from twinstep.fast.optimizers.scalers import DynamicLossScale

pytestmark = pytest.mark.usefixtures("replay")


@pytest.mark.parametrize("name", ["FP16Optimizer", "FP16UnfusedOptimizer"])
def test_an_inner_optimizer_with_hooks_is_called(name: str) -> None:
    """What kernels would not do is left to it; a skipped step does not call it."""
    twins, calls = Twins(name, static_loss_scale=8.0, clip_grad=0.1), list[str]()
    twins.do(lambda one: one.optimizer.register_step_pre_hook(lambda *_: calls.append("step")))
    for seed, bad in enumerate((None, math.inf, None)):
        twins.fill(seed, bad=bad)
        twins.step()
        twins.check()
    assert calls == ["step"] * 2 * len(list(twins.both()))


def test_an_overflow_at_the_floor_raises_when_something_is_read() -> None:
    subject = Subject("fast", "FP16Optimizer")
    params = subject.parameters(7)
    scaler = DynamicLossScale(init_scale=1.0, delayed_shift=1)
    optimizer = subject(params, loss_scale_config=scaler)
    before = observed(optimizer, params)
    fill(params, 1, bad=math.inf)
    optimizer.step()
    with pytest.raises(MinimumLossScale, match=r"overflow at loss scale 1\.0, which should be"):
        assert optimizer.overflow
    assert optimizer.overflow
    after = observed(optimizer, params)
    assert {what for what in before if after[what] != before[what]} == {"overflow", "norm"}
    assert not optimizer.state
    assert torch.equal(torch.tensor(optimizer.loss_scale), torch.tensor(1.0))
