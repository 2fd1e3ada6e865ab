"""Every supported opcode form against the independent statement of its meaning, bit for bit.

By default each form gets the edges of its types and random bits; the long profile goes through all
65,536 patterns wherever a source has 16 bits.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import twinstep.replay
from tests.helpers.profile import LONG
from twinstep.parity.expected.instruction_error import relative_errors
from twinstep.replay import UnknownInstruction, launches, run_ptx
from twinstep.replay.conformance import atomics, memory, suite, threads
from twinstep.replay.conformance.operands import edges, exhaustive, sampled
from twinstep.replay.conformance.probe import Probe, Result, batch
from twinstep.replay.conformance.run import compared, on_replay, rows, same
from twinstep.replay.conformance.statements import Statement, statement
from twinstep.replay.isa.documented import CHARGES, documented, markdown
from twinstep.replay.isa.forms import form_of, supported
from twinstep.replay.spec.floats import decode, encode, signed
from twinstep.replay.spec.functions import FUNCTIONS, log_two, pi

FAMILIES = sorted({form.split(".")[0] for form in suite.pure_forms()})


def test_every_supported_form_is_shown_by_some_probe() -> None:
    assert suite.missing() == []


def test_every_form_of_a_pure_family_has_a_statement() -> None:
    assert all(statement(form).form == form for form in suite.pure_forms())


def test_a_form_without_a_statement_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = memory.probes()
    monkeypatch.setattr(memory, "probes", lambda: known[1:])
    assert set(suite.missing()) == {"mov.pred"}


@pytest.mark.parametrize("family", FAMILIES)
def test_pure_instructions_mean_what_is_stated(family: str) -> None:
    forms = suite.pure_forms(family)
    probes = suite.thorough(forms) if LONG else suite.pure(forms, suite.FEW)
    found = rows(probes)
    assert set(found) == set(forms)
    assert [row for row in found.values() if row.mismatches or not row.cases] == []


def stated(form: str, count: int) -> list[tuple[int, ...] | None]:
    """The stated results of a form on a sample that its sources alone decide."""
    one = statement(form)
    columns = sampled(one.sources, ".".join(one.sources), count)
    return [one.want(*row) for row in zip(*(x.tolist() for x in columns), strict=True)]


@pytest.mark.parametrize("modifier", ["sat", "satfinite", "relu", "NaN"])
def test_no_modifier_is_ignored_by_what_is_stated(modifier: str) -> None:
    """A modifier that replay and the statement both forget is seen by no comparison of the two."""
    without = {}
    for form in suite.pure_forms():
        family, *parts = form.split(".")
        whole = family == "cvt" and parts[-2][0] in "us"  # saturates from floats in any case
        if modifier in parts and not (whole and parts[-1][0] not in "us"):
            without[form] = ".".join([family, *(part for part in parts if part != modifier)])
    compared = {form: plain for form, plain in without.items() if form_of(plain) == plain}
    assert len(compared) >= 6
    same = (
        (f, all(stated(f, n) == stated(plain, n) for n in (16, 512)))
        for f, plain in compared.items()
    )
    assert [form for form, ignored in same if ignored] == []


@pytest.mark.parametrize("name", ["memory", "atomics", "threads"])
def test_instructions_that_touch_memory_and_threads_leave_what_is_stated(name: str) -> None:
    module = {"memory": memory, "atomics": atomics, "threads": threads}[name]
    found = rows(module.probes())
    assert [row for row in found.values() if row.mismatches or not row.cases] == []


def test_hints_are_no_part_of_a_form() -> None:
    hinted = "ld.relaxed.gpu.global.L1::evict_last.L2::cache_hint.v4.b32"
    assert form_of(hinted) == "ld.global.v4.b32"
    assert form_of("add.shiny.f32") is None
    assert form_of("cvt.rn.f32.f32.f32") is None
    assert form_of("mul.lo.f32") is None


@pytest.mark.parametrize(
    "opcode", ["add.s33", "and.rn.b32", "mov.f16", "ld.global.v8.b64", "barrier.cluster.arrive"]
)
def test_what_no_form_describes_is_refused(opcode: str) -> None:
    text = f"""
    .version 8.8
    .target sm_90
    .address_size 64
    .visible .entry k() {{ .reg .b32 %r<9>; {opcode} %r1, %r2, %r3; ret; }}"""
    with pytest.raises(UnknownInstruction, match=opcode):
        run_ptx(text, "k", (1,), (32,), [])


def test_forms_are_distinct_and_describe_themselves() -> None:
    forms = supported()
    assert len(set(forms)) == len(forms) > 3000
    assert all(form_of(form) == form for form in forms)


def wrong_by_one() -> Probe:
    one = statement("add.s32")
    off = Statement(one.form, one.sources, one.results, one.code, lambda a, b: (a + b + 1,))
    return batch([off], [np.array([1, 2], np.uint32), np.array([3, 4], np.uint32)])


def test_the_comparison_can_say_no() -> None:
    (row,) = rows([wrong_by_one()]).values()
    assert row.mismatches == row.cases > 0
    assert row.first == "of 0x1, 0x3: 0x4, should be 0x5"


def test_results_left_open_are_not_compared() -> None:
    probe = wrong_by_one()
    (result,) = probe.results
    open_ = Result(result.form, result.kind, [None] * len(result.wanted))
    again = Probe(probe.body, probe.inputs, (open_,), probe.count)
    (row,) = compared(again, on_replay(again))
    assert (row.cases, row.mismatches) == (0, 0)


def test_a_nan_is_a_nan_and_a_zero_has_its_sign() -> None:
    assert same("f32", 0x7FC00001, 0x7FFFFFFF)
    assert same("f16x2", 0x7E013C00, 0x7FFF3C00)
    assert not same("u32", 0x7FC00001, 0x7FFFFFFF)
    assert not same("f32", 0x80000000, 0)
    assert not same("bf16x2", 0x00018000, 0x00010000)


def test_division_by_zero_gives_all_ones_and_the_dividend() -> None:
    for opcode, wanted in (("div.u32", 0xFFFFFFFF), ("rem.u32", 7), ("div.s32", 0xFFFFFFFF)):
        one = statement(opcode)
        stated = Statement(
            one.form, one.sources, one.results, one.code, lambda a, b, w=wanted: (w,)
        )
        numbers = [np.array([7], np.uint32), np.array([0], np.uint32)]
        (row,) = rows([batch([stated], numbers)]).values()
        assert row.mismatches == 0, row.first


def test_the_statement_of_pi_and_of_ln_2_is_theirs() -> None:
    assert abs(pi(60) / 2.0**60 - math.pi) < 2.0**-50
    assert abs(log_two(60) / 2.0**60 - math.log(2)) < 2.0**-50


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_stated_functions_agree_with_libm_to_its_accuracy(name: str) -> None:
    libm = {"ex2": lambda x: 2.0**x, "lg2": math.log2}
    function = libm.get(name) or getattr(math, name)
    for x in (0.1, 0.7, 1.5, 3.0, 10.25, 100.0, 1e-5):
        bits = encode(signed(Fraction(x), False), "f64")
        got = decode(FUNCTIONS[name](decode(bits, "f64"), "f64"), "f64").value
        assert float(got) == pytest.approx(function(x), rel=2.0**-51)


def test_launches_charge_approximate_instructions() -> None:
    for opcode in ("sin.approx.ftz.f32", "div.full.f32", "ex2.approx.f16x2", "rcp.approx.f32"):
        with launches() as log:
            rows(suite.pure([opcode], 32))
        charge = opcode.replace(".ftz", "").removesuffix("x2")
        assert log[0].approximations == {charge: log[0].grid[0] * log[0].block[0]}


@pytest.mark.parametrize("kinds", [("bf16",), ("f16", "f16", "pred"), ("f16x2", "f32")])
def test_each_narrow_source_of_a_thorough_probe_takes_every_pattern(kinds: tuple[str, ...]) -> None:
    columns = exhaustive(kinds, "seed") or []
    assert {len(column) for column in columns} == {1 << 16}
    for kind, column in zip(kinds, columns, strict=True):
        if kind in ("f32", "pred"):
            assert set(edges(kind)) <= set(column.tolist())
        for half in (0, 16) if kind.endswith("x2") else (0,):
            taken = np.unique(column >> half & 0xFFFF).size
            assert taken == 1 << 16 or kind in ("f32", "pred")
    # Not the same pattern in both sources, of which most results would be alike.
    assert len(columns) == 1 or not np.array_equal(columns[0], columns[1])
    assert exhaustive(["f32", "pred"], "seed") is None


def test_the_published_errors_are_those_of_the_table() -> None:
    readme = Path(twinstep.replay.__file__).with_name("README.md").read_text()
    assert readme.split("with documented.py -->\n")[1].split("\n<!-- end")[0] == markdown()


def test_an_operand_finds_the_row_that_speaks_of_it() -> None:
    near, far = documented("sin.approx.f32", -6.0), documented("sin.approx.f32", 300.0)
    assert near is not None
    assert far is not None
    assert (near.absolute, far.absolute) == (2.0**-20.5, 2.0**-14.7)
    assert documented("sin.approx.f32", 1e6) is None
    assert documented("rcp.approx.f64", 1.0) is None


def test_bounds_charge_what_is_documented() -> None:
    for name, charged in relative_errors("div", "rcp", "sqrt", "rsqrt").items():
        row = documented(name, 1.0)
        if row is not None:
            assert charged == max(row.relative, row.ulp * 2.0**-23), name


def test_every_approximate_form_is_charged_under_a_documented_name() -> None:
    for form in supported():
        if {"approx", "full"} & set(form.split(".")):
            assert form.replace(".ftz", "").removesuffix("x2") in CHARGES, form
