"""Checkpoint files: read so that they can run no code, written so that none is ever half there.

`torch.load` with `weights_only=True` makes tensors and plain values alone. A few classes that
DeepSpeed's files name are allowed besides, and something harmless is made instead of them.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.fragments import FragmentAddress
from twinstep.contract.parallel import Groups

CPU = torch.device("cpu")


class SavedScaler:
    """Stand-in for a scaler of DeepSpeed's: its attributes, and nothing that can be called."""


SCALERS = "deepspeed.runtime.fp16.loss_scaler"
# What is made instead of a class in DeepSpeed's files, and its name there.
FOREIGN: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (SavedScaler, f"{SCALERS}.DynamicLossScaler"),
    (SavedScaler, f"{SCALERS}.LossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
BROKEN = (
    *(RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, AssertionError, EOFError, pickle.UnpicklingError),
)


def write_checkpoint(path: Path, contents: Mapping[str, object]) -> None:
    """Write a file with `torch.save`; if interrupted, the old file or the new one is there.

    The new one is written beside the old one, reaches the disk, and takes its name. A process that
    is killed may leave a hidden file that ends in `.partial`.

    Args:
        path: of the file; a link is followed.
        contents: tensors and plain values.

    Raises:
        OSError, RuntimeError: it cannot be written. The old file is still there.
    """
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(beside, "xb") as file:
            torch.save(dict(contents), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    # The new name is on the disk with its folder.
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_checkpoint(
    path: Path, ranks: Groups = (), device: torch.device = CPU
) -> dict[str, object]:
    """Read a file that `torch.save` has made of a dict.

    Tensors are on the CPU, whatever device they were saved from.

    Args:
        path: of the file.
        ranks: groups of ranks that read a file each; all of them do, or none. `ranks` of an
            optimizer are those that load alike.
        device: that the groups communicate from.

    Raises:
        ValueError: it is cut off, no such file at all, or holds more than tensors and plain values;
            or another rank has had an error.
        OSError: it cannot be opened.
    """
    return on_all_ranks(lambda: _read_dict(path), ranks, device)


def _read_dict(path: Path) -> dict[str, object]:
    loaded = _read(path)
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} holds a {type(loaded).__name__}, but should hold a dict")
    return loaded


def read_number(path: Path) -> float:
    """Read a file that holds one number, or a tensor of one.

    Raises:
        ValueError: it does not, or is broken.
        OSError: it cannot be opened.
    """
    loaded = _read(path)
    if isinstance(loaded, Tensor) and loaded.numel() == 1 and not loaded.is_meta:
        return float(loaded)
    if isinstance(loaded, int | float) and not isinstance(loaded, bool):
        return float(loaded)
    raise ValueError(f"{path.name} holds a {type(loaded).__name__}, but should hold a number")


def _read(path: Path) -> object:
    try:
        with torch.serialization.safe_globals(list(FOREIGN)):
            loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:
        raise ValueError(
            f"{path.name} should be a whole checkpoint of tensors and plain values, "
            f"but {_reason(str(error).strip() or type(error).__name__)}"
        ) from error
    return loaded


def _reason(text: str) -> str:
    """Torch's own words without its advice, which is to trust the file."""
    code = re.search(r"GLOBAL (\S+)", text)
    if code is not None:
        return f"it names code: {code[1]}"
    _, _, unpickler = text.partition("WeightsUnpickler error: ")
    first, *_ = re.split(r"\. |\n", unpickler or text, maxsplit=1)
    return f"reading it failed: {first.strip()[:150]}"
