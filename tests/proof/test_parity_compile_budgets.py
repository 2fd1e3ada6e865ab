"""The main loop of the exact sum keeps its budget, and what is put back into it is seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import twinstep.fast.kernels.reduce as reduce
from twinstep.parity.proof.gates.compile.artefacts import Facts
from twinstep.parity.proof.gates.compile.budgets import NEVER, over_budget
from twinstep.parity.proof.gates.compile.build import TARGETS, build
from twinstep.parity.proof.gates.compile.ceilings import breaches, load
from twinstep.parity.proof.gates.compile.main_loop import of_assembly, of_sass
from twinstep.parity.proof.gates.compile.model import resident
from twinstep.parity.proof.gates.compile.variants import Variant, recorded

SUM = "reduce_flat_kernel grads=bf16 limbs=i64 KIND=2"
MOMENTS = "lamb_moments_kernel limbs=i64 P=fp32 G=bf16 M=fp32"
LOOP = "        # Half of every part first"
NUMBER = "                x = half_of(parts[part], half, TYPE)\n"
WIDE = "pointer(address, tl.uint32, True)"
# Name -> texts and what is put in their places, facts that then break a rule, and where.
PLANTED: dict[str, tuple[dict[str, str], set[str], tuple[str, ...]]] = {
    "barrier_and_float64": (
        {
            LOOP: f"        tl.debug_barrier()\n{LOOP}",
            NUMBER: f"{NUMBER}                x = (x.to(tl.float64) * 1.1).to(tl.float32)\n",
        },
        {"loop_barrier", "loop_float64"},
        TARGETS,
    ),
    "single_elements": ({WIDE: WIDE.replace("True", "False")}, {"loop"}, ("sm_90",)),
}


def the_sum() -> Variant:
    """The sum of one bf16 tensor."""
    with recorded() as found:
        limbs = reduce.new_limbs(torch.device("cpu"))
        reduce.reduce_gradients([torch.zeros(64, dtype=torch.bfloat16)], limbs)
    return found[SUM]


def facts_of(variant: Variant, targets: Sequence[str]) -> dict[str, set[str]]:
    """Facts of a variant that break a rule or the budget, by target."""
    every = build([variant], targets, lambda _: None)
    assert {built.error for built in every} == {""}
    found = breaches(replace(load(), compilers={}), every, {}, whole=False)
    return {target: {one.fact for one in found if one.target == target} for target in targets}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_in_the_sum_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits, facts, targets = PLANTED[name]
    text = Path(str(reduce.__file__)).read_text()
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / f"planted_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = facts_of(replace(the_sum(), module=f"planted_{name}"), targets)
    assert all(facts <= found[target] for target in targets), found


def test_the_recorded_sums_keep_their_budgets() -> None:
    sums = {
        key: facts
        for key, facts in load().facts.items()
        if re.search("reduce.*KIND=2|lamb_moments", key[0])
    }
    assert len(sums) == 24 + 16 * len(TARGETS) + 6 * 3
    assert [
        row for (name, target), facts in sums.items() for row in over_budget(name, target, facts)
    ] == []


def test_an_instruction_too_many_and_a_spill_are_over_the_budget() -> None:
    facts: Facts = {"loop": 12 * 32, "loop_bytes": 64}
    assert list(over_budget(SUM, "sm_90", facts)) == []
    ((fact, allowed, found, _),) = over_budget(SUM, "sm_90", {**facts, "loop": 12 * 32 + 1})
    assert (fact, allowed, found) == ("loop", 384, 385)
    for never in NEVER:
        assert [row[:3] for row in over_budget(SUM, "sm_80", {**facts, never: 1})] == [
            (never, 0, 1)
        ]
    ((fact, _, _, why),) = over_budget(SUM, "sm_90", {})
    assert "element by element" in why
    turn: Facts = {"loop": 4 * 81, "loop_bytes": 4 * 14}
    assert list(over_budget(MOMENTS, "sm_90", turn)) == []
    for fact in ("loop", "loop_barrier", "loop_float64"):
        ((seen, *_),) = over_budget(MOMENTS, "sm_90", {**turn, fact: turn.get(fact, 0) + 1})
        assert seen == fact


def test_the_grid_is_what_registers_let_a_multiprocessor_hold() -> None:
    registers = [
        facts["registers"]
        for (name, target), facts in load().facts.items()
        if name.startswith("reduce_") and "KIND=2" in name and target in ("sm_90", "sm_100")
    ]
    assert resident(max(registers), reduce.WARPS) == reduce.RESIDENT


SASS = """
        /*0000*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0010*/                   LDG.E.U16 R1, desc[UR4][R2.64] ;
        /*0020*/              @!P1 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   IMAD.WIDE R6, R4, R4, R6 ;
        /*0040*/                   DADD R8, R8, R6 ;
        /*0050*/              @!P0 BRA 0x20 ;
        /*0060*/                   LDG.E.U16 R1, desc[UR4][R2.64] ;
        /*0070*/               @P0 BRA 0x60 ;
        /*0080*/               @P0 BRA 0x0 ;
"""
AMD = """
.LBB0_1:
	s_barrier
.LBB0_2:                                ; %loop
	global_load_dwordx2 v[0:1], v2, s[0:1]
	v_mad_u64_u32 v[4:5], s[2:3], v0, v0, v[4:5]
	s_cbranch_scc1 .LBB0_2
	s_cbranch_vccz .LBB0_1
"""


def test_the_main_loop_is_the_innermost_that_reads_the_most() -> None:
    assert of_sass(SASS) == {
        "loop": 4,
        "loop_bytes": 16,
        "loop_narrow": 0,
        "loop_memory": 1,
        "loop_wide": 1,
        "loop_float64": 1,
        "loop_branch": 1,
    }
    found = of_assembly(AMD)
    assert (found["loop"], found["loop_bytes"], found["loop_wide"]) == (3, 8, 1)
    assert "loop_barrier" not in found
    assert of_sass("") == of_assembly("") == {}
