"""Argument names that Triton's launcher overwrites: each really breaks, and is named in advance."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.command import parity
from twinstep.parity.operations.triton_names import TAKEN, taken_names

SOURCE = """
import triton
import triton.language as tl
from twinstep.parity import register

@triton.jit
def add(NAME, other, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(NAME + at, mask=inside) + tl.load(other + at, mask=inside)
    tl.store(NAME + at, total, mask=inside)

@register("accumulate", name="added", dtypes=("fp32",), layouts=("flat",))
def added(accumulators, grads):
    for a, g in zip(accumulators, grads, strict=True):
        add[(1,)](a, g, a.numel(), BLOCK=4096)
"""


def module(folder: Path, name: str) -> ModuleType:
    file = folder / f"with_{name}.py"
    file.write_text(SOURCE.replace("NAME", name).split("@register")[0])
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("name", TAKEN)
def test_a_taken_name_breaks_the_launch_and_is_named_before(tmp_path: Path, name: str) -> None:
    loaded = module(tmp_path, name)
    x = torch.ones(5)
    with pytest.raises(Exception, match=TAKEN[name]):
        loaded.add[(1,)](x, x.clone(), 5, BLOCK=16)
    (says,) = taken_names(vars(loaded))
    assert f"Triton kernel add has an argument named {name}" in says


@pytest.mark.usefixtures("replay")
def test_other_names_launch_and_are_not_named(tmp_path: Path) -> None:
    loaded = module(tmp_path, "weights")
    x = torch.ones(5)
    loaded.add[(1,)](x, x.clone(), 5, BLOCK=16)
    assert x.tolist() == [2.0] * 5
    assert taken_names(vars(loaded)) == []


def test_check_says_it_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE.replace("NAME", "params"))
    assert parity("check", "mine.py", "--quick", "--law", "value") == 1
    assert "remark: Triton kernel add has an argument named params" in capsys.readouterr().err
