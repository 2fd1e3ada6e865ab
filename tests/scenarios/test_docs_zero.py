"""The page on ZeRO: its table of config keys, and its program under torchrun."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import twinstep.fast
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.waiting import finished
from tools.source import ROOT
from twinstep.fast.deepspeed import DeepSpeedZeroOptimizer

PAGE = (ROOT / "docs" / "guide" / "zero.md").read_text()
TABLE = PAGE.partition("## From DeepSpeed's config to ours")[2]
ROWS = re.findall(r"^\| `([\w.]+)`[^|]*\| `(\w+)` \|([^|]*)\|$", TABLE, re.MULTILINE)
REFUSED = [(name, note.split()[-1]) for _, name, note in ROWS if "refused but for" in note]


@pytest.mark.parametrize("side", SIDES)
def test_the_table_and_the_sentence_after_it_have_every_argument(side: str) -> None:
    said = re.search(r"Not from a config: (.*?)\. Keys", TABLE, re.DOTALL)
    assert said is not None
    named = {name for _, name, _ in ROWS} | set(re.findall(r"`(\w+)`", said[1]))
    known = set(inspect.signature(CLASSES[side]["ZeroOptimizer"].__init__).parameters) - {"self"}
    assert named == known
    theirs = set(inspect.signature(DeepSpeedZeroOptimizer).parameters)
    only_theirs = {"parameter_alignment", "compute_grad_norm"}
    assert theirs == known | only_theirs
    assert all(f"`{name}`" in TABLE for name in only_theirs)
    assert TABLE.count("\n| `") == len(ROWS) > 30


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize(("name", "only"), REFUSED)
def test_what_the_table_calls_refused_is_refused(name: str, only: str) -> None:
    values = {"True": True, "False": False, "None": None}

    def built(value: object) -> object:
        param = nn.Parameter(torch.ones(4, dtype=torch.float16))
        inside = twinstep.fast.FusedAdam([param])
        options = {name: value, "verbose": False}
        return twinstep.fast.ZeroOptimizer(inside, param_names={param: "only"}, **options)  # type: ignore[arg-type]

    built(values[only])
    with pytest.raises(ValueError, match=f"{name}=.* but should be {only}"):
        built(object() if only == "None" else not values[only])


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
def test_the_program_prints_under_torchrun_what_the_page_says(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# train_zero.py\n(.*?)```", PAGE, re.DOTALL)
    ((line, said),) = re.findall(r"^    \$ torchrun (.*)\n    (.*)\n", PAGE, re.MULTILINE)
    (tmp_path / "train_zero.py").write_text(code)
    done = finished(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == said
