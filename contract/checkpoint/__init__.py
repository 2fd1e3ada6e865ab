"""Checkpoints: written whole, read without running code, checked before anything changes.

files       a file of tensors and plain values
entries     keys, a clip norm and masters of every state dict
inner       the state of the inner optimizer
plain       state dicts of plain optimizers by themselves
fp16        state dicts of the FP16 optimizers
partitions  state dicts of `BF16Optimizer`, one entry per rank
elastic     state dicts of `ZeroOptimizer`, by parameter
deepspeed_zero  shards of DeepSpeed's ZeRO, taken for such
universal   DeepSpeed's universal checkpoints, for all of them
universal_write  such checkpoints, written
"""

from twinstep.contract.checkpoint.files import read_checkpoint, write_checkpoint
from twinstep.contract.checkpoint.universal import load_universal_checkpoint
from twinstep.contract.checkpoint.universal_write import save_universal_checkpoint

__all__ = [
    "load_universal_checkpoint",
    "read_checkpoint",
    "save_universal_checkpoint",
    "write_checkpoint",
]
