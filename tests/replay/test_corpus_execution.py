"""Every text of the corpus runs on replay and gives what was stated next to its kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch

from twinstep.replay import options
from twinstep.replay.corpus.case import CASES, Near, Run
from twinstep.replay.corpus.execute import compare, execute, mismatches
from twinstep.replay.corpus.kernels import load
from twinstep.replay.corpus.make import COMPILERS, source_text
from twinstep.replay.corpus.store import Entry, read

load(["twinstep.parity.proof.replay_cases"])
NAMES = sorted(CASES)


def distinct(name: str) -> list[Entry]:
    """One entry for each different text of a kernel."""
    return [entry for entry in read().distinct() if entry.case == name]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_computes_what_was_stated(name: str) -> None:
    wrong = []
    for entry in distinct(name):
        found = execute(entry, read().text(entry).whole).mismatches
        wrong += [f"{entry.compiler} sm_{entry.sm}: {line}" for line in found]
    assert not wrong


@pytest.mark.parametrize("name", [n for n in NAMES if CASES[n].grid != (1,)])
def test_the_order_of_blocks_does_not_matter(name: str) -> None:
    entry = distinct(name)[-1]
    with options(order="permuted", seed=len(name)):
        assert execute(entry, read().text(entry).whole).mismatches == []


def test_every_kernel_was_compiled_by_every_compiler_for_every_target() -> None:
    present = {(entry.case, entry.compiler, entry.sm) for entry in read().entries}
    wanted = {
        (name, compiler.name, sm)
        for name, case in CASES.items()
        for compiler in COMPILERS
        for sm in case.sms
        if compiler.name.startswith("nvrtc" if case.source else "triton")
    }
    assert present == wanted
    assert len(CASES) >= 30


def test_every_text_has_its_provenance() -> None:
    corpus = read()
    assert {entry.compiler for entry in corpus.entries} == set(corpus.tools)
    assert all({"command"} < set(tool) for tool in corpus.tools.values())
    assert set(corpus.sources) == set(CASES)
    for name, case in CASES.items():
        assert corpus.sources[name]["grid"] == list(case.grid)
        assert corpus.sources[name]["block"] == list(case.block)


def test_the_corpus_was_made_from_the_sources_that_are_here() -> None:
    """Remedy: `make ptx-corpus`. Fast kernels move on; the corpus holds them as they were."""
    corpus = read()
    stale = [
        name
        for name, case in CASES.items()
        if not case.statement.__module__.endswith(".replay_cases")
        and corpus.sources[name]["source"] != hashlib.sha256(source_text(case).encode()).hexdigest()
    ]
    assert not stale


def test_every_body_has_the_digest_that_names_it() -> None:
    corpus = read()
    assert {entry.body for entry in corpus.entries} == set(corpus.bodies)
    assert all(corpus.text(entry).digest == entry.body for entry in corpus.distinct())


@pytest.mark.parametrize("name", NAMES)
def test_statements_repeat(name: str) -> None:
    first, second = CASES[name].run(), CASES[name].run()
    assert first.wants.keys() == second.wants.keys()
    assert first.wants
    for key, want in first.wants.items():
        other = second.wants[key]
        assert isinstance(want, Near) == isinstance(other, Near)
        values = other.values if isinstance(other, Near) else other
        assert compare(want.values if isinstance(want, Near) else want, values) is None


def floats(values: Sequence[float]) -> torch.Tensor:
    """A tensor for the tests of the comparison."""
    return torch.tensor(values)


def test_the_comparison_sees_one_bit_and_the_sign_of_zero() -> None:
    assert compare(floats([1.0, float("nan")]), floats([1.0, -float("nan")])) is None
    assert "[0]" in str(compare(floats([0.0]), floats([-0.0])))
    assert "[1]" in str(compare(floats([1.0, 1.0 + 2**-23]), floats([1.0, 1.0])))
    assert "torch.float64" in str(compare(floats([1.0]).double(), floats([1.0])))
    assert "shape" in str(compare(floats([1.0]), floats([1.0, 2.0])))


def test_the_comparison_keeps_to_the_bound() -> None:
    near = Near(floats([1.0]).double(), floats([0.25]).double(), "a quarter")
    assert compare(floats([1.25]), near) is None
    assert "+- 0.25" in str(compare(floats([1.26]), near))
    assert compare(floats([float("nan")]), near) is not None
    assert compare(floats([float("inf")]), near) is not None


def test_a_changed_input_and_an_unknown_want_are_found() -> None:
    x = floats([1.0])
    run = Run({"x": x}, {"z": x})
    found = mismatches(run, {"x": floats([2.0])})
    assert any(line.startswith("x[0]") for line in found)
    assert any("'z'" in line for line in found)
