"""All known-wrong optimizer classes, wrappers and scalers."""

from __future__ import annotations

from twinstep.parity.proof.corpus.ordinary_classes import WRONG_ORDINARY
from twinstep.parity.proof.corpus.wrong_by_hand import WRONG_BY_HAND
from twinstep.parity.proof.corpus.wrong_by_situation import WRONG_BY_SITUATION
from twinstep.parity.proof.corpus.wrong_by_state import WRONG_BY_STATE
from twinstep.parity.proof.corpus.wrong_by_time import WRONG_BY_TIME
from twinstep.parity.proof.corpus.wrong_optimizers import WRONG_OPTIMIZERS
from twinstep.parity.proof.corpus.wrong_over_ranks import WRONG_OVER_RANKS
from twinstep.parity.proof.corpus.wrong_wrappers import WRONG_WRAPPERS
from twinstep.parity.proof.corpus.wrong_zero import WRONG_ZERO
from twinstep.parity.proof.corpus.wrong_zero_steps import WRONG_ZERO_STEPS

WRONG_CLASSES = (
    *(
        *WRONG_OPTIMIZERS,
        *WRONG_BY_SITUATION,
        *WRONG_BY_HAND,
        *WRONG_BY_TIME,
        *WRONG_BY_STATE,
        *WRONG_WRAPPERS,
        *WRONG_ORDINARY,
    ),
    *(*WRONG_OVER_RANKS, *WRONG_ZERO, *WRONG_ZERO_STEPS),
)
