"""DeepSpeed's tests as `make compat` has them, on DeepSpeed's own classes: what they expect is so.

Needs DeepSpeed 0.19.8 beside us, which `make peers` installs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch

from twinstep.golden.record_deepspeed import (
    FLAT,
    UNFUSED,
    bf16_optimizer,
    class_of,
    deepspeed_version,
)
from twinstep.parity.proof.compat.cases import Case, Side, outcome
from twinstep.parity.proof.compat.of_deepspeed import cases
from twinstep.parity.proof.peers.installed import group_of_one

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or "PYTEST_XDIST_WORKER" in os.environ,
    reason="DeepSpeed is not installed (make peers installs it), or several processes share it",
)
# Its main branch does as the test says; 0.19.8 does not. The others are no tests of one object.
NEWER = ("loss scale validation (main)", "reported norm (main)", "hysteresis (main)")
LEFT_OUT = ("unfused MoE", "lr schedulers")


@pytest.fixture(autouse=True)
def _group_of_its_own() -> Iterator[None]:
    """One group for the test, and none left behind."""
    with group_of_one():
        yield


def adam(params: Any, lr: float = 1e-3, adam_w_mode: bool = True, **options: Any) -> Any:
    """torch's, in the place of kernels that take minutes to compile."""
    kind: Callable[..., Any] = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, foreach=False, **{"weight_decay": 0.0, **options})


def wrapper(path: str, patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A class of DeepSpeed's, with the counters of its scale where its tests once read them."""
    kind = class_of(path)
    for name in ("cur_scale", "cur_iter", "dynamic_loss_scale"):
        read: Callable[[Any], Any] = attrgetter(f"loss_scale_config.{name}")
        patch.setattr(kind, name, property(read), raising=False)

    def made(inside: Any, compat: Any = None, **options: Any) -> Any:
        del compat
        return kind(inside, **options)

    return made


def bf16(inside: Any, param_names: Any, clip_grad: float = 0.0) -> Any:
    found: Any = bf16_optimizer(inside, param_names, clip_grad=clip_grad)
    # Its own passes an argument too many in 0.19.8.
    found.backward = lambda loss: (loss.backward(), found.update_hp_grads())
    return found


def judged(case: Case) -> bool:
    return not any(name in case.test for name in (*NEWER, *LEFT_OUT))


@pytest.mark.parametrize(
    "case", [case for case in cases() if judged(case)], ids=lambda case: f"{case.test} {case.case}"
)
def test_deepspeed_ends_as_its_test_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_version()
    flat, unfused = (wrapper(path, monkeypatch) for path in (FLAT, UNFUSED))
    side = Side(
        name="deepspeed",
        adam=adam,
        lamb=adam,
        apex_lamb=adam,
        flat=flat,
        unfused=unfused,
        bf16=bf16,
        dynamic=adam,
    )
    found = outcome(case, side)
    assert (found.why, found.known) == ("", True)
