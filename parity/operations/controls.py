"""Values that controls are drawn from, and controls that several operations share.

No customary default is among them (lr 1e-3, betas 0.9 and 0.999, eps 1e-8, decay 0.01): a kernel
that ignores an argument and hard-codes the usual value must not get away with it. The first value
of each tuple is the ordinary one; zeros, which switch something off, and extremes follow. Counters
of the loss-scale rules stay small, so that every branch of the rule is met.
"""

from __future__ import annotations

import math

import torch

from twinstep.parity.operations.operation import Control

THIRD = 0.3333333432674408
FP64, FP32, INT64 = torch.float64, torch.float32, torch.int64

LR = Control(name="lr", dtype=FP64, values=(3.7e-3, 0.25, 2.3e-5, 8.0, 0.0))
BETA1 = Control(name="beta1", dtype=FP64, values=(0.8765, 0.9991, 0.5, 0.95, 0.0))
BETA2 = Control(name="beta2", dtype=FP64, values=(0.9987, 0.95, 0.99995, 0.7, 0.0))
EPS = Control(name="eps", dtype=FP64, values=(3e-6, 1.3e-3, 1e-10, 0.5, 0.0))
WEIGHT_DECAY = Control(name="weight_decay", dtype=FP64, values=(0.013, 0.31, 1.7, 0.0, -0.02))
MAX_COEFF = Control(name="max_coeff", dtype=FP64, values=(3.5, 0.6, 1e30, 40.0))
MIN_COEFF = Control(name="min_coeff", dtype=FP64, values=(0.05, 0.4, 0.0, 1e-6))
MOMENTUM = Control(name="momentum", dtype=FP64, values=(0.85, 0.97, 0.5, 0.0))
DAMPENING = Control(name="dampening", dtype=FP64, values=(0.1, 0.003, 0.75, 0.0))
FACTOR = Control(name="factor", dtype=FP32, values=(0.37, 2.0**-16, 0.75, 3.3e-5, 1.9))
SKIP = Control(name="found_inf", dtype=FP32, values=(0.0,))
FOUND = Control(name="found_inf", dtype=FP32, values=(0.0, 1.0))
FOUND_OUT = Control(name="found_inf", dtype=FP32, values=(0.0, 1.0), output=True)
# The last two take some bf16 and fp16 numbers to within half an fp32 ULP, or two, of a tie.
INV_SCALE = Control(
    name="inv_scale",
    dtype=FP32,
    values=(0.37, 2.0**-16, 0.75, 3.3e-5, 2.0**7, 14991255 / 2.0**24, 15099498 / 2.0**24),
)
# The first is small enough to clip ordinary gradients under the ordinary loss scale.
MAX_NORM = Control(name="max_norm", dtype=FP64, values=(2e-4, 0.8, 0.03, 7.5, 1e30, 0.0, -1.0))
# The first is below a limit of 7.5, by less than half: nothing may be clipped.
NORM = Control(
    name="norm", dtype=FP32, values=(5.3, 0.0, 0.8, 6.1e4, math.inf, math.nan, 3e38, 1e-20)
)
NORM_OUT = Control(name="norm", dtype=FP32, values=(-7.0, 1.25), output=True)
FACTOR_OUT = Control(name="factor", dtype=FP32, values=(-7.0, 1.25), output=True)
SCALE = Control(name="scale", dtype=FP64, values=(65536.0, 1.0, 0.75, 3.0, 128.0, 2.0**-30))
STEP_SCALE = Control(name="scale", dtype=FP64, values=(1024.0, 65536.0, 3.0, 1.0, 0.75))
CUR_ITER = Control(name="cur_iter", dtype=INT64, values=(7, 0, 1, 2, 3, 4, 5, 6, 8, 2**40))
LAST_OVERFLOW = Control(name="last_overflow_iter", dtype=INT64, values=(3, -1, 0, 1, 2, 5, 6))
HYSTERESIS = Control(name="cur_hysteresis", dtype=INT64, values=(2, 1, 3))
DELAYED_SHIFT = Control(name="delayed_shift", dtype=INT64, values=(3, 1, 2))
EXHAUSTED = Control(name="exhausted", dtype=INT64, values=(0, 1))
SCALE_FACTOR = Control(name="scale_factor", dtype=FP64, values=(4.0, 3.0, 1.7))
GROWTH_FACTOR = Control(name="growth_factor", dtype=FP64, values=(4.0, 1.7, 1.001))
BACKOFF_FACTOR = Control(name="backoff_factor", dtype=FP64, values=(0.25, 0.7, 0.999))
SCALE_WINDOW = Control(name="scale_window", dtype=INT64, values=(3, 1, 2, 4))
GROWTH_INTERVAL = Control(name="growth_interval", dtype=INT64, values=(3, 1, 2, 4))
GROWTH_TRACKER = Control(name="growth_tracker", dtype=INT64, values=(2, 0, 1, 3))
MIN_SCALE = Control(name="min_scale", dtype=FP64, values=(0.75, 2.0, 128.0))
TORCH_SCALE = Control(
    name="scale", dtype=FP64, values=(65536.0, THIRD, 2.0**127, 12345.6787109375, 2.0**-149)
)
