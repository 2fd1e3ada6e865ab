"""Named scenarios: laws hold in short ones, each planted fault breaks a law, every law can fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from twinstep import scenarios
from twinstep.parity.records.errors import UsageError
from twinstep.reference.loss_scale import ScaleState, WrapperRule
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.scenarios import optimizers
from twinstep.scenarios.named import laws
from twinstep.scenarios.named.command import judged, listing
from twinstep.scenarios.named.drive import run
from twinstep.scenarios.named.scenario import Law, Outcome, Scenario
from twinstep.scenarios.named.table import ROWS, TABLE
from twinstep.scenarios.trace import read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "scenarios.md"


def outcome(name: str, side: str = "reference", steps: int | None = None) -> Outcome:
    row = TABLE[name]
    return run(row, row.plan_of(None, steps, 1), side, 1)


def broken(found: Outcome) -> set[str]:
    return {claim for claim, said in judged([found]) if said}


@pytest.fixture(scope="module")
def burst() -> Outcome:
    return outcome("overflow_burst", steps=50)


def test_a_burst_of_overflows_keeps_every_law(burst: Outcome) -> None:
    assert not broken(burst)
    assert burst.trace.skipped == [21, 22, 23, 24]
    assert burst.trace.header.scenario == "overflow_burst"


def test_the_command_runs_both_sides_and_leaves_trace_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["window_edge", "--steps", "40", "--out", str(tmp_path)]
    assert scenarios.main(words) == 0
    said = capsys.readouterr().out
    assert "holds  the fast side has the reference's bits in every step" in said
    assert "BROKEN" not in said
    reference, fast = read(tmp_path / "window_edge.jsonl")
    assert (reference.header.side, fast.header.side) == ("reference", "fast")
    assert (tmp_path / "window_edge.png").read_bytes().startswith(b"\x89PNG")


def test_a_scale_that_grows_a_step_late_breaks_the_laws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = WrapperRule.after

    def late(self: WrapperRule, state: ScaleState, found_inf: bool) -> ScaleState:
        return right(replace(self, scale_window=self.scale_window + 1), state, found_inf)

    monkeypatch.setattr(WrapperRule, "after", late)
    words = ["window_edge", "--steps", "40", "--side", "reference", "--out", str(tmp_path)]
    assert scenarios.main(words) == 1
    said = capsys.readouterr().out
    assert (
        f"BROKEN {laws.SCALE.claim}: reference, step 19: the scale is 512, by the rule 1024" in said
    )
    assert "BROKEN in step 19 the loss scale is 1024: reference, it is 512" in said


def test_a_skipped_step_that_moves_a_master_breaks_the_laws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = FP16Optimizer.step

    def step(self: FP16Optimizer) -> None:
        right(self)
        if self.overflow:
            self.fp32_groups_flat[0].data[0] += 0.5

    monkeypatch.setattr(FP16Optimizer, "step", step)
    assert {laws.KEEPS.claim, laws.ROUNDED.claim} <= broken(outcome("window_edge", steps=40))


def test_moments_that_a_restart_loses_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    right = optimizers.load

    def load(
        optimizer: torch.optim.Optimizer, saved: Sequence[optimizers.Saved], rank: int
    ) -> None:
        right(optimizer, saved, rank)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    assert not broken(outcome("other_side", "fast", steps=40))
    monkeypatch.setattr("twinstep.scenarios.trainers.load", load)
    (claim,) = broken(outcome("other_side", "fast", steps=40))
    assert claim.startswith("every step has the bits of")


def doctored(run: Outcome, step: int, **facts: object) -> Outcome:
    """A run with other facts of one step."""
    records, seen = list(run.trace.records), list(run.seen)
    for name, value in facts.items():
        if hasattr(records[step - 1], name):
            records[step - 1] = replace(records[step - 1], **{name: value})  # type: ignore[arg-type]
        else:
            seen[step - 1] = replace(seen[step - 1], **{name: value})  # type: ignore[arg-type]
    return replace(run, trace=replace(run.trace, records=records), seen=seen)


GENERAL: list[tuple[Law, dict[str, object]]] = [
    (laws.FINITE, {"finite": False}),
    (laws.SKIPS, {"overflowed": True}),
    (laws.SKIPS, {"skipped": True}),
    (laws.KEEPS, {"moved": frozenset()}),
    (laws.ROUNDED, {"rounded": False}),
    (laws.REACH, {"reach": 3.0}),
    (laws.SCALE, {"scale": 3.0}),
    (laws.skips_exactly(21, 22, 23, 24), {"skipped": True}),
    (laws.scale_at(5, 2.0**10), {"scale": 3.0}),
    (laws.scale_comes_back(2.0**8), {"scale": 3.0}),
    (laws.norm_spikes(6, 0.5), {"norm": 1e6}),
    (laws.norm_is_exact(), {"norm64": 1e6}),
    (laws.UNTOUCHED, {"moved": frozenset({"another"})}),
    (laws.still_until("another", None), {"moved": frozenset({"another"})}),
    (laws.still_until("norm.gain", 1), {"moved": frozenset()}),
]


@pytest.mark.parametrize(("law", "facts"), GENERAL)
def test_every_law_on_steps_can_fail(burst: Outcome, law: Law, facts: dict[str, object]) -> None:
    step = 1 if law.claim.startswith("norm.gain") else 5
    assert law.broken(burst) is None
    assert law.broken(doctored(burst, step, **facts))


def test_laws_on_whole_runs_can_fail(burst: Outcome) -> None:
    twin = replace(burst, twin=burst.trace)
    other = replace(burst, twin=doctored(burst, 7, state="other").trace)
    same, parts = laws.same_as_twin("it"), laws.parts_from_twin(7)
    assert same.broken(twin) is None
    assert same.broken(other)
    assert parts.broken(twin)
    assert parts.broken(other)
    assert laws.ends_below_twin(0.1, "it").broken(twin)
    assert laws.learns(9.0).broken(burst)
    assert laws.all_move("another").broken(burst)
    assert laws.all_move("norm.gain").broken(burst) is None
    assert laws.lr_begins_again(10).broken(burst)
    assert laws.skips_at_most(0.01).broken(burst)
    assert laws.skips_at_most(0.1).broken(burst) is None


def test_a_weight_moves_by_at_most_one_learning_rate_in_adams_first_step() -> None:
    assert laws.adam_reach(0.9, 0.95, 1) == pytest.approx(1.0)
    assert laws.adam_reach(0.9, 0.95, 1000) == pytest.approx(
        0.1 / 0.05**0.5 / (1 - 0.81 / 0.95) ** 0.5
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_laws_and_reaches_all_that_happens(row: Scenario) -> None:
    assert row.laws
    assert all(restart.saved < restart.step for restart in row.restarts)
    for dtype in row.dtypes:
        plan = row.plan_of(dtype, None, row.ranks)
        assert plan.steps >= row.least
    ends = [max(fault.steps) for fault in row.faults] + [at.step for at in row.restarts]
    ends += [change.step for change in row.changes] + [frozen.until for frozen in row.frozen]
    ends += [int(n) for law in row.laws for n in re.findall(r"(?:step|first) (\d+)", law.claim)]
    assert max(ends, default=0) <= row.least


def test_what_a_scenario_does_not_have_is_refused() -> None:
    row = TABLE["overflow_burst"]
    ask: Callable[..., object] = partial(row.plan_of)
    with pytest.raises(UsageError, match="dtype='bf16', but should be one of"):
        ask("bf16", None, 1)
    with pytest.raises(UsageError, match="steps=3, but should be at least 50"):
        ask(None, 3, 1)
    with pytest.raises(UsageError, match="ranks=3, but should divide the 4 micro-batches"):
        TABLE["rank_failure"].plan_of(None, None, 3)
    with pytest.raises(UsageError, match="ranks=2, but should be a multiple of 4"):
        TABLE["elastic_resize"].plan_of(None, None, 2)


def test_the_page_lists_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenarios.main(["list"]) == 0
    assert capsys.readouterr().out.startswith(listing() + "\n")
    shown = PAGE.read_text().partition("$ parity scenario list\n\n")[2].partition("\n\n")[0]
    assert shown == "\n".join("    " + line for line in listing().splitlines())
