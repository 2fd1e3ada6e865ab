"""Names of DeepSpeed's and apex's classes: the page, our objects, and DeepSpeed's objects."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.sides import CLASSES, SIDES
from tools.source import ROOT
from twinstep.golden import record_checkpoints
from twinstep.golden.record_zero import Made, config_of, groups_of, weights_of
from twinstep.parity.proof.peers.installed import deepspeed, group_of_one
from twinstep.parity.proof.peers.zero_run import Losses
from twinstep.parity.proof.upstream.names import NAMES, Names, render

pytestmark = pytest.mark.usefixtures("replay")
LIVE = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or "PYTEST_XDIST_WORKER" in os.environ,
    reason="DeepSpeed is not installed (make peers installs it), or several processes share it",
)
OF_TORCH = {*dir(torch.optim.Optimizer), "defaults", "state", "param_groups"}
FP16 = ("FP16Optimizer", "FP16UnfusedOptimizer")
BUILDERS = {"FusedAdam": "multi_tensor_adam", "FusedLamb": "lamb"}


def made(side: str, name: str) -> Any:
    """An object of ours."""
    kind = CLASSES[side][name]
    if name in ("StaticLossScale", "DynamicLossScale"):
        return kind()
    dtype = torch.bfloat16 if name == "BF16Optimizer" else torch.float16
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    if name in (*BUILDERS, "FusedLAMB"):
        return kind([param])
    named: dict[str, Any] = {} if name in FP16 else {"param_names": {param: "p"}}
    return kind(CLASSES[side]["FusedAdam"]([param]), **named)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("names", NAMES, ids=lambda names: f"{names.place}.{names.theirs}")
def test_what_is_called_met_is_there_and_what_is_left_out_is_not(side: str, names: Names) -> None:
    ours = made(side, names.ours)
    missing = [name for name in names.same if not hasattr(ours, name)]
    for path in names.other.values():
        reduce(getattr, path.split("."), ours)
    found = [name for row in names.without for name in row.names if hasattr(ours, name)]
    renamed = [name for name in names.other if hasattr(ours, name)]
    assert (missing, found, renamed) == ([], [], [])


def test_the_page_is_that_of_the_data() -> None:
    assert (ROOT / "docs" / "reference" / "upstream-names.md").read_text() == render()


@pytest.fixture
def _own_group() -> Iterator[None]:
    """One group for the test, and none left behind."""
    with group_of_one():
        yield


def theirs(names: Names, patch: pytest.MonkeyPatch) -> Any:
    """An object of DeepSpeed's, with kernels that nothing calls."""
    kinds = {"FP16_Optimizer": "flat", "FP16_UnfusedOptimizer": "unfused", "BF16_Optimizer": "bf16"}
    module = deepspeed(names.place)
    if names.theirs in kinds:
        dtype = torch.bfloat16 if names.theirs == "BF16_Optimizer" else torch.float16
        params = [nn.Parameter(torch.ones(4, dtype=dtype))]
        inside = torch.optim.AdamW(params)
        return record_checkpoints.optimizer_of(kinds[names.theirs], inside, params)
    if names.theirs == "DeepSpeedZeroOptimizer":
        params = weights_of("bf16")
        run = config_of(Made(dtype="bf16", stage=2, elastic=False, world=1))
        inside = torch.optim.AdamW(groups_of(params))
        made = import_module("deepspeed").initialize
        return made(model=Losses(params), optimizer=inside, config=run)[0].optimizer
    if names.theirs in BUILDERS:
        kernels = SimpleNamespace(multi_tensor_adam=None)
        built = SimpleNamespace(load=lambda: kernels)
        patch.setattr(module, f"{names.theirs}Builder", lambda: built)
        return vars(module)[names.theirs]([nn.Parameter(torch.ones(4))])
    if names.theirs == "LossScaleConfig":
        return module.LossScaleConfig(torch.float16, True, 1.0, None)
    if names.theirs == "LossScaler":
        return module.LossScaler(1.0)
    return module.DynamicLossScaler(
        init_scale=2.0, scale_window=2, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
    )


@LIVE
@pytest.mark.parametrize(
    "names",
    [names for names in NAMES if names.place.startswith("deepspeed")],
    ids=lambda names: names.theirs,
)
@pytest.mark.usefixtures("_own_group")
def test_every_public_name_of_deepspeeds_objects_is_listed_once(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = theirs(names, monkeypatch)
    own = [kind for kind in type(found).__mro__ if kind.__module__.startswith("deepspeed")]
    there = set(vars(found)).union(*map(vars, own)) - OF_TORCH
    listed = names.listed()
    assert sorted(set(listed)) == sorted(listed)
    # Some names with an underscore are made by the first step.
    public = {name for name in listed if not name.startswith("_")}
    assert {name for name in there if not name.startswith("_")} == public
