"""The arrows of the house hold in every file, and each kind of breach is seen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.arrows import STRANGERS, violations
from tools.source import parse, python_files

FILES = python_files(*STRANGERS)


def test_there_is_source_to_read() -> None:
    assert {path.parts[0] for path in FILES} >= {"fast", "parity", "reference", "scenarios"}


def test_every_file_keeps_the_arrows() -> None:
    found = [sentence for path in FILES for sentence in violations(path, parse(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("contract/errors.py", "import numpy"),
        ("contract/errors.py", "from twinstep.reference.adam import adam_step"),
        ("reference/adam.py", "import numpy"),
        ("reference/adam.py", "import torch, triton.language as tl"),
        ("reference/adam.py", "from hypothesis import given"),
        ("reference/adam.py", "def f():\n    from fast.adam import adam_step_"),
        ("fast/adam.py", "from twinstep.reference.adam import adam_step"),
        ("fast/adam.py", "from . import dispatch"),
        ("fast/kernels/adam.py", "from ..dispatch import engine"),
        (
            "fast/runtime/dispatch.py",
            "import importlib\nimportlib.import_module('twinstep.replay')",
        ),
        ("fast/runtime/dispatch.py", "__import__('golden')"),
        ("golden/trace.py", "import twinstep.fast"),
        ("golden/trace.py", "import twinstep.parity.runner.failure"),
        ("parity/run.py", "import twinstep.scenarios.cli"),
        ("parity/cli/app.py", "from twinstep.benchmarks import gpu_check"),
        ("scenarios/train.py", "from twinstep.benchmarks import gpu_check"),
        ("parity/run.py", "if True:\n    import tools.source"),
    ],
)
def test_a_planted_breach_is_caught_once_with_its_line(path: str, code: str) -> None:
    found = violations(Path(path), ast.parse(code))
    line = code.count("\n") + 1
    assert found
    assert all(sentence.startswith(f"{path}:{line} imports ") for sentence in found)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (
            "reference/adam.py",
            "import math\nimport torch\nfrom twinstep.reference.clip import clip_factor",
        ),
        ("reference/adam.py", "from torch import Tensor\nimport torch.optim"),
        ("reference/adam.py", "from twinstep.contract.compat import Compat"),
        ("fast/adam.py", "from twinstep.contract.compat import Compat"),
        ("contract/wrapper.py", "from twinstep.contract.timers import Timers\nimport torch"),
        ("fast/adam.py", "import triton\nfrom twinstep.fast.kernels import adam"),
        (
            "parity/registry/kernels.py",
            "import twinstep.reference.adam\nimport fast.adam\nimport golden",
        ),
        (
            "scenarios/train.py",
            "import twinstep.parity.runner.failure\nimport twinstep.reference.adam",
        ),
        ("parity/__main__.py", "import twinstep.scenarios.cli\nfrom benchmarks import gpu_check"),
    ],
)
def test_what_the_arrows_allow_passes(path: str, code: str) -> None:
    assert violations(Path(path), ast.parse(code)) == []
