"""Sums by integers on names: what is made of the exact sum is proved, and nothing else is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.helpers.proved_kernels import planted
from twinstep.parity.proof.mutate.copies import changed, kernel_of
from twinstep.parity.prove.exact_sums import SUMS_ARE_EXACT
from twinstep.parity.prove.rows import prove_situation
from twinstep.parity.prove.situations import situations
from twinstep.parity.records.proof import NOT_PROVED, PROVED, REFUTED, Verdict
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.replay.dtypes import Array
from twinstep.replay.names.gathered import gathered, gathered_apart, gathered_choice
from twinstep.replay.names.naming import naming
from twinstep.replay.names.session import NotNamed, Session
from twinstep.replay.names.sums import Sum, bag, mix
from twinstep.replay.names.values import Names, decided, put, wrapped


def small(kernel: Kernel, dtype: str, *sizes: int) -> Verdict:
    """The verdict on a few elements of one tensor, or of a list."""
    layout = "list" if len(sizes) > 1 else "flat"
    first = next(s for s in situations(kernel, [dtype]) if not s.aligned and s.layout == layout)
    return prove_situation(replace(first, sizes=sizes), 60.0)


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("triton.global_norm", "fp16", (70,)),
        ("triton.mixed_step", "bf16", (70,)),
        # What fits its window and what does not, and two windows in one register.
        ("triton.lamb_step", "mixed", (70, 37)),
    ],
)
def test_what_is_made_of_the_exact_sum_is_proved_under_its_assumption(
    name: str, dtype: str, sizes: tuple[int, ...]
) -> None:
    register_house()
    verdict = small(next(k for k in kernels() if k.name == name), dtype, *sizes)
    assert (verdict.word, verdict.paths) == (PROVED, 2), verdict
    assert SUMS_ARE_EXACT in verdict.assumes


def test_a_fault_before_the_sum_is_not_proved(tmp_path: Path) -> None:
    mutant = planted("lamb_direction", "wd * p")
    assert mutant is not None
    with changed(mutant, tmp_path):
        verdict = small(kernel_of("lamb_step"), "fp32", 70)
    assert verdict.word in (REFUTED, NOT_PROVED), verdict


def test_only_the_same_elements_with_the_same_bits_take_the_name_of_a_sum() -> None:
    session = Session()
    table, sums = session.table, session.sums
    x, y, norm = (table.leaf(name, 2) for name in ("x", "y", "norm"))
    flag = table.row("eq.f32", (x, y), 0)
    sums.told[bag(table, [x, table.row("cvt.f64.f32", (y,), 4)])] = Sum(norm, 77, flag, False)
    whole, part = mix(table, [x, y], 2), mix(table, [x], 2)
    assert sums.left(table, whole, 77, 2) == norm
    assert sums.left(table, whole, 78, 2) == whole
    assert sums.left(table, part, 77, 2) == part
    assert sums.left(table, mix(table, [x, y], 0), 0, 0) == flag
    assert sums.left(table, x, 77, 2) == x
    assert table.row("add.rn.f32", (part, y), 2) == whole


def codes(names: Names) -> Array:
    assert names is not None
    return np.asarray(names["n"])


def test_a_register_of_two_sums_keeps_them_apart_and_a_plain_choice_takes_one() -> None:
    with naming() as session:
        table = session.table
        x, y = (mix(table, [table.leaf(name, 2)], 1) for name in "xy")
        both = wrapped(np.array([[[4 * x, 4 * y]]]))
        assert_array_equal(codes(gathered_apart(2, both)), codes(both))
        assert_array_equal(codes(gathered(2, both)) >> 2, mix(table, [x, y], 2))
        one, two = (put(np.array([[n]]), 1) for n in (x, y))
        second, chooser = np.array([[False]]), table.leaf("flag", 0)
        assert_array_equal(codes(gathered_choice(1, second, None, one, two)), codes(two))
        flag = put(np.array([[chooser]]), 0)
        found = codes(gathered_choice(1, second, flag, one, two))
        assert_array_equal(found >> 2, mix(table, [x, y, chooser], 1))


def test_a_branch_on_a_sum_is_refused_outside_of_it() -> None:
    with naming() as session:
        x = session.table.leaf("x", 2)
        names = put(np.array([[mix(session.table, [x], 0)]]), 0)
        decided(np.array([[True]]), names, "here", inside=True)
        with pytest.raises(NotNamed, match="a branch depends on a sum: here"):
            decided(np.array([[True]]), names, "here")
    assert not session.decided
