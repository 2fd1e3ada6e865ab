"""Checkpoint files, read so that they can run no code.

`torch.load` with `weights_only=True` makes tensors and plain values alone. A few classes that
DeepSpeed's files name are allowed besides, and something harmless is made instead of them.
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.fragments import FragmentAddress


class ScalerRecord:
    """Attributes of a scaler that DeepSpeed has saved as an object; it does nothing."""


SCALERS = "deepspeed.runtime.fp16.loss_scaler"
ALLOWED: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *((ScalerRecord, f"{SCALERS}.{name}") for name in ("LossScaler", "DynamicLossScaler")),
]
BROKEN = (
    *(RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, AssertionError, EOFError, pickle.UnpicklingError),
)


def read_checkpoint(path: Path) -> dict[str, object]:
    """Read a file that `torch.save` has made of a dict.

    Tensors are on the CPU, whatever device they were saved from.

    Raises:
        ValueError: it is cut off, no such file at all, or holds more than tensors and plain values.
        OSError: it cannot be opened.
    """
    whole = _loaded(path)
    if isinstance(whole, dict):
        return whole
    raise ValueError(f"{path.name} holds a {type(whole).__name__}, but should hold a dict")


def read_number(path: Path) -> float:
    """Read a file that holds one number, or a tensor of one.

    Raises:
        ValueError: it does not, or is broken.
        OSError: it cannot be opened.
    """
    value = _loaded(path)
    one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    if one or (isinstance(value, int | float) and not isinstance(value, bool)):
        return float(cast(float, value))
    raise ValueError(f"{path.name} holds a {type(value).__name__}, but should hold a number")


def _loaded(path: Path) -> object:
    try:
        with torch.serialization.safe_globals(list(ALLOWED)):
            whole: object = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:
        reason = _reason(str(error).strip() or type(error).__name__)
        raise ValueError(
            f"{path.name} should be a whole file of tensors and plain values, but {reason}"
        ) from error
    return whole


def _reason(text: str) -> str:
    """What torch says, without its advice to trust the file."""
    code = re.search(r"GLOBAL (\S+)", text)
    if code is not None:
        return f"it names code, {code.group(1)}"
    _, _, unpickler = text.partition("WeightsUnpickler error: ")
    first, *_ = re.split(r"\. |\n", unpickler or text, maxsplit=1)
    return f"reading it failed: {first.strip()[:150]}"
