"""What a saved state has to look like, checked whole before anything changes."""

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from twinstep.contract.errors import in_words
from twinstep.contract.loss_scale import Saved
from twinstep.contract.tensors import check_in_memory
from twinstep.fast.scalers import DynamicLossScale, LossScale

# Who saves under these keys.
FLAT, UNFUSED, SPLIT = "fp32_groups_flat", "fp32_groups", "single_partition_of_fp32_groups"


def require_entries(state_dict: object, names: Sequence[str], where: str) -> Mapping[str, object]:
    """Return a state dict that has these entries.

    Raises:
        ValueError: it is no dict, or lacks one; the sentence says what it looks like instead.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state is a {type(state_dict).__name__}, but should be a dict [{where}]")
    for name in names:
        if name not in state_dict:
            raise ValueError(
                f"state has no {name}, but should have one{_guess(state_dict)} [{where}]"
            )
    return state_dict


def _guess(state_dict: Mapping[str, object]) -> str:
    """Say whose state this seems to be."""
    if "zero_stage" in state_dict:
        return "; it seems to be that of a ZeRO optimizer"
    if "ds_version" in state_dict:
        for key in ("optimizer", "optimizer_state_dict"):
            if isinstance(state_dict.get(key), Mapping):
                return f"; it seems to be a whole checkpoint of DeepSpeed, with the state in {key}"
    owners = {FLAT: "FP16Optimizer", UNFUSED: "FP16UnfusedOptimizer", SPLIT: "BF16Optimizer"}
    found = [owner for key, owner in owners.items() if key in state_dict]
    return f"; it seems to be that of {found[0]}" if found else ""


def scale_to_save(scaler: LossScale) -> Saved:
    """Return the dict of a scaler, and the two constants that DeepSpeed reads with it.

    Nobody reads them here: constants come from the constructor.
    """
    known = isinstance(scaler, DynamicLossScale) and scaler.scaling.rule != "torch"
    window = int(scaler.scaling.scale_window)
    constants: Saved = {"scale_factor": scaler.scaling.scale_factor, "scale_window": window}
    return {**scaler.state_dict(), **(constants if known else {})}


def clip_of(state_dict: Mapping[str, object], now: float, where: str) -> float:
    """Return the saved clip norm, or the one of now where none is saved.

    Raises:
        ValueError: it is no number.
    """
    value = state_dict.get("clip_grad", now)
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return float(value)
    raise ValueError(f"clip_grad={in_words(value)}, but should be a number [{where}]")


def tensors_like(saved: object, own: Sequence[Tensor], name: str, where: str) -> list[Tensor]:
    """Return saved tensors, one for each of ours, with its shape and dtype.

    Raises:
        ValueError: they are not that.
    """
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        found = len(saved) if isinstance(saved, list | tuple) else type(saved).__name__
        raise ValueError(f"{name} has {found} tensors, but should have {len(own)} [{where}]")
    for index, (tensor, like) in enumerate(zip(saved, own, strict=True)):
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ValueError(f"{name}[{index}] is a {kind}, but should be a tensor [{where}]")
        check_in_memory(tensor, f"{name}[{index}]", where)
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{name}[{index}] has {tensor.numel()} elements, but should have {like.numel()} "
                f"[{where}]"
            )
        got, wanted = (tensor.dtype, tuple(tensor.shape)), (like.dtype, tuple(like.shape))
        if got != wanted:
            raise ValueError(
                f"{name}[{index}] is {got[0]} of shape {got[1]}, but should be {wanted[0]} of "
                f"shape {wanted[1]} [{where}]"
            )
    return [tensor.detach() for tensor in cast("Sequence[Tensor]", saved)]
