"""The names of `fast`, which loads this module with the first of them."""

from twinstep.contract.compat import Compat as Compat
from twinstep.contract.errors import MinimumLossScale as MinimumLossScale
from twinstep.fast.optimizers.apex_lamb import FusedLAMB as FusedLAMB
from twinstep.fast.optimizers.bf16 import BF16Optimizer as BF16Optimizer
from twinstep.fast.optimizers.fp16 import FP16Optimizer as FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import (
    FP16UnfusedOptimizer as FP16UnfusedOptimizer,
)
from twinstep.fast.optimizers.fused_adam import FusedAdam as FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb as FusedLamb
from twinstep.fast.optimizers.scalers import DynamicLossScale as DynamicLossScale
from twinstep.fast.optimizers.scalers import StaticLossScale as StaticLossScale
from twinstep.fast.optimizers.zero import ZeroOptimizer as ZeroOptimizer
