"""Processes that are killed or stopped: an error on all others in time, and a resume to the bit."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.plans import STEPS, plans
from tests.helpers.processes import Case, Loss, lose, resume, simulated
from tests.helpers.profile import LONG
from tests.helpers.sides import SIDES

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo"),
]
TORCH: Any = torch.multiprocessing  # exports without saying so
TIMEOUT_S = 2.0
# For what a rank computes before it waits, on a machine that does other things.
SLACK_S = 30.0
SAID = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@st.composite
def losses(draw: st.DrawFn, how: signal.Signals) -> Loss:
    plan = draw(plans().filter(lambda plan: 1 < plan.world.size < 5))
    side, resumed = draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES))
    case = Case(plan, side, resumed, draw(st.integers(0, STEPS - 1)))
    rank = draw(st.integers(0, plan.world.size - 1))
    return Loss(case, rank, how, draw(st.integers(0, 4)), draw(st.booleans()))


def started(run: Callable[..., None], loss: Loss, folder: Path) -> list[Any]:
    """A process for each rank."""
    set_forkserver_preload(["tests.helpers.processes", "torch._dynamo"])
    count, arguments = len(loss.case.plan.places), (loss, folder, TIMEOUT_S)
    context = TORCH.start_processes(run, arguments, count, False, start_method="forkserver")
    return list(context.processes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@settings(
    max_examples=50 if LONG else 2,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_lost_process_is_an_error_of_all_others_and_a_resume_gives_the_uninterrupted_bits(
    how: signal.Signals, data: st.DataObject
) -> None:
    loss = data.draw(losses(how))
    wanted = simulated(loss.case)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = started(lose, loss, folder)
        lost = ranks.pop(loss.rank)
        try:
            for process in ranks:
                process.join(TIMEOUT_S + 2 * SLACK_S)
            assert [process.exitcode for process in ranks] == [0] * len(ranks)
            assert lost.is_alive() == (how == signal.SIGSTOP)
        finally:
            for process in [*ranks, lost]:
                process.kill()
                process.join()
        gone = float((folder / "gone").read_text())
        errors = [json.loads(file.read_text()) for file in folder.glob("error*")]
        assert len(errors) == len(ranks)
        for error in errors:
            assert any(said in error["error"] for said in SAID), error
            assert error["at"] - gone < TIMEOUT_S + SLACK_S
        ranks = started(resume, loss, folder)
        for process in ranks:
            process.join()
        for number, whole in enumerate(wanted):
            found = json.loads((folder / f"resumed{number}").read_text())
            assert found == whole[loss.case.at :]
