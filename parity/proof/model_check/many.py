"""The finalise kernel over many states at once: each program of one launch is a whole step's.

A program calls the kernel that production launches, on its own control block, limbs, counter and
coefficients; nothing of the kernel is written again here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._limbs import NONFINITE, PADDED
from twinstep.fast.kernels.finalise import Finish, finalise_kernel
from twinstep.fast.runtime.control import SLOTS
from twinstep.fast.runtime.dispatch import launch

WORDS = tl.constexpr(len(SLOTS))
ROOM = tl.constexpr(32)  # coefficients of one tensor, and some to spare
LR = tl.constexpr(SLOTS["lr"])
BETA1 = tl.constexpr(SLOTS["beta1"])
BETA2 = tl.constexpr(SLOTS["beta2"])
EPS = tl.constexpr(SLOTS["eps"])
WEIGHT_DECAY = tl.constexpr(SLOTS["weight_decay"])
MAX_NORM = tl.constexpr(SLOTS["max_norm"])
SCALE = tl.constexpr(SLOTS["scale"])
CUR_ITER = tl.constexpr(SLOTS["cur_iter"])
LAST = tl.constexpr(SLOTS["last_overflow_iter"])
HYSTERESIS = tl.constexpr(SLOTS["cur_hysteresis"])
TRACKER = tl.constexpr(SLOTS["growth_tracker"])
EXHAUSTED = tl.constexpr(SLOTS["exhausted"])
FACTOR = tl.constexpr(SLOTS["scale_factor"])
WINDOW = tl.constexpr(SLOTS["scale_window"])
MIN_SCALE = tl.constexpr(SLOTS["min_scale"])
SHIFT = tl.constexpr(SLOTS["delayed_shift"])
BACKOFF = tl.constexpr(SLOTS["backoff_factor"])
NORM = tl.constexpr(SLOTS["norm"])
FOUND = tl.constexpr(SLOTS["found_inf"])


@triton.jit(do_not_specialize=["tensors"])  # type: ignore[untyped-decorator]
def finalise_many_kernel(  # type: ignore[no-untyped-def]
    limbs,
    steps,
    coefficients,
    tensors,
    reals,
    wholes,
    halves,
    RULE: tl.constexpr,
    CONSECUTIVE: tl.constexpr,
    RAISE: tl.constexpr,
    GROW_ON_WINDOW: tl.constexpr,
):
    """One program for each state; `reals`, `wholes` and `halves` are the same control blocks."""
    at = tl.program_id(0).to(tl.int64)
    real = reals + at * WORDS
    whole = wholes + at * WORDS
    half = halves + 2 * at * WORDS
    finalise_kernel(
        limbs + at * PADDED,
        steps + at,
        coefficients + at * ROOM,
        tensors,
        real + LR,
        real + BETA1,
        real + BETA2,
        real + EPS,
        real + WEIGHT_DECAY,
        real + MAX_NORM,
        real + SCALE,
        whole + CUR_ITER,
        whole + LAST,
        whole + HYSTERESIS,
        whole + TRACKER,
        whole + EXHAUSTED,
        real + FACTOR,
        whole + WINDOW,
        real + MIN_SCALE,
        whole + SHIFT,
        real + BACKOFF,
        half + 2 * NORM,
        half + 2 * FOUND,
        real + SCALE,
        real + SCALE,
        real + SCALE,
        BIAS_CORRECTION=True,
        IS_TABLE=False,
        RULE=RULE,
        CONSECUTIVE=CONSECUTIVE,
        RAISE=RAISE,
        GROW_ON_WINDOW=GROW_ON_WINDOW,
        UNSCALE_WITH_NEW=False,
        EXTERNAL=False,
        NORM_1=False,
        NORM_MAX=False,
        NORM_GIVEN=False,
        NORM_SCALED=False,
        LAMB=False,
        RANKS=False,
        BOUNDED=False,
    )


def finalise_many(
    blocks: Tensor, overflows: Tensor, finish: Finish, *, nan: bool = False, warps: int = 1
) -> None:
    """Take one step from every state.

    Args:
        blocks: int64[n, number of slots], control blocks as in `fast.runtime.control`; written.
        overflows: bool[n].
        finish: rule and its choices.
        nan: overflows are NaNs, not infinities.
        warps: of a program; production has 4, a step's arithmetic is the same in every thread.
    """
    count = len(blocks)
    limbs = torch.zeros(count, PADDED.value, dtype=torch.int64)
    limbs[:, NONFINITE.value] = overflows.to(torch.int64) << (32 if nan else 0)
    steps = torch.zeros(count, dtype=torch.int64)
    coefficients = torch.zeros(count, ROOM.value, dtype=torch.float32)
    launch(
        finalise_many_kernel,
        count,
        limbs,
        (
            limbs,
            steps,
            coefficients,
            1,
            blocks.view(torch.float64),
            blocks,
            blocks.view(torch.float32),
        ),
        warps=warps,
        RULE=finish.rule,
        CONSECUTIVE=finish.consecutive_hysteresis,
        RAISE=finish.raise_error_at_min_scale,
        GROW_ON_WINDOW=finish.growth_counts_this_step,
    )
    if not torch.equal(steps, (~overflows).to(torch.int64)):
        raise AssertionError("a step counter moved in a skipped step, or did not in a clean one")
