"""Pages under torchrun: a program that is killed and goes on, and those from DeepSpeed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.profile import LONG
from tests.helpers.waiting import finished
from tools.source import ROOT

PAGE = (ROOT / "docs" / "guide" / "several-machines.md").read_text()
PROGRAM = re.compile(r"```python\n# train.py\n(.*?)```", re.DOTALL)
# Commands, and what the last one prints.
COMMANDS = re.compile(
    r"((?:^    [^\n]*torchrun [^\n]*\n)+)\n(?:prints\n\n)?```text\n([^`]*)```", re.MULTILINE
)
pytestmark = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch was built without gloo"
)


def launched(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of the page, run by this Python."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words[: words.index("torchrun")])
    return finished(
        [sys.executable, "-m", "torch.distributed.run", *words[len(variables) + 1 :]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def test_the_commands_of_the_page_print_what_it_says_also_after_a_kill(tmp_path: Path) -> None:
    (code,) = PROGRAM.findall(PAGE)
    whole, killed = COMMANDS.findall(PAGE)
    # Those with a kill do all that the other does, and end in the same norm.
    for number, (lines, said) in enumerate([killed, whole] if LONG else [killed]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.py").write_text(code)
        *before, last = [launched(line, folder) for line in lines.splitlines()]
        assert [done.returncode != 0 for done in before] == [True] * len(before)
        assert last.returncode == 0, last.stderr
        assert last.stdout == said
    assert killed[1].partition("norm")[2] == whole[1].partition("norm")[2]


FROM_DEEPSPEED = (ROOT / "docs" / "guide" / "from-deepspeed.md").read_text()
BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_ranks_of_a_job_print_what_the_page_says_or_end_in_a_sentence(tmp_path: Path) -> None:
    """DeepSpeed beside them: `tests/proof/test_peers_ranks.py`."""
    rows = BLOCK.findall(FROM_DEEPSPEED)
    for name, code, _ in rows:
        (tmp_path / name).write_text(code)
    page = {name: said for name, _, said in rows}
    done = finished(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "tests.helpers.page_programs"),
            *(str(tmp_path), *page),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second
    apart, connected = first
    alone = "RuntimeError: torch.distributed is not initialised in a job of 2 ranks, but should be"
    for name in ("config.py", "load.py"):
        assert apart.pop(name).startswith(alone)
    assert connected.pop("config.py").startswith("ValueError: nothing averages the gradients of 2")
    assert apart == {name: page[name] for name in ("several.py", "direct.py", "differs.py")}
    assert connected == {name: page[name] for name in ("direct.py", "differs.py", "load.py")}
