"""`python -m twinstep.parity.proof.compat` (`make compat`): run everything, write the page."""

from __future__ import annotations

import logging
import sys
from itertools import chain

import twinstep.replay
from twinstep.parity.proof.compat import of_apex, of_deepspeed, of_torch
from twinstep.parity.proof.compat.cases import outcomes
from twinstep.parity.proof.compat.page import PAGE, ROOT, page


def main() -> int:
    """Exit code 1 if a case ends otherwise than there, for a reason that is not known."""
    # What is logged of ignored arguments is expected here.
    logging.disable(logging.WARNING)
    twinstep.replay.activate()
    table = of_torch.cases(of_torch.optim_table())
    found = list(outcomes(chain(table, of_deepspeed.cases(), of_apex.cases())))
    PAGE.write_text(page(found))
    print(f"{PAGE.relative_to(ROOT)}: {sum(one.passed for one in found)} of {len(found)} as there")
    unknown = [one for one in found if not one.known]
    for one in unknown:
        print(f"{one.side}, {one.project}, {one.test}, {one.case}: {one.why}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
