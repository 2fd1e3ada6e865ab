"""DeepSpeed's engine and `from_config` on the ranks of a job; `make peers` runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.beside_deepspeed import CONFIGS
from tools.source import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make peers"
)


def test_ranks_of_a_job_have_the_bits_and_skips_of_deepspeed() -> None:
    """Gradients on one rank alone are infinite, NaN, or finite with a square past fp32."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "tests.helpers.beside_deepspeed"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first == second
    assert first.keys() == CONFIGS.keys()
    for name, (theirs, ours) in first.items():
        assert ours == theirs, name
        assert [skipped for _, skipped in ours] == [False, True, False, True, True, False][
            : len(ours)
        ], name
