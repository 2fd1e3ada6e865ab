"""Drawn trainings under `torchrun`: real groups give the bits of simulated ones."""

from __future__ import annotations

import json
import os
import pickle
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.plans import DTYPES, STEPS, Plan, plans
from tests.helpers.processes import Case, simulated
from tests.helpers.profile import LONG
from tests.helpers.sides import SIDES, WRAPPERS
from tests.helpers.waiting import finished
from tests.helpers.zero_plans import axes_of, zero_plans
from tools.source import ROOT

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo"),
]
CELLS = [
    (kind, when)
    for kind in WRAPPERS
    for when in ("none", "before", "after", "all")
    if kind != "BF16Optimizer" or when in ("none", "before")
]
# Worlds, and the sides that take turns in the cells: each cell is run by both.
WORLDS = {2: ("fast", "reference"), 4: ("reference", "fast")}


def drawn(world: int, kind: str, when: str, side: str) -> list[Case]:
    """Cases of a world of that size."""
    found: list[Case] = []

    def of_that_size(plan: Plan) -> bool:
        return plan.world.size == world

    @settings(
        max_examples=12 if LONG else 2,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(
        plans(kind, when).filter(of_that_size), st.sampled_from(SIDES), st.integers(0, STEPS - 1)
    )
    def draw(plan: Plan, resumed: str, at: int) -> None:
        found.append(Case(plan, side, resumed, at))

    draw()
    return found[1:]  # the first is always the simplest


def drawn_zero(world: int) -> list[Case]:
    """Cases of ZeroOptimizer, over all axes that a world of that size can have."""
    found: list[Case] = []

    @settings(
        max_examples=30 if LONG else 4,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.data(), st.sampled_from(SIDES), st.integers(0, STEPS - 1))
    def draw(data: st.DataObject, resumed: str, at: int) -> None:
        axes = data.draw(st.sampled_from(axes_of(world)))
        plan = data.draw(zero_plans(axes, data.draw(st.sampled_from(DTYPES)), at == 1))
        found.append(Case(plan, "fast", resumed, at))

    draw()
    return found[1:]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_of_torchrun_give_the_bits_of_simulated_ones(world: int, tmp_path: Path) -> None:
    """After each step, and after each step of a run that was resumed from files."""
    turns = zip(CELLS, cycle(WORLDS[world]))
    cases = [case for cell, side in turns for case in drawn(world, *cell, side)]
    cases += drawn_zero(world)
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "tests.helpers.processes", str(tmp_path / "cases"), str(tmp_path)]
    done = finished(
        [*launch, "--nproc-per-node", str(world), *program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"{len(lines)} trainings of {world} ranks on {lines[0]['backend']}")
    for case, line in zip(cases, lines, strict=True):
        for (whole, resumed), wanted in zip(line["ranks"], simulated(case), strict=True):
            assert whole == wanted, case
            assert resumed == wanted[case.at :], case
