"""State made ahead of the first step, and memory by kind: alike on both sides for every class."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.checkpoint_runs import KINDS, plain, started
from tests.helpers.sides import SIDES
from twinstep.parity.sequences.observe import differences

pytestmark = pytest.mark.usefixtures("replay")


@pytest.mark.parametrize("kind", KINDS)
def test_state_made_ahead_changes_nothing_else_and_no_later_step(kind: str) -> None:
    """Edges FP-1, UF-5: no step is taken, whose decay and counters would stay."""
    runs = [started(side, kind) for side in SIDES]
    for run in runs:
        before = {path: leaf for path, leaf in run.seen().items() if path.startswith("params")}
        run.optimizer.initialize_optimizer_states()
        after = {path: leaf for path, leaf in run.seen().items() if path.startswith("params")}
        assert differences(after, before) == []
        masters = [one for group in run.optimizer.param_groups for one in group["params"]]
        assert len(run.optimizer.state) == len(masters)
        for master in masters:
            held = run.optimizer.state[master]
            assert int(held["step"]) == 0
            for key in ("exp_avg", "exp_avg_sq"):
                assert held[key].shape == master.shape
                assert held[key].dtype == torch.float32
                assert not held[key].any()
        run.optimizer.initialize_optimizer_states()
        run.train(range(1))
    late = started("reference", kind)
    late.train(range(1))
    wanted = plain(late.optimizer.state_dict())
    assert [plain(run.optimizer.state_dict()) for run in runs] == [wanted, wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_there_is_kept(kind: str) -> None:
    for side in SIDES:
        run = started(side, kind)
        run.train(range(1))
        before = run.seen()
        run.optimizer.initialize_optimizer_states()
        assert differences(run.seen(), before) == [], side


@pytest.mark.parametrize("kind", KINDS)
def test_memory_by_kind_is_that_of_the_tensors(kind: str) -> None:
    fast_run, reference_run = (started(side, kind) for side in SIDES)
    # Ten elements; flat partitions of BF16Optimizer are even, as six and four are.
    wanted = {"model_weights": 20, "master_weights": 40, "gradients": 0, "optimizer_state": 0}
    if kind == "bf16":
        wanted["accumulators"] = 40
    assert fast_run.optimizer.memory_report() == reference_run.optimizer.memory_report() == wanted
    for run in (fast_run, reference_run):
        run.params[0].grad = torch.ones_like(run.params[0])
        run.optimizer.initialize_optimizer_states()
    # Two counters: empty parameters have no state.
    wanted |= {"gradients": 12, "optimizer_state": 80 + 2 * 8}
    assert fast_run.optimizer.memory_report() == reference_run.optimizer.memory_report() == wanted
