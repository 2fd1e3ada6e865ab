"""The laws: one file each, with the real bugs it exists for. The order is that of the columns."""

from __future__ import annotations

from parity.laws.base import Law
from parity.laws.boundary_sizes import BOUNDARY_SIZES
from parity.laws.every_output_written import EVERY_OUTPUT_WRITTEN
from parity.laws.non_finite import NON_FINITE
from parity.laws.nothing_else_written import NOTHING_ELSE_WRITTEN
from parity.laws.permutation import PERMUTATION
from parity.laws.repeat import REPEAT
from parity.laws.skipped_step import SKIPPED_STEP
from parity.laws.value import VALUE

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        VALUE,
        NOTHING_ELSE_WRITTEN,
        EVERY_OUTPUT_WRITTEN,
        SKIPPED_STEP,
        NON_FINITE,
        BOUNDARY_SIZES,
        PERMUTATION,
        REPEAT,
    )
}
