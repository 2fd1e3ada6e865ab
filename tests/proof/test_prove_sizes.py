"""Addresses for every size: right ones are proved, and no wrong one is."""

import pytest
from rich.console import Console

from tests.helpers.flat_kernels import flat_row
from twinstep.parity.prove.affine import NotAffine
from twinstep.parity.prove.situations import Situation
from twinstep.parity.prove.sizes import NARROW, SMALL, Wrong, prove_sizes
from twinstep.parity.prove.sizes_command import every_size, size_verdict
from twinstep.parity.records.proof import PROVED, REFUTED, UNSUPPORTED


def subject(fault: str = "") -> Situation:
    return Situation(flat_row(fault), "fp32", "flat", (SMALL,), True, {})


def test_a_kernel_is_proved_for_every_size() -> None:
    found = prove_sizes(subject())
    # A grid has less than 2^31 programs.
    assert (found.most, found.chunks) == (64 * NARROW, (64,))
    # Of one element, of multiples of 16 and others, in 32 and 64 bits.
    assert found.variants >= 4
    console = Console(record=True, width=200)
    (row,) = every_size(console, [flat_row()], (), 60.0)
    assert (row["dtype"], row["word"]) == ("fp32", PROVED)
    assert row["detail"].splitlines()[0] in console.export_text(clear=False)
    assert "every size from 1 to 137,438,953,408" in console.export_text()


def test_a_fault_is_run_at_its_size_before_the_word_is_refuted() -> None:
    word, detail = size_verdict(subject("tail of seven left out"), 60.0)
    assert word == REFUTED
    assert detail.startswith("with 7 elements: element 0 of accumulators[0] is written 0 times")
    assert size_verdict(subject("strided"), 60.0)[0] == UNSUPPORTED


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        ("one beyond", 1), ("last one left out", 1), ("tail of seven left out", 7), ("no mask", 1),
        ("reads ahead", 1), ("twice", 1),
    ],
)  # fmt: skip
def test_a_fault_is_found_with_a_size_that_has_it(fault: str, size: int) -> None:
    with pytest.raises(Wrong) as caught:
        prove_sizes(subject(fault))
    assert caught.value.size >= size


@pytest.mark.parametrize(
    "fault", ["32-bit offsets", "one block twice", "strided", "only where not zero"]
)
def test_what_is_not_affine_is_never_proved(fault: str) -> None:
    with pytest.raises((NotAffine, Wrong)):
        prove_sizes(subject(fault))
