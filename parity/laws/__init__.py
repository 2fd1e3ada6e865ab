"""The laws: one file each, with the real bugs it exists for. The order is that of the columns."""

from __future__ import annotations

from twinstep.parity.laws.after_skip import AFTER_SKIP
from twinstep.parity.laws.alignment import ALIGNMENT
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.boundary_sizes import BOUNDARY_SIZES
from twinstep.parity.laws.every_output_written import EVERY_OUTPUT_WRITTEN
from twinstep.parity.laws.formula import FORMULA
from twinstep.parity.laws.graph_capture import GRAPH_CAPTURE
from twinstep.parity.laws.large_index import LARGE_INDEX
from twinstep.parity.laws.no_host_read import NO_HOST_READ
from twinstep.parity.laws.non_finite import NON_FINITE
from twinstep.parity.laws.nothing_else_written import NOTHING_ELSE_WRITTEN
from twinstep.parity.laws.permutation import PERMUTATION
from twinstep.parity.laws.power_of_two import POWER_OF_TWO
from twinstep.parity.laws.process_state import PROCESS_STATE
from twinstep.parity.laws.race_free import RACE_FREE
from twinstep.parity.laws.repeat import REPEAT
from twinstep.parity.laws.sign_symmetry import SIGN_SYMMETRY
from twinstep.parity.laws.skipped_step import SKIPPED_STEP
from twinstep.parity.laws.splitting import SPLITTING
from twinstep.parity.laws.strided import STRIDED
from twinstep.parity.laws.uninitialised import UNINITIALISED
from twinstep.parity.laws.value import VALUE

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        VALUE,
        FORMULA,
        NOTHING_ELSE_WRITTEN,
        EVERY_OUTPUT_WRITTEN,
        UNINITIALISED,
        SKIPPED_STEP,
        AFTER_SKIP,
        NON_FINITE,
        BOUNDARY_SIZES,
        ALIGNMENT,
        STRIDED,
        PERMUTATION,
        SPLITTING,
        SIGN_SYMMETRY,
        POWER_OF_TWO,
        REPEAT,
        RACE_FREE,
        LARGE_INDEX,
        NO_HOST_READ,
        GRAPH_CAPTURE,
        PROCESS_STATE,
    )
}
