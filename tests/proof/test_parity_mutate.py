"""The gate on the judge is itself judged: a planted survivor or false alarm closes it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

import twinstep.parity.proof.mutate.judging as judging
from twinstep.parity.cli.judge_command import Outputs
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.commands.mutate import Choice, run_mutate, subjects
from twinstep.parity.proof.corpus import Entry, Variant, corpus, harmless
from twinstep.parity.proof.mutate.edits import Edit, edited, text_of
from twinstep.parity.proof.mutate.judging import QUICK, verdict_on
from twinstep.parity.proof.mutate.proving import faults, meetings, pairs, situations
from twinstep.parity.proof.mutate.rules import IN_KERNELS, IN_LAUNCHERS
from twinstep.parity.proof.mutate.same_code import instructions
from twinstep.parity.proof.mutate.score import Score
from twinstep.parity.proof.mutate.sites import ROOT, Mutant, edits_of, functions, mutants
from twinstep.parity.proof.mutate.still_proved import STILL_PROVED
from twinstep.parity.proof.mutate.survivors import SURVIVORS
from twinstep.parity.proof.mutate.verdict import End, Kind, Subject, Verdict
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE, UsageError
from twinstep.parity.records.ledger import Ledger

CLIP = "fast/kernels/clip.py clip_coefficient_kernel"


def wrong_row(name: str) -> Entry:
    return next(entry for entry in corpus() if entry.name == name)


def right_row(name: str) -> Variant:
    return next(variant for variant in harmless() if variant.name == name)


def verdict(
    name: str,
    end: End,
    kind: Kind = Kind.WRONG,
    *,
    law: str = "",
    killed_by: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
    reason: str = "",
    complete: bool = True,
) -> Verdict:
    return Verdict(
        subject=Subject(kind=kind, name=name),
        operation="unscale",
        end=end,
        says="-",
        law=law,
        killed_by=killed_by,
        kept=kept,
        complete=complete,
        reason=reason,
    )


@pytest.mark.parametrize("entry", [e for e in corpus() if e.alone and e.law == "value"])
def test_quick_profile_judges_by_every_law_only_what_shows_that_a_law_is_needed(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noted(entry: Entry, *, laws: tuple[str, ...], **rest: object) -> Ledger:
        asked.extend(laws)
        return Ledger()

    monkeypatch.setattr(judging, "judged", noted)
    for alone in (True, False):
        asked.clear()
        monkeypatch.setattr(
            judging, "entries", lambda a=alone: {entry.name: replace(entry, alone=a)}
        )
        found = verdict_on(Subject(kind=Kind.WRONG, name=entry.name), QUICK)
        assert found.complete == alone
        every = set(operation_named(entry.operation, "test").laws)
        assert set(asked) == (every if alone else {entry.law})


def test_every_law_has_a_kernel_that_shows_it_is_needed() -> None:
    assert {entry.law for entry in corpus() if entry.alone} == set(LAWS)


KILLED = verdict("one", End.KILLED, killed_by=("value",), kept=("repeat",))
ALONE = verdict("two", End.KILLED, killed_by=("repeat",))
RIGHT = verdict("three", End.ACCEPTED, Kind.HARMLESS, kept=("value", "repeat"))


# --- the gate -------------------------------------------------------------------------------------


def test_gate_is_open_if_all_die_and_every_law_kills_something_alone() -> None:
    score = Score([KILLED, ALONE, RIGHT])
    assert score.problems() == []
    assert score.exit_code() == EXIT_KEPT


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (verdict("no", End.SURVIVED, law="value"), "survives"),
        (verdict("no", End.SURVIVED, Kind.PLANTED), "survivors.py"),
        (verdict("no", End.REJECTED, Kind.HARMLESS, killed_by=("value",)), "false alarm"),
        (verdict("no", End.WAITS, killed_by=("value",)), "waits for nothing"),
    ],
)
def test_gate_closes_at_one_bad_verdict(bad: Verdict, says: str) -> None:
    score = Score([KILLED, ALONE, RIGHT, bad])
    assert [problem for problem in score.problems() if says in problem and "no" in problem]
    assert score.exit_code() == EXIT_BROKEN


def test_gate_closes_if_a_law_kills_nothing_alone() -> None:
    both = replace(ALONE, killed_by=("value", "repeat"))
    assert Score([KILLED, both, RIGHT]).exit_code() == EXIT_BROKEN
    assert Score([KILLED, both, RIGHT], complete=False).exit_code() == EXIT_KEPT
    unsure = replace(ALONE, complete=False)
    assert Score([KILLED, unsure, RIGHT]).exit_code() == EXIT_BROKEN


def test_gate_closes_if_nothing_was_planted_or_nothing_harmless_judged() -> None:
    assert Score([]).exit_code() == EXIT_TOO_LITTLE
    assert Score([KILLED, ALONE]).exit_code() == EXIT_TOO_LITTLE
    assert Score([RIGHT], complete=False).exit_code() == EXIT_KEPT


def test_an_argued_survivor_passes_and_a_stale_argument_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SURVIVORS, "argued", "nothing can see it")
    argued = verdict("argued", End.SURVIVED, Kind.PLANTED, reason="nothing can see it")
    assert Score([KILLED, ALONE, RIGHT, argued]).exit_code() == EXIT_KEPT
    stale = replace(argued, end=End.KILLED)
    assert Score([KILLED, ALONE, RIGHT, stale]).exit_code() == EXIT_BROKEN


# --- the command ----------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: Entry, variant: Variant) -> int:
    monkeypatch.setattr(judging, "entries", lambda: {entry.name: entry})
    monkeypatch.setattr(judging, "variants", lambda: {variant.name: variant})
    monkeypatch.setattr(judging, "ENOUGH", replace(judging.ENOUGH, examples=4))
    monkeypatch.setattr("twinstep.parity.proof.commands.mutate.entries", judging.entries)
    monkeypatch.setattr("twinstep.parity.proof.commands.mutate.variants", judging.variants)
    choice = Choice(operations=("clip_factor",), kinds=("wrong", "harmless"), quick=True)
    return run_mutate(choice, Outputs(json=str(tmp_path / "out.json"), jobs=1))


def a_wrong_clip() -> Entry:
    return next(entry for entry in corpus() if entry.operation == "clip_factor")


def test_command_succeeds_on_a_wrong_kernel_and_a_right_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path, a_wrong_clip(), right_row("plain_clip_factor")) == EXIT_KEPT
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["score"]["wrong kernel"] == {"planted": 1, "killed": 1}
    assert data["score"]["harmless variant"] == {"judged": 1, "false alarms": 0}
    assert {row["end"] for row in data["verdicts"]} == {"killed", "accepted"}


def test_command_fails_on_a_planted_survivor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = right_row("plain_clip_factor")
    survivor = replace(a_wrong_clip(), name="in_truth_right", kernel=right.kernel)
    assert run(monkeypatch, tmp_path, survivor, right) == EXIT_BROKEN


def test_command_fails_on_a_false_alarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = a_wrong_clip()
    alarm = replace(right_row("plain_clip_factor"), name="in_truth_wrong", kernel=wrong.kernel)
    assert run(monkeypatch, tmp_path, wrong, alarm) == EXIT_BROKEN


def test_command_refuses_names_that_it_does_not_know() -> None:
    for choice in (Choice(operations=("no",)), Choice(laws=("no",)), Choice(kinds=("no",))):
        with pytest.raises(UsageError, match='"no" is unknown, but should be among'):
            run_mutate(choice, Outputs(jobs=1))


def test_sample_is_seeded() -> None:
    def drawn(seed: int) -> list[Subject]:
        return subjects(Choice(kinds=("planted",), sample=5, seed=seed))

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(drawn(1)) == 5
    assert len(subjects(Choice(kinds=("planted",)))) == len(mutants())


# --- faults planted in our own source -------------------------------------------------------------


def test_edit_changes_one_place_and_moves_no_line() -> None:
    source = "x = 1\ny = f(\n    a,  # here\n    b,\n)\nz = 2\n"
    call = ast.parse(source).body[1]
    assert isinstance(call, ast.Assign)
    new = edited(source, Edit("test", call.value, "g(a)"))
    assert text_of(ast.parse(new).body[1]) == "y = g(a)"
    assert new.splitlines()[5] == "z = 2"
    assert new.splitlines()[0] == "x = 1"


def test_every_mutant_is_python_of_as_many_lines_and_is_reached_by_an_operation() -> None:
    every = mutants().values()
    assert len(every) >= 1000
    originals = {mutant.file: (ROOT / mutant.file).read_text() for mutant in every}
    for mutant in every:
        ast.parse(mutant.source)
        assert mutant.source != originals[mutant.file]
        assert mutant.source.count("\n") == originals[mutant.file].count("\n")
        assert mutant.operations


KERNEL = '''
@triton.jit
def kernel(p, n, BLOCK: tl.constexpr):
    """Not mutated: 1 + 1."""
    at = tl.arange(0, BLOCK)
    x = tl.load(p + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.div_rn(x, tl.sqrt_rn(x) + eps)
    x = x - y
    if n > 0:
        tl.store(p + at, x, mask=at < n)
    tl.store(p, x)
'''
LAUNCHER = """
def f_(tensors):
    launch(kernel, cdiv(n, 4), near, args, FLAG=flag)
"""


def test_each_rule_finds_its_place() -> None:
    (function,) = functions(KERNEL)
    made = {(edit.rule, edit.after) for edit in edits_of(function)}
    for wanted in [
        ("operator", "x + y"),
        ("constant", "0.0 + 1"),
        ("comparison", "at <= n"),
        ("bound - 1", "at < n - 1"),
        ("condition", "not (n > 0)"),
        ("mask dropped", "None"),
        ("other", "0.0 + 1"),
        ("index + 1", "p + at + 1"),
        ("store dropped", "pass"),
        ("store of x early", "tl.store(p, x); x = x - y"),
        ("narrower type", "tl.bfloat16"),
        ("under the root", "tl.sqrt_rn(x + eps)"),
        ("fast division", "(x) / (tl.sqrt_rn(x) + eps)"),
        ("fast root", "tl.sqrt(x)"),
    ]:
        assert wanted in made, wanted
    (launcher,) = functions(LAUNCHER)
    made = {(edit.rule, edit.after) for edit in edits_of(launcher)}
    for wanted in [
        ("grid + 1", "cdiv(n, 4) + 1"),
        ("grid - 1", "cdiv(n, 4) - 1"),
        ("flag", "not (flag)"),
    ]:
        assert wanted in made, wanted
    assert IN_KERNELS[:4] == IN_LAUNCHERS[:4]


def named(start: str) -> Mutant:
    return next(mutant for name, mutant in mutants().items() if name.startswith(start))


def judged_mutant(mutant: Mutant) -> Verdict:
    return verdict_on(Subject(kind=Kind.PLANTED, name=mutant.name), QUICK)


def test_fault_in_our_source_is_killed_and_the_checkout_is_untouched() -> None:
    import twinstep.fast.kernels.clip as before

    mutant = named(f"{CLIP}, operator: largest / ")
    text = (ROOT / mutant.file).read_text()
    assert judged_mutant(mutant).end is End.KILLED
    assert (ROOT / mutant.file).read_text() == text
    import twinstep.fast.kernels.clip as after

    assert after is before


def test_source_that_compiles_to_the_same_instructions_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant = named(f"{CLIP}, operator: largest / ")
    same = (ROOT / mutant.file).read_text().replace("k < 1.0)", "1.0 > k)")
    equal = replace(mutant, name="equal", source=same)
    monkeypatch.setattr(judging, "mutants", lambda: {"equal": equal})
    found = judged_mutant(equal)
    assert found.end is End.SAME_CODE, found


def test_fault_that_no_law_sees_is_a_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = named(f"{CLIP}, operator: largest / ")
    # Other instructions, the same results: adding zero twice to a value that is never -0.
    text = (ROOT / mutant.file).read_text()
    other = text.replace("k = largest /", "k = (largest * 4.0) * 0.25 /")
    assert other != text
    hidden = replace(mutant, name="hidden", source=other)
    monkeypatch.setattr(judging, "mutants", lambda: {"hidden": hidden})
    assert judged_mutant(hidden).end is End.SURVIVED


def test_fault_that_does_not_compile_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = named(f"{CLIP}, operator: largest / ")
    broken = (ROOT / mutant.file).read_text().replace("k = largest /", "k = nothing_there /")
    stillborn = replace(mutant, name="stillborn", source=broken)
    monkeypatch.setattr(judging, "mutants", lambda: {"stillborn": stillborn})
    assert judged_mutant(stillborn).end is End.STILLBORN


def test_instructions_leave_out_lines_and_files() -> None:
    one = '\t.file 1 "a.py"\n$L__tmp0:\n\t.loc 1 7 3\n\tadd.f32 %f1, %f2, %f3;\n'
    two = '\t.file 1 "b.py"\n$L__tmp9:\n\t.loc 1 8 3\n\tadd.f32 %f1, %f2, %f3;\n'
    assert instructions(one) == instructions(two) != ""
    assert instructions(one) != instructions(two.replace("add", "sub"))


def test_faults_that_stay_proved_are_put_before_the_prover_and_argued() -> None:
    assert set(STILL_PROVED) <= set(faults(()))
    assert all(STILL_PROVED.values())


def test_few_situations_have_every_pair_of_dtypes_layouts_and_options() -> None:
    mutant = mutants()[next(name for name in faults(("apex_lamb_step",)) if "apex" in name)]
    every = list(situations(mutant))
    few = list(meetings(every))
    assert set().union(*map(pairs, few)) == set().union(*map(pairs, every))
    assert len(few) < len(every) / 10


def test_survivors_are_planted_and_argued() -> None:
    assert set(SURVIVORS) <= set(mutants())
    assert all(len(argument.split()) >= 5 for argument in SURVIVORS.values())


@pytest.mark.parametrize("law", ["nothing_else_written", "boundary_sizes", "repeat"])
def test_the_law_that_has_to_kill_is_asked_first(law: str) -> None:
    assert QUICK.laws_of("adamw_step", law)[0] == law


def test_a_coefficient_that_clips_below_its_limit_is_noticed() -> None:
    (below,) = (name for name in mutants() if name == f"{CLIP}, constant: 1.0 -> 1.0 + 1")
    assert verdict_on(Subject(kind=Kind.PLANTED, name=below), QUICK).end is End.KILLED
