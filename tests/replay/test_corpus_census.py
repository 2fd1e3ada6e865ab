"""The published list of instructions is what the corpus holds."""

from __future__ import annotations

from twinstep.replay.corpus import census
from twinstep.replay.corpus.store import read
from twinstep.replay.isa.forms import without_hints


def test_the_page_is_current() -> None:
    assert census.PAGE.read_text() == census.page()


def test_the_corpus_reaches_each_kind_of_instruction() -> None:
    found = census.uses(read())
    heads = {opcode.partition(".")[0] for opcode in found}
    assert heads >= {"add", "fma", "div", "sqrt", "ex2", "rsqrt", "cvt", "ld", "st", "cp"}
    assert heads >= {"atom", "red", "bar", "shfl", "vote", "match", "redux", "activemask", "popc"}
    assert heads >= {"prmt", "lop3", "dp4a", "mad", "madc", "bra", "setp", "selp", "mul"}
    assert {"fma.rn.bf16x2", "mul.rn.f16x2", "mul.rn.f32x2", "fma.rn.f32.bf16"} <= set(found)
    assert {"ld.local.f32", "ld.local.b32"} & set(found)


def test_an_opcode_is_counted_without_what_changes_no_result() -> None:
    assert without_hints("ld.relaxed.gpu.global.L1::evict_last.v4.b32") == "ld.global.v4.b32"
    assert without_hints("add.rn.ftz.f32") == "add.rn.ftz.f32"
