"""Addresses for every size: right ones are proved, and no wrong one is."""

import pytest

from tests.helpers.flat_kernels import flat_row
from twinstep.parity.prove.affine import NotAffine
from twinstep.parity.prove.situations import Situation
from twinstep.parity.prove.sizes import MOST, Wrong, prove_sizes


def subject(fault: str = "") -> Situation:
    return Situation(flat_row(fault), "fp32", "flat", (48,), True, {})


def test_a_kernel_is_proved_for_every_size() -> None:
    found = prove_sizes(subject())
    assert (found.most, found.chunks) == (MOST, (64,))
    # Of one element, of multiples of 16 and others, in 32 and 64 bits.
    assert found.variants >= 4


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
