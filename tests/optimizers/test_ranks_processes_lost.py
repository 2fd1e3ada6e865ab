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
from tests.helpers.waiting import LIMIT_S, ended_well, said_in, wait_for

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo"),
]
TORCH: Any = torch.multiprocessing  # exports without saying so
TIMEOUT_S = 2.0
SAID = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@st.composite
def losses(draw: st.DrawFn, how: signal.Signals) -> Loss:
    plan = draw(plans().filter(lambda plan: 1 < plan.world.size < 5))
    side, resumed = draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES))
    case = Case(plan, side, resumed, draw(st.integers(0, STEPS - 1)))
    rank = draw(st.integers(0, plan.world.size - 1))
    return Loss(case, rank, how, draw(st.integers(0, 4)), draw(st.booleans()))


def started(run: Callable[..., None], count: int, *arguments: object) -> dict[str, Any]:
    """A process for each rank, by name."""
    set_forkserver_preload(["tests.helpers.processes", "torch._dynamo"])
    context = TORCH.start_processes(run, arguments, count, False, start_method="forkserver")
    return {f"rank {number} of {run.__name__}": p for number, p in enumerate(context.processes)}


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
    wanted, count = simulated(loss.case), len(loss.case.plan.places)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = started(lose, count, loss, folder, TIMEOUT_S)
        everyone = list(ranks.values())
        lost = ranks.pop(f"rank {loss.rank} of lose")
        gone, stays = folder / "gone", how == signal.SIGSTOP
        try:
            ended_well(ranks, folder)
            wait_for(
                f"rank {loss.rank} to be lost",
                lambda: gone.exists() and gone.read_text() and lost.is_alive() == stays,
                lambda: said_in(folder),
            )
        finally:
            for process in everyone:
                process.kill()
                process.join()
        errors = [json.loads(file.read_text()) for file in folder.glob("error*")]
        assert len(errors) == len(ranks)
        for error in errors:
            assert any(said in error["error"] for said in SAID), error
            # Sooner than by the limit that the groups were made with.
            assert error["at"] - float(gone.read_text()) < LIMIT_S / 2
        ended_well(started(resume, count, loss, folder), folder)
        for number, whole in enumerate(wanted):
            found = json.loads((folder / f"resumed{number}").read_text())
            assert found == whole[loss.case.at :]
