"""Sequences over simulated ranks: worlds are drawn, the right pass, sentences name the rank."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.profile import LONG
from twinstep.contract import agreement
from twinstep.contract.parallel import groups_given
from twinstep.parity.proof.corpus.harmless_over_ranks import HARMLESS_OVER_RANKS
from twinstep.parity.proof.corpus.optimizers import Optimizer, judged_optimizer, twin_of
from twinstep.parity.proof.corpus.wrong_over_ranks import WRONG_OVER_RANKS
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.sequences.bf16_rules import BF16Rules
from twinstep.parity.sequences.drawing import kind_of, sequence
from twinstep.parity.sequences.drive import on_all_ranks, run
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.judge import (
    SEQUENCES,
    TwinEffort,
    judge_twin,
    over_ranks,
    twin_engine,
)
from twinstep.parity.sequences.over_ranks.compare import groups_clause
from twinstep.parity.sequences.over_ranks.drive import WorldRun
from twinstep.parity.sequences.over_ranks.laws import broken_law
from twinstep.parity.sequences.over_ranks.place import WORLDS, axes_of
from twinstep.parity.sequences.parts import RANKS
from twinstep.parity.sequences.registry import REFERENCES, RULES, Twin, ranked, register_optimizer
from twinstep.parity.sequences.world import Act

WRAPPERS = ("FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer", "ZeroOptimizer")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "adding-an-optimizer.md"


def pair(reference: str) -> Twin:
    """A reference against itself, over ranks."""
    cls = type("Same", (REFERENCES[reference],), {})
    found = twin_of(Optimizer(cls=cls, says="", reference=reference)).over_ranks()
    assert found is not None
    return found


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_default_run_shows_every_motif(name: str) -> None:
    rules = pair(name).rules
    count = over_ranks(rules, SEQUENCES)
    for dtype in ("fp16", "bf16"):
        kinds = {kind_of(rules, 0, dtype, number) for number in range(count)}
        assert kinds.issuperset(range(len(rules.scripts())))
    assert over_ranks(rules, 1) == rules.least


@pytest.mark.parametrize("dtype", ("bf16", "fp16", "fp32") if LONG else ("bf16",))
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_reference_keeps_its_laws_and_is_given_every_group(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also every argument that rules on one rank exempt for the sake of these sequences."""
    twin, passed, worlds = pair(name), set[str](), Counter[str]()
    groups = 0
    plain: Any = vars(REFERENCES[name])["__init__"]

    def spying(self: object, inside: object, **named: Any) -> None:
        nonlocal groups
        passed.update(named)
        groups += len(groups_given(named))
        plain(self, inside, **named)

    monkeypatch.setattr(twin.reference, "__init__", spying)
    drawn = (sequence(twin.rules, 3, dtype, number) for number in itertools.count())
    forgetting = next(n for n, acts in enumerate(drawn) if "forget" in {act.name for act in acts})
    for number in {*range(200 if LONG else 12), forgetting}:
        acts = sequence(twin.rules, 3, dtype, number)
        assert acts == sequence(twin.rules, 3, dtype, number)
        found = on_all_ranks(twin.reference, twin, dtype, "cpu", acts)
        assert not found.stopped
        assert broken_law(acts, found) == ""
        assert all(len(rows) == len(acts) for rows in found.ranks)
        worlds[str(acts[0].values["ranks"])] += 1
    base = RULES[REFERENCES[name]]
    assert {key for key, reason in base.exempt.items() if reason == RANKS} <= passed
    assert groups > 10
    assert len(worlds) >= (len(WORLDS) if LONG else 4)


@pytest.mark.parametrize("row", HARMLESS_OVER_RANKS, ids=lambda row: row.name)
def test_other_messages_with_the_same_results_pass(row: Optimizer) -> None:
    for dtype in row.dtypes:
        assert judged_optimizer(row, dtype, 400 if LONG else 30) == ""


def refused_on_one(name: str) -> tuple[list[Act], WorldRun]:
    """Two ranks that only the engine's world connects, or `dp_process_group`."""
    twin, dice = pair(name), Random(0)
    known = twin.rules.actions()
    engine = {"engine": "leaves"} if "engine" in known["build"].choices else {}
    acts = [
        known["build"].draw(dice, {"seed": 0, "ranks": "data 2", "given": "", **engine}),
        known["construct_wrongly"].draw(dice, {"on": 1}),
        known["load_damaged"].draw(dice, {"how": "drop", "on": 1}),
    ]
    return acts, on_all_ranks(twin.reference, twin, "bf16", "cpu", acts)


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_one_rank_refuses_none_takes(name: str) -> None:
    acts, found = refused_on_one(name)
    assert [[row.raised for row in rows] for rows in found.ranks] == [[False, True, True]] * 2
    assert broken_law(acts, found) == ""


def test_ranks_cut_apart_go_on_alike_after_a_load_that_one_refuses() -> None:
    twin, dice = pair("BF16Optimizer"), Random(0)
    known = twin.rules.actions()
    acts = [
        known["build"].draw(dice, {"seed": 0, "ranks": "data 2", "given": ""}),
        known["recut"].draw(dice),
        known["train"].draw(dice, {"regime": "ordinary"}),
        known["load_universal"].draw(dice, {"missing": "folder", "on": 1}),
    ]
    found = on_all_ranks(twin.reference, twin, "bf16", "cpu", acts)
    assert [rows[-1].raised for rows in found.ranks] == [False, True]
    assert broken_law(acts, found) == ""


def test_a_rank_that_takes_what_another_refuses_breaks_a_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a fault in code that both sides share is one that no comparison shows."""
    monkeypatch.setattr(agreement, "groups_given", lambda options: [])
    acts, found = refused_on_one("FP16Optimizer")
    said = broken_law(acts, found)
    assert said == f"rank 1 (data 1) refuses what rank 0 (data 0) takes after {acts[1]}"


def test_rules_of_a_user_keep_their_own_actions_over_ranks() -> None:
    class Own(FP16Rules):
        exempt = {**FP16Rules.exempt, "later": "no part of it"}

        def report(self, world: object) -> None:
            """No action any more."""

    rules = ranked(Own())
    assert isinstance(rules, Own)
    assert "later" in rules.exempt
    assert "report" not in rules.actions()
    assert ranked(RULES[REFERENCES["FusedAdam"]]) is None


def test_worlds_are_counted_round_their_axes() -> None:
    assert axes_of("data 2, tensor 3") == {"data": 2, "expert": 1, "tensor": 3}
    sizes = {text: axes_of(text) for text in WORLDS}
    assert {1, 2, 3, 4, 7, 8} <= {s["data"] * s["expert"] * s["tensor"] for s in sizes.values()}


def test_the_first_group_that_is_used_otherwise_is_named() -> None:
    want = (("group a of ranks 0, 1", "all_reduce(MAX)"), ("group b of ranks 1, 2", "broadcast"))
    assert groups_clause(want, want).startswith("both called the same over a of ranks 0, 1 and b")
    assert groups_clause(want[:1], want) == (
        "over group b of ranks 1, 2 the class called nothing, the reference broadcast"
    )


def hangs(self: Any) -> None:
    """Call a collective on the first rank alone."""
    group = self.groups[0].process_group
    if group is not None and group.rank() == 0:
        group.barrier().wait()


def test_ranks_that_do_not_meet_are_told_of_in_one_sentence() -> None:
    cls = type("Waits", (REFERENCES["BF16Optimizer"],), {"destroy": hangs})
    claims = {"reference": "BF16Optimizer", "dtypes": ("bf16",), "over_ranks": True}
    row = Optimizer(cls=cls, says="", **claims)  # type: ignore[arg-type]
    failure = judged_optimizer(row, "bf16", 400)
    assert "rank 0 (" in failure
    assert "waits for a collective that other ranks do not call in destroy()" in failure
    assert re.search(r"got +(the action has ended here, but )?rank \d", failure), failure


def checked(text: str, folder: Path, over_ranks: int = 31, *, quick: bool = False) -> Cell:
    """A user's file, driven over ranks; quick without shrinking and without a repro file."""
    file = folder / "my_wrapper.py"
    file.write_text(text)
    twin = load_file(str(file)).twins[0]
    effort = TwinEffort(sequences=1, over_ranks=over_ranks, repros=str(folder))
    effort = replace(effort, shrunk_by=0, repros=None) if quick else effort
    return judge_twin(twin, "fp16", twin_engine(twin), effort)


def test_the_page_tells_what_becomes_of_its_wrapper(tmp_path: Path) -> None:
    """Right as it stands; wrong, with the sentence of the page, where it asks one group alone."""
    page = PAGE.read_text()
    text = re.findall(r"```py\n# my_wrapper.py\n(.*?)```", page, re.DOTALL)[0]
    right = checked(text, tmp_path, 6)
    assert right.status is Status.PASSED, right.failure
    assert right.over_ranks == 6
    wrong = text.replace("self.engine, experts):", "self.engine, experts)[:1]:")
    assert wrong != text
    cell = checked(wrong, tmp_path)
    assert cell.status is Status.FAILED
    assert cell.failure.splitlines()[0] in page
    assert 0 < cell.over_ranks <= cell.sequences
    again = subprocess.run([sys.executable, cell.repro], capture_output=True, text=True)
    assert again.returncode == 1, again.stdout + again.stderr
    (tmp_path / "my_wrapper.py").write_text(text)
    mended = subprocess.run([sys.executable, cell.repro], capture_output=True, text=True)
    assert mended.returncode == 0, mended.stdout + mended.stderr


USERS = """
from twinstep.parity import register_optimizer
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.model_norm import norm_of_parts
from twinstep.reference.optimizers.parallelism import Parallelism, gradient_parts
from twinstep.reference.unscale import worst_of

MASTERS = "single_partition_of_fp32_groups"


class Own(Parallelism):
    """

# By what a user's class does wrong: the body of `Own`, the reference, the rest of the class, and
# the sentence, which names rank, action and group.
FAULTS = {
    "the norm of its own shard": (
        """def global_norm(self, pairs, norm_type, worst):
        groups = (self.expert_groups, self.expert_data_groups)
        parts = gradient_parts(self.counted(pairs), [], *groups)
        return norm_of_parts(parts, norm_type, worst=worst)
""",
        "FP16Optimizer",
        "",
        r"rank \d \(.*tensor \d.*\): .*norm differs .* after \w+\(.*\); over group tensor of",
    ),
    "an overflow that is agreed with no rank": (
        """def worst(self, prepare, scale=None):
        pairs = prepare()
        return pairs, worst_of([grad for _, grad in pairs]).item()
""",
        "FP16Optimizer",
        "",
        r"rank \d \(.*\): .* (after|in) train\(.*size=inf\); over group .* of .*the reference",
    ),
    "the experts of another rank": (
        "pass\n",
        "BF16Optimizer",
        """
    def load_state_dict(self, state_dict_list, *given, **named):
        entries = [dict(entry) for entry in state_dict_list]
        rows = [list(entry.get(MASTERS, ())) for entry in entries]
        for at, group in enumerate(self.groups):
            for row in rows:
                if group.expert is not None and at < min(map(len, rows)):
                    row[at] = rows[group.rank % len(rows)][at]
        if all(rows):
            entries = [{**entry, MASTERS: row} for entry, row in zip(entries, rows)]
        super().load_state_dict(entries, *given, **named)
""",
        r"rank \d \(.*expert \d.*\): .* differs .* after (load|resume).*\(.*\); .* expert of ranks",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_of_a_user_is_rejected_with_rank_group_and_action(
    fault: str, tmp_path: Path
) -> None:
    own, base, rest, sentence = FAULTS[fault]
    text = f"""{USERS}{own}

@register_optimizer("mine", reference="{base}", arithmetic="exact", dtypes=("fp16",))
class Mine({base}):
    def __init__(self, init_optimizer, **options):
        super().__init__(init_optimizer, **options)
        self._parallelism = Own(**vars(self._parallelism))
{rest}"""
    cell = checked(text, tmp_path, quick=True)
    assert cell.status is Status.FAILED
    assert re.search(sentence, cell.failure.splitlines()[0]), cell.failure


def test_bounds_over_ranks_are_refused() -> None:
    class Bounded(FP16Rules):
        def contracts(self, world: object) -> list[object]:
            """None."""
            return []

    claims: dict[str, Any] = {"reference": "FP16Optimizer", "arithmetic": "bounded"}
    with pytest.raises(UsageError, match='compare every bit; it should be "exact"'):
        register_optimizer(**claims, rules=Bounded())(REFERENCES["FP16Optimizer"])


def test_a_reference_whose_ranks_have_another_scale_judges_nothing() -> None:
    row = next(row for row in WRONG_OVER_RANKS if row.name == "ForgetsScaleOnOtherRanks")
    twin = replace(twin_of(row), reference=row.cls)
    effort = TwinEffort(sequences=1, over_ranks=31, repros=None)
    cell = judge_twin(twin, "fp16", twin_engine(twin), effort)
    assert cell.status is Status.CANNOT_JUDGE
    law = (
        r"the reference breaks a law over ranks: rank 1 .* and rank 0 .* have another more.readings"
    )
    where = r" after \w+\(.*\) \[seed 0, sequence \d+ over ranks\]"
    assert re.fullmatch(law + r"\S*" + where, cell.reason), cell.reason


def test_the_same_sequence_over_ranks_fails_alike_twice() -> None:
    cls = type("Forgets", (REFERENCES["BF16Optimizer"],), {"_gather": lambda self: None})
    twin = twin_of(Optimizer(cls=cls, says="", reference="BF16Optimizer")).over_ranks()
    assert twin is not None
    rows = (sequence(twin.rules, 0, "bf16", number) for number in range(30))
    acts = next(acts for acts in rows if run(twin, "bf16", "cpu", acts))
    first, second = (run(twin, "bf16", "cpu", acts) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.over is not None
    assert second.over is not None
    assert (first.at, first.difference) == (second.at, second.difference)
    assert (first.over.who, first.over.groups) == (second.over.who, second.over.groups)


def test_rules_over_ranks_are_found_for_every_wrapper() -> None:
    for base in (FP16Rules, BF16Rules):
        rules = ranked(base())
        assert rules is not None
        assert inspect.signature(type(rules).build).parameters["rank"]
