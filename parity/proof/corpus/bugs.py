"""All real defects by id, and the page about them.

Ids are stable: A Adam kernels, counters and state; B LAMB, Lion and low-bit variants; C overflow
detection; D loss scale and unscale; E norms and clipping; F bf16, master weights, accumulation; G
partitions, reduction and offload; H checkpoint and resume; I Triton, graphs and compilers; J the
checks themselves. Numbers that are missing were duplicates. `waits_for` names what has to exist
before a row can be replanted here; every other row is planted by at least one entry of the corpus,
by a wrong optimizer class or by the test that it names, and a test holds that so.
"""

from __future__ import annotations

from twinstep.parity.proof.corpus import (
    bugs_checks,
    bugs_kernels,
    bugs_precision,
    bugs_ranks,
    bugs_scales,
)
from twinstep.parity.proof.corpus.bug import Bug

BUGS: dict[str, Bug] = dict(
    sorted(
        {
            **bugs_kernels.ROWS,
            **bugs_scales.ROWS,
            **bugs_precision.ROWS,
            **bugs_ranks.ROWS,
            **bugs_checks.ROWS,
        }.items()
    )
)
