"""Repro files of failing sequences: each runs alone and names the fault until it is mended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinstep.parity.records.ledger import Status
from twinstep.parity.records.standalone import BROKEN, KEPT
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.registry import REFERENCES, RULES
from twinstep.parity.sequences.repro import carried

ROOT = Path(__file__).resolve().parents[2]
# One process for all files, so that torch is imported once, and what torch imports when it is first
# used; every file runs in a child that has nothing but torch. The first two start processes of
# their own, as for a user, which import torch anew.
RUNNER = """
import os, runpy, sys
import torch
import torch.optim.lr_scheduler
torch.set_num_threads(1)
used = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
used.step()
used.zero_grad()
used.load_state_dict(used.state_dict())
for at, name in enumerate(sys.argv[1:]):
    print(f"== {name}", flush=True)
    child = os.fork()
    if not child:
        sys.argv = [name, "here"][: 1 + (at > 1)]
        try:
            runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)
        os._exit(99)
    print("== exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Planted:
    """A class with a fault, as a user's file.

    Attributes:
        reference: name of the reference class.
        base: module of the class that it derives from.
        fault: body of the class.
        dtype: of the parameters.
        private: attributes that are its own business.
        rules: exported ones from which the file derives its own; "" for those of the reference.
    """

    reference: str
    base: str
    fault: str
    dtype: str = "fp16"
    private: tuple[str, ...] = ()
    rules: str = ""

    def text(self, mended: bool) -> str:
        """The file."""
        claims = f"reference={self.reference!r}, arithmetic='exact', private={self.private!r}"
        own = ""
        if self.rules:
            claims += ", rules=Own()"
            own = f"from twinstep.parity.sequences import {self.rules} as Base\n"
            own += "Own = type('Own', (Base,), {'__module__': __name__})\n"
        return (
            "from twinstep.parity import register_optimizer\n"
            f"{own}"
            f"from {self.base} import {self.reference}\n\n\n"
            f"@register_optimizer('mine', {claims})\n"
            f"class Mine({self.reference}):\n"
            f"    {'pass' if mended else self.fault}\n"
        )


DROPPED_LR = "set_lr = lambda self, lr: None"
SCALERS = "update_scale = lambda self, overflow: super().update_scale(not overflow)"
OPTIMIZERS = "twinstep.reference.optimizers"
PLANTED = (
    Planted(
        "FusedAdam",
        f"{OPTIMIZERS}.fused_adam",
        "initialize_states = lambda self: None",
        rules="AdamRules",
    ),
    Planted(
        "FusedLamb",
        "twinstep.fast.optimizers.fused_lamb",
        "get_lamb_coeffs = lambda self: super(Mine, self).get_lamb_coeffs()[::-1] + [1.0]",
        "bf16",
        ("_blocks", "_cache", "_ratios"),
    ),
    Planted(
        "FusedLAMB",
        f"{OPTIMIZERS}.apex_lamb",
        "zero_grad = lambda self, set_to_none=None: None",
    ),
    Planted("BF16Optimizer", "twinstep.reference.optimizers.bf16", DROPPED_LR, "bf16"),
    Planted("FP16Optimizer", "twinstep.reference.optimizers.fp16", DROPPED_LR, "fp32"),
    Planted(
        "FP16UnfusedOptimizer",
        "twinstep.reference.optimizers.fp16_unfused",
        "refresh_fp32_params = lambda self: None",
    ),
    Planted(
        "ZeroOptimizer",
        "twinstep.reference.optimizers.zero",
        "refresh_fp32_params = lambda self: None",
    ),
    Planted(
        "StaticLossScale",
        "twinstep.reference.optimizers.scalers",
        SCALERS.replace("super()", "Mine.mro()[1]"),
    ),
    Planted(
        "DynamicLossScale",
        "twinstep.reference.optimizers.scalers",
        SCALERS.replace("super()", "Mine.mro()[1]"),
    ),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of every repro file, with the fault and without."""
    folder = tmp_path_factory.mktemp("repros")
    files = []
    for row in PLANTED:
        user = folder / f"my_{row.reference}.py"
        user.write_text(row.text(mended=False))
        twin = load_file(str(user)).twins[0]
        effort = TwinEffort(sequences=60, shrunk_by=75, repros=str(folder / row.reference))
        # Its own run of the file imports torch anew; test_a_failure_is_shrunk has it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("twinstep.parity.sequences.judge.shown_again", lambda path: "")
            cell = judge_twin(twin, row.dtype, twin_engine(twin), effort)
        assert cell.status is Status.FAILED, row
        right = folder / f"mended_{row.reference}.py"
        right.write_text(row.text(mended=True))
        text = Path(cell.repro).read_text()
        assert repr(str(user)) in text
        mended = folder / f"mended_repro_{row.reference}.py"
        mended.write_text(text.replace(repr(str(user)), repr(str(right))))
        files += [cell.repro, str(mended)]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *files],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^== (\S+\.py)\n(.*?)^== exit (-?\d+)$", done.stdout, re.M | re.S)
    assert [file for file, _, _ in found] == files, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    outcomes = [(int(code), says) for _, says, code in found]
    return {
        name: outcomes[2 * at + mended]
        for at, row in enumerate(PLANTED)
        for mended, name in enumerate((row.reference, f"{row.reference} mended"))
    }


@pytest.mark.parametrize("name", REFERENCES)
def test_a_repro_file_names_the_fault_alone_and_is_silent_once_it_is_mended(
    runs: dict[str, tuple[int, str]], name: str
) -> None:
    broken, kept = (1, 0) if name == PLANTED[0].reference else (BROKEN, KEPT)
    code, says = runs[name]
    assert code == broken, says
    assert "\n  got    " in says
    assert "\n  wanted " in says
    assert runs[f"{name} mended"][0] == kept, runs[f"{name} mended"][1]


def test_a_repro_file_carries_what_its_rules_are_made_of_in_the_order_of_imports() -> None:
    for rules in RULES.values():
        modules = carried(type(rules))
        assert type(rules).__module__ == modules[-1] or type(rules).__module__ in modules
        for at, name in enumerate(modules):
            text = (ROOT / Path(*name.split("."))).with_suffix(".py").read_text()
            imported = set(re.findall(r"^from (twinstep\.parity\.\S+) import", text, re.M))
            assert imported <= set(modules[:at]), name
            assert imported or name != type(rules).__module__
