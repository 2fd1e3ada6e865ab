"""When the measurement of a wrong class's power may end."""

from __future__ import annotations

import pytest

from twinstep.parity.proof.corpus.sequence_power import Power
from twinstep.parity.proof.corpus.wrong_classes import WRONG_CLASSES


@pytest.mark.parametrize(
    ("default", "noticed", "driven", "sure"),
    [
        (200, 0, 450, False),
        (200, 1, 1, False),
        (200, 2, 2, False),
        (200, 3, 3, True),
        (200, 3, 8, False),
        (200, 4, 8, True),
        (200, 30, 450, False),
        (200, 60, 450, True),
        (40, 4, 8, False),
        (40, 8, 8, True),
        (40, 40, 200, False),
    ],
)
def test_few_sequences_suffice_where_most_notice(
    default: int, noticed: int, driven: int, sure: bool
) -> None:
    """With a power of 99.9 %, one sequence of 200 notices 3.4 % of times, one of 40 15.9 %.

    Two of two by chance are 0.034**2, which is more than DOUBT.
    """
    power = Power(WRONG_CLASSES[0], "fp32", {0: default}, {0: (noticed, driven)})
    assert power.sure == sure
