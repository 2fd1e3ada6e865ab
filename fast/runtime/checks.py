"""Requirements of kernels on their arguments, checked before anything is launched.

A kernel sees addresses: a wrong length, dtype or device there is a wrong number or a crash, not
an error. Every check here looks at metadata alone and never waits for a GPU.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from twinstep.contract.tensors import FLOATS, dtype_names
from twinstep.fast.runtime.uploads import is_capturing

FP32 = (torch.float32,)
FP64 = (torch.float64,)
INT64 = (torch.int64,)

Lists = Mapping[str, Sequence[Tensor]]
Dtypes = tuple[torch.dtype, ...]


def require_one_device(where: str, params: Iterable[Tensor]) -> None:
    """Require that all parameters of an optimizer are on one device."""
    first: Tensor | None = None
    for index, param in enumerate(params):
        first = param if first is None else first
        if param.device != first.device:
            raise ValueError(
                f"parameter {index} is on {param.device}, but should be on {first.device} like "
                f"the first [{where}]"
            )


def require_not_captured(where: str, device: torch.device) -> None:
    """Refuse to make state inside a CUDA graph, which would make it anew at every replay."""
    if is_capturing(device):
        raise RuntimeError(
            "state of a first step is made while a CUDA graph is being captured, but should be "
            f"made before: take a step, or have the optimizer make its state first [{where}]"
        )


def require_lengths(where: str, lists: Lists) -> None:
    """Require lists of one length; lists that may be absent are left out by the caller."""
    (first, lead), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(lead):
            raise ValueError(
                f"{name} has {len(tensors)} tensors, but should have {len(lead)}, "
                f"as many as {first} [{where}]"
            )


def require_tensor(where: str, name: str, tensor: Tensor, dtypes: Dtypes, near: Tensor) -> None:
    """Require one of the dtypes, the device of `near`, and memory without gaps or overlaps."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} is {dtype_names([tensor.dtype])}, but should be {dtype_names(dtypes)} "
            f"[{where}]"
        )
    if tensor.device != near.device:
        raise ValueError(
            f"{name} is on {tensor.device}, but should be on {near.device} "
            f"like everything else [{where}]"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, but should be "
            f"contiguous: kernels walk over memory in order [{where}]"
        )


def require_lists(where: str, lists: Lists, dtypes: Mapping[str, Dtypes], near: Tensor) -> None:
    """Require lists of one length, equal shapes slot by slot, and what `require_tensor` says."""
    require_lengths(where, lists)
    shapes = [tensor.shape for tensor in next(iter(lists.values()))]
    for name, tensors in lists.items():
        for slot, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            require_tensor(where, f"{name}[{slot}]", tensor, dtypes[name], near)
            if tensor.shape != shape:
                raise ValueError(
                    f"{name}[{slot}] has shape {tuple(tensor.shape)}, but should have "
                    f"{tuple(shape)} [{where}]"
                )


def require_steps(where: str, steps: Sequence[Tensor], count: int, near: Tensor) -> None:
    """Require one 0-dim int64 counter for each tensor."""
    if len(steps) != count:
        raise ValueError(
            f"steps has {len(steps)} tensors, but should have {count}, as many as params [{where}]"
        )
    for slot, step in enumerate(steps):
        require_control(where, f"steps[{slot}]", step, INT64, near)


def require_pairs(where: str, lists: Lists) -> None:
    """Require lists of any floats that agree in length and shapes; none may be given."""
    given = [tensor for tensors in lists.values() for tensor in tensors]
    if given:
        require_lists(where, lists, dict.fromkeys(lists, FLOATS), given[0])


def require_step(
    where: str, lists: Lists, steps: Sequence[Tensor], controls: Mapping[str, Tensor]
) -> None:
    """Require the arguments of an optimizer's step; optional lists may be empty."""
    near = next(iter(controls.values()))
    given = {name: tensors for name, tensors in lists.items() if name not in OPTIONAL or tensors}
    require_lists(where, given, LIST_DTYPES, near)
    require_steps(where, steps, len(lists["params"]), near)
    require_controls(where, near, controls)


def require_remainder_step(
    where: str, lists: Lists, steps: Sequence[Tensor], controls: Mapping[str, Tensor]
) -> None:
    """Require the arguments of a step of bf16 weights with 16-bit remainders."""
    near = next(iter(controls.values()))
    require_lists(where, lists, {**LIST_DTYPES, "params": (torch.bfloat16,)}, near)
    require_steps(where, steps, len(lists["params"]), near)
    require_controls(where, near, controls)


def require_control(where: str, name: str, value: Tensor, dtypes: Dtypes, near: Tensor) -> None:
    """Require a 0-dim tensor of one of the dtypes on the device of `near`."""
    if value.dim() != 0:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but should be a 0-dim tensor [{where}]"
        )
    require_tensor(where, name, value, dtypes, near)


def require_controls(where: str, near: Tensor, controls: Mapping[str, Tensor]) -> None:
    """Require every control in the dtype that its name stands for."""
    for name, value in controls.items():
        require_control(where, name, value, CONTROL_DTYPES[name], near)


LIST_DTYPES: dict[str, Dtypes] = {
    **dict.fromkeys(("params", "grads", "copies"), FLOATS),
    **dict.fromkeys(("exp_avgs", "exp_avg_sqs", "momentums"), FP32),
    "remainders": (torch.int16,),
}
OPTIONAL = ("copies", "momentums")

CONTROL_DTYPES: dict[str, Dtypes] = {
    **dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), FP64),
    **dict.fromkeys(("max_coeff", "min_coeff"), FP64),
    **dict.fromkeys(("momentum", "dampening", "max_norm", "scale", "scale_factor"), FP64),
    **dict.fromkeys(("growth_factor", "backoff_factor", "min_scale"), FP64),
    **dict.fromkeys(("factor", "inv_scale", "norm", "found_inf"), FP32),
    **dict.fromkeys(("cur_iter", "last_overflow_iter", "cur_hysteresis"), INT64),
    **dict.fromkeys(("growth_tracker", "exhausted", "scale_window"), INT64),
    **dict.fromkeys(("growth_interval", "delayed_shift"), INT64),
}
