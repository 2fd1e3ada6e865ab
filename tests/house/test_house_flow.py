"""The way down: modules from the command line to a verdict, files from a step to its kernels."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.command import parity
from tools.source import ROOT
from twinstep.fast import FP16Optimizer, FusedAdam, FusedLamb
from twinstep.fast.runtime import native
from twinstep.parity.expected.accepted import Accepted

KERNEL = """
import traceback
from pathlib import Path
from twinstep.parity import register


@register("cast_copy", dtypes=("bf16",))
def mine(sources, copies):
    for source, copy in zip(sources, copies, strict=True):
        copy.copy_(source)
    frames = traceback.extract_stack()
    Path(__file__).with_suffix(".way").write_text("\\n".join(row.filename for row in frames))
"""
MODULES, FILES = 25, 10


def ours(names: list[str]) -> list[str]:
    """Files of the project in a stack, each once, from top to bottom."""
    paths = dict.fromkeys(Path(name).resolve() for name in names)
    within = [path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)]
    outside = {"tests", ".venv"}
    return [str(path) for path in within if path.parts[0] not in outside and len(path.parts) > 1]


def recording(into: list[list[str]], function: Callable[..., object]) -> Callable[..., object]:
    """The function, which first notes the way on which it was reached."""

    def noted(*arguments: object, **options: object) -> object:
        into.append(ours([row.filename for row in traceback.extract_stack()]))
        return function(*arguments, **options)

    return noted


def test_a_check_goes_down_in_few_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    ways: list[list[str]] = []
    monkeypatch.setattr(Accepted, "accepts", recording(ways, Accepted.accepts))
    monkeypatch.chdir(tmp_path)
    assert parity("check", "kernel.py", "--law", "value", "--examples", "1", "--jobs", "1") == 0
    to_the_comparison = {name for way in ways for name in way}
    # The kernel runs in a process of its own, from the bottom of which it tells its way.
    to_the_kernel = set(ours(file.with_suffix(".way").read_text().splitlines()))
    assert {"parity/cli/app.py", "parity/runner/judge_cell.py"} < to_the_comparison
    assert "parity/runner/calls/invoke.py" in to_the_kernel
    assert len(to_the_comparison | to_the_kernel) <= MODULES


@pytest.mark.parametrize("inner", [FusedAdam, FusedLamb])
def test_a_step_reaches_its_kernels_in_few_files(
    inner: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [torch.nn.Parameter(torch.ones(size, dtype=torch.float16)) for size in (8, 33)]
    optimizer = FP16Optimizer(inner(params), static_loss_scale=128.0, clip_grad=1.0)
    optimizer.backward(torch.cat(list(params)).sum())
    ways: list[list[str]] = []
    monkeypatch.setattr(native, "launch", recording(ways, native.launch))
    optimizer.step()
    assert len(ways) >= 3
    assert all(way[0] == "fast/optimizers/fp16.py" for way in ways)
    assert len({name for way in ways for name in way}) <= FILES
