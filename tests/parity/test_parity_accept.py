"""Deviations that a kernel accepts: by name, with a reason, on the record, and nothing besides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.helpers.command import parity
from twinstep.parity.expected.deviations import DEVIATIONS, known_deviations
from twinstep.parity.proof.corpus.adamw_kernel import triton_arranged
from twinstep.parity.proof.corpus.calls import AdamCall, kernel_from
from twinstep.parity.proof.corpus.harmless_adamw import (
    Form,
    Numbers,
    Step,
    as_torch,
    by_powers_in_fp32,
    stepped,
)
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Cell
from twinstep.parity.registry.kernels import register, registrations
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session

QUICK = Effort(examples=2, shrink_seconds=0.01, repros=None)
WHY = "as the runs that we compare with"
Run = Callable[[AdamCall], None]


def judged(run: Run, accept: dict[str, str], *laws: str) -> tuple[Cell, ...]:
    with registrations() as collected:
        kernel = kernel_from(AdamCall, run, "mine")
        register("adamw_step", name="mine", dtypes=("fp32",), accept=accept)(kernel)
    selection = Selection(laws=laws, dtypes=("fp32",))
    return tuple(Session(selection=selection, effort=QUICK).run(collected).cells.values())


def complement(call: AdamCall) -> None:
    triton_arranged(call, "complement")


def styled(step: Step = as_torch, form: Form | None = None) -> Run:
    return lambda call: stepped(call, step, form)


@pytest.mark.parametrize(
    ("run", "name"),
    [(complement, "one_minus_beta"), (styled(form=by_powers_in_fp32), "power_of_beta")],
)
def test_a_deviation_passes_under_its_name_alone(run: Run, name: str) -> None:
    (silent,) = judged(run, {}, "value")
    assert silent.status.value == "failed"
    assert f'accept={{"{name}": "why"}}' in silent.failure.replace("\n", "").replace("  ", "")
    (named,) = judged(run, {name: WHY}, "value")
    assert named.status.value == "passed"
    (other,) = judged(run, {other: WHY for other in DEVIATIONS if other != name}, "value")
    assert other.status.value == "failed"


def test_an_accepted_deviation_keeps_the_formula_on_replay() -> None:
    (cell,) = judged(complement, {"one_minus_beta": WHY}, "formula")
    assert cell.status.value == "passed"


def a_millionth_more(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Numbers) -> None:
    as_torch(w, g, m, v, h)
    w.mul_(1 + 1e-6)


def test_an_accepted_deviation_hides_no_other_mistake() -> None:
    (cell,) = judged(styled(a_millionth_more), dict.fromkeys(DEVIATIONS, WHY), "value")
    assert cell.status.value == "failed"


@pytest.mark.parametrize(
    ("operation", "arithmetic", "accept", "says"),
    [
        ("adamw_step", "bounded", {"one_minus": WHY}, "among one_minus_beta, power_of_beta"),
        ("unscale", "bounded", {"one_minus_beta": WHY}, "among nothing: this operation has none"),
        ("adamw_step", "bounded", {"one_minus_beta": " "}, "should say why"),
        ("adamw_step", "exact", {"one_minus_beta": WHY}, "an exact kernel has no deviation"),
    ],
)
def test_what_is_unknown_unexplained_or_contradicted_is_refused(
    operation: str, arithmetic: str, accept: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        register(operation, name="mine", arithmetic=arithmetic, accept=accept)(print)


def test_names_are_known_where_an_operation_forms_such_a_scalar() -> None:
    assert known_deviations("lamb_step") == ("one_minus_beta",)
    assert known_deviations("sgd_step") == ()


FILE = """
from functools import partial
from twinstep.parity import register
from twinstep.parity.proof.corpus.adamw_kernel import triton_arranged
from twinstep.parity.proof.corpus.calls import AdamCall, kernel_from

mine = kernel_from(AdamCall, partial(triton_arranged, how="complement"), "mine")
register("adamw_step", dtypes=("fp32",), accept={"one_minus_beta": "two arguments less"})(mine)
"""


def test_the_table_and_the_json_show_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    command = ("check", "mine.py", "--quick", "--law", "value", "--jobs", "1", "--json", "out.json")
    assert parity(*command) == 0
    assert "accepts one_minus_beta: two arguments less" in capsys.readouterr().out
    cells = json.loads(Path("out.json").read_text())["cells"]
    judged = [cell for cell in cells if cell["status"] == "passed"]
    assert [cell["accepts"] for cell in judged] == [{"one_minus_beta": "two arguments less"}]
