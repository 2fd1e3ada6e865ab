"""Values that controls are drawn from, and controls that several operations share.

The first value of each tuple is an odd one, so that a kernel that hard-codes the customary value
does not get away with it. Customary values follow, because a kernel may be wrong there alone;
zeros, which switch something off; extremes. Betas have their customary values in pairs. Counters
of the loss-scale rules stay small in the lists, so that every branch of the rule is met.
"""

from __future__ import annotations

import math

import torch

from twinstep.parity.operations.operation import Control, OptionValue, Range

THIRD = 0.3333333432674408
FP64, FP32, INT64 = torch.float64, torch.float32, torch.int64
# Not below 0.5: there torch's lerp takes beta for 1 - fp32(1 - beta), which loses digits.
BETA = Range(low=1e-6, high=0.5, below_one=True)
FACTORS = Range(low=2.0**-30, high=4.0)
COUNTS = Range(low=1.0, high=2.0**62)
FEW = Range(low=1.0, high=5000.0)

LR = Control(
    name="lr",
    dtype=FP64,
    values=(3.7e-3, 1e-3, 0.25, 2.3e-5, 8.0, 0.0, -0.0125, 30.0),
    range=Range(low=1e-8, high=50.0),
)
BETA1 = Control(name="beta1", dtype=FP64, values=(0.8765, 0.9991, 0.5, 0.95, 0.0), range=BETA)
BETA2 = Control(name="beta2", dtype=FP64, values=(0.9987, 0.95, 0.99995, 0.7, 0.0), range=BETA)
EPS = Control(
    name="eps",
    dtype=FP64,
    values=(3e-6, 1e-8, 1.3e-3, 1e-10, 0.5, 0.0),
    range=Range(low=1e-16, high=1.0),
)
WEIGHT_DECAY = Control(
    name="weight_decay",
    dtype=FP64,
    values=(0.013, 0.01, 0.31, 1.7, 0.0, -0.02),
    range=Range(low=1e-6, high=2.0),
)
MAX_COEFF = Control(
    name="max_coeff",
    dtype=FP64,
    values=(3.5, 10.0, 0.6, 1e30, 40.0),
    range=Range(low=0.5, high=1e3),
)
MIN_COEFF = Control(
    name="min_coeff",
    dtype=FP64,
    values=(0.05, 0.01, 0.4, 0.0, 1e-6),
    range=Range(low=1e-8, high=0.5),
)
MOMENTUM = Control(name="momentum", dtype=FP64, values=(0.85, 0.9, 0.97, 0.5, 0.0), range=BETA)
DAMPENING = Control(
    name="dampening",
    dtype=FP64,
    values=(0.1, 0.003, 0.75, 0.0, 1.0),
    range=Range(low=1e-4, high=1.0),
)
FACTOR = Control(
    name="factor", dtype=FP32, values=(0.37, 1.0, 2.0**-16, 0.75, 3.3e-5, 1.9), range=FACTORS
)
SKIP = Control(name="found_inf", dtype=FP32, values=(0.0,))
FOUND = Control(name="found_inf", dtype=FP32, values=(0.0, 1.0))
FOUND_OUT = Control(name="found_inf", dtype=FP32, values=(0.0, 1.0), output=True)
# The last two take some bf16 and fp16 numbers to within half an fp32 ULP, or two, of a tie.
INV_SCALE = Control(
    name="inv_scale",
    dtype=FP32,
    values=(0.37, 1.0, 2.0**-16, 0.75, 3.3e-5, 2.0**7, 14991255 / 2.0**24, 15099498 / 2.0**24),
    range=FACTORS,
)
# The first is small enough to clip ordinary gradients under the ordinary loss scale.
MAX_NORM = Control(
    name="max_norm",
    dtype=FP64,
    values=(2e-4, 1.0, 0.8, 0.03, 7.5, 1e30, 0.0, -1.0),
    range=Range(low=1e-6, high=1e3),
)
# The first is below a limit of 7.5, by less than half: nothing may be clipped.
NORM = Control(
    name="norm",
    dtype=FP32,
    values=(5.3, 1.0, 0.0, 0.8, 6.1e4, math.inf, math.nan, 3e38, 1e-20),
    range=Range(low=1e-6, high=1e6),
)
# The first is below the ordinary norm under the ordinary factor, by less than one power of ten.
MAX_NORM_OF_ALL = Control(
    name="max_norm",
    dtype=FP64,
    values=(0.7, 1.0, 0.03, 7.5, 1e30, 0.0, -1.0),
    range=Range(low=1e-3, high=1e3),
)
NORM_OUT = Control(name="norm", dtype=FP32, values=(-7.0, 1.25), output=True)
FACTOR_OUT = Control(name="factor", dtype=FP32, values=(-7.0, 1.25), output=True)
SCALE = Control(
    name="scale",
    dtype=FP64,
    values=(65536.0, 1.0, 0.75, 3.0, 128.0, 2.0**-30),
    range=Range(low=2.0**-20, high=2.0**32),
)
STEP_SCALE = Control(
    name="scale",
    dtype=FP64,
    values=(1024.0, 65536.0, 3.0, 1.0, 0.75),
    range=Range(low=0.25, high=2.0**24),
)
CUR_ITER = Control(
    name="cur_iter",
    dtype=INT64,
    values=(7, 0, 1, 2, 3, 4, 5, 6, 2**31 - 1, 2**53 + 1),
    range=COUNTS,
)
LAST_OVERFLOW = Control(
    name="last_overflow_iter",
    dtype=INT64,
    values=(3, -1, 0, 1, 2, 5, 6, 2**31 - 5),
    range=COUNTS,
)
HYSTERESIS = Control(name="cur_hysteresis", dtype=INT64, values=(2, 1, 3), range=FEW)
DELAYED_SHIFT = Control(name="delayed_shift", dtype=INT64, values=(3, 1, 2), range=FEW)
EXHAUSTED = Control(name="exhausted", dtype=INT64, values=(0, 1))
SCALE_FACTOR = Control(
    name="scale_factor",
    dtype=FP64,
    values=(4.0, 2.0, 3.0, 1.7, 1.0),
    range=Range(low=1.0, high=64.0),
)
GROWTH_FACTOR = Control(
    name="growth_factor",
    dtype=FP64,
    values=(4.0, 2.0, 1.7, 1.001, 1.0),
    range=Range(low=1.0, high=64.0),
)
BACKOFF_FACTOR = Control(
    name="backoff_factor",
    dtype=FP64,
    values=(0.25, 0.5, 0.7, 0.999, 1.0),
    range=Range(low=2.0**-6, high=1.0),
)
SCALE_WINDOW = Control(name="scale_window", dtype=INT64, values=(3, 1, 2, 4, 1000), range=FEW)
GROWTH_INTERVAL = Control(name="growth_interval", dtype=INT64, values=(3, 1, 2, 4, 2000), range=FEW)
GROWTH_TRACKER = Control(name="growth_tracker", dtype=INT64, values=(2, 0, 1, 3, 1999), range=FEW)
MIN_SCALE = Control(
    name="min_scale",
    dtype=FP64,
    values=(0.75, 1.0, 2.0, 128.0),
    range=Range(low=2.0**-10, high=2.0**10),
)
TORCH_SCALE = Control(
    name="scale",
    dtype=FP64,
    values=(65536.0, 1.0, THIRD, 2.0**127, 12345.6787109375, 2.0**-149),
    range=Range(low=2.0**-20, high=2.0**32, single=True),
)

Settings = dict[str, OptionValue | float]
# Defaults of torch.optim and of most papers, and what large language models are trained with.
BETAS: Settings = {"beta1": 0.9, "beta2": 0.999, "bias_correction": True}
LATER_BETAS: Settings = {"beta1": 0.9, "beta2": 0.95, "bias_correction": True}
ADAM: Settings = {**BETAS, "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}
LANGUAGE: Settings = {**LATER_BETAS, "lr": 3e-4, "eps": 1e-8, "weight_decay": 0.1}
MOMENTUM_ALONE: Settings = {"momentum": 0.9}
SGD: Settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
UNSCALED: Settings = {"factor": 1.0}
# apex's LAMB: no trust ratio without NVLAMB; a norm that is too large, and one that is not.
WITHOUT_DECAY: Settings = {"weight_decay": 0.0, "use_nvlamb": False}
NVLAMB: Settings = {"weight_decay": 0.0, "use_nvlamb": True}
UNCLIPPED: Settings = {"norm": 0.8, "max_norm": 1.0, "factor": 1.0}
CLIPPED: Settings = {"max_norm": 1.0, "scale": 65536.0}
UNSCALED_CLIPPED: Settings = {"max_norm": 1.0, "scale": 1.0}
# Overflow at the floor with nothing left of the hysteresis: raised, or silent.
AT_FLOOR: Settings = {"scale": 1.0, "min_scale": 1.0, "cur_hysteresis": 1, "exhausted": 0}
# No float64 holds the counter, and the scale grows as soon as one may: after one clean step.
LATE: Settings = {
    "cur_iter": 2**53 + 1,
    "last_overflow_iter": 2**53 - 1,
    "scale_window": 1,
    "scale": 1024.0,
    "scale_factor": 4.0,
    "found_inf": 0.0,
}
# The next scale is a float64, and no fp32 number.
AT_CEILING: Settings = {
    "scale": 2.0**127,
    "growth_factor": 4.0,
    "growth_tracker": 2,
    "growth_interval": 3,
    "found_inf": 0.0,
}
DYNAMIC: Settings = {
    "scale": 65536.0,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
}
