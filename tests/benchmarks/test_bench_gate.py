"""The gate's own arithmetic: false alarms and power by simulation, growths, histories, exports."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, cast

import pytest

from twinstep.benchmarks.beside.rows import device_of, groups_of, timed_kernels
from twinstep.benchmarks.beside.statistics import over_processes, rate_at_most
from twinstep.benchmarks.beside.subject import Shape, arguments_of
from twinstep.benchmarks.regressions.gate import Verdict
from twinstep.benchmarks.regressions.growth import growths
from twinstep.benchmarks.regressions.pairs import CONFIRMED, SHARED, Look, Plan
from twinstep.benchmarks.regressions.report import workflow_commands
from twinstep.benchmarks.regressions.sides import Answer, Checkout, Process, SideFailed, asked
from twinstep.benchmarks.regressions.timed import labels, subject_named
from twinstep.benchmarks.runs import history, results
from twinstep.benchmarks.runs.key import differences
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels

PLAN = Plan()


def simulated(
    rng: random.Random, slower: float, between: float, turn: float, plan: Plan = PLAN
) -> Look:
    """A look at a row whose processes differ by `between`, and whose turns have heavy tails."""
    found = Look()
    for _ in range(plan.sets):
        levels = [math.exp(rng.gauss(0.0, between)) for _ in range(3)]
        levels[1] *= slower
        found.add(
            [
                # Every tenth turn somebody else had the core.
                [
                    level * math.exp(abs(rng.gauss(0.0, turn)) + (rng.random() < 0.1))
                    for _ in range(plan.rounds)
                ]
                for level in levels
            ]
        )
    return found


def failed(rng: random.Random, slower: float, between: float, turn: float) -> bool:
    """True if two looks in succession call the candidate slower."""
    if not simulated(rng, slower, between, turn).ratio().above(SHARED):
        return False
    again = simulated(rng, slower, between, turn, PLAN.second)
    return again.ratio(CONFIRMED).above(SHARED)


@pytest.mark.parametrize("between", [0.002, 0.01, 0.03, 0.1])
def test_unchanged_code_does_not_fail(between: float) -> None:
    rng = random.Random(7)
    rows = 1500
    assert sum(failed(rng, 1.0, between, 0.05) for _ in range(rows)) == 0


def test_one_look_at_unchanged_code_is_seldom_wrong() -> None:
    rng = random.Random(8)
    alarms = sum(simulated(rng, 1.0, 0.1, 0.05).ratio().above(SHARED) for _ in range(2000))
    assert alarms <= 0.025 * 2000  # what an interval of 95 % leaves on that side


def test_code_at_the_minimum_effect_seldom_fails() -> None:
    """There 2.5 % of first looks are suspect, and half a percent of the second confirm it."""
    rng = random.Random(9)
    assert sum(failed(rng, 1.0 + SHARED, 0.01, 0.05) for _ in range(1500)) <= 2


@pytest.mark.parametrize(
    ("slower", "between", "power"), [(1.15, 0.01, 0.9), (1.3, 0.02, 0.9), (2.0, 0.05, 0.95)]
)
def test_what_is_much_slower_fails(slower: float, between: float, power: float) -> None:
    rng = random.Random(10)
    rows = 300
    assert sum(failed(rng, slower, between, 0.05) for _ in range(rows)) >= power * rows


def test_an_interval_holds_the_truth_as_often_as_it_should() -> None:
    rng = random.Random(11)
    held = 0
    for _ in range(2000):
        ratio = over_processes([math.exp(rng.gauss(0.2, 0.1)) for _ in range(4)])
        held += ratio.low <= math.exp(0.2) <= ratio.high
    assert 0.93 <= held / 2000 <= 0.97


def test_a_limit_of_a_rate_is_that_of_tables() -> None:
    assert rate_at_most(0, 300) == pytest.approx(1.0 - 0.05 ** (1 / 300))
    assert rate_at_most(1, 20) == pytest.approx(0.2161, abs=1e-4)


def test_the_verdict_has_the_rate_of_false_alarms() -> None:
    said = Verdict(false_alarms=1, controls=20).control
    assert "1 of 20 first looks" in said
    assert "at most 21.6%" in said


class Heard:
    """A side that has its answers already, and what it was told."""

    def __init__(self, name: str, *answers: Answer) -> None:
        self.checkout, self.answers = Checkout(name, Path()), list(answers)
        self.told = list[str]()

    def tell(self, do: str, **_: object) -> None:
        """Note a request."""
        self.told.append(do)

    def hear(self) -> Answer:
        """The next answer."""
        return self.answers.pop(0)


def test_sides_are_told_at_the_same_time_and_all_heard_where_one_fails() -> None:
    first = Heard("baseline", {"error": "no"}, {"at": 1})
    second = Heard("candidate", {"at": 0}, {"at": 2})
    both = [cast(Process, first), cast(Process, second)]
    with pytest.raises(SideFailed, match="baseline: no"):
        asked(both, "open")
    assert asked(both, "close") == [{"at": 1}, {"at": 2}]
    assert first.told == second.told == ["open", "close"]


def test_a_side_keeps_the_bytecode_of_what_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr("subprocess.Popen", lambda _, **how: given.update(how))
    Process(Checkout("candidate", Path()), threads=1).log.close()
    assert "PYTHONDONTWRITEBYTECODE" not in given["env"]
    assert given["env"]["TWINSTEP_BENCH_THREADS"] == "1"


def row(missing: str = "", **facts: float) -> dict[str, Any]:
    """Counts of one label."""
    named = {name.replace("_", " "): value for name, value in facts.items()}
    return {"place": "kernel.py:3", "facts": named, "missing": missing}


def test_a_growth_is_a_sentence_with_its_place() -> None:
    found = growths({"k": row(launches=2)}, {"k": row(launches=3)})
    assert list(map(str, found)) == ["k: launches grew from 2 to 3 (+50.0%)"]
    (said,) = workflow_commands(Verdict(growths=found))
    assert said == (
        "::error file=kernel.py,line=3,title=parity bench gate::"
        "k: launches grew from 2 to 3 (+50.0%25)"
    )


def test_what_is_accepted_by_name_is_no_growth() -> None:
    before, after = {"k bf16": row(launches=2)}, {"k bf16": row(launches=3)}
    assert growths(before, after, ["k *: launches"]) == []
    assert len(growths(before, after, ["k *: bytes*"])) == 1


def test_what_can_no_longer_be_counted_fails() -> None:
    found = growths({"k": row(launches=2)}, {"k": row(missing="RuntimeError: no")})
    assert list(map(str, found)) == ["k: can no longer be counted: RuntimeError: no"]
    assert growths({"k": row(missing="a")}, {"k": row(missing="b")}) == []


def test_a_variant_under_a_new_name_is_held_to_the_old_ones() -> None:
    fact = "machine code, load_width"
    before = {"update BLOCK=8 sm_90": {"place": "", "facts": {fact: 16}, "missing": ""}}
    after = {"update BLOCK=9 sm_90": {"place": "", "facts": {fact: 4}, "missing": ""}}
    assert [one.after for one in growths(before, after)] == [4]
    assert growths({}, after) == []


def test_every_kernel_that_runs_here_has_a_row() -> None:
    """By being registered, without another word."""
    register_house()
    there = {k.name for k in kernels() if k.operation.lists and device_of(k) is not None}
    assert there == {kernel.name for kernel in timed_kernels(kernels())}
    assert {f"cpu.{name}" for name in ("adamw_step", "global_norm", "accumulate")} <= there
    groups = groups_of(kernels(), [Shape(1, 64), Shape(3, 64)])
    assert {group.operation for group in groups} == {n.partition(".")[2] for n in there}


def test_every_label_of_the_gate_is_timed_in_a_dtype_that_its_kernel_claims() -> None:
    register_house()
    named = labels(kernels(), [(1, 64)], classes=False)
    assert "native.global_norm bf16 1x64" in named
    for label in named:
        subject_named(kernels(), label).turn()
    with pytest.raises(LookupError, match="no kernel native.accumulate for fp32"):
        subject_named(kernels(), "native.accumulate fp32 1x64")


def test_a_turn_begins_with_the_same_values() -> None:
    register_house()
    kernel = next(k for k in kernels() if k.name == "cpu.adamw_step")
    device = device_of(kernel)
    assert device is not None
    given = arguments_of(kernel.operation, "bf16", Shape(3, 100), device)
    first = [t.clone() for t in given.lists["params"]]
    given.call(kernel)
    assert any(bool((a != b).any()) for a, b in zip(first, given.lists["params"], strict=True))
    given.restore()
    assert all(bool((a == b).all()) for a, b in zip(first, given.lists["params"], strict=True))
    assert given.read_and_written == (14 * 300, 14 * 300)


def group(ms: float, passes: float) -> dict[str, Any]:
    """A group of results with one kernel of ours and one pass."""
    common = {
        "version": "",
        "gb_s": 1.0,
        "times_ours": [0.99, 1.0, 1.01],
        "of_ceiling": [0.98 * passes / ms, passes / ms, 1.02 * passes / ms],
    }
    return {
        "operation": "adamw_step",
        "dtype": "bf16",
        "tensors": 1,
        "each": 2**24,
        "absent": {},
        "bytes": 2**28,
        "rows": [
            {"name": "cpu.adamw_step", "family": "ours", "ms": ms, "best_ms": ms, **common},
            {"name": "copy", "family": "ceiling", "ms": passes, "best_ms": passes, **common},
        ],
    }


def test_a_kernel_faster_than_memory_is_an_error() -> None:
    assert list(results.too_fast([group(10.0, 9.0)])) == []
    (said,) = results.too_fast([group(10.0, 12.0)])
    assert "1.20 times as fast as the fastest pass over as many bytes" in said


def test_one_lucky_turn_or_one_process_is_no_proof_of_that() -> None:
    lucky = group(10.0, 12.0)
    for interval in ([0.6, 1.2, 2.4], [None, 1.2, None]):
        for one in lucky["rows"]:
            one["of_ceiling"] = interval
        assert list(results.too_fast([lucky])) == []


def test_a_share_of_the_ceiling_is_of_the_fastest_pass() -> None:
    times = {"k": [2.0] * 3, "copy": [3.0] * 3, "in place": [1.0] * 3}
    assert results.ceiling_share(times, "k", ["copy", "in place"]) == 0.5


def document(**key: str) -> dict[str, Any]:
    """A run."""
    return {
        "key": {"device": "AMD EPYC x2", "torch": "2.13.0", **key},
        "stamp": {"time": "now", "commit": "abc"},
        "groups": [group(10.0, 9.0)],
    }


def test_another_version_starts_a_new_history(tmp_path: Path) -> None:
    assert history.record(document(), tmp_path) == (tmp_path / "amd-epyc-x2.json", True)
    assert history.record(document(), tmp_path)[1] is False
    assert history.record(document(torch="2.14.0"), tmp_path)[1] is True
    series = history.load(tmp_path / "amd-epyc-x2.json")
    assert [len(one["runs"]) for one in series] == [2, 1]
    assert differences(series[0]["key"], series[1]["key"]) == ["torch was 2.13.0, is 2.14.0"]


def test_a_broken_history_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UsageError, match="is no history"):
        history.load(tmp_path / "x.json")


def test_the_export_is_what_the_action_reads() -> None:
    (entry,) = json.loads(json.dumps(history.exported(document())))
    assert entry["name"] == "cpu.adamw_step: adamw_step bf16 16,777,216"
    assert (entry["unit"], entry["value"], entry["range"]) == ("ms", 10.0, "1.0% of itself")


def test_what_neither_counts_nor_times_has_compared_nothing() -> None:
    look = Look(problem="raises")
    unable = {"a": {"place": "", "facts": {}, "missing": "raises"}}
    assert not Verdict(looks={"a": look}, counts={"baseline": unable, "candidate": unable}).compared
    assert Verdict(looks={"a": look, "b": Look()}).compared
    assert Verdict(counts={"candidate": {"a": {**unable["a"], "facts": {"launches": 1}}}}).compared
